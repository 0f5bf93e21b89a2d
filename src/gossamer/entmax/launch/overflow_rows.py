"""Rows without a list, and the kernels that pass over all of their scores.

With `top_k` these make lists after all (`large.py`, by groups of neighbouring rows); without it the rows are
computed by tiles of any rows (`long_rows.py`, `long_rows_backward.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.entmax.hopper.key_bounds import Bounds
from gossamer.entmax.hopper.long_rows.configurations import long_rows_columns_config, long_rows_config
from gossamer.entmax.launch.calls import (
    BOUNDS,
    KernelCall,
    Stats,
    for_hopper,
    intervals,
    precision,
    seen_by,
    strides,
    value_of,
)
from gossamer.entmax.lists import RowLists
from gossamer.entmax.triton.large import large_kernel, list_groups_kernel
from gossamer.entmax.triton.tiled import tiled_kernel
from gossamer.entmax.triton.tiled_backward import tiled_columns_kernel, tiled_dq_kernel
from gossamer.entmax.triton.tiles import FAST, list_rows_kernel, tile_ranges_kernel
from gossamer.kernels.gpu import processors
from gossamer.kernels.launch import dtype_of
from gossamer.kernels.relaunch import padded

GROUP_ROWS = 64
FEW = 2  # up to so many tiles of 64 rows a multiprocessor the warpgroups of a block share the keys of one


class OverflowRows(NamedTuple):
    """The rows of each head that have no list, ascending."""

    list: Tensor  # (B H, Q) int32
    counts: Tensor  # (B H,) int32
    drawn: Tensor  # (2,) int32: 0, which Hopper kernels count their tiles with


def rows_of(c: KernelCall, lists: RowLists) -> OverflowRows:
    """The rows whose count is -1."""
    B, H, Q, _ = c.q.shape
    rows = OverflowRows(
        torch.empty(B * H, Q, dtype=torch.int32, device=c.q.device),
        torch.empty(B * H, dtype=torch.int32, device=c.q.device),
        torch.empty(2, dtype=torch.int32, device=c.q.device),
    )
    list_rows_kernel[(B * H,)](lists.counts, *rows, Q, STEP=4096, num_warps=8)
    return rows


def common(c: KernelCall) -> dict[str, Any]:
    """The constants that all kernels here are compiled with."""
    D, E = c.q.shape[3], c.v.shape[3]
    return {
        "D": D, "E": E, "BLOCK_D": padded(D), "BLOCK_E": padded(E), "GROUP": c.group, "BOUNDS": c.bounds,
        "POSITIONS": c.q_positions is not None, "PRECISION": precision(c.q),
    }  # fmt: skip


def large(
    c: KernelCall, stats: Stats, lists: RowLists, first_head: int, heads: int, first_listed: int, only_keys: bool
) -> None:
    """The lists of the k largest of the rows of some heads that have none."""
    (B, H, Q, D), K = c.q.shape, c.k.shape[2]
    n = -(-Q // GROUP_ROWS)
    groups = torch.empty(B * H, n, dtype=torch.int32, device=c.q.device)
    counts = torch.empty(B * H, dtype=torch.int32, device=c.q.device)
    list_groups_kernel[(B * H,)](lists.counts, groups, counts, Q, R=GROUP_ROWS, STEP=256, num_warps=8)
    options = common(c)
    del options["E"], options["BLOCK_E"]
    small = padded(D) * c.q.element_size() <= 256
    large_kernel[(n, heads)](
        c.q, c.k, c.steepness, *seen_by(c), groups, counts, lists.counts, stats.lam, stats.support, stats.certified,
        lists.keys, lists.weights, *strides(c.q, c.k, c.q_positions, c.k_positions), first_head, H, Q, K, c.offset,
        c.top_k, first_listed, c.scale, L=c.listed, KEYS=only_keys, TOLD=stats.requested, R=GROUP_ROWS,
        STEP=64 if small else 32, A=value_of(c.same), **options, num_warps=4, num_stages=2 if small else 1,
    )  # fmt: skip


def power_of(c: KernelCall) -> float:
    """alpha - 1 as the kernels of tiles are compiled for it."""
    if c.same in (0.0, 0.25, 0.5, 1.0):
        return c.same
    known = c.same is not None and c.same > 0.02 and c.q.element_size() == 2
    return FAST.value if known else -1.0


def nearness(c: KernelCall) -> float:
    """The bound of |log(sum of weights)| before the last step, which about squares it.

    Half of the error of a type is left; where alpha is near 2, and weights may leave the support at once, a step gains
    less.
    """
    half = c.q.element_size() == 2
    if c.same in (0.25, 0.5):
        return 0.05 if half else 0.01
    if c.same is not None and c.same < 0.6:
        return 0.02 if half else 3e-4
    return 2e-4 if half else 5e-6


class TileSizes(NamedTuple):
    """The tile of a kernel, and how it is launched."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile_sizes(c: KernelCall, kernel: str) -> TileSizes:
    """The tile of a kernel: "forward", "dq" or "columns"."""
    size = max(padded(c.q.shape[3]), padded(c.v.shape[3])) * c.q.element_size()
    if size <= 128:
        return TileSizes(64, 64, 4, 2 if kernel == "columns" else 3)
    if size <= 256:
        return TileSizes(32, 64, 4, 2) if kernel == "columns" else TileSizes(64, 32, 4, 2)
    if size <= 512:
        return TileSizes(32, 64, 8, 1) if kernel == "columns" else TileSizes(64, 32, 8, 1)
    return TileSizes(32, 32, 4, 1)


def tiles_of(c: KernelCall, kernel: str) -> tuple[TileSizes, dict[str, Any]]:
    """(tile, constants) of a kernel of tiles."""
    s = tile_sizes(c, kernel)
    options = common(c) | {"R": s.rows, "A": power_of(c), "num_warps": s.num_warps, "num_stages": s.num_stages}
    if kernel == "columns":
        return s, options | {"COLUMNS": s.keys}
    return s, options | {"STEP": s.keys}


def long_rows(c: KernelCall, out: Tensor, stats: Stats, lists: RowLists, with_out: bool) -> None:
    """Compute out and the statistics of the rows without a list, where `top_k` is None."""
    (B, H, Q, _), K = c.q.shape, c.k.shape[2]
    rows, key = rows_of(c, lists), by_hopper(c)
    if key is not None and with_out:
        long_rows_by_hopper(c, key, rows, out, stats)
        return
    s, options = tiles_of(c, "forward")
    tiled_kernel[(B * H, -(-Q // s.rows))](
        c.q, c.k, c.v, c.steepness, *seen_by(c), rows.list, rows.counts, out, *stats,
        *strides(c.q, c.k, c.v, c.q_positions, c.k_positions), 0, H, Q, K, c.offset, c.scale, NEAR=nearness(c),
        OUT=with_out, TOLD=stats.requested, SAMPLE=128 if s.num_stages == 3 else 32, **options,
    )  # fmt: skip


def by_hopper(c: KernelCall, *others: Tensor) -> tuple[str, int, int, float, Bounds] | None:
    """The configuration of the Hopper kernels of tiles for a call; None where they do not take it.

    Args:
        others: tensors that they read besides.
    """
    D, E, power = c.q.shape[3], c.v.shape[3], power_of(c)
    takes = max(D, E) <= 128 and D % 8 == E % 8 == 0 and power not in (0.0, -1.0)
    if not takes or not for_hopper(c, c.q, c.k, c.v, *others):
        return None
    return dtype_of(c.q), D, E, power if power > 0 else -1.0, BOUNDS[c.bounds]


def pairs(x: Tensor) -> Tensor:
    """A contiguous tensor of 16 bits as (rows, pairs of columns)."""
    return x.view(-1, x.shape[-1]).view(torch.int32)


def long_rows_by_hopper(
    c: KernelCall, key: tuple[str, int, int, float, Bounds], rows: OverflowRows, out: Tensor, stats: Stats
) -> None:  # fmt: skip
    """Compute them by the Hopper kernel."""
    from gossamer.entmax.hopper import compiled

    blocks = processors(c.q.device)
    compiled.long_rows(long_rows_config(*key, stats.requested))(
        c.q, c.k, c.v, c.steepness, *intervals(c), *rows, pairs(out), *stats.flat, c.scale, nearness(c), c.offset,
        FEW * blocks, blocks,
    )  # fmt: skip


def long_rows_backward(
    c: KernelCall, lists: RowLists, lam: Tensor, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, alpha_terms: Tensor,
    with_alpha: bool,
) -> None:  # fmt: skip
    """Add the gradients of the rows without a list."""
    (B, H, Q, _), (_, G, K, _) = c.q.shape, c.k.shape
    rows, key = rows_of(c, lists), by_hopper(c, dout)
    delta = torch.empty(B, H, Q, device=c.q.device)
    visible, row_list = seen_by(c), (rows.list, rows.counts)
    rest = *strides(c.q, c.k, c.v, dout, c.q_positions, c.k_positions), H, Q, K, c.offset, c.scale
    s, options = tiles_of(c, "dq")
    tiled_dq_kernel[(B * H, -(-Q // s.rows))](
        c.q, c.k, c.v, dout, c.steepness, *visible, *row_list, lam, delta, dq, alpha_terms, *rest, **options,
        WITH_ALPHA=with_alpha,
    )  # fmt: skip
    if key is not None:
        from gossamer.entmax.hopper import compiled

        compiled.long_rows_columns(long_rows_columns_config(*key))(
            c.q, c.k, c.v, dout, c.steepness, *intervals(c), *rows, lam.view(-1), delta.view(-1), pairs(dk), pairs(dv),
            c.scale, c.offset, processors(c.q.device),
        )  # fmt: skip
        return
    s, options = tiles_of(c, "columns")
    tiles = -(-Q // s.rows)
    ranges = torch.empty(B * H, tiles, 4, dtype=torch.int32, device=c.q.device)
    lo, hi, *_ = visible
    tile_ranges_kernel[(tiles, B * H)](
        *row_list, lo, hi, ranges, tiles, Q, K, c.offset, R=s.rows, BOUNDS=c.bounds, num_warps=1
    )
    strided = strides(c.q, c.k, c.v, dout, c.q_positions, c.k_positions)
    tiled_columns_kernel[(B * G, -(-K // s.keys))](
        c.q, c.k, c.v, dout, c.steepness, *visible, *row_list, lam, delta, ranges, dk, dv, *strided, tiles, H, Q, K,
        c.offset, c.scale, MEMBERS=triton.next_power_of_2(c.group), SPAN=128, **options,
    )  # fmt: skip
