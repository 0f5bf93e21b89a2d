"""Models of transformers in one graph: no break, no read on the host, no compilation for other values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.integrations.transformers import register
from gossamer.integrations.transformers.attention_mask import make_mask
from gossamer.integrations.transformers.device import Rules
from gossamer.patterns.reach import Reach
from tests.integrations.test_transformers import (
    CHUNKS_RESTART,
    NO_CACHE,
    VOCABULARY,
    B,
    N,
    at_real_tokens,
    generated,
    ids_of,
    inputs_of,
    padding,
)
from tests.support.host_reads import Graphs, NothingRead, waiting_raises
from tests.support.thorough import more
from tests.support.transformers_models import hf, masking_utils, model_of

pytestmark = pytest.mark.filterwarnings("ignore")

NEAR = 2e-5  # float32, of eager
PACKINGS = ((10, 9, 5), (24,), (1, 2, 3, 18), (12, 12))
PADDINGS = ((7, 24), (0, 19), (0, 24), (3, 20))  # keys before the first of batch element 0, and the end of 1


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def positions(documents: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in documents])[None].repeat(B, 1)


def padded(first: int, end: int) -> Tensor:
    mask = torch.ones(B, N, dtype=torch.long)
    mask[0, :first], mask[1, end:] = 0, 0
    return mask


def step_of(model: Any, run: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits at real tokens, and gradients, of a step of training."""
    model.zero_grad(set_to_none=True)
    logits = at_real_tokens("llama", given, run(ids_of(), **given, **NO_CACHE).logits)
    weigh = torch.randn(B, N, VOCABULARY, generator=torch.Generator().manual_seed(3))
    ((logits * weigh).sum() / weigh.numel() ** 0.5).backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compared(family: str, form: str, backend: Any, **changes: Any) -> None:
    """One graph for all packings, or all paddings: its logits and gradients are those of eager attention."""
    model = model_of(family, attention_dropout=0.0, **changes).train()
    model.set_attn_implementation("gossamer")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    if form == "packed":
        values = [{"position_ids": positions(documents)} for documents in PACKINGS]
    else:
        values = [{"attention_mask": padded(*ends)} for ends in PADDINGS]
    found = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        found += [step_of(model, compiled, given) for given in values]
    # Eager attention of gpt-oss lets packed documents see one another.
    model.set_attn_implementation("gossamer" if (family, form) == ("gpt_oss", "packed") else "eager")
    for given, (logits, gradients) in zip(values, found, strict=True):
        wanted, slopes = step_of(model, model, given)
        assert (logits - wanted).abs().max() <= NEAR
        assert (gradients - slopes).abs().max() <= NEAR * max(1.0, float(slopes.abs().max()))


def _skip_what_is_not_ours(family: str, form: str) -> None:
    if CHUNKS_RESTART:
        return
    if family == "gpt_oss":
        pytest.skip("this release's experts read their gradients on the host")
    if family == "llama4" and form == "packed":
        pytest.skip("this release counts chunks over all documents")


@pytest.mark.parametrize(
    ("family", "form"), [("llama", "packed"), ("mistral", "padded"), ("gemma3", "packed"), ("gpt_oss", "padded")]
)
def test_steps_of_training_in_one_graph(family: str, form: str) -> None:
    _skip_what_is_not_ours(family, form)
    graphs = Graphs()
    compared(family, form, graphs)
    assert graphs.compiled == 1 and graphs.reads == []
    # The layers of a kind share one structure.
    assert len(graphs.layouts) == 2 and len(set(graphs.layouts)) == (2 if family in ("gemma3", "gpt_oss") else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gemma2", "packed"), ("llama4", "padded"),
        *more(("llama", "padded"), ("mistral", "packed"), ("gemma2", "padded"), ("gemma3", "padded"),
              ("gpt_oss", "packed"), ("llama4", "packed")),
    ],
)  # fmt: skip
def test_more_steps_of_training_in_one_graph(family: str, form: str) -> None:
    _skip_what_is_not_ours(family, form)
    compared(family, form, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_steps_of_training_by_inductor(form: str) -> None:
    compared("mistral", form, "inductor", num_hidden_layers=1)


def test_activations_that_are_checkpointed() -> None:
    """Layers that keep nothing share the structure that was made before them."""
    model, given = model_of("llama", attention_dropout=0.0).train(), {"attention_mask": padding("left")}
    model.set_attn_implementation("gossamer")
    wanted = step_of(model, model, given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = step_of(model, torch.compile(model, fullgraph=True, backend="aot_eager"), given)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).abs().max() <= NEAR


# -- decoding -----------------------------------------------------------------------------------------------------

STEPS, ROOM = 14, 4  # over the window of 8, so that sliding caches roll


def decoded(model: Any, run: Any, form: str, device: str = "cpu", after: Any = None) -> Tensor:
    """Logits of a prompt, and of steps of decoding behind it, in a static cache."""
    ids = ids_of(N + STEPS).to(device)
    mask = torch.ones(B, N + STEPS + ROOM, dtype=torch.long, device=device)
    if form == "left":
        mask[0, :7] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask} if form == "left" else {}
    cache = hf.StaticCache(config=model.config, max_cache_len=N + STEPS + ROOM)
    with torch.no_grad():
        parts = [model(ids[:, :N], position_ids=places[:, :N], past_key_values=cache, **given).logits]
        for at in range(N, N + STEPS):
            now = ids[:, at : at + 1].contiguous(), places[:, at : at + 1].contiguous()
            if after is not None:
                after(at - N)
            parts.append(run(now[0], position_ids=now[1], past_key_values=cache, **given).logits.clone())
    return at_real_tokens("llama", {"attention_mask": mask[:, : N + STEPS]}, torch.cat(parts, 1))


SLOW = pytest.param("gemma3", "left", marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "form"), [("llama", "plain"), ("mistral", "left"), SLOW])
def test_steps_of_decoding_with_a_static_cache(family: str, form: str) -> None:
    """One graph while the cache has room, and one more where a sliding cache rolls, as with sdpa."""
    model, graphs = model_of(family), Graphs()
    model.set_attn_implementation("eager")
    wanted = decoded(model, model, form)
    model.set_attn_implementation("gossamer")
    found = decoded(model, torch.compile(model, fullgraph=True, backend=graphs), form)
    assert (found - wanted).abs().max() <= NEAR
    assert graphs.compiled == (1 if family == "llama" else 2) and graphs.reads == []


@pytest.mark.parametrize("family", ["mistral"])
def test_generation_with_a_compiled_step(family: str) -> None:
    """As `generate` does by itself on a GPU: masks are made outside of the compiled step."""
    model, given = model_of(family), inputs_of(family, "left")
    compiling = hf.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    model.set_attn_implementation("eager")
    wanted = generated(model, given)
    model.set_attn_implementation("gossamer")
    found = generated(model, given, cache_implementation="static", compile_config=compiling)
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert (one - other).abs().max() <= NEAR


def test_the_position_of_a_static_cache_is_not_read() -> None:
    """Nor what it becomes when the cache adds to it before attention runs."""
    position = torch.tensor(5)
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 32, 8)
    wanted = gs.attention(q, k, k, gs.SlidingWindow(3), q_offset=5)
    for _ in range(2):  # the first time that a form is met it is certified
        mask = make_mask(2, 1, 32, position, 0, masking_utils.sliding_window_causal_mask_function(4))
    with NothingRead():
        mask = make_mask(2, 1, 32, position, 0, masking_utils.sliding_window_causal_mask_function(4))
        position.add_(1)
        assert mask.kept.what == Rules(Reach(3, 0), ())
        attended = mask.attended(None, 2, q.device)
    torch.testing.assert_close(gs.attention(q, k, k, attended.pattern, **attended.options), wanted)
    with pytest.raises(AssertionError, match="reads a tensor"), NothingRead():
        int(position)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# Layers with a window, with all keys, and with both in turn; torch takes long to compile.
@pytest.mark.parametrize(
    ("family", "form"), [("llama", "left"), ("mistral", "plain"), ("gemma3", "plain"), ("gemma3", "left")]
)
def test_a_compiled_step_of_decoding_does_not_wait(family: str, form: str) -> None:
    model = model_of(family).cuda()
    model.set_attn_implementation("eager")
    wanted = decoded(model, model, form, "cuda")

    def after(step: int) -> None:  # both graphs of a sliding cache have been compiled
        waiting_raises(step > 3)

    model.set_attn_implementation("gossamer")
    try:
        found = decoded(model, torch.compile(model, fullgraph=True), form, "cuda", after)
    finally:
        waiting_raises(False)
    assert (found - wanted).abs().max() <= 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_a_compiled_step_of_training_does_not_wait(form: str) -> None:
    model = model_of("gemma3", attention_dropout=0.0).cuda().train()
    model.set_attn_implementation("gossamer")
    compiled = torch.compile(model, fullgraph=True)
    ids = ids_of().cuda()
    for at, (documents, ends) in enumerate(zip(PACKINGS, PADDINGS, strict=True)):
        given = {"position_ids": positions(documents)} if form == "packed" else {"attention_mask": padded(*ends)}
        given = {name: x.cuda() for name, x in given.items()}
        torch.cuda.synchronize()
        try:
            waiting_raises(at > 1)
            compiled(ids, **given, **NO_CACHE).logits.square().mean().backward()
        finally:
            waiting_raises(False)


# -- what has no rules on a device ----------------------------------------------------------------------------------


def test_holes_in_the_padding_are_refused_in_a_graph() -> None:
    model = model_of("llama", num_hidden_layers=1)
    model.set_attn_implementation("gossamer")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(ids_of(), attention_mask=padding("left"), **NO_CACHE)
        with pytest.raises(RuntimeError, match="attention_mask must have no hole between two keys"):
            compiled(ids_of(), attention_mask=padding("holes"), **NO_CACHE)


def test_what_has_no_rules_breaks_the_graph_or_is_refused() -> None:
    register("gossamer-sinks", restrict=gs.SlidingWindow(3, sinks=2))
    model, given = model_of("llama", num_hidden_layers=1), {"attention_mask": padding("left")} | NO_CACHE
    model.set_attn_implementation("gossamer-sinks")
    with torch.no_grad():
        wanted = model(ids_of(), **given).logits
        with pytest.raises(torch._dynamo.exc.Unsupported, match="has no rules on a device"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(ids_of(), **given)
        torch.compiler.reset()
        found = torch.compile(model, backend="aot_eager")(ids_of(), **given).logits
        assert (found - wanted).abs().max() <= NEAR

    def thirds(hidden: Tensor) -> Any:
        third = lambda b, h, q, kv: (q + kv) % 3 != 1  # noqa: E731
        return masking_utils.create_causal_mask(model.config, hidden, None, None, and_mask_function=third).shape

    with pytest.raises(torch._dynamo.exc.Unsupported, match="has no rules on a device"):
        torch.compile(thirds, fullgraph=True, backend="eager")(torch.zeros(B, N, 32))
    torch.compiler.reset()
    assert torch.compile(thirds, backend="eager")(torch.zeros(B, N, 32)) == (B, 1, N, N)


def test_restrictions_with_rules_are_in_the_graph() -> None:
    register("gossamer-local", restrict=lambda config, layer: gs.Local(5) if layer else gs.SlidingWindow(6))
    model, given = model_of("llama"), {"attention_mask": padding("left")} | NO_CACHE
    model.set_attn_implementation("gossamer-local")
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids_of(), **given).logits
        assert (found - model(ids_of(), **given).logits).abs().max() <= NEAR


def test_documents_that_the_mask_function_is_not_told_of() -> None:
    """With an empty cache they follow from the positions that the layers are given."""
    model = model_of("llama", num_hidden_layers=1)
    model.set_attn_implementation("gossamer")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for documents in PACKINGS[::2]:
            given = {"position_ids": positions(documents)}
            wanted = model(ids_of(), **given, use_cache=False).logits
            assert (compiled(ids_of(), **given, use_cache=True).logits - wanted).abs().max() <= NEAR


def test_cu_seq_lens_in_a_graph() -> None:
    model = model_of("llama", num_hidden_layers=1)
    model.set_attn_implementation("gossamer")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, edges = ids_of(batch=1), torch.tensor([0, 10, 19, 24], dtype=torch.int32)
    given = {"position_ids": positions(PACKINGS[0])[:1], "max_length_q": 10, "max_length_k": 10} | NO_CACHE
    with torch.no_grad():
        found = compiled(ids, cu_seq_lens_q=edges, cu_seq_lens_k=edges, **given).logits
        assert (found - model(ids, **given).logits).abs().max() <= NEAR
        with pytest.raises(RuntimeError, match="must be None, or have the documents of packed position_ids"):
            compiled(ids, cu_seq_lens_q=edges, cu_seq_lens_k=edges - (edges == 19).int(), **given)
