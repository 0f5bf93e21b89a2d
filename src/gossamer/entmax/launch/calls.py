"""A call of the kernels of entmax: its tensors, its parts, and what kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.hopper.key_bounds import Bounds
from gossamer.entmax.options import MOST_LISTED
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.triton.config import X3, Direction
from gossamer.kernels.triton.gather.config import row_config

BOUNDS: tuple[Bounds, ...] = ("every", "causal", "intervals")
# A part of a call has at least so many rows, pairs or bytes, whichever makes it the largest: at its
# end a GPU waits for the longest rows.
PAIRS_OF_A_PART = 2**30
ROWS_OF_A_PART = 2 * 132 * 128
BYTES_OF_A_PART = 10 * 2**20


class KernelCall(NamedTuple):
    """The arguments of the kernels."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, E)
    steepness: Tensor  # (H,) float32, alpha - 1
    same: float | None  # alpha - 1 of all heads, where the host knows it
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
    """The normaliser, the size of the support and the certificate of each row (B, H, Q); (1,) where not requested."""

    lam: Tensor  # float32
    support: Tensor  # int32
    certified: Tensor  # bool

    @property
    def requested(self) -> bool:
        return self.lam.ndim == 3

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same memory as Hopper kernels write it."""
        return self.lam.view(-1), self.support.view(-1), self.certified.view(-1).view(torch.uint8)


class CallPart(NamedTuple):
    """Blocks of rows that are computed together: whole heads, or rows of one head."""

    first_block: int
    blocks: int
    first_row: int  # counted over (B, H, Q)
    rows: int
    first_head: int
    heads: int


def parts(c: KernelCall, rows: int, bytes_a_row: int) -> Iterator[CallPart]:
    """The blocks of `rows` rows of a call, divided into parts."""
    B, H, Q, _ = c.q.shape
    blocks = -(-Q // rows)
    most = max(ROWS_OF_A_PART, PAIRS_OF_A_PART // c.k.shape[2], BYTES_OF_A_PART // bytes_a_row) // rows
    if most >= blocks:
        heads = min(B * H, most // blocks)
        for first in range(0, B * H, heads):
            n = min(heads, B * H - first)
            yield CallPart(first * blocks, n * blocks, first * Q, n * Q, first, n)
        return
    for head in range(B * H):
        for first in range(0, blocks, most):
            n = min(most, blocks - first)
            # The blocks of a head are counted from its last rows on.
            start, stop = (blocks - first - n) * rows, min(Q, (blocks - first) * rows)
            yield CallPart(head * blocks + first, n, head * Q + start, stop - start, head, 1)


@cache
def hopper_here(device: torch.device) -> bool:
    """Whether Hopper kernels run on a device."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return capable and not missing_packages()


def for_hopper(c: KernelCall, *tensors: Tensor) -> bool:
    """Whether a Hopper kernel in 16 bits takes a call, and can read these tensors by TMA."""
    takes = c.q.element_size() == 2 and c.scale > 0 and c.q_positions is None
    return takes and hopper_here(c.q.device) and all(by_tma(x) for x in tensors)


def intervals(c: KernelCall) -> tuple[Tensor, Tensor]:
    """(lo, hi); any tensor in the place of None."""
    unread = c.steepness.view(torch.int32)
    return unread if c.lo is None else c.lo, unread if c.hi is None else c.hi


def by_tma(x: Tensor) -> bool:
    """Whether TMA can read a tensor: addresses and strides are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(s % 8 == 0 and s > 0 for s in x.stride()[:3]) and x.stride(3) == 1


def value_of(same: float | None) -> float:
    """alpha - 1 as kernels are compiled for it."""
    return same if same in (0.0, 0.5, 1.0) else -1.0


def precision(x: Tensor) -> str:
    """The precision of products: in float32 they have the error of float32."""
    return X3 if x.dtype == torch.float32 else "ieee"


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """The strides of (B, heads, rows)."""
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3]))


def row_options(x: Tensor, direction: Direction, D: int, E: int) -> dict[str, Any]:
    """Choices of a kernel that gathers rows: those of the gather kernels, with rows of a single warp."""
    bits = 8 * x.element_size()
    config = row_config(direction, bits, D, E)
    if bits == 16 and max(D, E) <= 64 and direction != "forward":
        # Lists are shorter than those of the gather kernels: more warps with fewer columns at once (dQ 172 us for 220).
        config = replace(config, columns=2, registers=80)
    options = {"RP": max(1, config.items // config.warps), "N": config.columns, "num_warps": 1}
    if x.device.type == "cuda" and config.registers:
        options["maxnreg"] = config.registers
    return options


def seen_by(c: KernelCall) -> tuple[Any, ...]:
    """(lo, hi, positions of q, positions of k), which say what a row may see; any tensor in the place of None."""
    unread = c.steepness
    return tuple(unread if x is None else x for x in (c.lo, c.hi, c.q_positions, c.k_positions))
