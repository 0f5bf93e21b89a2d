"""Calls that are computed in parts whatever that costs, for the tests of the CPU, of GPUs and of the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.kernels import parts
from gossamer.memo import forget_all
from gossamer.plan import partition
from gossamer.plan.capability import reasons
from gossamer.plan.table import load
from gossamer.testing import inputs, tolerance
from gossamer.testing.cases import Case, square
from tests.support.exact import NAMES, Exact, exact_of

HEADS = [gs.SlidingWindow(9), gs.Dilated(9, 0, 8), gs.SlidingWindow(3), gs.Dilated(9, 0, 8)]
CASES = (
    square("divides", 160, lambda: gs.Dilated(6, 3, 5), "one"),
    square("one_row_more", 163, lambda: gs.Dilated(30, 0, 7), H=4, G=2),
    square("fewer_queries", 90, lambda: gs.Dilated(12, 2, 7), K=200, B=2, H=4, G=1),
    square("more_queries", 150, lambda: gs.Dilated(12, 0, 8), K=70, B=3, G=1),
    square("negative_positions", 100, lambda: gs.Dilated(9, 4, 6), K=80, q_offset=-31, B=2),
    square("one_query", 1, lambda: gs.Dilated(40, 0, 3), K=199, B=2, H=4, G=2),
    square("few_keys", 40, lambda: gs.Dilated(3, 3, 11), K=7, q_offset=0, B=2, D=8),  # at most one in a class
    square("odd_sizes", 131, lambda: gs.Dilated(9, 0, 4), D=17, E=23, H=3, G=1),
    square("many_batches", 60, lambda: gs.Dilated(9, 0, 3), B=5, H=2, key_lengths=(60, 0, 31, 1, 59)),
    square(
        "terms", 130, lambda: gs.Dilated(20, 0, 4), B=2, H=4, G=2, key_lengths=(130, 61), softcap=3.0,
        sink_logits=True, alibi_slopes=True,
    ),
    square("folded_terms", 130, lambda: gs.Dilated(20, 0, 4), B=2, H=4, G=2, sink_logits=True, alibi_slopes=True),
    square("per_head", 200, lambda: gs.PerHead(HEADS), H=4, B=2),
    square("per_head_grouped", 200, lambda: gs.PerHead(HEADS), H=4, G=2, sink_logits=True),
    square("per_head_one_key_head", 200, lambda: gs.PerHead(HEADS), H=4, G=1, alibi_slopes=True),
    square("longformer", 200, lambda: gs.Longformer(20, (0, 77, 150), 8), B=2),
    square("longformer_sinks", 120, lambda: gs.Longformer(20, (0, 77), 8), K=200, H=4, G=2, sink_logits=True),
    square("strided", 300, lambda: gs.Strided(16, 20)),
    square("several", 220, lambda: gs.Dilated(9, 3, 4) | gs.Dilated(8, 3, 6) | gs.SlidingWindow(5) | gs.Local(20)),
    square("longnet", 256, lambda: gs.LongNet((32, 64, 128), (1, 2, 4), heads=6), H=6, B=2),
    square("longnet_grouped", 256, lambda: gs.LongNet((32, 64, 128), (1, 2, 8), heads=12), H=12, G=3),
    square("longnet_one_key_head", 130, lambda: gs.LongNet((32, 64), (2, 4), heads=8), H=8, G=1, B=2),
    square(
        "longnet_terms", 250, lambda: gs.LongNet((32, 64), (2, 4), heads=3, causal=False), H=3, K=260,
        sink_logits=True, alibi_slopes=True, alibi_distance="signed",
    ),
    square(
        "folded_slopes_of_each", 130, lambda: gs.Dilated(12, 9, 4), B=2, H=4, G=2, alibi_slopes="each",
        alibi_distance="absolute",
    ),
    square(
        "slopes_of_each_by_element", 130, lambda: gs.Dilated(12, 9, 4), B=2, H=4, G=2, key_lengths=(130, 61),
        alibi_slopes="each", alibi_distance="absolute",
    ),
    square(
        "slopes_of_each_by_class", 60, lambda: gs.Dilated(9, 5, 3), B=5, key_lengths=(60, 0, 31, 1, 59),
        alibi_slopes="each", alibi_distance="absolute",
    ),
    square(
        "longnet_slopes_of_each", 250, lambda: gs.LongNet((32, 64), (2, 4), heads=3, causal=False), H=3, K=260, B=2,
        alibi_slopes="each", alibi_distance="absolute",
    ),
    square(
        "per_head_slopes_of_each", 200, lambda: gs.PerHead(HEADS), H=4, G=2, B=2, alibi_slopes="each",
        alibi_distance="signed",
    ),
)  # fmt: skip


def at_any_price(patch: pytest.MonkeyPatch) -> list[partition.Partition]:
    """Parts are taken whatever they cost; the splits that were."""
    cheaper, fold, taken = partition._cheaper, parts.PartitionedCall.fold, []

    def take(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
        cost.call = lambda *a, **k: math.inf
        return cheaper(found, pattern, p, sizes, cost)

    def seen(partitioned: Any) -> Any:
        taken.append(partitioned.plan.partition(partitioned.pattern.handle, partitioned.scoring.q_offset))
        return fold(partitioned)

    patch.setattr(partition, "_cheaper", take)
    patch.setattr(partition, "_classes_cost", lambda *a: 0.0)
    patch.setattr(parts.PartitionedCall, "fold", seen)
    return taken


def forget() -> None:
    """Plans and calls remember how they were computed."""
    forget_all()


def run(e: Exact, name: str, leaves: list[torch.Tensor], backward: bool) -> list[torch.Tensor]:
    case, t = e.case, e.terms
    sink = leaves[3] if len(leaves) > 3 else None
    with torch.set_grad_enabled(backward):
        out, lse = gs.attention(
            *leaves[:3], e.pattern, q_offset=case.q_offset, key_lengths=t.key_lengths, softcap=t.softcap,
            sink_logits=sink, alibi_slopes=t.alibi_slopes, alibi_distance=case.alibi_distance,
            return_lse=True, implementation=name,
        )  # fmt: skip
        if not backward:
            return [out, lse]
        loss = (out * e.dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * e.dlse).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def refused(name: str, e: Exact, backward: bool) -> list[str]:
    implementation = load(name)
    assert not isinstance(implementation, str), implementation
    return reasons(inputs.problem_of(e.case, e.dtype, e.device, backward=backward), implementation.capability)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same values, NaN before and after each head, the last rows those of the allocation."""
    B, heads, N, size = x.shape
    room = torch.full((B * heads * (N + 3), size), math.nan, dtype=x.dtype, device=x.device)
    view = room.view(B, heads, N + 3, size)[:, :, 3:]
    with torch.no_grad():
        view.copy_(x)
    return view.requires_grad_()


def check(name: str, device: str, dtype: str, case: Case, always: list[partition.Partition]) -> None:
    """Every number of a call in parts, from inputs that NaN surrounds."""
    e = exact_of(case, dtype, device)
    backward = not refused(name, e, True)
    if refused(name, e, False):
        with pytest.raises(gs.Unsupported):
            run(e, name, e.leaves, False)
        return
    leaves = [*(surrounded(x) for x in e.leaves[:3]), *e.leaves[3:]]
    found = run(e, name, leaves, backward)
    assert always, "computed as one"
    if "one" in case.tags:
        assert len(always[0].parts) == 1
    for result, actual, exact, low in zip(NAMES, found, e.exact, e.low, strict=False):
        assert actual.shape == exact.shape and actual.is_contiguous()
        tolerance.check(result, actual, exact, low)
    empty = e.exact[1] == -torch.inf
    assert (found[0][empty] == 0).all() and (found[1][empty] == -torch.inf).all()
    again = run(e, name, leaves, backward)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
