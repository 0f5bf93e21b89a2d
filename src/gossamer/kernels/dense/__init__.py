"""Small problems: every pair is computed, with one bit for each that says whether it counts. Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.dense import launch
from gossamer.kernels.rows import stored
from gossamer.plan.capability import Capability, TileChoice
from gossamer.plan.problem import Problem

# B * H * Q * K of a forward, and of a backward. Past them lists of tiles win: measured on an H200, docs/results.md.
MOST_PAIRS = (2**20, 2**18)
# Keys of a forward, and keys and queries of a backward: a program walks them all, 1.5 us for 128 keys of a forward and
# 2.3 us for 32 of a backward, where lists are cut for several.
MOST_POSITIONS = (512, 256)


class Dense:
    """One launch forward and one backward, with nothing to look up: what counts where a call is all latency."""

    name = "dense"
    layout = "words"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        max_head_dim=256,
        max_float32_head_dim=128,  # more does not fit the shared memory of sm_89
        min_sm=80,
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes"}),
        max_pairs=MOST_PAIRS,
        max_walk=MOST_POSITIONS,
        tiles=frozenset(),
        float32_results=False,
    )

    def unavailable(self) -> list[str]:
        """Why nothing can run here."""
        if torch.cuda.is_available() or triton.knobs.runtime.interpret:
            return []
        return ["torch finds no CUDA device"]

    def tile(self, problem: Problem) -> tuple[int, int]:
        """The whole matrix."""
        return problem.Q, problem.K

    def tile_choices(self, problem: Problem) -> tuple[TileChoice, ...]:
        return ()

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Tensor | None,
        terms: Terms,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`layout` is the words (Bl, Hl, Q, 4 ceil(K / 128)) int32 of the kept pairs, or None when all are kept."""
        found = launch.forward(problem, q, k, v, layout, terms)
        return found if into is None else stored(into, found)

    def backward(
        self,
        problem: Problem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Tensor | None,
        terms: Terms,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *grads, dsink = found = launch.backward(problem, dout, dlse, q, k, v, out, lse, layout, terms)
        return found if into is None else (*stored(into, tuple(grads)), dsink)  # type: ignore[return-value]

    def bound_forward(
        self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, layout: Tensor | None, terms: Terms, into: Any = None
    ) -> Callable[..., tuple[Tensor, Tensor]] | None:
        return launch.bound_forward(problem, q, k, v, layout, terms, into)

    def bound_backward(
        self,
        problem: Problem,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Tensor | None,
        terms: Terms,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """None for given gradients: parts of a call are larger problems."""
        return None if into is not None else launch.bound_backward(problem, dout, q, k, v, out, lse, layout, terms)


IMPLEMENTATION: Any = Dense()
