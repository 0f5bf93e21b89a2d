"""Triton kernels for NVIDIA GPUs of compute capability 8.0 and later: forward and backward, always deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.devices import elsewhere
from gossamer.kernels.triton import binding
from gossamer.kernels.triton.block import launch as launch_block
from gossamer.kernels.triton.config import BUCKETS
from gossamer.kernels.triton.gather import launch as launch_gather
from gossamer.kernels.triton.gather.config import GATHERS
from gossamer.kernels.triton.wide import launch as launch_wide
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.capability import Capability
from gossamer.plan.problem import Problem


class Triton:
    """Tiles of 128 x 128 pairs, walked by the three mask modes of a layout, and gathered keys for scattered pairs.

    Heads wider than 256 are computed by slices of D and E.

    See docs/kernels/triton.md and docs/kernels/gather.md.
    """

    name = "triton"
    layout = "block"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        max_head_dim=4096,
        min_sm=80,
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes"}),
        gathers=GATHERS,
    )

    def unavailable(self) -> list[str]:
        """Why nothing can run here."""
        if torch.cuda.is_available() or triton.knobs.runtime.interpret:
            return []
        return ["torch finds no CUDA device"]

    def tile(self, problem: Problem) -> tuple[int, int]:
        """(block_q, block_kv): fewer query rows when there are few queries (decoding)."""
        return (32 if problem.Q <= 32 else 64 if problem.Q <= 64 else 128), 128

    def tile_choices(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        """64 x 64 where its configurations were measured: BigBird's own blocks, narrow windows, sparse graphs."""
        measured = (problem.sm or 0) >= 90 and problem.dtype != "float32" and max(problem.D, problem.E) <= 128
        return ((64, 64),) if measured and problem.Q > 64 else ()

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if elsewhere(q):
            with torch.cuda.device(q.device):
                return self.forward(problem, q, k, v, layout, terms, into)
        return _launches(problem, layout).forward(problem, q, k, v, layout, terms, into=into)

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
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if elsewhere(q):
            with torch.cuda.device(q.device):
                return self.backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, into)
        return _launches(problem, layout).backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, into=into)

    def bound_forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if max(problem.D, problem.E) > BUCKETS[-1]:
            return None
        return binding.bound_forward(
            problem, q, k, v, layout, terms, into,
            lambda q, k, v, terms, into: self.forward(problem, q, k, v, layout, terms, into),
        )  # fmt: skip

    def bound_backward(
        self,
        problem: Problem,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """None: several launches and their workspace are most of it."""
        return None


def _launches(problem: Problem, layout: BlockLayout | GatherLayout) -> Any:
    """The module whose forward and backward compute a layout."""
    if isinstance(layout, GatherLayout):
        return launch_gather
    return launch_wide if max(problem.D, problem.E) > BUCKETS[-1] else launch_block


IMPLEMENTATION = Triton()
