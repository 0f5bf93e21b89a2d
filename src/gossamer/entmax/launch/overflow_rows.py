"""Rows without a list, and the kernels that pass over all of their scores.

With `top_k` these make lists after all (`large.py`, by groups of neighbouring rows); without it the rows are
computed by tiles of any rows (`long_rows.py`, `long_rows_backward.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from gossamer.entmax.hopper.key_bounds import Bounds
from gossamer.entmax.hopper.long_rows.configurations import long_rows_columns_config, long_rows_config
from gossamer.entmax.launch.calls import BOUNDS, KernelCall, ListNames, Stats, for_hopper, precision, value_of, words
from gossamer.entmax.launch.kernels import step
from gossamer.entmax.triton.large import large_kernel, list_groups_kernel
from gossamer.entmax.triton.tiled import tiled_kernel
from gossamer.entmax.triton.tiled_backward import tiled_columns_kernel, tiled_dq_kernel
from gossamer.entmax.triton.tiles import FAST, tile_ranges_kernel
from gossamer.kernels.gpu import processors
from gossamer.kernels.launch import BYTES, Builder
from gossamer.kernels.relaunch import padded

LISTING_STEP = 512  # rows that a program looks at together when it lists those of a head
GROUP_ROWS = 64
FEW = 2  # up to so many tiles of 64 rows a multiprocessor the warpgroups of a block share the keys of one


class OverflowRows(NamedTuple):
    """The names of arrays of the rows of each head that have no list, which a kernel of `triton/gather.py` writes."""

    list: str  # (B H, Q) int32, ascending
    counts: str  # (B H,) int32
    pair_counts: str  # (B H,) int32: the pairs in lists
    zeros: str  # int32: the first two count the tiles of Hopper kernels

    def drawn(self, b: Builder) -> str:
        """The counters of Hopper kernels, (2,)."""
        return self.zeros if b[self.zeros].shape == (2,) else b.view("drawn", self.zeros, (2,), (1,))


def rows_of(c: KernelCall, zeros: int) -> OverflowRows:
    """Their arrays.

    Args:
        zeros: how many numbers start at 0.
    """
    heads = c.B * c.H
    shapes = {"row_list": (heads, c.Q), "row_counts": (heads,), "pair_counts": (heads,), "zeros": (zeros,)}
    return OverflowRows(*(c.b.array(name, "int32", shape) for name, shape in shapes.items()))


def common(c: KernelCall) -> dict[str, Any]:
    """The constants that all kernels here are compiled with."""
    return {
        "D": c.D, "E": c.E, "BLOCK_D": padded(c.D), "BLOCK_E": padded(c.E), "GROUP": c.group, "BOUNDS": c.bounds,
        "POSITIONS": c.positions, "PRECISION": precision(c),
    }  # fmt: skip


def large(
    c: KernelCall, stats: Stats, lists: ListNames, first_head: int, heads: int, first_listed: int, only_keys: bool
) -> None:
    """The lists of the k largest of the rows of some heads that have none."""
    b, n = c.b, -(-c.Q // GROUP_ROWS)
    if "groups" not in b:
        b.array("groups", "int32", (c.B * c.H, n))
        b.array("group_counts", "int32", (c.B * c.H,))
    step(
        b, list_groups_kernel, (c.B * c.H,), (lists.counts, "groups", "group_counts", c.Q),
        {"R": GROUP_ROWS, "STEP": 256, "num_warps": 8},
    )  # fmt: skip
    options = common(c)
    del options["E"], options["BLOCK_E"]  # which are no constants of the kernel
    small = padded(c.D) * BYTES[c.dtype] <= 256
    step(
        b, large_kernel, (n, heads),
        (
            c.q, c.k, "steepness", (*c.seen_by, "groups", "group_counts"),
            (lists.counts, *stats.arrays, lists.keys, lists.weights),
            c.strides(c.q, c.k, "q_positions", "k_positions"), first_head, c.H,
            (c.Q, c.K, c.offset, c.top_k, first_listed, c.scale),
        ),
        options | {"L": c.listed, "KEYS": only_keys, "TOLD": stats.requested, "R": GROUP_ROWS,
                   "STEP": 64 if small else 32, "A": value_of(c.same), "num_warps": 4,
                   "num_stages": 2 if small else 1},
    )  # fmt: skip


def power_of(c: KernelCall) -> float:
    """alpha - 1 as the kernels of tiles are compiled for it."""
    if c.same in (0.0, 0.25, 0.5, 1.0):
        return c.same
    known = c.same is not None and c.same > 0.02 and c.half
    return FAST.value if known else -1.0


def nearness(c: KernelCall) -> float:
    """The bound of |log(sum of weights)| before the last step, which about squares it.

    Half of the error of a type is left; where alpha is near 2, and weights may leave the support at once, a step gains
    less.
    """
    half = c.half
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
    size = max(padded(c.D), padded(c.E)) * BYTES[c.dtype]
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


def long_rows(c: KernelCall, rows: OverflowRows, stats: Stats) -> None:
    """Compute out and the statistics of the rows without a list, where `top_k` is None."""
    b, key = c.b, by_hopper(c)
    if key is not None:
        lo, hi, *_ = c.seen_by
        blocks = processors(c.device)
        b.step(
            c.hopper("long_rows", long_rows_config(*key, stats.requested)), c.q, c.k, c.v, "steepness", lo, hi,
            rows.list, rows.counts, rows.drawn(b), words(c, "out"), *stats.arrays, c.scale, nearness(c), c.offset,
            FEW * blocks, blocks,
        )  # fmt: skip
        return
    s, options = tiles_of(c, "forward")
    step(
        b, tiled_kernel, (c.B * c.H, -(-c.Q // s.rows)),
        (
            c.q, c.k, c.v, "steepness", (*c.seen_by, rows.list, rows.counts), ("out", *stats.arrays),
            c.strides(c.q, c.k, c.v, "q_positions", "k_positions"), 0, c.H, (c.Q, c.K, c.offset, c.scale),
        ),
        options
        | {"NEAR": nearness(c), "OUT": True, "TOLD": stats.requested, "SAMPLE": 128 if s.num_stages == 3 else 32},
    )  # fmt: skip


def by_hopper(c: KernelCall, *others: str) -> tuple[str, int, int, float, Bounds] | None:
    """The configuration of the Hopper kernels of tiles for a call; None where they do not take it.

    Args:
        others: arrays that they read besides.
    """
    power = power_of(c)
    takes = max(c.D, c.E) <= 128 and c.D % 8 == c.E % 8 == 0 and power not in (0.0, -1.0)
    if not takes or not for_hopper(c, c.q, c.k, c.v, *others):
        return None
    return c.dtype, c.D, c.E, power if power > 0 else -1.0, BOUNDS[c.bounds]


def long_rows_backward(c: KernelCall, rows: OverflowRows, dout: str, with_alpha: bool) -> None:
    """Add the gradients of the rows without a list."""
    b, key = c.b, by_hopper(c, dout)
    delta = b.array("delta", "float32", (c.rows,))
    row_list = rows.list, rows.counts
    lo, hi, *_ = visible = c.seen_by
    strided = c.strides(c.q, c.k, c.v, dout, "q_positions", "k_positions")
    numbers = c.Q, c.K, c.offset, c.scale
    s, options = tiles_of(c, "dq")
    step(
        b, tiled_dq_kernel, (c.B * c.H, -(-c.Q // s.rows)),
        (
            c.q, c.k, c.v, dout, "steepness", (*visible, *row_list), "lam", (delta, "dq", "alpha_terms"), strided, c.H,
            numbers,
        ),
        options | {"WITH_ALPHA": with_alpha},
    )  # fmt: skip
    if key is not None:
        b.step(
            c.hopper("long_rows_columns", long_rows_columns_config(*key)), c.q, c.k, c.v, dout, "steepness", lo, hi,
            *row_list, rows.drawn(b), "lam", delta, words(c, "dk"), words(c, "dv"), c.scale, c.offset,
            processors(c.device),
        )  # fmt: skip
        return
    s, options = tiles_of(c, "columns")
    tiles = -(-c.Q // s.rows)
    ranges = b.array("ranges", "int32", (c.B * c.H, tiles, 4))
    step(
        b, tile_ranges_kernel, (tiles, c.B * c.H),
        (*row_list, lo, hi, ranges, tiles, c.Q, c.K, c.offset), {"R": s.rows, "BOUNDS": c.bounds, "num_warps": 1},
    )  # fmt: skip
    step(
        b, tiled_columns_kernel, (c.B * c.G, -(-c.K // s.keys)),
        (
            c.q, c.k, c.v, dout, "steepness", (*visible, *row_list), ("lam", delta, ranges), ("dk", "dv"), strided,
            (tiles, c.H), numbers,
        ),
        options | {"MEMBERS": triton.next_power_of_2(c.group), "SPAN": 128},
    )  # fmt: skip
