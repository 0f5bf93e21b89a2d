"""Calls of one query, which are rewritten before they are looked up.

One offset on the device for each sequence (`ends_of_one_query`): a query that sees the keys up to one sees what
`key_lengths` says, which kernels read themselves, and no structure is made.

Keys that grow by a token a call (`growing_call`): the query sees all keys, those before it, or those of a window: a
view of the keys, of which it sees all. The request becomes one for the next multiple of `RANGE` keys, of which
`key_lengths` says how many there are; the rest is neither there nor read (`Capability.grows`). So every number of keys
of a range shares one launch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.kernels.launch import ALIGNMENT, NO_VECTORS, Vectors
from gossamer.memo import LEAST, Memo
from gossamer.patterns import Causal, Dense, Pattern, SlidingWindow
from gossamer.plan.arguments import most_offset
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Unsupported
from gossamer.plan.table import NAMES, load
from gossamer.torch.arguments import INTEGERS, Arguments, four_dimensional, unbatched
from gossamer.torch.arguments import known as holds
from gossamer.torch.calls import Call, call_of, known
from gossamer.torch.key import alignment, differentiable
from gossamer.torch.memory import hold_for_graphs, outlasting
from gossamer.torch.planning import growing
from gossamer.torch.request import DENSE, Request, ResolvedPattern

RANGE = 128  # numbers of keys that share a launch
MOST_REACH = 2**30  # of a rule: positions and it are added in int32
STEP = 8  # strides of k and v, which are not part of the key, are multiples of it
_NUMBERS = (type(None), int, float)

_lengths: Memo[tuple[Tensor, ...]] = Memo(LEAST)


class VisibleKeys(NamedTuple):
    """The keys that one query sees."""

    first: int
    number: int


class Growing(NamedTuple):
    """A call of one query and so many keys."""

    call: Call
    visible: VisibleKeys
    length: Tensor  # (B,) int32: how many
    bshd: bool  # q, k, v and out are (B, positions, heads, size)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *vectors: Tensor | None) -> tuple[Tensor, ...]:
        """(out, lse)."""
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        if self.bshd:
            q, k, v = four_dimensional(q, k, v, self.bshd)
        if self.visible.number != k.shape[2]:
            k, v = k.narrow(2, *self.visible), v.narrow(2, *self.visible)
        sinks = Vectors(*vectors).sink_logits if vectors else None
        out, lse = self.call(q, k, v, self.length, sinks, None)
        return unbatched(out, lse, 4, self.bshd) if self.bshd else (out, lse)  # out of one query lies alike in both


def ends_of_one_query(
    q: Any, k: Any, pattern: Any, offset: Tensor, key_starts: Any, key_lengths: Any, alibi_slopes: Any,
    implementation: Any, bshd: bool,
) -> Tensor | None:  # fmt: skip
    """key_lengths (B,) that say all that the one query of each sequence sees; None where it goes the usual way.

    Args:
        offset: `q_offset`, a tensor.
    """
    if not key_starts is alibi_slopes is implementation is None:
        return None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4 and offset.ndim == 1):
        return None
    rows = 1 if bshd else 2
    if not holds(q.shape[rows] == 1) or not (pattern is None or isinstance(pattern, Pattern)):
        return None
    for x in (offset, key_lengths):
        if x is not None and (
            not isinstance(x, Tensor) or x.device != q.device or x.dtype not in INTEGERS
            or x.ndim != 1 or not holds(x.shape[0] == q.shape[0])
        ):  # fmt: skip
            return None
    rule = (DENSE if pattern is None else pattern).device_rule()
    reach = None if rule is None else rule.interval
    if reach is None or reach.left is not None or reach.first is not None or reach.blocks:
        return None
    if reach.right is None:
        return key_lengths
    if abs(reach.right) > MOST_REACH:
        return None
    behind, K = reach.right + 1, k.shape[rows]
    at = offset if offset.dtype == torch.int64 else offset.int()
    ends = at.clamp(-behind, K - behind) + behind
    return ends if key_lengths is None else torch.minimum(ends, key_lengths)


def growing_call(
    q: Tensor, k: Any, v: Any, pattern: Any, scale: Any, q_offset: Any, softcap: Any, implementation: Any,
    deterministic: bool, vectors: Vectors | tuple[()], bshd: bool,
) -> Growing | None:  # fmt: skip
    """The call of one query, made where there was none before; None where it goes the usual way.

    Args:
        vectors: or nothing.
    """
    lengths, sinks, slopes = vectors or NO_VECTORS
    if lengths is not None or slopes is not None or not grows_on(q.device.type) or differentiable(q, k, v, sinks):
        return None
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS:
        return None
    if bshd:
        q, k, v = four_dimensional(q, k, v, bshd)
    visible = visible_keys(q, k, v, pattern, q_offset)
    if visible is None:
        return None
    most = -(-visible.number // RANGE) * RANGE
    B, G, _, D = k.shape
    key = (
        "one query", most, B, G, D, v.shape[3], q.shape, q.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, scale, type(scale), softcap, type(softcap), implementation, deterministic,
        sinks is not None and (sinks.shape, sinks.stride(), sinks.dtype, sinks.device, alignment(sinks)),
    )  # fmt: skip
    of_range = q.device, B, most
    numbers = _lengths.get(of_range) or _lengths.put(of_range, _make_lengths(*of_range))
    length, call = numbers[visible.number - most - 1], known.get(key)
    if call is None:
        k, v = k.narrow(2, *visible), v.narrow(2, *visible)
        a = Arguments(q, k, v, None, None, length, sinks, None, scale, softcap, implementation, deterministic, False)
        try:
            call = call_of(Request(a, ResolvedPattern(DENSE.handle, alive=DENSE), keys=most), key)
        except Unsupported:
            return None
    return Growing(call, visible, length, bshd)


def visible_keys(q: Tensor, k: Any, v: Any, pattern: Any, q_offset: Any) -> VisibleKeys | None:
    """What the one query of a call sees, where that is a run of its keys; None where it goes the usual way."""
    if q.ndim != 4 or q.shape[2] != 1 or q.data_ptr() % ALIGNMENT:
        return None
    if not isinstance(pattern, (Dense, Causal, SlidingWindow)) or (
        isinstance(pattern, SlidingWindow) and pattern.sinks
    ):
        return None
    for x in (k, v):
        if type(x) is not Tensor or x.ndim != 4 or x.device != q.device or x.layout is not torch.strided:
            return None
        batch, head, row, last = x.stride()
        if last != 1 or min(batch, head, row) <= 0 or (batch | head | row) % STEP or x.data_ptr() % ALIGNMENT:
            return None
    K = k.shape[2]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or not K:
        return None
    if type(q_offset) not in (type(None), int) or abs(q_offset or 0) > most_offset(1, K):
        return None
    position = K - 1 if q_offset is None else q_offset
    if isinstance(pattern, SlidingWindow):
        left, right = pattern.left, pattern.right
    else:
        left, right = None, 0 if isinstance(pattern, Causal) else None
    first = 0 if left is None else max(0, position - left)
    end = K if right is None else min(K, position + right + 1)
    return VisibleKeys(first, end - first) if first < end else None


@cache
def grows_on(device: str) -> bool:
    """Whether an implementation for a type of device takes any number of keys."""
    return any(device in found.capability.grows for found in map(load, NAMES) if not isinstance(found, str))


def for_one_query(usual: Plan, a: Arguments, pattern: Any) -> Plan:
    """The plan of a call with what its calls go to first, where they are rewritten: for `explain`."""
    if not grows_on(a.q.device.type) or a.backward or a.key_lengths is not None or a.alibi_slopes is not None:
        return usual
    visible = visible_keys(a.q, a.k, a.v, pattern, a.q_offset)
    if visible is None:
        return usual
    try:
        plan = growing(usual.problem, a.implementation, visible.number)
    except Unsupported:
        return usual
    return replace(usual, implementations=tuple(dict.fromkeys((*plan.implementations, *usual.implementations))))


def _make_lengths(device: torch.device, B: int, most: int) -> tuple[Tensor, ...]:
    """(B,) of each number of keys up to `most` that shares its launch, at multiples of 16 bytes."""

    def make() -> tuple[Tensor, ...]:
        numbers = torch.arange(most - RANGE + 1, most + 1, dtype=torch.int32, device="cpu")
        rows = numbers[:, None].expand(RANGE, -(-B // 4) * 4).contiguous().to(device)
        return rows[:, :B].unbind(0)

    return outlasting(device, make)
