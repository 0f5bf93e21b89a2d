"""Block patterns: a boolean block matrix, and BigBird."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gossamer.checks import array, boolean, digest, integer
from gossamer.patterns.base import Pattern, Tiles
from gossamer.patterns.dense import Causal
from gossamer.patterns.grid import EMPTY, FULL, MIXED, Grid, Sizes, combine_ids, distinct, ranges


class TileCounts(NamedTuple):
    """The tiles that hold a kept pair, ascending by ti * nk + tj, and how many pairs each keeps."""

    keys: np.ndarray
    kept: np.ndarray


class Counted(Pattern):
    """A pattern whose non-empty tiles can be listed with the exact number of pairs in each."""

    @abstractmethod
    def _count_tiles(self, grid: Grid) -> TileCounts:
        """The non-empty tiles of a grid."""

    def tile_bound(self, grid: Grid) -> int:
        return len(_remembered_counts(self, grid).keys)

    def tile_candidates(self, grid: Grid, start: int, stop: int) -> Tiles:
        keys = _remembered_counts(self, grid).keys
        first, last = np.searchsorted(keys, [start * grid.nk, stop * grid.nk])
        ti, tj = np.divmod(keys[first:last], grid.nk)
        return ti, tj

    def tile_classes(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        keys, kept = _remembered_counts(self, grid)
        if not len(keys):
            return np.full(len(ti), EMPTY, dtype=np.int8)
        wanted = ti * grid.nk + tj
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        pairs = np.where(keys[at] == wanted, kept[at], 0)
        return np.where(pairs == 0, EMPTY, np.where(pairs == grid.area(ti, tj), FULL, MIXED)).astype(np.int8)


@lru_cache(maxsize=8)
def _remembered_counts(pattern: Counted, grid: Grid) -> TileCounts:
    return pattern._count_tiles(grid)


class Blocks(Counted):
    """A union of blocks of `block` rows by `block` keys, rows and keys counted from 0."""

    block: int

    @abstractmethod
    def _blocks(self, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        """Block rows and block columns of the kept blocks, each block once."""

    @abstractmethod
    def _holds(self, block_rows: np.ndarray, block_columns: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Whether the blocks are kept; indices may lie outside the matrix, where nothing is."""

    @property
    def reads_positions(self) -> bool:
        return False

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self._holds((i - sizes.q_offset) // self.block, j // self.block, sizes)

    def _count_tiles(self, grid: Grid) -> TileCounts:
        block_rows, block_columns = self._blocks(grid.sizes)
        r0, c0 = block_rows * self.block, block_columns * self.block
        r1, c1 = np.minimum(r0 + self.block, grid.Q), np.minimum(c0 + self.block, grid.K)
        which, ti = ranges(r0 // grid.block_q, -(-r1 // grid.block_q))
        again, tj = ranges((c0 // grid.block_kv)[which], (-(-c1 // grid.block_kv))[which])
        which, ti = which[again], ti[again]
        t0, t1 = grid.row_bounds(ti)
        u0, u1 = grid.key_bounds(tj)
        height = np.minimum(r1[which], t1) - np.maximum(r0[which], t0)
        width = np.minimum(c1[which], u1) - np.maximum(c0[which], u0)
        keys, inverse = np.unique(ti * grid.nk + tj, return_inverse=True)
        return TileCounts(keys, np.bincount(inverse, weights=height * width, minlength=len(keys)).astype(np.int64))

    def tile_ids(self, grid: Grid, ti: np.ndarray, tj: np.ndarray) -> np.ndarray:
        rows, columns = grid.block_q // self.block, grid.block_kv // self.block
        aligned = grid.block_q % self.block == 0 and grid.block_kv % self.block == 0
        if not aligned or rows * columns > 62:
            return super().tile_ids(grid, ti, tj)
        sizes = grid.sizes
        ids = np.zeros(len(ti), dtype=np.int64)
        for bit, (r, c) in enumerate(np.ndindex(rows, columns)):
            ids |= self._holds(ti * rows + r, tj * columns + c, sizes).astype(np.int64) << bit
        return combine_ids(ids)

    def pairs_kept(self, sizes: Sizes) -> int | None:
        block_rows, block_columns = self._blocks(sizes)
        height = np.minimum(self.block, sizes.Q - block_rows * self.block)
        width = np.minimum(self.block, sizes.K - block_columns * self.block)
        return int((height * width).sum())


@dataclass(frozen=True, eq=False, init=False, repr=False)
class BlockMask(Blocks):
    """The pairs whose block is True in a block matrix, rows and keys counted from 0 whatever `q_offset` is.

    Args:
        mask: boolean (nq, nk), (H, nq, nk) or (B, H, nq, nk), nq = ceil(Q / block), nk = ceil(K / block).
        block: edge of a block, in rows and in keys.

    Examples:
        >>> gs.BlockMask([[True, False], [True, True]], block=2).materialize(4, 4).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 1],
               [1, 1, 1, 1]])
    """

    mask: np.ndarray
    block: int

    def __init__(self, mask: Any, block: int) -> None:
        mask = array("mask", mask, ndim=(2, 3, 4), kind="boolean")
        if 0 in mask.shape:
            raise ValueError(f"mask must have no empty dimension, got shape {mask.shape}")
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "block", integer("block", block, minimum=1))
        object.__setattr__(self, "_digest", digest(np.packbits(mask)) if mask.size else ())

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.mask.shape)
        return f"BlockMask({shape} blocks of {self.block}, {self.mask.mean():.1%} kept)"

    def _key(self) -> tuple[Any, ...]:
        return self.mask.shape, self.block, self.__dict__["_digest"]

    @property
    def lead(self) -> tuple[int, int]:
        lead = (1,) * (4 - self.mask.ndim) + self.mask.shape[:-2]
        return lead[0], lead[1]

    def at(self, b: int, h: int) -> Pattern:
        if self.mask.ndim == 2:
            return self
        return BlockMask(self.mask[h] if self.mask.ndim == 3 else self.mask[b, h], self.block)

    def _check(self, Q: int, K: int) -> None:
        nq, nk = -(-Q // self.block), -(-K // self.block)
        if self.mask.shape[-2:] != (nq, nk):
            raise ValueError(
                f"mask of BlockMask must have {nq} x {nk} blocks of {self.block} for Q={Q}, K={K}; "
                f"got {self.mask.shape[-2]} x {self.mask.shape[-1]}"
            )

    def _blocks(self, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = np.nonzero(self.mask)
        return rows, columns

    def _holds(self, block_rows: np.ndarray, block_columns: np.ndarray, sizes: Sizes) -> np.ndarray:
        nq, nk = self.mask.shape
        inside = (block_rows >= 0) & (block_rows < nq) & (block_columns >= 0) & (block_columns < nk)
        return self.mask[np.clip(block_rows, 0, nq - 1), np.clip(block_columns, 0, nk - 1)] & inside


@dataclass(frozen=True, eq=False)
class BigBird(Pattern):
    """BigBird's block pattern (arXiv:2007.14062, the ITC form of the authors' code). Q == K.

    The first and the last `global_blocks` block rows attend to all, and those block columns are attended by all;
    each block row sees a window of `window_blocks` blocks around itself, and `random_blocks` more, drawn without
    replacement among the blocks it does not see yet (all of them when there are fewer). Every head has the same
    draw. A ragged last block counts as the last.

    Args:
        block: edge of a block.
        window_blocks: blocks in the window, odd.
        global_blocks: global blocks at each end.
        random_blocks: random blocks of a row that is not global.
        seed: of the draw (numpy's default generator).
        causal: only j <= i, with the random blocks of block row I drawn among the blocks <= I - 2; early rows have
            fewer.

    Examples:
        >>> gs.BigBird(1, random_blocks=1).materialize(8, 8).astype(int)
        array([[1, 1, 1, 1, 1, 1, 1, 1],
               [1, 1, 1, 0, 0, 0, 1, 1],
               [1, 1, 1, 1, 0, 1, 0, 1],
               [1, 0, 1, 1, 1, 1, 0, 1],
               [1, 1, 0, 1, 1, 1, 0, 1],
               [1, 1, 0, 0, 1, 1, 1, 1],
               [1, 1, 0, 0, 0, 1, 1, 1],
               [1, 1, 1, 1, 1, 1, 1, 1]])
    """

    block: int = 64
    window_blocks: int = 3
    global_blocks: int = 1
    random_blocks: int = 3
    seed: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        least = {"block": 1, "window_blocks": 1, "global_blocks": 0, "random_blocks": 0, "seed": 0}
        for name, minimum in least.items():
            object.__setattr__(self, name, integer(name, getattr(self, name), minimum=minimum))
        object.__setattr__(self, "causal", boolean("causal", self.causal))
        if self.window_blocks % 2 == 0:
            raise ValueError(f"window_blocks must be odd, got {self.window_blocks}")

    @property
    def reads_positions(self) -> bool:
        return False

    def _check(self, Q: int, K: int) -> None:
        if Q != K:
            raise ValueError(f"BigBird needs as many queries as keys, got Q={Q}, K={K}")

    def lower(self, sizes: Sizes) -> Pattern:
        blocks = _BigBirdBlocks(self, -(-sizes.K // self.block))
        return blocks & Causal() if self.causal else blocks

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        return self.lower(sizes)._keep(i, j, sizes)


@dataclass(frozen=True, eq=False)
class _BigBirdBlocks(Blocks):
    """The blocks of a BigBird pattern with n block rows, causality inside the blocks left out."""

    source: BigBird
    n: int

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.source.block

    def _blocks(self, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = np.divmod(_big_bird_blocks(self.source, self.n), self.n)
        return rows, columns

    def _holds(self, block_rows: np.ndarray, block_columns: np.ndarray, sizes: Sizes) -> np.ndarray:
        kept = _big_bird_blocks(self.source, self.n)
        inside = (block_rows >= 0) & (block_rows < self.n) & (block_columns >= 0) & (block_columns < self.n)
        wanted = block_rows * self.n + block_columns
        return inside & (kept[np.minimum(np.searchsorted(kept, wanted), len(kept) - 1)] == wanted)


@lru_cache(maxsize=8)
def _big_bird_blocks(p: BigBird, n: int) -> np.ndarray:
    """Kept blocks as sorted row * n + column."""
    rows = np.arange(n)
    ends = np.unique(np.concatenate([rows[: p.global_blocks], rows[max(0, n - p.global_blocks) :]]))
    half = p.window_blocks // 2
    near_rows, near_columns = ranges(np.maximum(rows - half, 0), np.minimum(rows + half + 1, n))
    draw_rows, draw_columns = _draw(p, n, half)
    kept = [
        near_rows * n + near_columns,
        draw_rows * n + draw_columns,
        (ends[:, None] * n + rows).reshape(-1),
        (rows[:, None] * n + ends).reshape(-1),
    ]
    return distinct(np.concatenate(kept))


def _draw(p: BigBird, n: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """The random blocks of the rows that are not global: block rows and block columns."""
    g = p.global_blocks
    rows = np.arange(g, max(g, n - g))
    # What a row may draw from is two runs of columns, before and behind its window; the second is empty when causal.
    before = np.maximum(np.minimum(rows - max(half, 1 if p.causal else half), n - g) - g, 0)
    second = np.maximum(rows + half + 1, g)
    behind = np.zeros_like(before) if p.causal else np.maximum(n - g - second, 0)
    free = before + behind
    rng = np.random.default_rng(p.seed)
    count = min(p.random_blocks, int(free.max(initial=0)))
    drawn = np.full((len(rows), count), -1)
    every = np.arange(len(rows))
    # Few are compared with one another; of many it is noted which are taken, in no more memory than `drawn` has.
    taken = np.zeros((len(rows), int(free.max(initial=0))), dtype=bool) if 8 * count > free.max(initial=0) else None
    for m in range(count):
        # Floyd's sampling without replacement, all rows at once: the m-th number is drawn from [0, top].
        top = free - np.minimum(p.random_blocks, free) + m
        valid = m < free
        number = rng.integers(0, np.where(valid, top, 0) + 1)
        again = (drawn[:, :m] == number[:, None]).any(axis=1) if taken is None else taken[every, number]
        drawn[:, m] = np.where(valid, np.where(again, top, number), -1)
        if taken is not None:
            taken[every[valid], drawn[valid, m]] = True
    columns = np.where(drawn < before[:, None], g + drawn, second[:, None] + drawn - before[:, None])
    listed = drawn >= 0
    return np.broadcast_to(rows[:, None], drawn.shape)[listed], columns[listed]
