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

from gossamer.kernels.contract import reasons
from gossamer.layouts import cached_layout
from gossamer.layouts.kept import KEPT_BYTES, LEAST_KEPT, MOST_KEPT, Kept
from gossamer.patterns import Causal, Dense, SlidingWindow
from gossamer.patterns.handles import token_of
from gossamer.torch.calls import keep
from gossamer.torch.plan import held, hold_for_graphs, plan_for, terms_of
from gossamer.torch.validate import Arguments

RANGE = 128  # numbers of keys that share a plan
STEP = 8  # strides of k and v, which are not part of what tells calls apart, are multiples of it
# Where `calls.kind_of` puts what is looked at here.
Q_SHAPE, K_SHAPE, V_SHAPE, Q_STRIDE, K_STRIDE, V_STRIDE, TYPES, DEVICES = *range(1, 8), 10
GRADIENT, ALIGNED, REST = range(13, 16)
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
    scale, q_offset, softcap, implementation, deterministic = options
    if len(kind[Q_SHAPE]) != 4 or kind[GRADIENT] or not kind[ALIGNED]:
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
    B, G, K, D = kind[K_SHAPE]
    first, end = _seen(pattern, K, K - 1 if q_offset is None else q_offset)
    seen = end - first
    if seen <= 0 or type(q_offset) not in (type(None), int) or abs(q_offset or 0) >= 2**31:
        return None
    most = -(-seen // RANGE) * RANGE
    key = (
        most, B, G, D, kind[V_SHAPE][3], kind[Q_SHAPE], kind[Q_STRIDE], kind[TYPES:GRADIENT], scale, softcap,
        implementation, deterministic, kind[-1] if tensors else None,
    )  # fmt: skip
    found = _ranges.get(key)
    if found is None:
        k, v, sinks = k[:, :, first:end], v[:, :, first:end], tensors[1] if tensors else None
        a = Arguments(q, k, v, None, None, None, sinks, None, scale, softcap, implementation, deterministic, False)
        found = _ranges.put(key, *_bound(a, most))
    if found.run is None:
        return None
    some = None if seen == K else (first, seen)
    return keep(kind, Decoding(found.run, some, found.lengths[seen - most - 1], token_of(kind[0])))


def _seen(pattern: Any, K: int, position: int) -> tuple[int, int]:
    """The first of K keys that a query sees, and the one after the last."""
    if isinstance(pattern, SlidingWindow):
        left, right = pattern.left, pattern.right
    else:
        left, right = None, 0 if isinstance(pattern, Causal) else None
    return 0 if left is None else max(0, position - left), K if right is None else min(K, position + right + 1)


def _bound(a: Arguments, most: int) -> tuple[Range, int]:
    """The calls of up to `most` keys, and the bytes of what they hold."""
    plan = plan_for(a, [])
    problem = replace(plan.problem, K=most, score_terms=plan.problem.score_terms | {"key_lengths"})
    able = [i for i in plan.implementations if i.capability.grows and not reasons(problem, i.capability)]
    if not able or not most:
        return Range(None, ()), 0
    block_q, block_kv = able[0].tile(problem)
    lengths = _lengths(a.q.device, problem.B, most)
    terms = replace(terms_of(a), q_offset=most - 1, key_lengths=lengths[0])
    layout = cached_layout(
        _DENSE, 1, most, block_q=block_q, block_kv=block_kv, q_offset=most - 1, device=a.q.device
    )  # fmt: skip
    binding: Any = able[0]
    return Range(binding.bound_forward(problem, a.q, a.k, a.v, layout, terms), lengths), held(layout)


@lru_cache(LEAST_KEPT)
def _lengths(device: torch.device, B: int, most: int) -> tuple[Tensor, ...]:
    """(B,) of each number of keys up to `most` that shares its plan, at multiples of 16 bytes."""
    numbers = torch.arange(most - RANGE + 1, most + 1, dtype=torch.int32)
    rows = numbers[:, None].expand(RANGE, -(-B // 4) * 4).contiguous().to(device)
    return rows[:, :B].unbind(0)
