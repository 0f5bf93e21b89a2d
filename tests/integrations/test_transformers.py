"""Models of transformers with gossamer: as their eager attention at every real token, or an error that says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.integrations.transformers import attention_mask, explain, register
from tests.support.transformers_models import DECODERS, OTHERS, VOCABULARY, WINDOW, hf, masking_utils, model_of

# 5.17 counts chunks from the first document on, and cannot make the static masks of Llama 4.
CHUNKS_RESTART = hasattr(masking_utils, "remap_positions_for_packed_sequence")

# What transformers and torch's compiler say of themselves is not gossamer's to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

# float32, of eager: set by the project, not by what was measured (1e-6).
NEAR = 1e-4
B, N, IMAGE = 2, 24, 98
NO_CACHE = {"use_cache": False}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    register()
    yield


def ids_of(n: int = N, batch: int = B) -> torch.Tensor:
    return torch.randint(1, VOCABULARY - 9, (batch, n), generator=torch.Generator().manual_seed(1))


def padding(kind: str) -> torch.Tensor:
    mask = torch.ones(B, N, dtype=torch.long)
    if kind == "left":
        mask[0, :7] = 0
    elif kind == "right":
        mask[1, 19:] = 0
    elif kind == "holes":
        mask[0, 9:12] = 0
    elif kind == "both":
        mask[0, :5], mask[0, 20:], mask[1, :2] = 0, 0, 0
    return mask


DOCUMENTS = (10, 9, 5)
POSITIONS = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].repeat(B, 1)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{kind: {"attention_mask": padding(kind)} for kind in ("left", "right", "holes", "both")},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


def inputs_of(family: str, form: str) -> dict[str, Any]:
    given = {"input_ids": ids_of(), **FORMS[form]}
    images = torch.Generator().manual_seed(2)
    if family in ("bart", "t5"):
        given["decoder_input_ids"] = ids_of(9)
    if family in ("modernbert", "bert", "bart", "t5"):
        given.pop("use_cache", None)
    if family == "vit":
        return {"pixel_values": torch.randn(B, 3, 16, 16, generator=images)}
    if family == "gemma3_images":
        tokens = given["input_ids"] = given["input_ids"].clone()
        tokens[:, 7:11] = tokens[:, 13:17] = IMAGE
        given |= {
            "token_type_ids": (tokens == IMAGE).long(),
            "pixel_values": torch.randn(2 * B, 3, 16, 16, generator=images),
        }
    return given


def at_real_tokens(family: str, given: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    if "attention_mask" not in given or family in ("bart", "t5"):
        return out
    return out * given["attention_mask"][..., None]


def difference(family: str, one: torch.Tensor, other: torch.Tensor, given: dict[str, Any]) -> float:
    one, other = (at_real_tokens(family, given, x) for x in (one, other))
    return float((one - other).abs().max())


def forms_of(family: str) -> list[str]:
    if family == "vit":
        return ["plain"]
    # BART and BERT have no packed form: their positions are their own, and their attention is not told of them.
    return [form for form in FORMS if form != "packed" or family not in ("bart", "bert", "t5")]


@pytest.mark.parametrize("family", [*DECODERS, *OTHERS])
def test_every_family_as_eager(family: str) -> None:
    model = model_of(family)
    for form in forms_of(family):
        given = inputs_of(family, form)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            wanted = model(**given)[0]
        model.set_attn_implementation("gossamer")
        if family == "t5" and model.encoder.config._attn_implementation == "gossamer":  # 5.17 leaves its parts sdpa
            with pytest.raises(gs.Unsupported, match=r"position_bias must be None.*T5"):
                model(**given)
            continue
        with torch.no_grad():
            found = model(**given)[0]
        if (family, form) == ("gpt_oss", "packed"):
            continue  # its eager attention lets documents see one another: below, each alone
        assert found.isfinite().all()
        assert difference(family, found, wanted, given) <= NEAR, form
        assert wanted.std() > 0.01


@pytest.mark.parametrize("family", [name for name in DECODERS if name != "gemma3_images"])
def test_packed_documents_are_as_each_alone(family: str) -> None:
    if family == "llama4" and not CHUNKS_RESTART:
        pytest.skip("this release counts chunks over all documents")
    model = model_of(family)
    ids = ids_of()
    model.set_attn_implementation("gossamer")
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in ids.split(DOCUMENTS, 1)], 1)
        # With an empty cache, too, where the model's mask function is not told of documents.
        for use_cache in (False, True) if family != "llama4" else (False,):
            packed = model(ids, position_ids=POSITIONS, use_cache=use_cache).logits
            assert (packed - alone).abs().max() <= NEAR


TOKENS = 14  # over the window of 8, so that sliding caches roll


def generated(model: Any, given: dict[str, Any], **options: Any) -> Any:
    return model.generate(
        **given, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", DECODERS)
def test_generation_with_growing_and_static_caches(family: str) -> None:
    model = model_of(family)
    for form in ("plain", "left"):
        given = inputs_of(family, form)
        for cache in (None,) if family == "llama4" and not CHUNKS_RESTART else (None, "static"):
            found = []
            for implementation in ("eager", "gossamer"):
                model.set_attn_implementation(implementation)
                options = {} if cache is None else {"cache_implementation": cache}
                found.append(generated(model, given, **options))
            wanted, mine = found
            assert torch.equal(mine.sequences, wanted.sequences), (form, cache)
            for step, (one, other) in enumerate(zip(mine.logits, wanted.logits, strict=True)):
                assert (one - other).abs().max() <= NEAR, (form, cache, step)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("form", ["plain", "left"])
def test_beam_search(family: str, form: str) -> None:
    model = model_of(family)
    found = []
    for implementation in ("eager", "gossamer"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**inputs_of(family, form), max_new_tokens=6, num_beams=3, do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss", "llama4", "cohere2"])
@pytest.mark.parametrize("form", ["plain", "left"])
def test_a_prompt_in_chunks(family: str, form: str) -> None:
    """The parts of a prompt one after the other give what the whole gives, in a cache that grows and a static one."""
    model = model_of(family)
    given = inputs_of(family, form)
    mask = given.get("attention_mask", torch.ones(B, N, dtype=torch.long))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(given["input_ids"], attention_mask=mask, position_ids=positions).logits
    model.set_attn_implementation("gossamer")
    for cache in (hf.DynamicCache(config=model.config), hf.StaticCache(config=model.config, max_cache_len=N + 8)):
        parts, at = [], 0
        for n in (5, 11, 1, 7):
            part = slice(at, at := at + n)
            with torch.no_grad():
                parts.append(
                    model(
                        given["input_ids"][:, part], attention_mask=mask[:, :at], position_ids=positions[:, part],
                        past_key_values=cache,
                    ).logits
                )  # fmt: skip
        assert difference(family, torch.cat(parts, 1), wanted, {"attention_mask": mask}) <= NEAR


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("form", ["plain", "left", "packed"])
def test_gradients_of_training(family: str, form: str) -> None:
    """With gradient checkpointing, of a loss over real tokens."""
    if (family, form) == ("gpt_oss", "packed"):
        pytest.skip("its eager attention lets documents see one another")
    model = model_of(family, attention_dropout=0.0).train()
    given = inputs_of(family, form) | NO_CACHE
    weigh = torch.randn(B, N, VOCABULARY, generator=torch.Generator().manual_seed(3))
    found = []
    for implementation, checkpointing in (("eager", False), ("gossamer", True), ("gossamer", False)):
        model.set_attn_implementation(implementation)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        model.zero_grad(set_to_none=True)
        loss = (at_real_tokens(family, given, model(**given).logits) * weigh).sum() / weigh.numel() ** 0.5
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    wanted, *mine = found
    largest = max(float(x.abs().max()) for x in wanted.values())
    for gradients in mine:
        assert gradients.keys() == wanted.keys()
        for name, x in gradients.items():
            assert (x - wanted[name]).abs().max() <= NEAR * max(1.0, largest), name
    if family == "gpt_oss":
        assert wanted["model.layers.0.self_attn.sinks"].abs().max() > 0


def test_training_under_autocast() -> None:
    """Queries and keys are float32 there, and values bfloat16; the result is as near to float32 as eager's."""
    model, found = model_of("llama").train(), []
    for implementation in ("eager", "gossamer"):
        model.set_attn_implementation(implementation)
        exact = model(ids_of(), **NO_CACHE).logits
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids_of(), **NO_CACHE).logits
        found.append(float((logits.float() - exact).norm()))
        logits.float().square().mean().backward()
    assert 0 < found[1] <= 2 * found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("form", ["plain", "left"])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_generation_on_a_gpu(family: str, form: str) -> None:
    """`generate` compiles a step of its static cache there, and captures it."""
    model = model_of(family).cuda()
    given = {name: x.cuda() for name, x in inputs_of(family, form).items()}
    model.set_attn_implementation("eager")
    wanted = generated(model, given)
    model.set_attn_implementation("gossamer")
    for options in ({}, {"cache_implementation": "static"}):
        found = generated(model, given, **options)
        assert torch.equal(found.sequences, wanted.sequences)
        for one, other in zip(found.logits, wanted.logits, strict=True):
            assert (one - other).abs().max() <= NEAR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss", "llama4", "bart"])
def test_forms_and_gradients_on_a_gpu(family: str) -> None:
    model = model_of(family, attention_dropout=0.0, dropout=0.0, activation_dropout=0.0).cuda().train()
    for form in forms_of(family):
        if (family, form) == ("gpt_oss", "packed"):
            continue
        given = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs_of(family, form).items()}
        found = []
        for implementation in ("eager", "gossamer"):
            model.set_attn_implementation(implementation)
            model.zero_grad(set_to_none=True)
            out = at_real_tokens(family, given, model(**given)[0])
            out.square().mean().backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found.append((out.detach(), torch.cat(gradients)))
        (wanted, gradients), (out, mine) = found
        assert (out - wanted).abs().max() <= NEAR, form
        assert (mine - gradients).abs().max() <= NEAR * max(1.0, float(gradients.abs().max())), form


# -- what raises --------------------------------------------------------------------------------------------------


def test_what_is_not_computed_raises_by_name() -> None:
    llama = model_of("llama", attention_dropout=0.1)
    llama.set_attn_implementation("gossamer")
    ids = ids_of()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("output_attentions must be None: probabilities are never held", {"output_attentions": True}),
        ("head_mask must be None: what it asks for is not known", {"head_mask": torch.ones(4)}),
        ("must hold 0 and minus infinity.*got -1.5", {"attention_mask": torch.full((B, 1, N, N), -1.5)}),
        ("attention_mask must be boolean, or additive", {"attention_mask": torch.ones(B, 1, N, N, dtype=torch.int64)}),
        ("cu_seq_lens_q must be None, or have the documents", {"cu_seq_lens_q": torch.tensor([0, 9, B * N])}),
    ]
    for message, given in cases:
        with pytest.raises(ValueError, match=message):
            llama(ids, **given)
    llama.train()
    with pytest.raises(gs.Unsupported, match=r"dropout must be 0.0.*got 0.1; set config.attention_dropout = 0.0"):
        llama(ids)


def test_models_that_look_at_their_mask() -> None:
    """GPT-2 asks for the dimensions of its mask; MPNet adds it to its scores, which a mask without pairs cannot be."""
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1)
    config.eos_token_id = None
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config).eval()
    for kind in ("dynamic", "static"):
        tokens = []
        for name in ("eager", "gossamer"):
            model.set_attn_implementation(name)
            made = model.generate(
                ids_of(), attention_mask=padding("left"), max_new_tokens=4, do_sample=False, pad_token_id=0,
                cache_implementation=kind, disable_compile=True,
            )  # fmt: skip
            tokens.append(made)
        assert torch.equal(*tokens)
    of_mpnet = hf.MPNetConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(ValueError, match=r"attention_mask, a mask of gossamer, cannot be used .*eager"):
        hf.MPNetModel._from_config(of_mpnet, attn_implementation="gossamer").eval()(ids_of())


def test_probabilities_that_the_configuration_asks_for() -> None:
    model = model_of("llama", _attn_implementation="eager", output_attentions=True)
    model.set_attn_implementation("gossamer")
    with pytest.raises(ValueError, match=r"config\.output_attentions must be False"):
        model(ids_of())


def test_cu_seq_lens_that_say_what_position_ids_say() -> None:
    ids, positions = ids_of(batch=1), POSITIONS[:1]
    ends = torch.tensor([0, 10, 19, 24], dtype=torch.int32)
    for family in ("llama", "gpt_oss"):
        model = model_of(family)
        model.set_attn_implementation("gossamer")
        given: dict[str, Any] = {"position_ids": positions, "use_cache": False, "max_length_q": 10, "max_length_k": 10}
        with torch.no_grad():
            wanted = model(ids, position_ids=positions, use_cache=False).logits
            found = model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **given).logits
        assert torch.equal(found, wanted)
        with pytest.raises(gs.Unsupported, match="cu_seq_lens_k must be None, or have the documents"):
            model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends[:-1], **given)


def test_masks_of_four_dimensions() -> None:
    """Given by the user: booleans, or 0 and minus infinity; one that is written to is read again."""
    model = model_of("llama")
    kept = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(4)) < 0.5
    kept |= torch.eye(N, dtype=torch.bool)
    least = torch.where(kept, 0.0, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(ids_of(), attention_mask=least).logits
        model.set_attn_implementation("gossamer")
        for mask in (kept, least, torch.where(kept, 0.0, -torch.inf)):
            assert (model(ids_of(), attention_mask=mask).logits - wanted).abs().max() <= NEAR
        least[:] = 0
        kept[:] = True
        found = [model(ids_of(), attention_mask=mask).logits for mask in (kept, least)]
        assert torch.equal(*found) and (found[0] - wanted).abs().max() > NEAR


def test_a_layer_without_a_mask() -> None:
    from gossamer.integrations.transformers.attending import attention_function

    attend = attention_function(None)
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    assert torch.equal(attend(module, q, q, q, None)[0], gs.attention(q, q, q, gs.Causal()).transpose(1, 2))
    assert torch.equal(attend(module, q, k, k, None, is_causal=False)[0], gs.attention(q, k, k).transpose(1, 2))
    one = q[:, :, :1]
    assert torch.equal(attend(module, one, k, k, None)[0], gs.attention(one, k, k).transpose(1, 2))
    with pytest.raises(gs.Unsupported, match="attention_mask is None in a causal layer of Q = 5 queries and K = 9"):
        attend(module, q, k, k, None)
    with pytest.raises(gs.Unsupported, match="sliding_window=3 without"):
        attend(module, q, q, q, None, sliding_window=3)
    with pytest.raises(ValueError, match=r"attention_mask must be .*got shape \(1, 9\)"):
        attend(module, q, k, k, torch.ones(1, 9))


# -- register, restrict, explain ----------------------------------------------------------------------------------


def test_a_mask_of_one_is_for_the_whole_batch() -> None:
    from gossamer.integrations.transformers.attending import attention_function
    from gossamer.integrations.transformers.attention_mask import make_mask

    attend, module = attention_function(None), torch.nn.Module()
    q = torch.randn(3, 2, 5, 8)
    mask = make_mask(1, 5, 5, 0, 0, masking_utils.bidirectional_mask_function, torch.arange(5)[None] < 4)
    wanted = gs.attention(q, q, q, key_lengths=torch.tensor([4] * 3, dtype=torch.int32))
    assert torch.equal(attend(module, q, q, q, mask)[0], wanted.transpose(1, 2))
    two = make_mask(2, 5, 5, 0, 0, masking_utils.bidirectional_mask_function)
    with pytest.raises(gs.Unsupported, match=r"attention_mask was made for \(B, 1, Q, K\) = \(2, 1, 5, 5\)"):
        attend(module, q, q, q, two)


def test_names() -> None:
    for name in ("flash_gossamer", "my_sdpa", "eager", "org/repo", "a|b", "", "paged_x", 3):
        with pytest.raises(ValueError, match="name must"):
            register(name)  # type: ignore[arg-type]
    for restrict in (gs.Causal, 512, "causal"):
        with pytest.raises(ValueError, match="restrict must be a gossamer pattern, a function"):
            register(restrict=restrict)  # type: ignore[arg-type]
    hf.AttentionInterface.register("somebody", lambda *args: None)
    with pytest.raises(ValueError, match="name must not be one that another library registered"):
        register("somebody")


def test_restrictions_of_several_names() -> None:
    """A name with a pattern, one with a function of the layer, and the plain one beside them."""
    seen = []

    def by_layer(config: Any, layer: int | None) -> gs.patterns.Pattern | None:
        seen.append((type(config).__name__, layer))
        return gs.SlidingWindow(3) if layer == 1 else None

    register("gossamer-window", restrict=gs.SlidingWindow(3))
    register("gossamer-layers", restrict=by_layer)
    register()
    mistral = model_of("mistral")
    ids, given = ids_of(), {"attention_mask": padding("left")}

    def logits(implementation: str, **more: Any) -> torch.Tensor:
        mistral.set_attn_implementation(implementation)
        with torch.no_grad():
            return mistral(ids, **given, **more).logits

    i, j = torch.arange(N)[:, None], torch.arange(N)
    real = given["attention_mask"][:, None, None, :].bool()
    reference = []
    for window in (4, WINDOW):
        kept = (j <= i) & (j > i - window) & real
        mistral.set_attn_implementation("eager")
        with torch.no_grad():
            reference.append(mistral(ids, attention_mask=torch.where(kept, 0.0, -1e38), position_ids=None).logits)
    at = given["attention_mask"][..., None]
    assert ((logits("gossamer-window") - reference[0]) * at).abs().max() <= NEAR
    assert ((logits("gossamer") - reference[1]) * at).abs().max() <= NEAR
    mixed = logits("gossamer-layers")
    assert all((mixed - other).abs().max() > NEAR for other in reference)
    assert seen == [("MistralConfig", 0), ("MistralConfig", 1)]
    report = explain(mistral, {"input_ids": ids})
    assert [layer.pattern for layer in report] == [repr(gs.SlidingWindow(WINDOW - 1)), repr(gs.SlidingWindow(3))]
    # With a mask of the user's, and in decoding, where the sliding cache has dropped keys.
    kept = ((j <= i) & real).expand(B, 1, N, N)
    mistral.set_attn_implementation("gossamer-window")
    with torch.no_grad():
        assert ((mistral(ids, attention_mask=kept).logits - reference[0]) * at).abs().max() <= NEAR
        cache = hf.DynamicCache(config=mistral.config)
        steps = [mistral(ids[:, n : n + 1], past_key_values=cache).logits for n in range(N)]
        whole = mistral(ids).logits
    assert (torch.cat(steps, 1) - whole).abs().max() <= NEAR


def test_restrictions_that_raise() -> None:
    register("gossamer-wrong", restrict=lambda config, layer: 5)  # type: ignore[arg-type,return-value]
    register("gossamer-window", restrict=gs.SlidingWindow(3))
    llama, bart = model_of("llama"), model_of("bart")
    llama.set_attn_implementation("gossamer-wrong")
    with pytest.raises(ValueError, match="restrict must return a gossamer pattern or None, got 5"):
        llama(ids_of())
    bart.set_attn_implementation("gossamer-window")
    with pytest.raises(gs.Unsupported, match=r"restrict is not for a model whose config.is_encoder_decoder"):
        bart(ids_of())


def test_explain_says_what_each_layer_runs() -> None:
    model = model_of("gemma3")
    with pytest.raises(ValueError, match=r"model must compute its attention with gossamer: register\(\)"):
        model.set_attn_implementation("eager")
        explain(model, ids_of())
    model.set_attn_implementation("gossamer")
    with pytest.raises(ValueError, match="inputs must be a tensor or a dictionary"):
        explain(model, [1, 2])  # type: ignore[arg-type]
    report = explain(model, {"input_ids": ids_of(), "attention_mask": padding("left")})
    names = [layer.name for layer in report]
    assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"] and len(report) == 2
    window, everything = report
    assert [x.pattern for x in report] == [f"{rule} <= i, key_starts, key_lengths" for rule in ("i - 7 <= j", "j")]
    assert [x.planned for x in report] == ["on the device"] * 2 and "on the device" in str(report)
    assert everything.implementation == "blocked" and window.density < everything.density == report[1].call.density
    kept = torch.ones(N, N).tril()
    assert everything.density == pytest.approx(float((kept.sum() + kept[7:, 7:].sum()) / (2 * N * N)))
    assert "model.layers.0.self_attn" in str(report) and "density" in str(report)
    (_, plain), (_, holes) = (
        explain(model, {"input_ids": ids_of(), "attention_mask": x}) for x in (None, padding("holes"))
    )
    assert plain.pattern == "Causal()" and plain.planned == "once" and holes.planned == "on the host"


def test_one_structure_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward makes each kind of mask once, and its structure once; without padding one plan serves all forwards."""
    made: list[Any] = []
    make = attention_mask.device_layout
    monkeypatch.setattr(attention_mask, "device_layout", lambda *x, **y: (made.append(x[3]), make(*x, **y))[1])
    model = model_of("gemma3", num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)
    model.set_attn_implementation("gossamer")
    for forwards in (1, 2):
        model(ids_of(), attention_mask=padding("left"), use_cache=False)
        assert len(made) == 2 * forwards
    model(ids_of(), use_cache=False)
    assert len(made) == 4
