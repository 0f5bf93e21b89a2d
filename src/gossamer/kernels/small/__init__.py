"""Small problems: every pair is computed, with one bit for each that says whether it counts. Triton.

A causal window over 26 positions takes 2.7 us on an H200, lists by Triton 5.2 and by Hopper's kernels 8.0
(docs/lab/2026-11-22-small-problems.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Direction, Operand, Prepared
from gossamer.kernels.small import launch_small
from gossamer.plan.capability import Capability
from gossamer.plan.problem import Problem

# B * H * Q * K of a forward, and of a backward. Past them lists of tiles win on an H200:
# docs/lab/2026-11-22-small-problems.md.
MOST_PAIRS = (2**20, 2**18)
# Keys of a forward, and keys and queries of a backward: a program walks them all, 1.5 us for 128 keys of a forward and
# 2.3 us for 32 of a backward, where lists are cut for several.
MOST_POSITIONS = (512, 256)


class Small:
    """One launch forward and one backward, with nothing to look up: what counts where a call is all latency."""

    name = "small"
    layout = "packed_mask"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        max_head_dim=256,
        max_float32_head_dim=128,  # more does not fit the shared memory of sm_89
        min_sm=80,
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes", "alibi_distance"}),
        max_pairs=MOST_PAIRS,
        max_walk=MOST_POSITIONS,
        tiles=frozenset(),
        float32_results=False,
    )

    def unavailable(self) -> list[str]:
        """The reasons for which nothing can run here."""
        if torch.cuda.is_available() or triton.knobs.runtime.interpret:
            return []
        return ["torch finds no CUDA device"]

    def tile(self, problem: Problem) -> tuple[int, int]:
        """The whole matrix."""
        return problem.Q, problem.K

    def tile_choices(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        return ()

    def prepare(
        self, problem: Problem, layout: Any, direction: Direction, scoring: Scoring, operands: Mapping[str, Operand]
    ) -> Prepared:
        """`layout` is the packed mask (Bl, Hl, Q, 4 ceil(K / 128)) int32, or None when all pairs are kept."""
        run = {"forward": launch_small.forward, "backward": launch_small.backward}[direction]
        return run(problem, layout, scoring, operands)

    def kernel(self, name: str, *key: Any) -> Callable[..., None]:
        return launch_small.kernel(name, *key)


IMPLEMENTATION: Any = Small()
