"""A call that is found by its key gives what a first call gives, whatever came between."""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.entmax import calls
from gossamer.memo import forget_all
from tests.support.entered import entered

N = 40
MODES = {
    "plain": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


def drawn(draw: random.Random) -> dict[str, Any]:
    """A call: some differ in one thing alone."""
    seed = draw.choice([0, 1])
    g = torch.Generator().manual_seed(seed)
    lead = draw.choice([(), (2,), (2, 2)])
    x = [torch.randn(*lead, N, 8, generator=g) for _ in range(3)]
    if draw.random() < 0.3:
        x[0] = torch.randn(*lead, N, 16, generator=g)[..., ::2]  # of other strides
    if draw.random() < 0.3:
        x[draw.choice([1, 2])] = torch.randn(*lead, 8, N, generator=g).transpose(-1, -2)
    if len(lead) == 2 and draw.random() < 0.3:
        x[1] = x[1][:1]
    x = [y.requires_grad_(draw.random() < 0.4) for y in x]
    H = lead[-1] if lead else 1
    alpha: Any = draw.choice([1, 1.0, 1.5, 2.0])
    if draw.random() < 0.4:
        alpha = torch.rand(draw.choice([(), (H,)]), generator=g).add_(1).requires_grad_(draw.random() < 0.5)
    options: dict[str, Any] = {
        "alpha": alpha, "top_k": draw.choice([None, None, 3]), "causal": draw.random() < 0.5,
        "scale": draw.choice([None, 0.5, torch.tensor(0.5)]), "save": draw.choice(["lists", "tau"]),
    }  # fmt: skip
    pattern: Any = draw.choice([None, gs.SlidingWindow(5), gs.SlidingWindow(5).handle, "mask"])
    if pattern == "mask":
        pattern = torch.rand(N, N, generator=g) < 0.5
    elif draw.random() < 0.3:
        options["k_positions"] = torch.randint(0, N, (N,), generator=g)
    return {"x": x, "pattern": pattern, "options": options, "aux": draw.random() < 0.3}


WINDOW = gs.SlidingWindow(5)  # keeps the handle


def run(call: dict[str, Any], mode: str) -> list[Tensor]:
    """All results of a call."""
    x, options = call["x"], call["options"]
    with MODES[mode]():
        found = gs.entmax_attention(*x, call["pattern"], **options, return_aux=call["aux"])
        out, aux = found if call["aux"] else (found, ())
        keys = gs.topk_keys(*x[:2], call["pattern"], k_keep=3, causal=options["causal"])
    leaves = [y for y in (*x, options["alpha"]) if isinstance(y, Tensor) and y.requires_grad]
    gradients = torch.autograd.grad(out.sum(), leaves) if out.requires_grad else ()
    assert out.requires_grad == bool(leaves and mode in ("plain", "autocast"))
    return [out.detach(), *aux, keys, *gradients]


@pytest.mark.parametrize("seed", range(3))
def test_calls_between_calls(seed: int) -> None:
    draw = random.Random(seed)
    every = [(drawn(draw), draw.choice(list(MODES))) for _ in range(60)]
    want = []
    for call, mode in every:
        forget_all()
        want.append(run(call, mode))
    forget_all()
    for _ in range(2):
        for (call, mode), expected in zip(every, want, strict=True):
            for one, other in zip(run(call, mode), expected, strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), (call, mode)
    assert len(calls.known)
    with ThreadPoolExecutor(4) as pool:
        for expected, found in zip(want, pool.map(lambda one: run(*one), every), strict=True):
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(expected, found, strict=True))


def test_what_is_written_between_calls_counts() -> None:
    q, k, v = (torch.randn(1, 2, N, 8) for _ in range(3))
    mask, alpha = torch.ones(N, N, dtype=torch.bool), torch.full((2,), 1.5)
    at = torch.arange(N)
    for given, options in ((mask, {}), (None, {"q_positions": at}), (None, {"alpha": alpha})):
        before = gs.entmax_attention(q, k, v, given, **options)
        mask[:, 5:] = False
        at -= 7
        alpha += 0.125
        after = gs.entmax_attention(q, k, v, given, **options)
        forget_all()
        assert torch.equal(after, gs.entmax_attention(q, k, v, given, **options)) and not torch.equal(before, after)


def test_mistakes_are_found_in_later_calls_too() -> None:
    q, k, v = (torch.randn(1, 2, N, 8) for _ in range(3))
    alpha = torch.full((2,), 1.5)
    for _ in range(2):
        gs.entmax_attention(q, k, v, alpha=alpha)
    alpha[1] = 2.5
    with pytest.raises(ValueError, match=r"alpha must lie in .*2\.5"):
        gs.entmax_attention(q, k, v, alpha=alpha)
    for _ in range(2):
        gs.entmax_attention(q, k, v, alpha=1, top_k=1)
        for wrong in ({"alpha": True}, {"top_k": True}, {"top_k": 1.0}, {"causal": 1}, {"alpha": "1"}, {"scale": "1"}):
            with pytest.raises(ValueError, match="must be"):
                gs.entmax_attention(q, k, v, **({"alpha": 1, "top_k": 1} | wrong))


def test_positions_and_masks_must_not_be_written_before_the_backward() -> None:
    q, k, v = (torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3))
    at = torch.arange(N)
    for _ in range(2):
        out = gs.entmax_attention(q, k, v, q_positions=at)
        at += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_kept_call_keeps_no_tensor_and_forgets_no_pattern() -> None:
    forget_all()
    q, k, v = (torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3))
    alpha, mask = torch.full((2,), 1.5), torch.ones(N, N, dtype=torch.bool)
    gs.entmax_attention(q, k, v, mask, alpha=alpha).sum().backward()
    for _ in range(3):  # an equal pattern, made anew
        gs.entmax_attention(q, k, v, gs.SlidingWindow(11)).sum().backward()
    assert len(calls.known) == 2
    seen = [weakref.ref(x) for x in (q, k, v, alpha, mask)]
    del q, k, v, alpha, mask
    gc.collect()
    assert not any(x() is not None for x in seen)


def test_what_is_kept_is_bounded() -> None:
    forget_all()
    for n in (64, 2048):
        x = torch.randn(1, 1, n, 8)
        gs.entmax_attention(x, x, x, causal=True)
    small, large = calls.known.values()
    assert 0 < small.bytes < calls.CHUNK_BYTES and large.bytes == 0 and large._kept is None


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"alpha": 2.0, "top_k": 8}], ids=str)
def test_how_much_of_the_package_a_call_of_entmax_enters(options: dict[str, Any], gradient: bool) -> None:
    """A repeated call on a CPU, arithmetic and all."""
    x = [torch.randn(1, 4, 256, 32, requires_grad=gradient) for _ in range(3)]
    gs.entmax_attention(*x, **options)
    repeat = entered(lambda: gs.entmax_attention(*x, **options))
    assert len(repeat.files) <= 9 and len(repeat.functions) <= 29, sorted(repeat.functions)
    gs.topk_keys(*x[:2], k_keep=8)
    keys = entered(lambda: gs.topk_keys(*x[:2], k_keep=8))
    assert len(keys.files) <= 7 and len(keys.functions) <= 13, sorted(keys.functions)
