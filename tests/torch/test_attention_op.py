"""The operators: opcheck, torch.compile, autocast, derivatives, what is remembered, explain, and host cost."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.patterns import handles
from gossamer.plan.problem import Unsupported
from gossamer.torch import planning, registry
from gossamer.torch.arguments import AttentionOptions
from gossamer.torch.given_layouts import geometry_of
from gossamer.torch.mask_layouts import layout_of

P = gs.SlidingWindow(10)


def qkv(N: int = 40, *, B: int = 2, H: int = 4, D: int = 16, grad: bool = True) -> list[Tensor]:
    return [torch.randn(B, H, N, D, requires_grad=grad) for _ in range(3)]


def dense(pattern: gs.Pattern, N: int) -> Tensor:
    return torch.from_numpy(pattern.materialize(N, N))


def same_as_sdpa(function: Callable[..., Tensor], args: list[Tensor], mask: Tensor) -> None:
    """Output and gradients of `function(q, k, v)` against SDPA with a dense mask."""
    out, expected = function(*args), F.scaled_dot_product_attention(*args, attn_mask=mask)
    weight = torch.randn_like(out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((out * weight).sum(), args)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weight).sum(), args), rtol=1e-4, atol=1e-5)


FORMS = {
    "pattern": lambda p, N: p,
    "mask": dense,
    "mask_by_head": lambda p, N: dense(p, N).expand(4, N, N),
    "layout": lambda p, N: p.layout(N, N, block_q=32, block_kv=64),
    "layout_of_tensors": lambda p, N: p.layout(N, N, block_q=32, block_kv=64).to("cpu"),
    "csr_pattern": lambda p, N: gs.CSR.from_torch(dense(p, N).to_sparse_coo()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_forms_of_a_pattern(form: str, implementation: str | None) -> None:
    pattern = FORMS[form](P, 70)
    for _ in range(2):  # the second call finds what the first one made
        same_as_sdpa(lambda *a: gs.attention(*a, pattern, implementation=implementation), qkv(70), dense(P, 70))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_csr_tensor() -> None:
    sparse = dense(P, 40).to(torch.float32).to_sparse_csr()
    for _ in range(2):
        same_as_sdpa(lambda *a: gs.attention(*a, sparse), qkv(), dense(P, 40))


@pytest.mark.parametrize("N", [40, 3000])
def test_packed_documents_of_one_batch_element(N: int) -> None:
    ids = torch.arange(N)[None] // 15
    for pattern in (gs.Document(ids) & gs.Causal(), gs.PerHead([gs.Document(ids)]) & gs.Dilated(9, 0, 16)):
        args = qkv(N, B=1, H=1)
        same_as_sdpa(lambda *a, p=pattern: gs.attention(*a, p), args, dense(pattern, N))


def test_ranks() -> None:
    q, k, v = qkv(grad=False)
    out, lse = gs.attention(q, k, v, P, return_lse=True)
    for at in ((0,), (0, 1)):
        part, part_lse = gs.attention(q[at], k[at], v[at], P, return_lse=True)
        torch.testing.assert_close((part, part_lse), (out[at], lse[at]))


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form", ["pattern", "mask", "layout_of_tensors"])
def test_opcheck(form: str, grad: bool, bshd: bool) -> None:
    given = FORMS[form](P, 40)
    if form == "pattern":
        entered: tuple[Any, ...] = [], [], given.handle
    elif form == "mask":
        entered = [given], [], -1
    else:
        entered = given.rows.arrays(), list(geometry_of(given)), -1
    sink = torch.randn(4, requires_grad=grad)
    operator = torch.ops.gossamer.forward.default
    args = (*qkv(grad=grad), *entered, None, None, None, sink, None, None, None, None, False, False, bshd)
    result = torch.library.opcheck(operator, args)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("fresh_compiler")
class TestCompile:
    def compiled(self, function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend="aot_eager", **more)

    def test_pattern_from_outside_with_changing_sizes(self) -> None:
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        f = torch.compile(lambda q, k, v: gs.attention(q, k, v, P), fullgraph=True, backend=counter)
        for N in (40, 50, 70, 33, 90):
            same_as_sdpa(f, qkv(N), dense(P, N))
        assert counter.frame_count <= 2

    def test_marked_dynamic(self) -> None:
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        f = torch.compile(lambda q, k, v: gs.attention(q, k, v, P), fullgraph=True, backend=counter)
        for N in (40, 70, 100):
            args = qkv(N)
            for x in args:
                torch._dynamo.mark_dynamic(x, 2)
            same_as_sdpa(f, args, dense(P, N))
        assert counter.frame_count == 1

    def test_pattern_as_argument_never_stale(self) -> None:
        f = self.compiled(lambda q, k, v, p: gs.attention(q, k, v, p))
        block = gs.BlockMask(torch.eye(5, dtype=torch.bool).numpy(), 8)
        documents = gs.Document([[0] * 15 + [1] * 25] * 2)
        many = (gs.SlidingWindow(3), block, documents, gs.PerHead([gs.Causal(), block] * 2), gs.Local(8) | gs.Local(5))
        for p in (gs.Causal(), *many, gs.Causal(), gs.Predicate(lambda i, j: abs(i - j) % 3 == 0)):
            same_as_sdpa(lambda *a, p=p: f(*a, p), qkv(), dense(p, 40))

    def test_a_handle_is_data(self) -> None:
        """Other documents in each step: two compilations, the second for any number."""
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        f = torch.compile(lambda q, k, v, h: gs.attention(q, k, v, h), fullgraph=True, backend=counter)
        for cut in range(3, 39, 3):
            p = gs.Document.from_cu_seqlens([0, cut, 40]) & gs.Causal()
            same_as_sdpa(lambda *a, p=p: f(*a, p.handle), qkv(), dense(p, 40))
            same_as_sdpa(lambda *a, p=p: gs.attention(*a, p.handle), qkv(), dense(p, 40))
        assert counter.frame_count <= 2
        for wrong in (gs.Local(77).handle, True):
            with pytest.raises(ValueError, match=r"make the pattern that it|Pattern or its handle.*got True"):
                gs.attention(*qkv(30), wrong)

    def test_pattern_as_module_attribute(self) -> None:
        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pattern: gs.Pattern = gs.SlidingWindow(6)

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return gs.attention(q, k, v, self.pattern)

        layer = Layer()
        f = self.compiled(layer)
        same_as_sdpa(f, qkv(), dense(gs.SlidingWindow(6), 40))
        layer.pattern = gs.BigBird(8)
        same_as_sdpa(f, qkv(), dense(gs.BigBird(8), 40))
        same_as_sdpa(copy.deepcopy(layer), qkv(), dense(gs.BigBird(8), 40))

    @pytest.mark.skipif(not registry.constants, reason="this torch has no constants of a plain class")
    def test_pattern_made_inside(self) -> None:
        f = self.compiled(lambda q, k, v: gs.attention(q, k, v, gs.SlidingWindow(5) | gs.BigBird(8)))
        for _ in range(2):
            same_as_sdpa(f, qkv(), dense(gs.SlidingWindow(5) | gs.BigBird(8), 40))
            gc.collect()

    def test_masks_and_layouts_are_data(self) -> None:
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        f = torch.compile(lambda q, k, v, m: gs.attention(q, k, v, m), fullgraph=True, backend=counter)
        for _ in range(3):
            mask = torch.rand(40, 40) < 0.5
            same_as_sdpa(lambda *a, mask=mask: f(*a, mask), qkv(), mask)
        assert counter.frame_count == 1
        for p in (gs.SlidingWindow(3), gs.Causal(), gs.BigBird(8)):
            layout = p.layout(40, 40, block_q=32, block_kv=32).to("cpu")
            same_as_sdpa(lambda *a, layout=layout: f(*a, layout), qkv(), dense(p, 40))

    def test_score_terms(self) -> None:
        def f(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, lengths: Tensor, offset: Any) -> Any:
            slopes = torch.full((4,), 0.5)
            return gs.attention(
                q, k, v, P, sink_logits=sink, key_lengths=lengths, q_offset=offset, softcap=3.0, alibi_slopes=slopes,
                return_lse=True,
            )  # fmt: skip

        compiled = self.compiled(f)
        for offset in (0, 3, torch.tensor(2)):
            args = [*qkv(), torch.randn(4, requires_grad=True)]
            lengths = torch.tensor([40, 17])
            found, expected = compiled(*args, lengths, offset), f(*args, lengths, offset)
            torch.testing.assert_close(found, expected)
            grads = [torch.autograd.grad(out.sum() + lse.sum(), args) for out, lse in (found, expected)]
            torch.testing.assert_close(*grads)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
    def test_inductor(self) -> None:
        f = torch.compile(lambda q, k, v: 2 * gs.attention(q + 1, k, v, P), fullgraph=True, mode="default")
        q, k, v = qkv()
        found = torch.autograd.grad(f(q, k, v).sum(), (q, k, v))
        expected = torch.autograd.grad((2 * gs.attention(q + 1, k, v, P)).sum(), (q, k, v))
        torch.testing.assert_close(found, expected)


def test_autocast_as_sdpa() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = gs.attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
        kept = gs.attention(q.double(), k.double(), v.double())
    assert out.dtype == expected.dtype == torch.bfloat16 and kept.dtype == torch.float64
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", FORMS)
def test_inference_mode_first_then_training(form: str) -> None:
    pattern = FORMS[form](gs.SlidingWindow(12), 40)
    with torch.inference_mode():
        gs.attention(*qkv(grad=False), pattern)
    same_as_sdpa(lambda *a: gs.attention(*a, pattern), qkv(), dense(gs.SlidingWindow(12), 40))


def test_inference_mode_first_then_training_of_a_reordered_graph() -> None:
    """Its order is made at the first call, and permutes what has a gradient in a later one."""
    graph = gs.CSR.from_torch(dense(gs.Dilated(4, 4, 7), 40).float().to_sparse_coo())
    pattern = graph.reordered()
    with torch.inference_mode():
        gs.attention(*qkv(grad=False), pattern)
    same_as_sdpa(lambda *a: gs.attention(*a, pattern), qkv(), dense(graph, 40))


def test_only_lse_is_used() -> None:
    q, k, v = qkv()
    _, lse = gs.attention(q, k, v, P, return_lse=True)
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = (q @ k.mT * 0.25).masked_fill(~dense(P, 40), -torch.inf)
    expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(found[:2], expected, rtol=1e-4, atol=1e-5)
    assert not found[2].any()


def test_layouts_written_to_are_read_again() -> None:
    mask = dense(P, 40)
    same_as_sdpa(lambda *a: gs.attention(*a, mask), qkv(), mask)
    mask[:, :5] = True
    same_as_sdpa(lambda *a: gs.attention(*a, mask), qkv(), mask)


def test_handles_are_shared_by_value_and_released() -> None:
    gc.collect()
    before = handles.count()
    first, second = gs.SlidingWindow(1234), gs.SlidingWindow(1234)
    handle = first.handle
    assert second.handle == handle
    del first
    gc.collect()
    assert handles.pattern_of(handle) == second
    del second
    gc.collect()
    assert handles.count() == before
    with pytest.raises(ValueError, match="unknown"):
        handles.pattern_of(handle)
    assert gs.SlidingWindow(1234).handle == handle
    fn = lambda i, j: i > j  # noqa: E731
    handle = gs.Predicate(fn).handle
    assert gs.Predicate(fn).handle != handle  # the first one is gone, and so might be its function


EXPORTED = """
import sys
import torch
import gossamer as gs
import gossamer.torch
x = [torch.ones(1, 2, 40, 8).cumsum(2) for _ in range(3)]
others = [gs.Local(n) for n in range(1, 9)]  # made before, they get no number of their own
if sys.argv[2] == "save":
    kept = gs.SlidingWindow(5) & ~gs.Local(3)
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return gs.attention(q, k, v, kept)
    torch.export.save(torch.export.export(Model(), tuple(x)), sys.argv[1])
else:
    del others
    program = torch.export.load(sys.argv[1]).module()
    try:
        program(*x)
    except ValueError as error:
        assert "make the pattern that it stands for" in str(error)
    else:
        raise AssertionError("another pattern was taken")
    kept = gs.SlidingWindow(5) & ~gs.Local(3)
    assert torch.equal(program(*x), gs.attention(*x, kept))
"""


def test_an_exported_program_means_its_pattern_in_another_process(tmp_path: Path) -> None:
    for what in ("save", "load"):
        command = [sys.executable, "-c", EXPORTED, str(tmp_path / "program.pt2"), what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr


def test_a_pattern_dropped_before_the_backward() -> None:
    q, k, v = qkv()
    out = gs.attention(q, k, v, gs.SlidingWindow(17))
    gc.collect()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense(gs.SlidingWindow(17), 40))
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q), rtol=1e-4, atol=1e-5
    )


def test_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    forget_all()
    planning._logged.clear()
    with caplog.at_level(logging.INFO, "gossamer"):
        for N in (40, 41):
            gs.attention(*qkv(N), P)
    (record,) = caplog.records
    assert "runs by blocked" in record.message and "not triton: " in record.message


def test_named_implementation_runs_or_gives_every_reason() -> None:
    q, k, v = (x.double() for x in qkv())
    with pytest.raises(Unsupported) as raised:
        gs.attention(q, k, v, P, implementation="triton")
    assert "cuda" in str(raised.value) and "available: blocked, reference" in str(raised.value)


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(Unsupported) as raised:
        call()
    return str(raised.value)


def test_explain() -> None:
    q, k, v = qkv(256, grad=False)
    found = gs.explain(q, k, v, gs.SlidingWindow(64))
    pairs = int(dense(gs.SlidingWindow(64), 256).sum())
    assert found.implementation == "blocked" and set(found.reasons) == {"small", "hopper", "triton", "reference"}
    assert found.density == pytest.approx(pairs / 256**2)
    assert found.useful_flops == pairs * 8 * 2 * 32 and found.executed_flops >= found.useful_flops
    assert found.tiles["full"] + found.tiles["interval"] + found.tiles["bits"] <= found.tiles["of"]
    assert not found.problem.backward and gs.explain(*qkv(), P).problem.backward
    assert "SlidingWindow" not in str(found) and "implementation" in str(found) and "not triton" in repr(found)
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found)
    console.file.close()
    text = console.export_text()
    assert "density" in text and text.startswith("This call runs on blocked")
    for form in (dense(P, 256), P.layout(256, 256, block_q=32, block_kv=32)):
        assert gs.explain(q, k, v, form).density == pytest.approx(gs.explain(q, k, v, P).density)
    assert gs.explain(q, k, v, P, implementation="reference").executed_flops == 256**2 * 8 * 2 * 32


def test_host_cost() -> None:
    """A repeated call does little in Python: well under a millisecond, whatever else the machine does."""
    q, k, v = qkv(8, B=1, H=1, D=8, grad=False)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        gs.attention(q, k, v, P)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


OLDER_TORCH = """
import torch, torch._library.opaque_object as opaque
register = opaque.register_opaque_type
def refuse(cls, *args, **options):
    if cls.__module__.startswith("gossamer"):
        raise TypeError("needs a metaclass of its own")
    return register(cls, *args, **options)
opaque.register_opaque_type = refuse
import gossamer as gs
from gossamer.torch import registry
assert not registry.constants
f = torch.compile(lambda q, k, v, p: gs.attention(q, k, v, p), fullgraph=True, backend="aot_eager")
q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
for p in (gs.Causal(), gs.SlidingWindow(3), gs.BigBird(8), gs.Causal(), gs.SlidingWindow(3)):
    found, expected = f(q, k, v, p), gs.attention(q, k, v, p)
    torch.testing.assert_close(found, expected)
    for x, y in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (found, expected))):
        torch.testing.assert_close(x, y)
"""


def test_compile_where_torch_has_no_constants_of_a_plain_class() -> None:
    """The path of torch 2.11: a pattern enters a graph by its handle, an integer attribute."""
    done = subprocess.run([sys.executable, "-c", OLDER_TORCH], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_masks_layout_is_one_that_a_user_might_give() -> None:
    """Row bounds that are not there are not read: no entry, not even padding, is in the interval list."""
    x = torch.zeros(2, 3, 100, 8)
    for shape in ((100, 90), (2, 1, 100, 90), (1, 3, 1, 90)):
        made = layout_of(torch.rand(shape) < 0.5, 100, 90, block_q=32, block_kv=64, transpose=True)
        gs.attention(x, x[:, :, :90], x[:, :, :90], made)
        for walk in (made.rows, made.columns):
            assert walk.lo.numel() or not walk.interval.indices.numel()


def test_options_are_the_keywords_of_attention_and_of_explain() -> None:
    """In one order: both hand them on by position."""
    of_call, of_explain = (inspect.signature(f).parameters.values() for f in (gs.attention, gs.explain))
    keywords = [x.name for x in of_call if x.kind is x.KEYWORD_ONLY and x.name not in ("return_lse", "merge")]
    assert list(AttentionOptions._fields) == keywords
    assert AttentionOptions() == tuple(x.default for x in of_call if x.name in keywords)
    assert [(x.name, x.kind, x.default) for x in of_call] == [(x.name, x.kind, x.default) for x in of_explain]
