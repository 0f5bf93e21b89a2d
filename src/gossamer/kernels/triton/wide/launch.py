"""Heads wider than 256, by slices of D and E: from tensors and a layout to kernel arguments, some tile rows at a time.

The scores of the listed tiles of some tile rows are kept between kernels, at most about SCRATCH_BYTES of them, so the
memory does not grow with the sequence. Gradients of keys are added up over the passes in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.rows import row_terms, sink_gradient
from gossamer.kernels.scores import scales
from gossamer.kernels.triton.arguments import results
from gossamer.kernels.triton.wide.kernels import gradient_kernel, output_kernel, products_kernel
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.plan.problem import Problem

SCRATCH_BYTES = 2**28
BLOCK = 256  # of D or E in one program of a result


def product_step(dtype: str, sm: int) -> int:
    """How much of D or E one product of scores takes; 64 float32 numbers spill kilobytes before sm_90."""
    return 32 if dtype == "float32" and sm < 90 else 64


@dataclass(frozen=True)
class Pass:
    """The tile rows [first, first + rows): their tiles in order, by rows and by columns, of each lead."""

    first: int
    rows: int
    most: int  # tiles of a lead
    begins: Tensor  # (leads,) int32 into `Tiles.table`
    counts: Tensor  # (leads,) int32
    row_starts: Tensor  # (leads, rows + 1) int32
    in_order: Tensor  # (most,) int32: 0, 1, 2, ...
    zeros: Tensor  # (leads,) int32
    by_column: Tensor  # int32: slots by tile column, lead after lead
    column_begins: Tensor  # (leads,) int32
    column_starts: Tensor  # (leads, tile columns + 1) int32


@dataclass(frozen=True)
class Tiles:
    """Every listed tile of a layout, (n, 4) int32: tile row, tile column, kind, entry of the pool; and the passes."""

    table: Tensor
    passes: tuple[Pass, ...]


_tiles: WeakKeyDictionary[BlockLayout, dict[int, Tiles]] = WeakKeyDictionary()


def tiles_of(layout: BlockLayout, most: int) -> Tiles:
    """The tiles of a layout in passes of about `most` tiles for each lead; a layout made on a device is read back."""
    known = _tiles.setdefault(layout, {})
    if most not in known:
        host = layout.rows if layout.host is None else layout.host.rows
        known[most] = _make_tiles(host.on_host(), most, layout.rows.lo.device)
    return known[most]


def _make_tiles(walk: Walk, most: int, device: torch.device) -> Tiles:
    leads, T = walk.lead[0] * walk.lead[1], walk.tiles
    C = -(-walk.columns // walk.block_columns)
    parts = []
    for kind, (name, tiles) in enumerate(walk.lists.items()):
        row, at = tiles.listed()
        entry = walk.pool_index[at] if name == "bits" else np.zeros(len(at), dtype=np.int64)
        parts.append(np.stack((row, tiles.indices[at], np.full(len(at), kind), entry), axis=1))
    table = np.concatenate(parts)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    row = table[:, 0]
    starts = np.searchsorted(row, np.arange(leads * T + 1))
    by_row = np.stack([starts[lead * T : (lead + 1) * T + 1] for lead in range(leads)])  # (leads, T + 1)
    table[:, 0] = row % T

    def move(x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device)

    passes, first = [], 0
    while first < T:
        last = first + 1
        while last < T and (by_row[:, last + 1] - by_row[:, first]).max() <= most:
            last += 1
        begins, ends = by_row[:, first], by_row[:, last]
        order, column_starts = [], []
        for begin, end in zip(begins, ends, strict=True):
            column = table[begin:end, 1]
            order.append(np.argsort(column, kind="stable"))
            column_starts.append(np.searchsorted(column[order[-1]], np.arange(C + 1)))
        counts = ends - begins
        passes.append(
            Pass(
                first, last - first, int(counts.max()), move(begins), move(counts),
                move(by_row[:, first : last + 1] - begins[:, None]), move(np.arange(max(1, counts.max()))),
                move(np.zeros(leads)), move(np.concatenate(order)), move(np.cumsum(counts) - counts),
                move(np.stack(column_starts)),
            )
        )  # fmt: skip
        first = last
    return Tiles(move(table), tuple(passes))


class Call:
    """What every launch of a call shares."""

    def __init__(self, p: Problem, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, terms: Terms) -> None:
        self.p, self.terms, self.walk = p, terms, layout.rows
        self.q, self.k, self.v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (q, k, v))
        short = p.dtype == "float32"
        edge = 64 if short else 128
        rows, columns = self.walk.block_rows, self.walk.block_columns
        self.R, self.C = min(edge, rows & -rows), min(edge, columns & -columns)
        self.rows, self.columns = min(64, self.R), min(64, self.C)  # of the kernels that make results
        self.block = BLOCK // 2 if short else BLOCK
        self.step = product_step(p.dtype, p.sm or 80)
        self.precision = "tf32x3" if short else "ieee"
        self.options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
        Bl, Hl = self.walk.lead
        self.leads = {"lead_b": Hl if Bl > 1 else 0, "lead_h": 1 if Hl > 1 else 0}
        tile_bytes = p.B * p.H * rows * columns * 4
        self.tiles = tiles_of(layout, max(1, SCRATCH_BYTES // tile_bytes))
        self.masks = tuple(x.contiguous() for x in (self.walk.lo, self.walk.hi, self.walk.pool))

    def scratch(self, done: Pass, dtype: torch.dtype) -> Tensor:
        """A place for the tiles of a pass, of all heads."""
        shape = (self.p.B * self.p.H, max(1, done.most), self.walk.block_rows, self.walk.block_columns)
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def products(
        self, done: Pass, first: Tensor, second: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, backward: bool
    ) -> None:
        """Scores of a pass into `first`, or P into it and dS into `second`."""
        p, t, walk = self.p, self.terms, self.walk
        if not done.most:
            return
        scale, cap = scales(t)
        assert first.shape[1] == done.most, "a place for each tile of the pass"
        grid = (done.most * p.B * p.H, walk.block_rows // self.R * (walk.block_columns // self.C))
        products_kernel[grid](
            self.q, self.k, self.v, dout, lse, delta, first, second, self.tiles.table, done.begins, done.counts,
            *self.masks, t.key_lengths, t.alibi_slopes, *self.q.stride()[:3], *self.k.stride()[:3],
            *self.v.stride()[:3], p.H, p.Q, p.K, t.q_offset, first.shape[1], **self.leads, scale=scale, cap=cap,
            GROUP=p.H // p.G, D=p.D, E=p.E, R=self.R, C=self.C, STEP=self.step, TILE_ROWS=walk.block_rows,
            TILE_COLUMNS=walk.block_columns, SOFTCAP=t.softcap is not None, BACKWARD=backward,
            PRECISION=self.precision, **self.options,
        )  # fmt: skip

    def gradient(
        self, done: Pass, weights: Tensor, x: Tensor, result: Tensor, factor: float, *, keys: bool, add: bool
    ) -> None:
        """dQ of a pass, or its share of the gradients of keys or values."""
        p, walk = self.p, self.walk
        group = p.H // p.G
        resident = walk.block_columns if keys else walk.block_rows
        count = -(-p.K // walk.block_columns) if keys else done.rows
        R = self.columns if keys else self.rows
        order = (done.by_column, done.column_begins, done.column_starts) if keys else (
            done.in_order, done.zeros, done.row_starts
        )  # fmt: skip
        size = result.shape[3]
        grid = (count * (resident // R) * p.B * (p.G if keys else p.H), -(-size // self.block))
        gradient_kernel[grid](
            weights, x, result, self.tiles.table, done.begins, *order, *x.stride()[:3], *result.stride()[:3], p.H,
            p.K if keys else p.Q, p.Q if keys else p.K, weights.shape[1], 0 if keys else done.first, count,
            **self.leads, factor=factor, MEMBERS=group if keys else 1, X_GROUP=1 if keys else group, SIZE=size, R=R,
            C=self.rows if keys else self.columns, BLOCK=self.block, TILE_ROWS=walk.block_rows,
            TILE_COLUMNS=walk.block_columns, TRANSPOSED=keys, ADD=add, PRECISION=self.precision, **self.options,
        )  # fmt: skip


def forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, terms: Terms,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse)."""
    call = Call(p, q, k, v, layout, terms)
    walk = call.walk
    out, lse = results(p, q, into)
    for done in call.tiles.passes:
        scores = call.scratch(done, torch.float32)
        call.products(done, scores, scores, call.v, lse, lse, False)
        grid = (done.rows * (walk.block_rows // call.rows) * p.B * p.H, -(-p.E // call.block))
        output_kernel[grid](
            scores, call.v, out, lse, terms.sink_logits, call.tiles.table, done.begins, done.row_starts,
            *call.v.stride()[:3], *out.stride()[:3], *lse.stride(), p.H, p.Q, p.K, scores.shape[1], done.first,
            done.rows, **call.leads, GROUP=p.H // p.G, E=p.E, R=call.rows, C=call.columns, BLOCK=call.block,
            TILE_ROWS=walk.block_rows, TILE_COLUMNS=walk.block_columns, PRECISION=call.precision, **call.options,
        )  # fmt: skip
    return out, lse


def backward(
    p: Problem, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    layout: BlockLayout, terms: Terms, into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink_logits or None)."""
    call = Call(p, q, k, v, layout, terms)
    dout = dout.contiguous()
    delta, lse = (x.contiguous() for x in row_terms(dout, dlse, out, lse, torch.float32))
    if into is None:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        into = dq, dk, dv
    dq, dk, dv = into
    several = len(call.tiles.passes) > 1
    # Over several passes the sums stay in float32.
    sums = [torch.empty(x.shape, dtype=torch.float32, device=x.device) if several else x for x in (dk, dv)]
    for at, done in enumerate(call.tiles.passes):
        weights, shares = call.scratch(done, q.dtype), call.scratch(done, q.dtype)
        call.products(done, weights, shares, dout, lse, delta, True)
        call.gradient(done, shares, call.k, dq, terms.scale, keys=False, add=False)
        call.gradient(done, shares, call.q, sums[0], terms.scale, keys=True, add=at > 0)
        call.gradient(done, weights, dout, sums[1], 1.0, keys=True, add=at > 0)
    if several:
        dk.copy_(sums[0])
        dv.copy_(sums[1])
    return dq, dk, dv, sink_gradient(delta, lse, terms)
