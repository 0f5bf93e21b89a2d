"""The Hopper kernels on the smoke cases, forward and both backwards, tiles and gathers, for a tool that watches memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/check_memory.py

Without the caching allocator every tensor is an allocation of its own, so that an access past its end is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from bound import bound
from torch import Tensor

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper import IMPLEMENTATION
from gossamer.kernels.hopper.launch import gather as launch
from gossamer.kernels.launch import VECTORS, Direction, Prepared
from gossamer.layouts.gather import build_gather
from gossamer.plan.capability import gathers_alone, reasons
from gossamer.plan.problem import Problem
from gossamer.testing import inputs
from gossamer.testing.cases import SMALL, Case


def both(prepare: Callable[..., Prepared], problems: Sequence[Problem], given: dict[str, Tensor]) -> None:
    """A forward, and the backward of each problem that has one, of launches that `prepare` describes."""
    first, *_ = problems
    out, lse = bound(lambda told: prepare(first, "forward", told), given)()
    given = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse), **given, "out": out, "lse": lse}
    for problem in problems:
        if problem.backward:
            bound(lambda told, p=problem: prepare(p, "backward", told), given)()


def by_tiles(case: Case, problem: Problem, scoring: Scoring, given: dict[str, Tensor]) -> None:
    """A forward by each size of tiles, then dq by reduction and by rows."""
    for block_q, block_kv in sorted({IMPLEMENTATION.tile(problem), (64, 64)}):
        made = case.pattern().layout(case.Q, case.K, block_q=block_q, block_kv=block_kv, q_offset=scoring.q_offset)
        layout = made.to("cuda")

        def prepare(p: Problem, direction: Direction, told: Any, layout: Any = layout) -> Prepared:
            return IMPLEMENTATION.prepare(p, layout, direction, scoring, told)

        both(prepare, [replace(problem, deterministic=x) for x in (False, True)], given)


def by_gathers(case: Case, problem: Problem, scoring: Scoring, given: dict[str, Tensor]) -> None:
    """Both directions over gathered columns, where the head sizes have such kernels; lists whole and cut."""
    for choice in IMPLEMENTATION.capability.gathers:
        if choice.reads(problem):
            made = build_gather(case.pattern(), case.Q, case.K, block_q=choice.block_q, q_offset=scoring.q_offset)
            layout = made.to("cuda")
            for split in (None, 1):

                def prepare(
                    p: Problem, direction: Direction, told: Any, layout: Any = layout, split: Any = split
                ) -> Prepared:
                    return getattr(launch, direction)(p, layout, scoring, told, split=split)

                both(prepare, [replace(problem, backward=problem.backward and choice.backward)], given)


def run(case: Case, dtype: str, *parts: Callable[..., None]) -> bool:
    """Whether the case was computed."""
    problem = inputs.problem_of(case, dtype, "cuda", backward=dtype != "float32")
    capability = IMPLEMENTATION.capability
    if reasons(problem, capability) and not gathers_alone(problem, capability):
        return False
    given = inputs.make(case, dtype, "cuda")
    while given.q.ndim < 4:
        given = given._replace(q=given.q[None], k=given.k[None], v=given.v[None])
    scale, q_offset, softcap, *vectors = inputs.terms_of(case, given)
    tensors = {"q": given.q, "k": given.k, "v": given.v} | dict(zip(VECTORS, vectors, strict=True))
    for part in parts:
        there = {name: x for name, x in tensors.items() if x is not None}
        part(case, problem, Scoring(scale, q_offset, softcap), there)
    torch.cuda.synchronize()
    return True


def main(names: list[str]) -> None:
    cases = [case for case in SMALL if not names or case.name in names]
    for dtype, parts in {"bfloat16": (by_tiles, by_gathers), "float32": (by_gathers,)}.items():
        done = [case.name for case in cases if run(case, dtype, *parts)]
        print(f"{len(done)} cases in {dtype}: {', '.join(done)}")


if __name__ == "__main__":
    main(sys.argv[1:])
