"""Tensors without elements: out is 0 or empty, lse -inf or the sink, gradients are 0, whatever is attended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.table import NAMES
from tests.support.host_reads import nothing_waits

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = ["cpu", CUDA]
D, E = 16, 8
SIZES = [  # B, H, G, Q, K
    (0, 4, 2, 70, 80), (2, 4, 2, 0, 80), (2, 4, 2, 70, 0), (2, 4, 2, 0, 0), (2, 0, 2, 70, 80), (2, 0, 0, 70, 80),
    (1, 1, 1, 1, 0), (1, 2, 1, 0, 1), (0, 0, 0, 0, 0),
]  # fmt: skip


def ints(*shape: int) -> Callable[[str], Tensor]:
    return lambda device: torch.zeros(shape, dtype=torch.int32, device=device)


# Of (B, H, G, Q, K): the tensor that a call reads, and the call.
Form = Callable[[int, int, int, int, int], tuple[Callable[[str], Tensor], Callable[..., Any]]]
FORMS: dict[str, Form] = {
    "dense": lambda B, H, G, Q, K: (ints(), lambda *x, data, **o: gs.attention(*x, **o)),
    "window": lambda B, H, G, Q, K: (ints(), lambda *x, data, **o: gs.attention(*x, gs.SlidingWindow(9, 3, 2), **o)),
    "dilated": lambda B, H, G, Q, K: (ints(), lambda *x, data, **o: gs.attention(*x, gs.Dilated(9, 0, 4), **o)),
    "complement": lambda B, H, G, Q, K: (ints(), lambda *x, data, **o: gs.attention(*x, ~gs.Local(8), **o)),
    "merged": lambda B, H, G, Q, K: (
        ints(), lambda *x, data, **o: gs.attention(*x, gs.Causal() | gs.Local(8), merge="lse", **o)
    ),
    "handle": lambda B, H, G, Q, K: (ints(), lambda *x, data, **o: gs.attention(*x, CAUSAL.handle, **o)),
    "terms": lambda B, H, G, Q, K: (
        ints(H), lambda *x, data, **o: gs.attention(*x, gs.Causal(), softcap=5.0, alibi_slopes=data.float(), **o)
    ),
    "mask": lambda B, H, G, Q, K: (ints(B, 1, Q, K), lambda *x, data, **o: gs.attention(*x, data == 0, **o)),
    "lengths": lambda B, H, G, Q, K: (
        ints(B), lambda *x, data, **o: gs.attention(*x, gs.Causal(), key_lengths=data + 5, **o)
    ),
    "starts": lambda B, H, G, Q, K: (ints(B), lambda *x, data, **o: gs.attention(*x, key_starts=data, **o)),
    "offsets": lambda B, H, G, Q, K: (
        ints(B), lambda *x, data, **o: gs.attention(*x, gs.SlidingWindow(9), q_offset=data, **o)
    ),
    "documents": lambda B, H, G, Q, K: (
        ints(B, K), lambda *x, data, **o: gs.attention(*x, gs.DocumentIds(data) & gs.Causal(), **o)
    ),
    "edges": lambda B, H, G, Q, K: (
        ints(3), lambda *x, data, **o: gs.attention(*x, gs.DocumentIds.from_cu_seqlens(data, K), **o)
    ),
    "blocks": lambda B, H, G, Q, K: (
        ints(B, 1, -(-Q // 64), 2), lambda *x, data, **o: gs.attention(*x, gs.BlockIndices(data) & gs.Causal(), **o)
    ),
    "keys": lambda B, H, G, Q, K: (ints(B, 1, Q, 3), lambda *x, data, **o: gs.attention(*x, gs.Indices(data), **o)),
    "no keys": lambda B, H, G, Q, K: (ints(B, 1, Q, 0), lambda *x, data, **o: gs.attention(*x, gs.Indices(data), **o)),
    "shared": lambda B, H, G, Q, K: (
        ints(B), lambda *x, data, **o: gs.attention(*x, gs.device_layout(*x, gs.Causal(), q_offset=data), **o)
    ),
}  # fmt: skip
CAUSAL = gs.Causal()


def inputs(sizes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    B, H, G, Q, K = sizes
    shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def check(sizes: tuple[int, ...], x: list[Tensor], sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    B, H, _, Q, _ = sizes
    assert out.shape == (B, H, Q, E) and out.dtype == x[0].dtype and lse.shape == (B, H, Q)
    assert lse.dtype == (torch.float64 if x[0].dtype == torch.float64 else torch.float32)
    wanted = torch.full_like(lse, -torch.inf) if sinks is None else sinks.to(lse.dtype)[:, None].expand(B, H, Q)
    assert (out == 0).all() and torch.equal(lse, wanted)
    given = x if sinks is None else [*x, sinks]
    dout, dlse = torch.ones_like(out), torch.full_like(lse, 0.5)
    found = torch.autograd.grad([out, lse], given, [dout, dlse])
    for y, dy in zip(x, found, strict=False):
        assert dy.shape == y.shape and dy.dtype == y.dtype and (dy == 0).all()
    if sinks is not None:
        assert torch.equal(found[3], torch.full_like(sinks, 0.5 * B * Q))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, device: str) -> None:
    for sizes in SIZES:
        data, call = FORMS[form](*sizes)
        x, given = inputs(sizes, device), data(device)
        for sinks in (None, torch.randn(sizes[1], device=device, requires_grad=True)):
            check(sizes, x, sinks, *call(*x, data=given, sink_logits=sinks, return_lse=True))
        with torch.no_grad():
            assert (call(*x, data=given) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_types_layouts_and_repeated_calls(dtype: torch.dtype, device: str) -> None:
    for sizes in SIZES:
        x = inputs(sizes, device, dtype)
        sinks = torch.randn(sizes[1], device=device, dtype=dtype, requires_grad=True)
        turned = [y.transpose(1, 2) for y in x]
        for _ in range(2):
            out, lse = gs.attention(*turned, gs.Causal(), sink_logits=sinks, return_lse=True, layout="bshd")
            check(sizes, x, sinks, out.transpose(1, 2), lse)
    q, k, v = inputs((1, 1, 1, 0, 5), device, dtype)
    for dims in (2, 3):
        q, k, v = q[0], k[0], v[0]
        assert gs.attention(q, k, v, gs.Causal()).shape == (*q.shape[:-1], E), dims


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("form", ["window", "mask", "offsets", "documents", "blocks", "keys"])
def test_compiled(form: str) -> None:
    for sizes in [(0, 4, 2, 70, 80), (2, 4, 2, 0, 80), (2, 4, 2, 70, 0)]:
        data, call = FORMS[form](*sizes)
        x, given = inputs(sizes, "cpu"), data("cpu")
        sinks = torch.randn(sizes[1], requires_grad=True)
        torch._dynamo.reset()
        run = torch.compile(call, fullgraph=True, backend="aot_eager")
        check(sizes, x, sinks, *run(*x, data=given, sink_logits=sinks, return_lse=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(0, 0), (0, 9), (7, 0)])
@pytest.mark.parametrize("edges", [(0,), (0, 0), (0, 0, 0)])
def test_packed_sequences(edges: tuple[int, ...], sizes: tuple[int, int], device: str) -> None:
    """No sequences, sequences of no tokens, no tokens at all."""
    Q, K = sizes
    cu = torch.tensor(edges, device=device, dtype=torch.int32)
    q, k, v = (torch.randn(n, 2, D, device=device, requires_grad=True) for n in (Q, K, K))
    used = torch.zeros(len(edges) - 1, dtype=torch.int32, device=device)
    for more in ({}, {"seqused_k": used}, {"pattern": gs.SlidingWindow(3)}):
        out, lse = gs.varlen(q, k, v, cu, return_lse=True, **more)  # type: ignore[arg-type]
        assert out.shape == (Q, 2, D) and (out == 0).all() and (lse == -torch.inf).all()
        assert all((dx == 0).all() for dx in torch.autograd.grad(out.sum(), [q, k, v]))
    shared = gs.device_layout(q, k, v, gs.PackedSequences(cu), layout="bshd")
    assert (gs.attention(q, k, v, shared, layout="bshd") == 0).all()


def test_no_sequences_of_some_tokens() -> None:
    q, k, v = (torch.randn(n, 2, D, requires_grad=True) for n in (7, 9, 9))
    out, lse = gs.varlen(q, k, v, torch.tensor([0]), return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((dx == 0).all() for dx in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_named_implementation_runs_or_raises_as_ever(name: str, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        whole, empty = (inputs((1, 2, 1, n, 64), device, dtype) for n in (64, 0))
        try:
            gs.attention(*whole, implementation=name)
        except gs.Unsupported as error:
            with pytest.raises(gs.Unsupported) as refused:
                gs.attention(*empty, implementation=name)
            assert str(refused.value) == str(error)
        else:
            assert gs.attention(*empty, implementation=name).shape == (1, 2, 0, E)


def test_what_is_wrong_stays_so() -> None:
    q, k, v = inputs((2, 4, 2, 0, 80), "cpu")
    wrong: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": -1.0}, "q_offset": {"pattern": gs.Causal(), "q_offset": 2**31},
        "pattern": {"pattern": torch.ones(3, 80, dtype=torch.bool)}, "must have no q_offset|left out": {
            "pattern": torch.ones(1, 80, dtype=torch.bool), "q_offset": 3,
        },
        "positions": {"pattern": gs.Document([0] * 9)}, "key_lengths": {"key_lengths": [1]},
        "DocumentIds": {"pattern": gs.DocumentIds(torch.zeros(9, dtype=torch.int32))},
    }  # fmt: skip
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            gs.attention(q, k, v, **options)


def test_explained() -> None:
    for sizes in SIZES:
        x = inputs(sizes, "cpu")
        offsets = torch.zeros(sizes[0], dtype=torch.int32)
        for more in ({}, {"q_offset": offsets}):
            found = gs.explain(*x, gs.Causal(), **more)  # type: ignore[arg-type]
            assert found.implementation == found.backward == "nothing" and found.useful_flops == 0
            assert "computes nothing" in str(found) and f"Q={sizes[3]} K={sizes[4]}" in str(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nothing_waits_for_a_gpu() -> None:
    for form in FORMS:
        data, call = FORMS[form](2, 4, 2, 0, 80)
        x, given = inputs((2, 4, 2, 0, 80), "cuda"), data("cuda")
        call(*x, data=given).sum().backward()
        with nothing_waits():
            call(*x, data=given).sum().backward()
