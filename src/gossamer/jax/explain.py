"""`explain`: what a call would do, without running it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array

from gossamer.jax.api import NAMES, Distance, asked_of, config_of
from gossamer.jax.arguments import AttentionOptions, Lengths, arguments_of, problem_of
from gossamer.jax.kernels.recipes import implementation_of
from gossamer.jax.prepared import plan_of, why_no_kernels
from gossamer.jax.tiles import TileLists
from gossamer.plan.problem import Problem


@dataclass(frozen=True)
class Explanation:
    """What a call would do. Counts are of one head, and of one forward."""

    problem: Problem
    implementation: str
    gradient: str
    pattern: str
    tile: tuple[int, int]  # (rows, 1) where lax gathers keys one by one, for so many rows together
    tiles: int  # that are visited
    all_tiles: int
    bits_tiles: int
    layout_bytes: int
    kernels: tuple[str, ...] = ()  # of a forward and a backward, in the order of their launch; empty: `lax`
    refused: tuple[str, ...] = ()  # why no kernels compute it

    @property
    def share(self) -> float:
        """Of all pairs, those in tiles that are visited."""
        return self.tiles / self.all_tiles if self.all_tiles else 0.0

    def __str__(self) -> str:
        p = self.problem
        block_q, block_kv = self.tile
        queries = "1 query" if block_q == 1 else f"{block_q} queries"
        gathered = f"{self.tiles:,} keys, each for {queries}: {self.share:.1%} of all pairs"
        tiles = (
            f"{self.tiles:,} of {self.all_tiles:,} of {block_q} x {block_kv} ({self.share:.1%}), "
            f"{self.bits_tiles:,} masked pair by pair"
        )
        rows = {
            "problem": f"B={p.B} H={p.H} G={p.G} Q={p.Q} K={p.K} D={p.D} E={p.E}, {p.dtype}, {p.device}"
            + (f", {', '.join(sorted(p.score_terms))}" if p.score_terms else ""),
            "pattern": self.pattern,
            "implementation": self.implementation,
            "gradient": self.gradient,
            **({"gathered": gathered} if block_kv == 1 and not self.kernels else {"tiles": tiles}),
            "layout": f"{self.layout_bytes:,} bytes",
        }
        if self.kernels:
            rows["kernels"] = ", ".join(self.kernels)
        if self.refused:
            rows["no kernels"] = "; ".join(self.refused)
        return "\n".join(f"{name:<15} {text}" for name, text in rows.items())


def explain(
    query: Any, key: Any, value: Any, pattern: Any = None, *, scale: float | Array | None = None,
    q_offset: int | None = None, key_lengths: Lengths | None = None, softcap: float | None = None,
    sink_logits: Any = None, alibi_slopes: Any = None, alibi_distance: Distance | None = None,
    implementation: str | None = None, deterministic: bool = False,
) -> Explanation:  # fmt: skip
    """What `attention` would do with these arguments: who computes it, over which tiles. Nothing is computed.

    Raises:
        ValueError: as `attention` does.

    Examples:
        >>> q = jnp.ones((1, 1024, 2, 64))
        >>> print(gsj.explain(q, q, q, gs.SlidingWindow(128)).implementation)
        blocked, in lax
    """
    options = AttentionOptions(
        scale, q_offset, key_lengths, softcap, sink_logits, alibi_slopes, alibi_distance, implementation, deterministic
    )
    a = arguments_of(query, key, value, options, NAMES)
    q_offset = None if q_offset is None else a.q_offset
    asked = asked_of(a, q_offset)
    plan = plan_of(pattern, asked)
    config = config_of(a, plan, q_offset, pattern)
    rows, lists, recipe = config.rows, plan.rows, plan.recipe
    Bl, Hl = rows.lead
    found = Explanation(
        problem=problem_of(a, jax.default_backend()),
        implementation="blocked, in lax",
        gradient="JAX's own" if implementation == "blocked" else "a rule over columns of the layout, no forward mode",
        pattern=plan.name, tile=(rows.block_rows, rows.block_columns), tiles=_tiles(lists) // (Bl * Hl),
        all_tiles=rows.tiles * rows.tile_columns, bits_tiles=_bits(lists) // (Bl * Hl), layout_bytes=plan.nbytes,
    )  # fmt: skip
    if recipe is None:
        refused = why_no_kernels(pattern, asked) if asked.kernels else ()
        return replace(found, refused=tuple(refused))
    work = recipe.work(plan.lists)
    name = implementation_of(recipe.problem.dtype)
    return replace(
        found, implementation=f"{name}, compiled kernels", gradient="kernels of their own, no forward mode",
        tile=work.tile, tiles=work.tiles, all_tiles=work.all_tiles, bits_tiles=work.bits_tiles, kernels=work.kernels,
    )  # fmt: skip


def _tiles(lists: TileLists) -> int:
    return int(np.asarray(lists.counts).sum())


def _bits(lists: TileLists) -> int:
    """Tiles of which each pair has a bit."""
    if not len(lists.masks) and len(lists.pool):
        return _tiles(lists)
    return int((np.asarray(lists.masks) >= 0)[: _tiles(lists)].sum())
