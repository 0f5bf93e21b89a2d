"""Calls of SparseK that were made before: what tells them apart, what is kept, and that nothing is forgiven."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k import calls
from tests.support.processes import INTERPRETING
from tests.support.sparsek import attention_by_definition, inputs
from tests.torch.test_host_cost import entered


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


def given(dtype: torch.dtype = torch.float32, N: int = 40, grad: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1, heads, N, 8, generator=g).to(dtype) for heads in (4, 2, 2)]
    return [t.requires_grad_(grad) for t in (*x, torch.randn(1, 2, N, generator=g))]


def results(x: list[Tensor], **options: Any) -> list[Tensor]:
    """out, lse and all gradients."""
    out, lse = gs.sparsek_attention(*x, return_lse=True, **options)
    found = torch.autograd.grad([out, lse], x, [torch.cos(out.detach()), torch.sin(lse.detach())])
    return [out.detach(), lse.detach(), *found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("gradient", [False, True])
def test_how_much_of_the_package_a_repeated_call_enters(gradient: bool) -> None:
    x = given(N=100, grad=gradient)
    for _ in range(2):
        repeat = entered(lambda: gs.sparsek_attention(*x, k_keep=9, window=5))
    assert len(repeat.files) <= 10 and len(repeat.functions) <= 45 + gradient, sorted(repeat.functions)
    assert len(calls.known) == 1


def test_a_second_call_is_the_first_one() -> None:
    options = [{"k_keep": 5}, {"k_keep": 6}, {"k_keep": 5, "window": 3}, {"k_keep": 5, "scale": 0.5},
               {"k_keep": 5, "gate": None}, {"k_keep": 5, "gate": "kv"}, {"k_keep": 5, "keep": "support"},
               {"k_keep": 5, "causal": False}, {"k_keep": 5, "straight_through": True}]  # fmt: skip
    x = given(grad=True)
    first, second = ([results(x, **o) for o in options] for _ in range(2))
    assert len(calls.known) == len(options)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert len({float(out.sum()) for out, *_ in first}) == len(options) - 1  # straight_through changes no result


@pytest.mark.parametrize("seed", range(3))
def test_known_calls_are_the_definition_of_their_numbers(seed: int) -> None:
    """The same keys, of numbers that change in place and of fresh tensors."""
    draw = random.Random(seed)
    for _ in range(5):
        x, options = inputs(draw)
        for _ in range(3):
            leaves = [t.detach().requires_grad_() for t in x]
            found = results(leaves, **options)
            out, lse = attention_by_definition(*leaves, **options)
            wanted = torch.autograd.grad([out, lse], leaves, [torch.cos(out.detach()), torch.sin(lse.detach())],
                                         allow_unused=True)  # fmt: skip
            for a, b in zip(found, [out, lse, *wanted], strict=True):
                assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=1e-8, atol=1e-8), options
            for t in x:
                t.copy_(t.flip(-1))


def test_a_key_is_told_by_all_that_matters() -> None:
    q, k, v, u = given()
    options = 5, 3, "topk", "v", True, None, None, False, False
    key = calls.key_of((q, k, v, u), options)
    others = [
        ((q[:, :2], k, v, u), options), ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v, u), options),
        ((q.double(), k.double(), v.double(), u), options), ((q, k, v, u.double()), options),
        ((q, k, v, u.clone().requires_grad_()), options), ((q, k, v, torch.zeros(81)[1:].view(1, 2, 40)), options),
        *(((q, k, v, u), (*options[:at], x, *options[at + 1 :])) for at, x in
          [(0, 6), (0, 5.0), (1, 4), (1, True), (2, "support"), (3, None), (4, False), (4, 1), (5, 1.0), (6, 0), (6, 1),
           (7, True), (7, 0), (8, True)]),
    ]  # fmt: skip
    assert key == calls.key_of((q.clone(), k.clone(), v.clone(), u.clone()), options)
    assert len({key, *(calls.key_of(*other) for other in others)}) == len(others) + 1
    for none in (((q, k, v, None), options), ((q, k.to_sparse(), v, u), options), ((q, k, v, u), (np.int64(5),))):
        assert calls.key_of(*none) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_keep": 0}, "k_keep must be"), ({"k_keep": 5.0}, "k_keep must be"), ({"window": True}, "window must be"),
        ({"causal": 1}, "causal must be"), ({"return_lse": 0}, "return_lse must be"), ({"keep": "all"}, "keep must be"),
        ({"scale": float("nan")}, "scale must be"), ({"straight_through": 1}, "straight_through must be"),
        ({"gate": "kv", "straight_through": True}, "straight_through must be False"),
        ({"u": torch.zeros(1, 3, 40)}, "u must be scores"), ({"u": torch.zeros(1, 2, 40).half()}, "u must be scores"),
        ({"k": torch.zeros(1, 2, 40, 9)}, "head size of q"),
        ({x: torch.zeros(1, 2, 41, 8) for x in "kv"}, "u must be scores"), ({"q_offset": 1}, "q_offset must be"),
        ({x: torch.zeros(1, 2, 39, 8) for x in "kv"}, "at least as many positions"),
        ({"key_lengths": [40, 40]}, "key_lengths, a list, must hold B=1 integers"),
        ({"scale": torch.ones(2)}, "scale must be"),
    ],
)  # fmt: skip
def test_nothing_is_forgiven_later(change: dict[str, Any], message: str) -> None:
    arguments = dict(zip("qkvu", given(), strict=True)) | {"k_keep": 5, "window": 1}
    for _ in range(2):
        gs.sparsek_attention(**arguments)
        with pytest.raises(ValueError, match=message):
            gs.sparsek_attention(**(arguments | change))
    assert len(calls.known) == 1


def test_modes_of_torch_between_calls() -> None:
    x = given(grad=True)
    wanted = results(x, k_keep=5, window=2)
    for _ in range(2):
        with torch.no_grad():
            assert not gs.sparsek_attention(*x, k_keep=5, window=2).requires_grad
        with torch.inference_mode():
            out = gs.sparsek_attention(*x, k_keep=5, window=2)
            assert out.is_inference() and torch.equal(out, wanted[0])
        with torch.autocast("cpu", torch.bfloat16):
            out = gs.sparsek_attention(*x, k_keep=5, window=2)
            assert out.dtype == torch.bfloat16
        (of_u,) = torch.autograd.grad(out.sum(), x[3])
        assert of_u.dtype == torch.float32
        assert same(results(x, k_keep=5, window=2), wanted)
        partly = [t.detach().requires_grad_(at == 3) for at, t in enumerate(x)]
        out, lse = gs.sparsek_attention(*partly, k_keep=5, window=2, return_lse=True)
        of_one = torch.autograd.grad([out, lse], partly[3], [torch.cos(out.detach()), torch.sin(lse.detach())])
        assert torch.equal(of_one[0], wanted[5])
        with pytest.raises(Unsupported, match="no second derivative"):
            torch.autograd.grad(gs.sparsek_attention(*x, k_keep=5).sum(), x, create_graph=True)
        with pytest.raises(Unsupported, match=r"torch\.func"):
            torch.func.vmap(lambda q: gs.sparsek_attention(q, *x[1:], k_keep=5))(x[0][None])


def test_a_backward_under_modes_is_the_same() -> None:
    """Autocast around backward, batched gradients and saved tensors that come back with other strides."""
    x = given(grad=True)
    wanted = results(x, k_keep=5, window=2)
    out, lse = gs.sparsek_attention(*x, k_keep=5, window=2, return_lse=True)
    seeds = [torch.cos(out.detach()), torch.sin(lse.detach())]
    with torch.autocast("cpu", torch.bfloat16):
        assert same(list(torch.autograd.grad([out, lse], x, seeds, retain_graph=True)), wanted[2:])
    turned = torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT if t.ndim > 2 else t, lambda t: t)
    with turned:
        found = results(x, k_keep=5, window=2)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_a_change_before_backward_is_seen() -> None:
    x = given(grad=True)
    for _ in range(2):
        copies = [t.detach().clone().requires_grad_() for t in x]
        scores = copies[3] * 1
        out = gs.sparsek_attention(*copies[:3], scores, k_keep=5)
        scores.data.add_(0)  # which autograd does not see
        with torch.no_grad():
            scores.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_tensor_as_the_scale() -> None:
    x, scale = given(grad=True), torch.tensor(0.3, requires_grad=True)
    found = []
    for _ in range(2):
        out = gs.sparsek_attention(*x, k_keep=5, scale=scale)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), [*x, scale])])
    assert same(*found) and len(calls.known) == 1
    number = gs.sparsek_attention(*x, k_keep=5, scale=0.3)
    assert torch.allclose(found[0][0], number, atol=1e-6)
    assert torch.equal(gs.sparsek_attention(*x, k_keep=5, scale=scale.detach()), number.new_tensor(number.tolist()))


@pytest.mark.parametrize("dims", [2, 3])
def test_fewer_dimensions(dims: int) -> None:
    x = [t[(0,) * (4 - dims)].detach().requires_grad_() for t in given()]
    first, second = (results(x, k_keep=5, window=2) for _ in range(2))
    assert same(first, second) and len(calls.known) == 1
    assert [t.shape for t in first] == [x[0].shape, x[0].shape[:-1], *(t.shape for t in x)]


def test_threads_ask_at_once() -> None:
    x = given(grad=True)
    wanted, found = results(x, k_keep=5, window=2), []
    forget_all()

    def run() -> None:
        found.append(results([t.detach().requires_grad_() for t in x], k_keep=5, window=2))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and all(same(f, wanted) for f in found)


def test_no_tensor_is_kept_alive() -> None:
    x = given(grad=True)
    results(x, k_keep=5, window=2)
    references = [weakref.ref(t) for t in x]
    del x
    gc.collect()
    assert len(calls.known) == 1 and not any(r() is not None for r in references)


def test_thresholds_are_the_operators() -> None:
    """Functions of plain tensors go past the dispatcher; results and both derivatives are those of the operators."""
    u = torch.randn(2, 3, 30, dtype=torch.float64)
    for name, operator in (
        ("sparsek", torch.ops.gossamer.sparsek),
        ("sparsek_causal", torch.ops.gossamer.sparsek_causal),
    ):
        found = []
        for call in (getattr(gs, name), operator):
            leaf = u.clone().requires_grad_()
            first, second = call(leaf, 4)
            taken = torch.where(first > -torch.inf, first, 0.0) if name == "sparsek_causal" else first
            more = second.sum() if second.is_floating_point() else 0
            (once,) = torch.autograd.grad((taken.square().sum() + more), leaf, create_graph=True)
            (twice,) = torch.autograd.grad(once.square().sum(), leaf)
            found.append([first.detach(), second.detach(), once.detach(), twice])
        assert same(*found)
    assert torch.equal(gs.last_topk(u, 4), torch.ops.gossamer.last_topk(u, 4))
    leaf = u.clone().requires_grad_()
    assert not gs.sparsek_causal(leaf, 4).last.requires_grad and not gs.last_topk(leaf, 4).requires_grad
    (of_tau,) = torch.autograd.grad(gs.sparsek(leaf, 4).tau.sum(), leaf)
    assert torch.allclose(of_tau.sum(-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.skipif(INTERPRETING, reason="interprets")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # of a new Triton, when it compiles first
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_repeated_call_launches(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """Kernels are stood in for: what each call launches, with what it was recorded for, which compiles."""
    pytest.importorskip("triton")
    from gossamer.kernels import launch_now, relaunch
    from gossamer.sparse_k.launch import triton as triton_calls
    from gossamer.sparse_k.launch.implementations import Implementation
    from gossamer.sparse_k.thresholds_triton import launch as prefixes

    recorded, ran = [], []

    def launcher(function: Any, programs: relaunch.Programs) -> Any:
        recorded.append(function.fn.__name__)
        if compiles:
            relaunch.compiled_for(function, programs.signature, dict(programs.options), 90)
        return lambda *arguments: ran.append((function.fn.__name__, len(arguments)))

    c = triton_calls
    by_kernels = Implementation("triton", c.forward, c.backward, c.memory, lambda x, o: [], "")
    monkeypatch.setattr(relaunch, "launcher", launcher)
    monkeypatch.setattr(prefixes, "available", lambda u: u.dtype == torch.float32)
    monkeypatch.setattr(calls, "implementation", lambda name, x, o: by_kernels)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch_now._kept.cache_clear()
    x = [t.to(torch.bfloat16) if t.ndim == 4 else t for t in given(N=2100)]
    x = [t.requires_grad_() for t in x]
    launched = []
    for _ in range(3):
        del ran[:]
        out = gs.sparsek_attention(*x, k_keep=64, window=32)
        forward = len(ran)
        out.backward(torch.ones_like(out))
        launched.append((forward, len(ran) - forward, tuple(ran), len(recorded)))
    first, *later = launched
    assert first[:2] == (12, 15)
    assert all(other == first for other in later), (first, later)
    assert set(recorded) == {name for name, _ in first[2]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("N", [300, 5000])
@pytest.mark.parametrize(
    "options", [{}, {"gate": None}, {"gate": "kv"}, {"straight_through": True}, {"keep": "support"}], ids=str
)
def test_repeated_launches_are_those_of_operators(N: int, options: dict[str, Any]) -> None:
    """The same bits from recorded launches, of fresh numbers in each call, on two streams, and of a number of numpy."""
    for turn in range(4):
        torch.manual_seed(turn)
        x = [torch.randn(2, heads, N, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
        x = [t.requires_grad_() for t in (*x, torch.randn(2, 2, N, device="cuda"))]
        wanted = results(x, k_keep=np.int64(40), window=20, **options)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = results(x, k_keep=40, window=20, **options)
        torch.cuda.synchronize()
        assert same(found, wanted), turn
        for name in ("sparsek_causal", "last_topk"):
            found, wanted = (f(x[3], 40) for f in (getattr(gs, name), getattr(torch.ops.gossamer, name)))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(calls.known) == 1
    chosen = [gs.topk_blocks(x[0], x[1], topk=3, causal=True) for _ in range(3)]
    forget_all()
    again = gs.topk_blocks(x[0], x[1], topk=3, causal=True)
    assert all(torch.equal(c.indices, again.indices) for c in chosen)
