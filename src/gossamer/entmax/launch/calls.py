"""A call of the kernels of entmax: its arrays, its parts, and what kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from gossamer.entmax.hopper.key_bounds import Bounds
from gossamer.entmax.options import MOST_LISTED
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.launch import Builder, Kernel, Operand
from gossamer.kernels.relaunch import Strides, strides
from gossamer.kernels.triton.config import X3, Direction
from gossamer.kernels.triton.gather.config import row_config

BOUNDS: tuple[Bounds, ...] = ("every", "causal", "intervals")
HOPPER = "gossamer.entmax.hopper.compiled"
# A part of a call has at least so many rows, pairs or bytes, whichever makes it the largest: at its
# end a GPU waits for the longest rows.
PAIRS_OF_A_PART = 2**30
ROWS_OF_A_PART = 2 * 132 * 128
BYTES_OF_A_PART = 10 * 2**20


class Facts(NamedTuple):
    """What kernels are told beside arrays."""

    device: torch.device
    same: float | None  # alpha - 1 of all heads, where the host knows it
    scale: float
    top_k: int | None
    bounds: int  # 0: every key, 1: causal, 2: intervals
    offset: int  # of causal: key j is seen by row r where j <= r + offset


@dataclass
class KernelCall:
    """A call as its launches are described: the names of its arrays in a `Builder`.

    Operands are q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); steepness (H,) float32, alpha - 1, where no number is
    known; lo and hi (Q,) int32 of intervals, in the layout; q_positions (B, H, Q) and k_positions (B, H, K) int64.
    """

    b: Builder
    facts: Facts
    q: str = "q"
    k: str = "k"
    v: str = "v"

    def __post_init__(self) -> None:
        b, c = self.b, self.facts
        self.same, self.scale, self.top_k, self.bounds, self.offset = c[1:]
        self.device = c.device
        (self.B, self.H, self.Q, self.D), (_, self.G, self.K, self.E) = b[self.q].shape, b[self.v].shape
        self.dtype = b[self.q].dtype
        self.half = self.dtype in ("float16", "bfloat16")
        self.rows, self.group = self.B * self.H * self.Q, self.H // self.G
        self.listed = self.top_k or MOST_LISTED  # the most keys of a list
        self.q, self.k, self.v = (readable(b, name) for name in (self.q, self.k, self.v))
        if "steepness" not in b:
            assert self.same is not None
            b.array("steepness", "float32", (self.H,), self.same, "launch")
        b.array("unread", "int32", (4,), 0, "launch")
        self.positions = "q_positions" in b

    @property
    def seen_by(self) -> tuple[str, ...]:
        """lo, hi, positions of q and of k, which say what a row may see; any array in the place of None."""
        return tuple(name if name in self.b else "unread" for name in ("lo", "hi", "q_positions", "k_positions"))

    def strides(self, *names: str) -> tuple[Strides, ...]:
        """The strides of (B, heads, rows)."""
        return tuple(strides(self.b[name]) if name in self.b else Strides(0, 0, 0) for name in names)

    def hopper(self, name: str, *key: Any) -> Kernel:
        """A Hopper kernel of a configuration."""
        return Kernel(HOPPER, name, key, "exchanged")


class ListNames(NamedTuple):
    """The names of the arrays that hold the supports of rows: see `entmax.lists.RowLists`."""

    keys: str
    weights: str
    counts: str


class Stats(NamedTuple):
    """The names of what is told of each row (B H Q,): the normaliser float32, the size of the support int32, and the
    certificate uint8; of (1,) if not `requested`.
    """

    lam: str
    support: str
    certified: str
    requested: bool

    @property
    def arrays(self) -> tuple[str, str, str]:
        return self.lam, self.support, self.certified


def stats_of(c: KernelCall, requested: bool) -> Stats:
    """Their arrays; those that are not requested are neither written nor read."""
    names = ("lam", "float32"), ("support", "int32"), ("certified", "uint8")
    if requested:
        lam, support, certified = (c.b.array(name, dtype, (c.rows,)) for name, dtype in names)
    else:
        lam, support, certified = (c.b.array(f"no_{name}", dtype, (1,), 0, "launch") for name, dtype in names)
    return Stats(lam, support, certified, requested)


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
    Q = c.Q
    blocks = -(-Q // rows)
    most = max(ROWS_OF_A_PART, PAIRS_OF_A_PART // c.K, BYTES_OF_A_PART // bytes_a_row) // rows
    if most >= blocks:
        heads = min(c.B * c.H, most // blocks)
        for first in range(0, c.B * c.H, heads):
            n = min(heads, c.B * c.H - first)
            yield CallPart(first * blocks, n * blocks, first * Q, n * Q, first, n)
        return
    for head in range(c.B * c.H):
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


def for_hopper(c: KernelCall, *names: str) -> bool:
    """Whether a Hopper kernel in 16 bits takes a call, and can read these arrays by TMA."""
    takes = c.half and c.scale > 0 and not c.positions
    return takes and hopper_here(c.device) and all(by_tma(c.b[name]) for name in names)


def by_tma(x: Operand) -> bool:
    """Whether TMA can read an array: addresses and strides are multiples of 16 bytes."""
    return x.aligned and all(s % 8 == 0 and s > 0 for s in x.strides[:3]) and x.strides[3] == 1


def readable(b: Builder, name: str) -> str:
    """An array whose last dimension lies together: itself, or a copy."""
    return name if b[name].strides[-1] == 1 else b.copied(name)


def words(c: KernelCall, name: str) -> str:
    """A contiguous array of 16 bits as (rows, pairs of columns), int32."""
    *lead, size = c.b[name].shape
    shape = lead[0] * lead[1] * lead[2], size // 2
    return c.b.view(f"{name}_words", name, shape, (size // 2, 1), dtype="int32")


def value_of(same: float | None) -> float:
    """alpha - 1 as kernels are compiled for it."""
    return same if same in (0.0, 0.5, 1.0) else -1.0


def precision(c: KernelCall) -> str:
    """The precision of products: in float32 they have the error of float32."""
    return X3 if c.dtype == "float32" else "ieee"


def row_options(c: KernelCall, direction: Direction, D: int, E: int) -> dict[str, Any]:
    """Choices of a kernel that gathers rows: those of the gather kernels, with rows of a single warp."""
    bits = 16 if c.half else 32
    config = row_config(direction, bits, D, E)
    if bits == 16 and max(D, E) <= 64 and direction != "forward":
        # Lists are shorter than those of the gather kernels: more warps with fewer columns at once (dQ 172 us for 220).
        # Of dK and dV with so many registers that as many programs are resident as a multiprocessor may have, 32.
        config = replace(config, columns=2, registers=80 if direction == "dq" else 64)
    options = {"RP": max(1, config.items // config.warps), "N": config.columns, "num_warps": 1}
    if c.device.type == "cuda" and config.registers:
        options["maxnreg"] = config.registers
    return options
