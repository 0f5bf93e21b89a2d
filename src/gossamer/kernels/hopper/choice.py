"""Which configuration a call takes: tile and stage choices of the kernels, one per (D, E, direction)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gossamer.cute.configurations import Clears
from gossamer.kernels.hopper.device.configurations import (
    BackwardConfig,
    ForwardConfig,
    Hold,
    KeptConfig,
    QueryConfig,
    WideConfig,
)
from gossamer.kernels.hopper.device.gather.configurations import SIZES, WIDEST, GatherConfig

Config = TypeVar("Config", ForwardConfig, BackwardConfig, WideConfig, QueryConfig)

FEW_QUERIES = 6  # heads that share a tile of gathered keys, from which its masks fit beside three stages of 128
SMALL = 64  # heads to this size gain nothing by keeping dS
WIDE = 128  # heads over this size have a kernel of their own for dK and dV, and dQ by rows
# Padded head sizes: a smaller head is padded with zeros by TMA, exactly.
HEAD_SIZES = (64, 96, 128, 192, 256)


def padded(size: int) -> int:
    """The smallest compiled head size that holds `size`."""
    for candidate in HEAD_SIZES:
        if size <= candidate:
            return candidate
    raise ValueError(f"head size {size} is over {max(HEAD_SIZES)}")


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


class TileCall(NamedTuple):
    """A call over a layout of block_q x block_kv tiles: what its configuration is chosen by."""

    dtype: str
    D: int  # head sizes before padding
    E: int
    block_q: int
    block_kv: int
    score: str  # as `score_of` gives it
    lengths: bool = False  # whether keys at and after a length are not attended
    clears: int = Clears.NOTHING  # what of the tiles is cleared, beside what lengths need

    def padded(self) -> TileCall:
        """The call with compiled head sizes."""
        return self._replace(D=padded(max(self.D, self.E)), E=padded(self.E))

    def configured(self, kind: type[Config], name: str, **chosen: Any) -> Config:
        """A configuration for these sizes with the fields that are chosen, and those that were measured for it."""
        sizes = self.D, self.E, self.block_q, self.block_kv
        # Past lengths queries may keep nothing.
        clears = max(self.clears, Clears.QUERIES if self.lengths else Clears.NOTHING)
        found = kind(self.dtype, *sizes, score=self.score, lengths=self.lengths, clears=clears, **chosen)
        return replace(found, **tuned(name, *sizes))


@cache
def forward_config(call: TileCall) -> ForwardConfig:
    """The configuration of the forward."""
    c, blocks = call.padded(), 1
    if c.block_q == 64:
        step, stages, q_stages, blocks = {
            64: (64, 4, 2, 2), 96: (64, 3, 2, 2), 128: (64, 2, 2, 2), 192: (64, 3, 2, 1), 256: (64, 2, 2, 1)
        }[c.D]  # fmt: skip
    else:
        step, stages, q_stages = {
            64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 192: (64, 2, 2), 256: (64, 2, 1)
        }[c.D]  # fmt: skip
    hold = Hold.UNCHECKED if c.E <= 128 else Hold.FIRST_ROW
    if c.block_q == 192:
        # With 192 rows, or more columns, the registers do not hold a row beside the others, and beside a soft cap not
        # even what tells where scores are computed again.
        hold = Hold.COMPILER if c.score == "softcap" else Hold.UNCHECKED_FULL
    return c.configured(ForwardConfig, "forward", step=step, stages=stages, q_stages=q_stages, blocks=blocks, hold=hold)


@cache
def backward_config(call: TileCall, with_dq: bool, narrow: bool = False) -> BackwardConfig:
    """The configuration of the column kernel.

    `narrow`: its columns are windows of a few tiles, of which the edges are a tenth.
    """
    size = padded(max(call.D, call.E))
    c = call._replace(D=size, E=size)
    return c.configured(
        BackwardConfig, "backward", q_stages=3 if size < 128 else 2,
        do_stages=3 if c.block_kv == 64 and size < 128 else 2, with_dq=with_dq,
        step=128 if (size, c.block_kv, c.score) == (64, 128, "fold") else 64,
        # Where items are long, the loop that tells warpgroups apart takes more than it leaves out.
        edges=narrow and (size, c.block_kv, c.score) == (128, 128, "fold"),
    )  # fmt: skip


@cache
def wide_config(call: TileCall) -> WideConfig:
    """The configuration of dK and dV for head sizes over 128."""
    c = call.padded()
    stages = 2 if c.D > 192 else 3
    return c.configured(WideConfig, "wide", q_stages=stages, do_stages=stages)


@cache
def query_config(call: TileCall) -> QueryConfig:
    """The configuration of dQ by rows."""
    c = call.padded()
    step, k_stages, v_stages = {
        64: (128, 2, 2), 96: (128, 2, 2), 128: (128, 2, 2), 192: (64, 2, 2), 256: (64, 2, 1)
    }[c.D]  # fmt: skip
    # Three warpgroups have 160 registers a thread each: room for a quarter of the scores of a 128-key tile.
    step = min(step, c.block_kv, 64 if c.block_q == 192 else 128)
    return c.configured(QueryConfig, "query_gradient", step=step, k_stages=k_stages, v_stages=v_stages)


@cache
def kept_config(dtype: str, D: int, block_q: int, block_kv: int, lengths: bool = False) -> KeptConfig:
    """The configuration of dQ from dS that is kept, for a layout of block_q x block_kv tiles."""
    size = padded(D)
    stages = 3 if (size, block_q) == (256, 128) else 4
    return KeptConfig(dtype, size, block_q, block_kv, stages, lengths)


@cache
def gather_config(
    direction: str,
    dtype: str,
    D: int,
    E: int,
    score: str,
    lengths: bool = False,
    heads: int = 1,
    particles: bool = False,
    gaussian: bool = False,
) -> GatherConfig:
    """The configuration for head sizes D and E; `heads`: whose rows share a tile; `particles`: groups of such."""
    small, large = SIZES
    if dtype == "float32":
        if direction != "forward" or max(D, E) > small:
            raise ValueError(f"no gather kernel of float32 for {direction} with heads of {D} and {E}")
        return GatherConfig(direction, dtype, small, 2, lengths=lengths, score=score)
    size = small if max(D, E) <= small else large if max(D, E) <= large else WIDEST
    stages, blocks = {64: (3, 3) if direction == "forward" else (4, 2), 128: (2, 2), 256: (2, 1)}[size]
    if (direction, size, heads) == ("gradients", 128, 1):  # the mask of 64 queries leaves no room for two
        stages, blocks = 3, 1
    if gaussian and size == small:  # positions take registers beside the scores
        stages, blocks = 4, 2
    found = GatherConfig(
        direction, dtype, size, stages, blocks, lengths=lengths, score=score, heads=heads, particles=particles,
        gaussian=gaussian,
    )  # fmt: skip
    if (direction, size) == ("forward", 128) and heads >= FEW_QUERIES:
        return replace(found, stages=3, q_stages=1, held_q=True)
    return found
