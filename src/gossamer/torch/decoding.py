"""One query behind keys that grow by a token a call: planned once for `RANGE` numbers of keys.

It sees all keys, those before it, or those of a window: a view of the keys, of which it sees all. The call is bound to
the next multiple of `RANGE` keys, of which `key_lengths` says how many there are; the rest is neither there nor read
(`Capability.grows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.layouts import cached_layout
from gossamer.layouts.kept import KEPT_BYTES, LEAST_KEPT, MOST_KEPT, Kept
from gossamer.patterns import Causal, Dense, SlidingWindow
from gossamer.patterns.handles import token_of
from gossamer.plan.capability import reasons
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem
from gossamer.torch.calls import keep, kind_of
from gossamer.torch.plan import held, hold_for_graphs, plan_for, terms_of
from gossamer.torch.validate import Arguments, most_offset

RANGE = 128  # numbers of keys that share a plan
STEP = 8  # strides of k and v, which are not part of what tells calls apart, are multiples of it
# Where `calls.kind_of` puts what is looked at here.
Q_SHAPE, K_SHAPE, V_SHAPE, Q_STRIDE, K_STRIDE, V_STRIDE, TYPES, DEVICES = *range(1, 8), 10
GRADIENT, ALIGNED = 13, 14
_NUMBERS = (type(None), int, float)
_DENSE = Dense()


class Range(NamedTuple):
    """What calls of one query and up to so many keys have in common."""

    run: Callable[..., tuple[Tensor, Tensor]] | None  # None: nothing that is bound takes fewer keys
    lengths: tuple[Tensor, ...]  # (B,): the numbers of keys of the range


class Decoding(NamedTuple):
    """What calls of one query and so many keys do."""

    run: Callable[..., tuple[Tensor, Tensor]]
    some: tuple[int, int] | None  # the first key that it sees, and how many; None: all
    length: Tensor  # (B,) int32: how many
    alive: Any  # the token of the pattern's handle, so that an equal one keeps it

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse); see `calls.Call`."""
        run, some, length, _ = self
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        if some is not None:
            k, v = k.narrow(2, *some), v.narrow(2, *some)
        return run(q, k, v, length, tensors[1] if tensors else None)


_ranges: Kept[Range] = Kept(LEAST_KEPT, MOST_KEPT, KEPT_BYTES)


def decoding(
    kind: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, pattern: Any, options: tuple[Any, ...],
    tensors: tuple[Tensor | None, ...],
) -> Decoding | None:  # fmt: skip
    """What calls of one query do, made where there was none before; None where they go the usual way.

    Args:
        kind: of the call, by `calls.kind_of`.
        options: (scale, q_offset, softcap, implementation, deterministic).
        tensors: key_lengths, sink_logits and alibi_slopes, or nothing.
    """
    seen = keys_seen(kind, pattern, options, tensors)
    if seen is None:
        return None
    scale, _, softcap, implementation, deterministic = options
    B, G, K, D = kind[K_SHAPE]
    count = seen[1]
    most = -(-count // RANGE) * RANGE
    key = (
        most, B, G, D, kind[V_SHAPE][3], kind[Q_SHAPE], kind[Q_STRIDE], kind[TYPES:GRADIENT], scale, softcap,
        implementation, deterministic, kind[-1] if tensors else None,
    )  # fmt: skip
    found = _ranges.get(key)
    if found is None:
        k, v, sinks = k.narrow(2, *seen), v.narrow(2, *seen), tensors[1] if tensors else None
        a = Arguments(q, k, v, None, None, None, sinks, None, scale, softcap, implementation, deterministic, False)
        found = _ranges.put(key, *_bound(a, most))
    if found.run is None:
        return None
    some = None if count == K else seen
    return keep(kind, Decoding(found.run, some, found.lengths[count - most - 1], token_of(kind[0])))


def keys_seen(
    kind: tuple[Any, ...], pattern: Any, options: tuple[Any, ...], tensors: tuple[Tensor | None, ...]
) -> tuple[int, int] | None:
    """The first key that the one query of a call sees, and how many; None where it goes the usual way."""
    scale, q_offset, softcap, *_ = options
    if len(kind[Q_SHAPE]) != 4 or kind[Q_SHAPE][2] != 1 or kind[GRADIENT] or not kind[ALIGNED]:
        return None
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS or len(set(kind[DEVICES:GRADIENT])) > 1:
        return None
    if len(kind[K_SHAPE]) != 4 or kind[K_SHAPE][:3] != kind[V_SHAPE][:3]:
        return None
    if not isinstance(pattern, (Dense, Causal, SlidingWindow)) or (
        tensors and (tensors[0], tensors[2]) != (None, None)
    ):
        return None
    if isinstance(pattern, SlidingWindow) and pattern.sinks:
        return None
    for strides in (kind[K_STRIDE], kind[V_STRIDE]):
        if strides[3] != 1 or min(strides) <= 0 or (strides[0] | strides[1] | strides[2]) % STEP:
            return None
    if type(q_offset) not in (type(None), int) or abs(q_offset or 0) > most_offset(1, kind[K_SHAPE][2]):
        return None
    K = kind[K_SHAPE][2]
    position = K - 1 if q_offset is None else q_offset
    if isinstance(pattern, SlidingWindow):
        left, right = pattern.left, pattern.right
    else:
        left, right = None, 0 if isinstance(pattern, Causal) else None
    first = 0 if left is None else max(0, position - left)
    end = K if right is None else min(K, position + right + 1)
    return (first, end - first) if first < end else None


def for_one_query(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, pattern: Any, options: tuple[Any, ...],
    tensors: tuple[Tensor | None, ...],
) -> Plan:  # fmt: skip
    """The plan of a call with what its calls are bound to first, where they are: for `explain`."""
    pattern = _DENSE if pattern is None else pattern
    tensors = tensors if any(x is not None for x in tensors) else ()
    kind = kind_of(q, k, v, pattern, options[4], options[:4], tensors)
    seen = None if kind is None else keys_seen(kind, pattern, options, tensors)
    found = None if seen is None else growing(plan, seen[1])
    if found is None:
        return plan
    return replace(plan, implementations=(found[0], *(i for i in plan.implementations if i is not found[0])))


def growing(plan: Plan, keys: int) -> tuple[Any, Problem] | None:
    """The implementation of a plan whose bound calls take up to so many keys, and its problem; None without one."""
    problem = replace(plan.problem, K=keys, score_terms=(plan.problem.score_terms - {"q_offset"}) | {"key_lengths"})
    able = [i for i in plan.implementations if i.capability.grows and not reasons(problem, i.capability)]
    return (able[0], problem) if able else None


def _bound(a: Arguments, most: int) -> tuple[Range, int]:
    """The calls of up to `most` keys, and the bytes of what they hold."""
    found = growing(plan_for(a, []), most)
    if found is None:
        return Range(None, ()), 0
    implementation, problem = found
    block_q, block_kv = implementation.tile(problem)
    lengths = _lengths(a.q.device, problem.B, most)
    terms = replace(terms_of(a), q_offset=most - 1, key_lengths=lengths[0])
    layout = cached_layout(
        _DENSE, 1, most, block_q=block_q, block_kv=block_kv, q_offset=most - 1, device=a.q.device
    )  # fmt: skip
    return Range(implementation.bound_forward(problem, a.q, a.k, a.v, layout, terms), lengths), held(layout)


@lru_cache(LEAST_KEPT)
def _lengths(device: torch.device, B: int, most: int) -> tuple[Tensor, ...]:
    """(B,) of each number of keys up to `most` that shares its plan, at multiples of 16 bytes."""
    numbers = torch.arange(most - RANGE + 1, most + 1, dtype=torch.int32)
    rows = numbers[:, None].expand(RANGE, -(-B // 4) * 4).contiguous().to(device)
    return rows[:, :B].unbind(0)
