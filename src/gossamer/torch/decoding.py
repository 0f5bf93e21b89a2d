"""Calls of one query, which are rewritten before they are looked up.

One offset on the device for each sequence, or first keys (`seen_by_one_query`): a query that sees the keys up to one
sees what `key_lengths` says, which kernels read themselves, and no structure is made. Where keys have a first one as
well, of a window or by `key_starts`, a kernel on a GPU computes both ends itself; calls with gradients, and of other
devices, go the usual way.

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

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import ALIGNMENT, NO_VECTORS, Vectors, operand_of
from gossamer.kernels.packages import has_triton
from gossamer.memo import LEAST, Memo
from gossamer.patterns import Causal, Dense, Pattern, SlidingWindow
from gossamer.patterns.reach import Reach
from gossamer.plan.arguments import most_offset
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem, Unsupported
from gossamer.plan.table import NAMES, load
from gossamer.torch.arguments import INTEGERS, Arguments, AttentionOptions, four_dimensional, is_empty, unbatched, wide
from gossamer.torch.arguments import known as holds
from gossamer.torch.bind import bind
from gossamer.torch.calls import Call, call_of, known
from gossamer.torch.key import alignment, differentiable, plain
from gossamer.torch.memory import hold_for_graphs, outlasting
from gossamer.torch.planning import growing, plan_for, scoring_of
from gossamer.torch.request import DENSE, Request, ResolvedPattern

RANGE = 128  # numbers of keys that share a launch
MOST_REACH = 2**30  # of a rule: positions and it are added in int32
WIDEST = 256  # head size of the kernel of queries whose keys have a first one
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


class SeenKeys(NamedTuple):
    """A call of one query of each sequence, whose keys have a first one that the device alone knows."""

    reach: Reach
    position: int | None  # of all queries; None: the last key, or offsets tell it
    vectors: tuple[Tensor | None, ...]  # q_offset, key_starts, key_lengths and sink_logits
    scale: float | None
    softcap: float | None
    bshd: bool

    def problem(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Problem, Scoring] | None:
        """What the kernel computes, of q, k and v in four dimensions; None for what it does not.

        Raises:
            ValueError: an argument is wrong.
        """
        *_, lengths, sinks = self.vectors
        a = Arguments(
            q, k, v, self.position, None, lengths, sinks, None, self.scale, self.softcap, "triton", False, False
        )  # fmt: skip
        if is_empty(a) or not q.shape[0] == k.shape[0] == v.shape[0] or max(q.shape[3], v.shape[3]) > WIDEST:
            return None
        try:
            problem = plan_for(a, ()).problem
        except Unsupported:
            return None
        return problem, scoring_of(a, problem.K)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """(out, lse), or None."""
        key = (
            "seen by one query", self.reach, self.position, q.shape, k.shape, v.shape, q.stride(), k.stride(),
            v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, alignment(q, k, v), self.scale,
            type(self.scale), self.softcap, type(self.softcap), self.bshd,
            *(x is not None and (x.shape, x.stride(), x.dtype, x.device, alignment(x)) for x in self.vectors),
        )  # fmt: skip
        if self.bshd:
            q, k, v = four_dimensional(q, k, v, self.bshd)
        call = known.get(key)
        if call is None:
            call = self._bound(q, k, v)
            if call is None:
                return None
            known.put(key, call)
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(call)
        out, lse = call(q, k, v, *self.vectors)
        return unbatched(out, lse, 4, self.bshd) if self.bshd else (out, lse)

    def _bound(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        found = self.problem(q, k, v)
        if found is None:
            return None
        from gossamer.kernels.triton.one_query.launch_one_query import Seen, forward

        problem, scoring = found
        names = ("q", "k", "v", "q_offset", "key_starts", "key_lengths", "sink_logits")
        given = zip(names, (q, k, v, *self.vectors), strict=True)
        operands = {name: operand_of(x) for name, x in given if x is not None}
        seen = Seen(self.reach.left, self.reach.right, self.reach.first, scoring.q_offset)
        return bind(
            outlasting(q.device, lambda: forward(problem, seen, scoring, operands, q.device)), q.device, names
        )  # fmt: skip


def seen_by_one_query(
    q: Any, k: Any, v: Any, pattern: Any, o: AttentionOptions, bshd: bool
) -> Tensor | SeenKeys | None:  # fmt: skip
    """What the one query of each sequence sees; None where the call goes the usual way.

    Returns:
        key_lengths (B,) that say all of it, or the call of queries whose keys have a first one.
    """
    reach = _reach(q, k, pattern, o, bshd)
    if reach is None:
        return None
    if isinstance(o.q_offset, Tensor) and o.key_starts is None and reach.left is None and reach.first is None:
        ends = _ends(q, k, reach.right, o.q_offset, o.key_lengths, bshd)
        if ends is not None:
            return ends
    return _with_first_key(q, k, v, reach, o, bshd)


def _reach(q: Any, k: Any, pattern: Any, o: AttentionOptions, bshd: bool) -> Reach | None:
    """The keys that one query of each sequence sees by its position; None where that is not all, or no interval."""
    if not o.alibi_slopes is o.implementation is None:
        return None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4):
        return None
    if not holds(q.shape[1 if bshd else 2] == 1) or not (pattern is None or isinstance(pattern, Pattern)):
        return None
    offset = o.q_offset if isinstance(o.q_offset, Tensor) else None
    for x in (offset, o.key_starts, o.key_lengths):
        if x is not None and (
            not isinstance(x, Tensor) or x.device != q.device or x.dtype not in INTEGERS
            or x.ndim != 1 or not holds(x.shape[0] == q.shape[0])
        ):  # fmt: skip
            return None
    rule = (DENSE if pattern is None else pattern).device_rule()
    reach = None if rule is None else rule.interval
    return None if reach is None or reach.blocks else reach


def _ends(
    q: Tensor, k: Tensor, right: int | None, offset: Tensor, key_lengths: Tensor | None, bshd: bool
) -> Tensor | None:  # fmt: skip
    """key_lengths (B,) of queries that see the keys up to `right` after their positions; None: not said by lengths."""
    if right is None:
        return key_lengths
    if abs(right) > MOST_REACH:
        return None
    behind, K = right + 1, k.shape[1 if bshd else 2]
    compiling = torch.compiler.is_compiling()
    if not compiling and q.is_cuda and has_triton() and q.shape[0] and plain(q, offset, key_lengths, profiled=True):
        from gossamer.kernels.triton.one_query.launch_one_query import ends_of

        return ends_of(offset, key_lengths, behind, K)
    at = offset if offset.dtype == torch.int64 else offset.int()
    ends = at.clamp(-behind, K - behind) + behind
    return ends if key_lengths is None else torch.minimum(ends, key_lengths)


def _with_first_key(q: Tensor, k: Tensor, v: Any, reach: Reach, o: AttentionOptions, bshd: bool) -> SeenKeys | None:
    """The call of queries whose keys have a first one; None where it goes the usual way."""
    if torch.compiler.is_compiling() or not sees_on(q.device.type):
        return None
    offset = o.q_offset if isinstance(o.q_offset, Tensor) else None
    if offset is None and type(o.q_offset) not in (type(None), int):
        return None
    if type(o.scale) not in _NUMBERS or type(o.softcap) not in _NUMBERS or o.alibi_distance is not None:
        return None
    sinks = wide(o.sink_logits, q)
    if not isinstance(v, Tensor) or v.ndim != 4 or not isinstance(sinks, (Tensor, type(None))):
        return None
    vectors: Any = offset, o.key_starts, o.key_lengths, sinks
    if not plain(q, k, v, *vectors, profiled=True) or differentiable(q, k, v, sinks):
        return None
    if type(o.deterministic) not in (type(None), bool) or not q.layout is k.layout is v.layout is torch.strided:
        return None
    return SeenKeys(reach, o.q_offset if offset is None else None, vectors, o.scale, o.softcap, bshd)


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


@cache
def sees_on(device: str) -> bool:
    """Whether the kernel of queries whose keys have a first one runs on a type of device."""
    found = load("triton") if has_triton() else ""
    return not isinstance(found, str) and device in found.capability.devices and not found.unavailable()


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
