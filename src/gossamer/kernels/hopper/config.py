"""Tile and stage choices of the Hopper kernels, one per (D, E, direction)."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SHARED_MEMORY = 227 * 1024
MULTIPROCESSOR = 228 * 1024  # shared memory of a multiprocessor; each block takes 1024 bytes more than it asks for


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
    # 1: a row's exponentials are done before P V is waited for; 2: and, in registers of their own, without a comparison
    # of the scores with the reference, for which their sums stand; 0: the assembler orders them, behind that wait;
    # 3: and full tiles are done without a comparison, in the registers of their scores
    hold: int = 1
    halves: bool = True  # interval steps of which a warpgroup needs one half of the columns compute no more
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    score: str = "fold"  # or "scale" (a factor that is not positive), "softcap"

    def __post_init__(self) -> None:
        known = self.block_q in (64, 128, 192) and self.block_kv in (64, 128) and self.step in (64, 128)
        if not known or self.block_kv % self.step or self.blocks not in ((1, 2) if self.block_q == 64 else (1,)):
            raise ValueError(f"no forward kernel for tiles {self.block_q} x {self.block_kv} in steps of {self.step}")
        if self.hold not in (0, 1, 2, 3):
            raise ValueError(f"hold must be 0, 1, 2 or 3, got {self.hold}")
        limit = min(SHARED_MEMORY, MULTIPROCESSOR // self.blocks - 1024)
        if self.shared_bytes > limit:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {limit}")

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

    def __post_init__(self) -> None:
        tiles = self.block_q in (64, 128, 192) and self.block_kv in (64, 128)
        if not tiles or self.step not in (32, 64, 128) or self.block_kv % self.step:
            raise ValueError(f"no dQ kernel for tiles {self.block_q} x {self.block_kv} in steps of {self.step}")
        if self.k_stages < 2:
            raise ValueError(f"the dQ kernel needs two stages of K, got {self.k_stages}")
        if self.shared_bytes > SHARED_MEMORY:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {SHARED_MEMORY}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q, dO, rings, barriers and an item's description."""
        rings = self.block_q * (self.D + self.E) + self.step * (self.k_stages * self.D + self.v_stages * self.E)
        return 2 * rings + 1024

    @property
    def blocks_per_processor(self) -> int:
        """Two blocks of one warpgroup each, where the shared memory holds them."""
        return 2 if self.block_q == 64 and 2 * (self.shared_bytes + 1024) <= SHARED_MEMORY else 1


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
    reduce: str = "bulk"  # dQ is added through shared memory and the copy engine; "direct": from registers
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    step: int = 64

    def __post_init__(self) -> None:
        wide = self.block_q in (64, 128, 192) and self.block_kv == 128
        if not (wide or self.single) or self.D not in (64, 96, 128):
            raise ValueError(f"no column kernel for tiles {self.block_q} x {self.block_kv} and heads of {self.D}")
        known = self.reduce in ("bulk", "direct") and not (self.single and self.with_dq)
        # With more columns, or slopes of a soft cap, the registers hold no more than 64 queries.
        long = self.step == 128 and (self.D, self.score) == (64, "fold") and not self.single
        known = known and (self.step == 64 or long)
        if self.E > self.D or self.q_stages < 2 or not known:
            raise ValueError(f"the column kernel cannot run as {self}")
        limit = min(SHARED_MEMORY, MULTIPROCESSOR // self.blocks_per_processor - 1024)
        if self.shared_bytes > limit:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {limit}")

    @property
    def single(self) -> bool:
        """One consumer warpgroup a block: K and V make room for dK and dV."""
        return (self.block_q, self.block_kv) == (64, 64)

    @property
    def blocks_per_processor(self) -> int:
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

    def __post_init__(self) -> None:
        if self.tile_kv not in (64, 128) or self.step != 64 or self.block_q % self.step:
            raise ValueError(f"no backward kernel for tiles {self.block_q} x {self.tile_kv} in steps of {self.step}")
        if self.q_stages < 2:
            raise ValueError(f"the kernel of dK and dV needs two stages of Q, got {self.q_stages}")
        if self.shared_bytes > SHARED_MEMORY:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, there are {SHARED_MEMORY}")

    @property
    def block_kv(self) -> int:
        """Keys of an item."""
        return 64

    @property
    def blocks_per_processor(self) -> int:
        """Blocks that share a multiprocessor."""
        return 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: K, V, rings, two stages of P, row terms, barriers and descriptions."""
        tiles = 128 * max(self.D, self.E) + self.step * (self.q_stages * self.D + self.do_stages * self.E)
        return 2 * tiles + 256 * self.step + 4 * self.step * (self.q_stages + self.do_stages) + 1024


# Padded head sizes: a smaller head is padded with zeros by TMA, exactly.
HEAD_SIZES = (64, 96, 128, 192, 256)


def padded(size: int) -> int:
    """The smallest compiled head size that holds `size`."""
    for candidate in HEAD_SIZES:
        if size <= candidate:
            return candidate
    raise ValueError(f"head size {size} is over {HEAD_SIZES[-1]}")


# What benchmarks/tune.py found faster than the choices below: kernel -> head sizes and tile -> fields.
TUNED = Path(__file__).with_name("tuned.json")


def tuned(kernel: str, D: int, E: int, block_q: int, block_kv: int) -> dict[str, Any]:
    """Fields of a configuration that were measured."""
    return _tuned().get(kernel, {}).get(tuned_key(D, E, block_q, block_kv), {})


def tuned_key(D: int, E: int, block_q: int, block_kv: int) -> str:
    """How head sizes and a layout's tile are written in tuned.json."""
    return f"{D},{E} {block_q}x{block_kv}"


@cache
def _tuned() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(TUNED.read_text())


@cache
def forward_config(
    dtype: str, D: int, E: int, block_q: int, block_kv: int, score: str, lengths: bool = False
) -> ForwardConfig:
    """The configuration for head sizes D, E and a layout of block_q x block_kv tiles."""
    D, E = padded(max(D, E)), padded(E)
    blocks = 1
    if block_q == 64:
        step, stages, q_stages, blocks = {
            64: (64, 4, 2, 2), 96: (64, 3, 2, 2), 128: (64, 2, 2, 2), 192: (64, 3, 2, 1), 256: (64, 2, 2, 1)
        }[D]  # fmt: skip
    else:
        step, stages, q_stages = {
            64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 192: (64, 2, 2), 256: (64, 2, 1)
        }[D]  # fmt: skip
    # With 192 rows, or more columns, the registers do not hold a row beside the others, and beside a soft cap not even
    # what tells where scores are computed again.
    hold = (0 if score == "softcap" else 3) if block_q == 192 else 2 if E <= 128 else 1
    found = ForwardConfig(
        dtype, D, E, block_q, block_kv, step, stages, q_stages, blocks, hold, lengths=lengths, score=score
    )
    return replace(found, **tuned("forward", D, E, block_q, block_kv))


@cache
def backward_config(
    dtype: str, D: int, E: int, block_q: int, block_kv: int, score: str, with_dq: bool, lengths: bool = False
) -> BackwardConfig:
    """The configuration of the column kernel for head sizes D, E and a layout of block_q x block_kv tiles."""
    size = padded(max(D, E))
    step = 128 if (size, block_kv, score) == (64, 128, "fold") else 64
    stages = 3 if block_kv == 64 and size < 128 else 2
    q_stages = 3 if size < 128 and step == 64 else 2
    found = BackwardConfig(
        dtype, size, size, block_q, block_kv, q_stages, stages, score, with_dq, lengths=lengths, step=step
    )
    return replace(found, **tuned("backward", size, size, block_q, block_kv))


@cache
def wide_config(
    dtype: str, D: int, E: int, block_q: int, block_kv: int, score: str, lengths: bool = False
) -> WideConfig:
    """The configuration of dK and dV for head sizes over 128 and a layout of block_q x block_kv tiles."""
    D, E = padded(max(D, E)), padded(E)
    stages = 2 if D > 192 else 3
    found = WideConfig(dtype, D, E, block_q, block_kv, 64, stages, stages, score, lengths)
    return replace(found, **tuned("wide", D, E, block_q, block_kv))


@cache
def query_config(
    dtype: str, D: int, E: int, block_q: int, block_kv: int, score: str, lengths: bool = False
) -> QueryConfig:
    """The configuration of dQ by rows for head sizes D, E and a layout of block_q x block_kv tiles."""
    D, E = padded(max(D, E)), padded(E)
    step, k_stages, v_stages = {
        64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 192: (64, 2, 2), 256: (64, 2, 1)
    }[D]  # fmt: skip
    # Three warpgroups have 160 registers a thread each: room for a quarter of the scores of a 128-key tile.
    step = min(step, block_kv, 64 if block_q == 192 else 128)
    found = QueryConfig(dtype, D, E, block_q, block_kv, step, k_stages, v_stages, score, lengths)
    return replace(found, **tuned("query_gradient", D, E, block_q, block_kv))


DTYPES = ("bfloat16", "float16")
SIZES = (*((size, size) for size in HEAD_SIZES), (192, 128))  # (D, E) for which kernels are made in advance

WIDE = 128  # heads over this size have a kernel of their own for dK and dV, and dQ by rows


class Shipped(NamedTuple):
    """A kernel that `gossamer compile` makes and the tests compile: `kind` is its name in compile.py."""

    kind: str
    arguments: tuple[Any, ...]
    dtype: str
    sizes: frozenset[tuple[int, int]]  # (D, E) that it serves


@cache
def shipped() -> tuple[Shipped, ...]:
    """At most 140 kernels, each once. What is not here is compiled when it is needed, and kept as well."""
    found: dict[tuple[str, tuple[Any, ...]], Shipped] = {}

    def add(kind: str, *arguments: Any, dtype: str, size: tuple[int, int]) -> None:
        known = found.get((kind, arguments))
        sizes = frozenset({size}) if known is None else known.sizes | {size}
        found[kind, arguments] = Shipped(kind, arguments, dtype, sizes)

    for size, dtype in itertools.product(SIZES, DTYPES):
        block_q = 192 if max(size) <= 64 else 128
        for score in ("fold", "softcap") if dtype == "bfloat16" else ("fold",):
            tile = (dtype, *size, block_q, 128, score)
            add("forward", forward_config(*tile), dtype=dtype, size=size)
            query = query_config(*tile)
            add("query_gradient", query, dtype=dtype, size=size)
            if max(size) > WIDE:
                columns: Any = wide_config(*tile)
                add("wide", columns, dtype=dtype, size=size)
            else:
                for with_dq in (True, False) if score == "fold" else (True,):
                    columns = backward_config(*tile, with_dq)
                    add("backward", columns, dtype=dtype, size=size)
        for lengths in (False, True):  # one query behind keys that grow has them
            add("forward", forward_config(dtype, *size, 64, 64, "fold", lengths), dtype=dtype, size=size)
        if max(size) <= WIDE:
            add("backward", backward_config(dtype, *size, 64, 64, "fold", False), dtype=dtype, size=size)
        add("merge", dtype, size[1], 64, dtype=dtype, size=size)
        add("preprocess", dtype, columns.E, 0, dtype=dtype, size=size)
        if max(size) <= WIDE:
            add("preprocess", dtype, columns.E, columns.D, dtype=dtype, size=size)
            add("postprocess", dtype, columns.D, dtype=dtype, size=size)
        for width, block in ((columns.D, 128), (columns.E, 128), (query.D, block_q)):
            add("sum_parts", dtype, width, block, dtype=dtype, size=size)
    add("forward", forward_config("bfloat16", 128, 128, 128, 128, "scale"), dtype="bfloat16", size=(128, 128))
    return tuple(found.values())
