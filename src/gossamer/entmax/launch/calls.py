"""A call of the kernels of entmax: its tensors, its parts, and what kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.hopper.key_bounds import Bounds
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.triton.config import X3, Direction
from gossamer.kernels.triton.gather.config import row_config

BOUNDS: tuple[Bounds, ...] = ("every", "causal", "intervals")
MOST_LISTED = 96  # keys of a row whose weights are kept as a list, where top_k does not say how many
# A part of a call has so many rows, sees so many pairs, or takes so many bytes, whichever makes it the largest: at its
# end a GPU waits for the longest rows.
PAIRS_OF_A_PART = 2**30
ROWS_OF_A_PART = 2 * 132 * 128
BYTES_OF_A_PART = 10 * 2**20


class Call(NamedTuple):
    """A call as the kernels take it."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, E)
    steepness: Tensor  # (H,) float32, alpha - 1
    same: float | None  # that of all heads, where the host knows it
    scale: float
    top_k: int | None
    bounds: int  # 0: every key, 1: causal, 2: intervals
    offset: int  # of causal: key j is seen by row r where j <= r + offset
    lo: Tensor | None  # (Q,) int32
    hi: Tensor | None  # (Q,) int32
    q_positions: Tensor | None  # (B, H, Q)
    k_positions: Tensor | None  # (B, H, K)

    @property
    def rows(self) -> int:
        B, H, Q, _ = self.q.shape
        return B * H * Q

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def listed(self) -> int:
        """The most keys of a list."""
        return self.top_k or MOST_LISTED


class Stats(NamedTuple):
    """What is known of each row; (B, H, Q), or nothing where it is not asked for."""

    lam: Tensor  # float32
    support: Tensor  # int32
    certified: Tensor  # bool

    @property
    def told(self) -> bool:
        return self.lam.ndim == 3

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """As Hopper kernels write them."""
        return self.lam.view(-1), self.support.view(-1), self.certified.view(-1).view(torch.uint8)


class Listed(NamedTuple):
    """The supports of rows: a row with a list has `counts` keys and weights, one without has a count of -1."""

    keys: Tensor  # (rows, L) int32
    weights: Tensor  # (rows, L) float32
    counts: Tensor  # (B, H, Q) int32


class Part(NamedTuple):
    """Blocks of rows that are computed together: whole heads, or rows of one head."""

    first_block: int
    blocks: int
    first_row: int  # counted over (B, H, Q)
    rows: int
    first_head: int
    heads: int


def parts(c: Call, rows: int, bytes_a_row: int) -> Iterator[Part]:
    """All blocks of so many rows, in parts that are large enough each."""
    B, H, Q, _ = c.q.shape
    blocks = -(-Q // rows)
    most = max(ROWS_OF_A_PART, PAIRS_OF_A_PART // c.k.shape[2], BYTES_OF_A_PART // bytes_a_row) // rows
    if most >= blocks:
        heads = min(B * H, most // blocks)
        for first in range(0, B * H, heads):
            n = min(heads, B * H - first)
            yield Part(first * blocks, n * blocks, first * Q, n * Q, first, n)
        return
    for head in range(B * H):
        for first in range(0, blocks, most):
            n = min(most, blocks - first)
            # The blocks of a head are counted from its last rows on.
            start, stop = (blocks - first - n) * rows, min(Q, (blocks - first) * rows)
            yield Part(head * blocks + first, n, head * Q + start, stop - start, head, 1)


@cache
def hopper_here(device: torch.device) -> bool:
    """Whether kernels for compute capability 9.0 run on a device."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return capable and not missing_packages()


def for_hopper(c: Call, *tensors: Tensor) -> bool:
    """Whether a Hopper kernel of 16 bits may take a call, of whose tensors it reads these by TMA."""
    takes = c.q.element_size() == 2 and c.scale > 0 and c.q_positions is None
    return takes and hopper_here(c.q.device) and all(by_tma(x) for x in tensors)


def intervals(c: Call) -> tuple[Tensor, Tensor]:
    """lo and hi; any tensor where there is none."""
    unread = c.steepness.view(torch.int32)
    return unread if c.lo is None else c.lo, unread if c.hi is None else c.hi


def by_tma(x: Tensor) -> bool:
    """Whether TMA can read a tensor: addresses and strides are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(s % 8 == 0 and s > 0 for s in x.stride()[:3]) and x.stride(3) == 1


def value_of(same: float | None) -> float:
    """alpha - 1 as kernels are compiled for it."""
    return same if same in (0.0, 0.5, 1.0) else -1.0


def precision(x: Tensor) -> str:
    """Of products: those of float32 have its error."""
    return X3 if x.dtype == torch.float32 else "ieee"


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """The strides of (B, heads, rows)."""
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3]))


def row_options(x: Tensor, direction: Direction, D: int, E: int) -> dict[str, Any]:
    """Choices of a kernel that gathers rows: those of the gather kernels, with rows of a single warp."""
    bits = 8 * x.element_size()
    found = row_config(direction, bits, D, E)
    if bits == 16 and max(D, E) <= 64 and direction != "forward":
        # Lists are shorter than those of the gather kernels: more warps with fewer columns at once (dQ 172 us for 220).
        found = replace(found, columns=2, registers=80)
    options = {"RP": max(1, found.items // found.warps), "N": found.columns, "num_warps": 1}
    if x.device.type == "cuda" and found.registers:
        options["maxnreg"] = found.registers
    return options


def seen_by(c: Call) -> tuple[Any, ...]:
    """What says which keys a row may see: lo, hi and the positions; any tensor where there is none."""
    unread = c.steepness
    return tuple(unread if x is None else x for x in (c.lo, c.hi, c.q_positions, c.k_positions))
