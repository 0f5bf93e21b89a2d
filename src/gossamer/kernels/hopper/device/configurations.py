"""What the kernels of block layouts are compiled from: what does not fit the chip is refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gossamer.cute.configurations import MULTIPROCESSOR, SHARED_MEMORY, Clears, check_memory


class Hold(IntEnum):
    """Which exponentials of a step are held before the wait for the P V that runs beside them."""

    COMPILER = 0  # none: the assembler orders them, behind that wait
    FIRST_ROW = 1  # those of one row of a thread
    UNCHECKED = 2  # those too, in registers of their own, and no score is compared with a reference: their sums tell
    UNCHECKED_FULL = 3  # as FIRST_ROW, but full tiles are done without a comparison, in the registers of their scores


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled forward kernel.

    block_q x block_kv is the layout's tile, `step` the keys of one step (a divisor of block_kv), `stages` the depth of
    the K and V rings, `q_stages` that of Q: with two, the next item begins while the current one ends. `blocks` share a
    multiprocessor: two, of 64 query rows each.
    """

    dtype: str
    D: int  # head sizes after padding
    E: int
    block_q: int = 128
    block_kv: int = 128
    step: int = 128
    stages: int = 2
    q_stages: int = 2
    blocks: int = 1
    hold: int = Hold.FIRST_ROW
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    score: str = "fold"  # or "scale" (a factor that is not positive), "softcap"
    clears: int = Clears.NOTHING  # values of keys that nothing attends

    heads = 1  # whose rows share a tile
    held_q = False  # Q is read from shared memory

    def __post_init__(self) -> None:
        known = self.block_q in (64, 128, 192) and self.block_kv in (64, 128) and self.step in (64, 128)
        if not known or self.block_kv % self.step or self.blocks not in ((1, 2) if self.block_q == 64 else (1,)):
            raise ValueError(f"no forward kernel for tiles {self.block_q} x {self.block_kv} in steps of {self.step}")
        if self.hold not in list(Hold):
            raise ValueError(f"hold must be 0, 1, 2 or 3, got {self.hold}")
        check_memory(self)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: rings, barriers and item descriptions."""
        rings = self.q_stages * self.block_q * self.D + self.stages * self.step * (self.D + self.E)
        head = 8 * (2 * self.q_stages + 4 * self.stages) + (64 + 8 * self.block_q) * self.q_stages
        return 2 * rings + -(-head // 1024) * 1024


@dataclass(frozen=True)
class QueryConfig:
    """One compiled kernel of dQ by rows (the deterministic backward): tiles and steps as in ForwardConfig.

    A stage of K is given back one step later, so there are two at least.
    """

    dtype: str
    D: int  # head sizes after padding
    E: int
    block_q: int = 128
    block_kv: int = 128
    step: int = 128
    k_stages: int = 2
    v_stages: int = 2
    score: str = "fold"  # or "softcap"
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    clears: int = Clears.NOTHING  # keys that nothing attends; dQ of rows that keep nothing at last

    heads = 1  # whose rows share a tile

    def __post_init__(self) -> None:
        tiles = self.block_q in (64, 128, 192) and self.block_kv in (64, 128)
        if not tiles or self.step not in (32, 64, 128) or self.block_kv % self.step:
            raise ValueError(f"no dQ kernel for tiles {self.block_q} x {self.block_kv} in steps of {self.step}")
        if self.k_stages < 2:
            raise ValueError(f"the dQ kernel needs two stages of K, got {self.k_stages}")
        check_memory(self)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, dO, rings, barriers and an item's description."""
        rings = self.block_q * (self.D + self.E) + self.step * (self.k_stages * self.D + self.v_stages * self.E)
        return 2 * rings + 1024

    @property
    def blocks(self) -> int:
        """Two blocks of one warpgroup each, where the shared memory holds them."""
        return 2 if self.block_q == 64 and 2 * (self.shared_bytes + 1024) <= SHARED_MEMORY else 1


@dataclass(frozen=True)
class KeptConfig:
    """One compiled kernel of dQ from dS that a column kernel has kept; block_q x block_kv is the layout's tile."""

    dtype: str
    D: int  # head size after padding
    block_q: int = 64
    block_kv: int = 64
    stages: int = 4  # of 64 keys and their dS
    lengths: bool = False  # keys at and after a length for each batch element are not attended

    clears = Clears.NOTHING

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128, 192) or self.block_kv not in (64, 128):
            raise ValueError(f"no kernel of dQ from dS for tiles {self.block_q} x {self.block_kv}")
        if self.stages < 2:
            raise ValueError(f"a stage is given back one step later, so there are two at least, got {self.stages}")
        check_memory(self)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring, dQ of an item on its way, barriers and descriptions."""
        return 2 * (64 * self.stages * (self.D + self.block_q) + self.block_q * self.D) + 1024

    @property
    def blocks(self) -> int:
        """Two blocks of one warpgroup each, where the shared memory holds them."""
        return 2 if self.block_q == 64 and 2 * (self.shared_bytes + 1024) <= MULTIPROCESSOR else 1


@dataclass(frozen=True)
class BackwardConfig:
    """One compiled column kernel: dK and dV, and dQ by reduction where `with_dq`.

    block_q x block_kv is the layout's tile, `q_stages` and `do_stages` the depths of the rings of Q and dO, `step` the
    queries of one step: 128 are any two times 64 of an item. A stage of Q is given back one step later, so there are
    two at least. Tiles of 64 x 64 have one consumer warpgroup, and two blocks a multiprocessor; their dQ is always made
    by rows.
    """

    dtype: str
    D: int  # head sizes after padding
    E: int
    block_q: int = 128
    block_kv: int = 128
    q_stages: int = 2
    do_stages: int = 2
    score: str = "fold"  # or "softcap"
    with_dq: bool = True
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    step: int = 64
    edges: bool = False  # a warpgroup leaves out an item's first or last step of which its own keys keep nothing
    keeps: bool = False  # dS of each pair of tiles goes to memory, for dQ
    clears: int = Clears.NOTHING

    def __post_init__(self) -> None:
        wide = self.block_q in (64, 128, 192) and self.block_kv == 128
        if not (wide or self.single) or self.D not in (64, 96, 128):
            raise ValueError(f"no column kernel for tiles {self.block_q} x {self.block_kv} and heads of {self.D}")
        # With more columns, or slopes of a soft cap, the registers hold no more than 64 queries.
        long = self.step == 128 and (self.D, self.score) == (64, "fold") and not self.single
        known = (self.step == 64 or long) and not (self.single and self.with_dq)
        known = known and not (self.edges and (self.single or long))
        known = known and not (self.keeps and (self.edges or self.with_dq or long))
        if self.E > self.D or self.q_stages < 2 or not known:
            raise ValueError(f"the column kernel cannot run as {self}")
        check_memory(self)

    @property
    def single(self) -> bool:
        """One consumer warpgroup a block: K and V make room for dK and dV."""
        return (self.block_q, self.block_kv) == (64, 64)

    @property
    def blocks(self) -> int:
        """Blocks that share a multiprocessor."""
        return 2 if self.single else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: K, V, rings, dS, staging memory of dQ or dK, dV, barriers and descriptions."""
        rings = self.step * (self.q_stages * self.D + self.do_stages * self.E)
        head = 4 * self.step * (self.q_stages + self.do_stages) + 1024
        if self.single:
            return 2 * (64 * (self.D + self.E) + rings) + head
        tiles = self.block_kv * (self.D + self.E + 2 * self.step)
        staging = 4 * self.step * self.D + (2 * self.block_kv * self.E if self.step == 64 else 0)
        return 2 * (tiles + rings) + staging + head


@dataclass(frozen=True)
class WideConfig:
    """One compiled kernel of dK and dV for heads wider than 128: items of 64 keys, layout tiles block_q x tile_kv.

    A stage of Q is given back one step later, so there are two at least.
    """

    dtype: str
    D: int  # head sizes after padding
    E: int
    block_q: int = 128
    tile_kv: int = 128
    step: int = 64
    q_stages: int = 2
    do_stages: int = 2
    score: str = "fold"  # or "softcap"
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    keeps: bool = False  # dS goes to memory, for dQ
    clears: int = Clears.NOTHING

    block_kv = 64  # keys of an item
    blocks = 1
    edges = False

    def __post_init__(self) -> None:
        if self.tile_kv not in (64, 128) or self.step != 64 or self.block_q % self.step:
            raise ValueError(f"no backward kernel for tiles {self.block_q} x {self.tile_kv} in steps of {self.step}")
        if self.q_stages < 2:
            raise ValueError(f"the kernel of dK and dV needs two stages of Q, got {self.q_stages}")
        check_memory(self)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: K, V, rings, two stages of P, row terms, barriers and descriptions."""
        tiles = 128 * max(self.D, self.E) + self.step * (self.q_stages * self.D + self.do_stages * self.E)
        return 2 * tiles + 256 * self.step + 4 * self.step * (self.q_stages + self.do_stages) + 1024
