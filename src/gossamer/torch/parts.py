"""What the parts of a call (`kernels.parts`) ask of torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gossamer.kernels.launch import EDGE, Builder, Kernel
from gossamer.kernels.parts import Selection
from gossamer.patterns import Pattern
from gossamer.plan.plan import Plan, plan_of
from gossamer.plan.problem import Problem
from gossamer.plan.table import available
from gossamer.torch.planning import select_layout


class TorchEdge(NamedTuple):
    """The edge of a call on a device, by the implementation that was named, if any."""

    named: str | None
    device: torch.device

    def plan(self, problem: Problem, backward: bool) -> Plan:
        return plan_of(problem, self.named, backward)

    def select(self, plan: Plan, pattern: Pattern, q_offset: int) -> Selection:
        return select_layout(plan, pattern, q_offset, self.device)

    def combine(self, b: Builder, out: str, lse: str, part_out: str, part_lse: str) -> None:
        if self.device.type == "cuda" and b[lse].dtype != "float64" and not available("triton"):
            from gossamer.kernels.triton.combine_results import combine_results

            combine_results(b, out, lse, part_out, part_lse)
        else:
            b.step(Kernel(EDGE, "combine"), part_out, part_lse, out, lse)
