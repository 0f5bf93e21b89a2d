"""The blocked implementation: its limits, its tiles, and which way a call is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from gossamer.kernels.blocked import bmm, flash, flash_tiles, gather
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.launch import Direction, Operand, Prepared, one_function
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.capability import Capability, GatherChoice
from gossamer.plan.problem import Problem

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


class Blocked:
    """Operators of the framework: tile by tile, and edge by edge on a CPU where pairs are scattered."""

    name = "blocked"
    layout = "block"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=DTYPES,
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes", "alibi_distance"}),
        grows=frozenset({"cpu"}),
        gathers=(GatherChoice(1, DTYPES, devices=frozenset({"cpu"})),),
        slower=frozenset({"softcap", "alibi_slopes"}),
    )

    def unavailable(self) -> list[str]:
        return []

    def tile(self, problem: Problem) -> tuple[int, int]:
        """64 x 64, measured on a CPU against 32 and 128; fewer rows where there are few queries."""
        return (32 if problem.Q <= 32 else 64), 64

    def tile_choices(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        return ()

    def prepare(
        self, problem: Problem, layout: BlockLayout | GatherLayout, direction: Direction, scoring: Scoring,
        operands: Mapping[str, Operand],
    ) -> Prepared:  # fmt: skip
        if isinstance(layout, GatherLayout):
            return one_function(self.name, problem, layout, direction, scoring, operands, f"gather_{direction}")
        return one_function(self.name, problem, layout, direction, scoring, operands)

    def kernel(self, name: str, problem: Problem, scoring: Scoring) -> Callable[..., tuple[Tensor, ...]]:
        functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {"forward": forward, "backward": backward}
        return partial((functions | gather.DIRECTIONS)[name], problem, scoring)


def forward(
    problem: Problem, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *vectors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse); the score vectors are key_lengths, sink_logits and alibi_slopes, or None."""
    terms = Terms(*scoring, *vectors)
    if flash.computes(problem, terms):
        plan = flash.plan_of(layout, problem, "forward", flash.features_of(problem, None))
        if plan is not None:
            return flash.forward(plan, terms, q, k, v)
        if terms.key_lengths is None:
            return flash_tiles.forward(flash_tiles.plan_of(layout, problem), problem, terms, q, k, v)
    return bmm.forward(problem, layout, terms, q, k, v)


def backward(
    problem: Problem, scoring: Scoring, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, layout: BlockLayout, *vectors: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and dsink_logits where there are sinks."""
    terms = Terms(*scoring, *vectors)
    if flash.computes(problem, terms):
        plan = flash.plan_of(layout, problem, "backward", flash.features_of(problem, dlse))
        if plan is not None:
            return flash.backward(plan, terms, dout, dlse, q, k, v, out, lse)
        if terms.key_lengths is None:
            tiles = flash_tiles.plan_of(layout, problem)
            return flash_tiles.backward(tiles, problem, terms, dout, dlse, q, k, v, out, lse)
    return bmm.backward(problem, layout, terms, dout, dlse, q, k, v, out, lse)


IMPLEMENTATION = Blocked()
