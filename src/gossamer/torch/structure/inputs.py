"""The inputs of a structure that is made on the device, and its layout, by operations there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.layouts import BlockLayout, TileList, Walk
from gossamer.layouts.device import (
    Progression,
    block_list_layout,
    interval_layout,
    key_list_layout,
    progression_layout,
)
from gossamer.patterns.reach import Bounds, Reach
from gossamer.plan.arguments import most_offset, within_positions
from gossamer.torch import device_arrays
from gossamer.torch.arguments import INTEGERS, describe, known
from gossamer.torch.given_layouts import Given
from gossamer.torch.structure.base import Lists, Sizes, Structure, narrow
from gossamer.torch.structure.fused_bounds import fused_bounds
from gossamer.torch.structure.groups import ALONE

Tile = tuple[int, int]


class Inputs(NamedTuple):
    """The structure, the sizes and the vectors of a call, of which its layout is made."""

    structure: Structure
    sizes: Sizes
    device: torch.device
    q_offset: int | None
    offset: Tensor | None  # q_offset as a tensor
    key_starts: Tensor | None
    key_lengths: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """All that is read."""
        vectors = (self.offset, self.key_starts, self.key_lengths)
        return [*self.structure.tensors, *(x for x in vectors if x is not None)]

    def check(self) -> None:
        """Raise ValueError for what does not fit the sizes."""
        Q, K = self.sizes.Q, self.sizes.K
        if self.q_offset is not None and abs(self.q_offset) > most_offset(Q, K):
            raise ValueError(f"q_offset must {within_positions(Q, K)}; got {describe(self.q_offset)}")
        self.structure.check(self.sizes, placed=not self.q_offset is self.offset is None)

    @property
    def placed(self) -> bool:
        """Whether anything reads the positions of query rows."""
        return goes_by_positions(self.structure) or not self.key_starts is self.key_lengths is None

    def positions(self) -> Tensor | None:
        """The positions of query rows, (B or 1, 1, Q) int32, or None where it is not `placed`.

        Offsets past the limit of `q_offset` count as it.
        """
        if not self.placed:
            return None
        Q, K = self.sizes.Q, self.sizes.K
        row = torch.arange(Q, dtype=torch.int32, device=self.device)
        if self.offset is None:
            return (row + (K - Q if self.q_offset is None else self.q_offset))[None, None]
        most = most_offset(Q, K)
        return row + narrow(self.offset, -most, most).to(self.device).reshape(-1, 1, 1)


def check_vectors(B: int, device: torch.device, offset: Any, key_starts: Any, key_lengths: Any) -> None:
    """Raise ValueError unless q_offset, key_starts and key_lengths are what a structure is made from."""
    for name, x in (("q_offset", offset), ("key_starts", key_starts), ("key_lengths", key_lengths)):
        if x is None:
            continue
        fits = (x.ndim == 1 and not known(x.shape[0] != B)) or (name == "q_offset" and x.ndim == 0)
        if x.dtype not in INTEGERS or not fits:
            also = "an int or a 0-d integer tensor, or one " if name == "q_offset" else "integers "
            raise ValueError(f"{name} must be {also}of shape (B,) = ({B},); got {describe(x)}")
        if x.ndim and x.device != device:
            raise ValueError(f"{name} must be a tensor on q's device, {device}; got {describe(x)}")


def goes_by_positions(structure: Structure) -> bool:
    """Whether positions of queries say what is attended; not where lists of blocks or keys alone do."""
    return not structure.rule.every or any(term.block is None for term in structure.terms)


def layout_of(inputs: Inputs, tile: Tile, transpose: bool) -> Given:
    """The layout of a structure over the keys [key_starts[b], key_lengths[b])."""
    structure, sizes, K = inputs.structure, inputs.sizes, inputs.sizes.K
    lists, only = structure.lists(sizes), structure.rule.interval
    vectors = inputs.offset, inputs.key_starts, inputs.key_lengths
    interval = fused_bounds(structure, sizes, inputs.q_offset, vectors, inputs.device) or _bounds(inputs)
    block_q, block_kv = tile
    if only is None:
        return _of_union(inputs, tile, interval, transpose)
    if lists is None:
        bounds = interval(only)
        return interval_layout(*bounds, K, block_q=block_q, block_kv=block_kv, xp=device_arrays, transpose=transpose)
    lo, hi = interval(only) if inputs.placed else (None, None)
    if lo is not None and lists.indices.shape[0] < lo.shape[0]:
        B = lo.shape[0]
        counts = None if lists.counts is None else lists.counts.expand(B, -1, -1)
        lists = Lists(lists.indices.expand(B, -1, -1, -1), counts)
    given = lists.indices, lists.counts, lo, hi, sizes.Q, K
    _, heads, _, _ = lists.indices.shape
    if structure.block == 1:
        # The gradients of groups are added in memory, and read no transpose.
        alone = tile == ALONE
        return key_list_layout(
            *given, block_q=block_q, heads=max(1, block_kv), xp=device_arrays, transpose=transpose and alone
        )
    times = 1 if heads == 1 else sizes.H // heads
    blocks = block_list_layout(*given, block=block_q, xp=device_arrays, transpose=transpose)
    return for_query_heads(blocks, times) if times > 1 else blocks


def _bounds(inputs: Inputs) -> Callable[[Reach], Bounds]:
    """The keys of each row by a reach, (Bl, 1, Q) int32, by operations."""
    structure, sizes, position = inputs.structure, inputs.sizes, inputs.positions()
    outer = None if position is None else structure.bounds(position, sizes)
    first, behind = (
        None if x is None else narrow(x, 0, sizes.K)[:, None, None] for x in (inputs.key_starts, inputs.key_lengths)
    )

    def interval(reach: Reach) -> Bounds:
        if outer is None or structure.own_positions or not reach.every:
            assert position is not None
            lo, hi = structure.reached(reach, position, sizes)
            lo, hi = (lo, hi) if outer is None else (torch.maximum(lo, outer.lo), torch.minimum(hi, outer.hi))
        else:
            lo, hi = outer
        hi = torch.maximum(lo, hi)
        if first is not None or behind is not None:  # rows without keys keep none at an end of those that are there
            lo, hi = lo.clamp(first, behind), hi.clamp(first, behind)
        return Bounds(lo.expand(hi.shape).contiguous(), hi)

    return interval


def _of_union(inputs: Inputs, tile: Tile, interval: Callable[[Reach], Bounds], transpose: bool) -> BlockLayout:
    """The layout of a rule of several intervals of keys, or of every n-th key of one."""
    (block_q, block_kv), reaches, sizes = tile, inputs.structure.rule.reaches, inputs.sizes
    position = inputs.positions()
    assert position is not None
    stepped = [reach.longest for reach in reaches if reach.step > 1]
    union = [Progression(*interval(reach), reach.step) for reach in reaches]
    B, H, _ = union[0].lo.shape
    unbounded = max(sizes.Q, sizes.K)
    lengths = [unbounded if longest is None else longest for longest in stepped]
    return progression_layout(
        union, position.select(-1, 0).expand(B, H), sizes.K, block_q=block_q, block_kv=block_kv,
        reach=max([0, *lengths]), xp=device_arrays, transpose=transpose,
    )  # fmt: skip


def for_query_heads(layout: BlockLayout, times: int) -> BlockLayout:
    """The layout of key heads for the query heads of each, which share its entries."""
    return BlockLayout(_repeated(layout.rows, times), _transpose=[_repeated(walk, times) for walk in layout._transpose])


def _repeated(walk: Walk, times: int) -> Walk:
    def each(x: Tensor) -> Tensor:
        return x if x.shape[-1] == 0 else x.repeat_interleave(times, 1)

    full, interval, bits = (
        TileList(x.starts.repeat_interleave(times, 1), x.counts.repeat_interleave(times, 1), x.indices)
        for x in walk.lists.values()
    )
    return replace(walk, full=full, interval=interval, bits=bits, lo=each(walk.lo), hi=each(walk.hi))
