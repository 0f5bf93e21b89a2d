"""Triton kernels for NVIDIA GPUs of compute capability 8.0 and later: forward and backward, always deterministic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton

from gossamer.kernels import relaunch
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Direction, Operand, Prepared
from gossamer.kernels.relaunch import Programs
from gossamer.kernels.triton.block import launch_block
from gossamer.kernels.triton.combine_results import combine_results_kernel
from gossamer.kernels.triton.config import BUCKETS
from gossamer.kernels.triton.gather import launch_gather
from gossamer.kernels.triton.gather.config import GATHERS
from gossamer.kernels.triton.one_query.kernels import one_query_kernel
from gossamer.kernels.triton.paged.kernels import merge_pages_kernel, paged_kernel
from gossamer.kernels.triton.paged.write_slots import write_slots_kernel
from gossamer.kernels.triton.row_terms import row_terms_kernel
from gossamer.kernels.triton.split_rows import combine_parts_kernel, sum_parts_kernel
from gossamer.kernels.triton.wide import launch_wide
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
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes", "alibi_distance"}),
        gathers=GATHERS,
    )

    def unavailable(self) -> list[str]:
        """Why nothing can run here, from torch."""
        import torch

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

    def prepare(
        self, problem: Problem, layout: BlockLayout | GatherLayout, direction: Direction, scoring: Scoring,
        operands: Mapping[str, Operand],
    ) -> Prepared:  # fmt: skip
        module: Any = launch_wide if max(problem.D, problem.E) > max(BUCKETS) else launch_block
        if isinstance(layout, GatherLayout):
            module = launch_gather
        return {"forward": module.forward, "backward": module.backward}[direction](problem, layout, scoring, operands)

    def kernel(self, name: str, *key: Any) -> Callable[..., None]:
        return relaunch.launcher(self.function(name), Programs(*key))

    def function(self, name: str) -> Any:
        """The function of Triton that a step names."""
        return KERNELS[name]


KERNELS = {
    function.fn.__name__: function
    for function in (
        *launch_block.KERNELS.values(), *launch_gather.ROW_KERNELS.values(), *launch_gather.TILE_KERNELS.values(),
        *launch_wide.KERNELS, row_terms_kernel, combine_parts_kernel, sum_parts_kernel, combine_results_kernel,
        one_query_kernel, paged_kernel, merge_pages_kernel, write_slots_kernel,
    )
}  # fmt: skip
IMPLEMENTATION = Triton()
