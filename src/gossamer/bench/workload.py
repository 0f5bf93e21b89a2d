"""A workload: a case of gossamer.testing in one type, as inputs on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import gossamer
from gossamer import Pattern
from gossamer.testing.cases import CASES, Case, case
from gossamer.testing.inputs import Inputs, make
from gossamer.testing.sweeps import BREAKEVEN, LADDER

PREFERRED = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True)
class Workload:
    """A case in one of its types; its pattern is made once, and counted once, when first asked for."""

    case: Case
    dtype: str

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def tags(self) -> frozenset[str]:
        return self.case.tags

    @property
    def shape(self) -> dict[str, int]:
        return {name: getattr(self.case, name) for name in ("B", "H", "G", "Q", "K", "D", "E")}

    @property
    def q_offset(self) -> int:
        return self.case.K - self.case.Q if self.case.q_offset is None else self.case.q_offset

    @cached_property
    def pattern(self) -> Pattern:
        return self.case.pattern()

    @cached_property
    def density(self) -> float:
        """Kept pairs over Q x K, of keys within the lengths of a case that has any."""
        c = self.case
        lengths = (c.K,) if c.key_lengths is None else c.key_lengths
        kept = [length * self.pattern.density(c.Q, length, self.q_offset) for length in lengths if length]
        return sum(kept) / (c.K * len(lengths))

    @property
    def pairs(self) -> int:
        """Kept pairs over all batch elements and query heads."""
        return round(self.density * self.case.B * self.case.H * self.case.Q * self.case.K)


def workloads(device: str, dtype: str | None = None) -> list[Workload]:
    """Every case that runs on "cpu" or "cuda", in the type that is usual there; in `dtype` those that have it."""
    every = [case for case in (*CASES, *BREAKEVEN, *LADDER) if device in case.devices]
    if dtype is not None:
        return [Workload(case, dtype) for case in every if dtype in case.dtypes]
    return [workload(case, device) for case in every]


def workload(case: Case, device: str) -> Workload:
    """The case in the type that is usual on the device, or else in its first."""
    preferred = PREFERRED[device]
    return Workload(case, preferred if preferred in case.dtypes else case.dtypes[0])


def find(name: str, device: str) -> Workload:
    """The case called `name`, of the sweeps too."""
    swept = [candidate for candidate in (*BREAKEVEN, *LADDER) if candidate.name == name]
    return workload(swept[0] if swept else case(name), device)


def make_inputs(work: Workload, device: torch.device, seed: int = 0) -> Inputs:
    """Random q, k, v and dout, drawn on the device."""
    return make(work.case, work.dtype, device, seed=seed, pattern=work.pattern, on_device=True)


def chosen(
    inputs: Inputs, implementation: str | None, gradients: bool = True, explain: Callable[..., Any] | None = None
) -> tuple[str, str]:
    """The implementations that gossamer takes for the forward and for the backward of the inputs.

    `explain` is that of another version of it.
    """
    q = inputs.q.detach().requires_grad_(gradients)
    plan = (explain or gossamer.explain)(
        q, inputs.k, inputs.v, inputs.pattern, implementation=implementation, **inputs.options()
    )
    return plan.implementation, plan.backward or plan.implementation
