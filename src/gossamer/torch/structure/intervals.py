"""The interval of keys that a reach gives each row of a call, within what else limits it."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.patterns.reach import MOST, Bounds, Reach
from gossamer.torch import device_arrays
from gossamer.torch.structure.base import Rows, Sizes, Structure, narrow
from gossamer.torch.validate import Arguments, most_offset

reach_bounds_op = torch.ops.gossamer.reach_bounds.default


def rows_of(a: Arguments, sizes: Sizes) -> Rows:
    """Where the rows of a call are; offsets past the limit of `q_offset` count as it."""
    Q, K, offset = sizes.Q, sizes.K, a.q_offset_tensor
    if offset is not None:
        return Rows(Q, 0, offset.to(a.q.device).reshape(-1), most_offset(Q, K), a.q.device)
    return Rows(Q, K - Q if a.q_offset is None else a.q_offset, None, 0, a.q.device)


def interval_of(
    structure: Structure, rows: Rows, sizes: Sizes, outer: Bounds | None, key_starts: Tensor | None,
    key_lengths: Tensor | None, reach: Reach,
) -> Bounds:  # fmt: skip
    """lo and hi (Bl, 1, Q) int32 of a reach of a rule, within `outer` and [key_starts[b], key_lengths[b])."""
    K, plain = sizes.K, outer is not None and not structure.own_positions and reach == Reach()
    vectors = (rows.offset, key_starts, key_lengths, None if outer is None else outer.lo, *structure.tensors)
    like, *_ = [x for x in vectors if x is not None]
    if device_arrays.fused(like) is not None and not structure.own_positions and len(reach.blocks) <= 1:
        lo, hi = (None, None) if outer is None else outer
        of_each = any(x is not None and x.shape[0] > 1 for x in (rows.offset, key_starts, key_lengths, lo))
        left, right = (None if n is None or n >= MOST else n for n in (reach.left, reach.right))
        (block,) = reach.blocks or (None,)
        found = reach_bounds_op(
            like, rows.offset, rows.first, rows.most, key_starts, key_lengths, lo, hi, sizes.B if of_each else 1,
            rows.Q, K, left, right, block, None if reach.first is None or reach.first >= K else reach.first,
        )  # fmt: skip
        return Bounds(*found)
    if plain and outer is not None:
        lo, hi = outer
    else:
        lo, hi = structure.reached(reach, rows.position, sizes)
        lo, hi = (lo, hi) if outer is None else (torch.maximum(lo, outer.lo), torch.minimum(hi, outer.hi))
    if key_starts is not None:
        lo = torch.maximum(lo, narrow(key_starts, 0, K)[:, None, None])
    if key_lengths is not None:
        hi = torch.minimum(hi, narrow(key_lengths, 0, K)[:, None, None])
    hi = torch.maximum(lo, hi)
    return Bounds(lo.expand(hi.shape).contiguous(), hi)
