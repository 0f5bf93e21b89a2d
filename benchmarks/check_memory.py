"""The Hopper kernels on the smoke cases, forward and both backwards, tiles and gathers, for a tool that watches memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/check_memory.py

Without the caching allocator every tensor is an allocation of its own, so that an access past its end is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper import IMPLEMENTATION
from gossamer.layouts.gather import build_gather
from gossamer.plan.capability import gathers_alone, reasons
from gossamer.plan.problem import Problem
from gossamer.testing import inputs
from gossamer.testing.cases import SMALL, Case


def by_tiles(case: Case, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
    """A forward by each size of tiles, then dq by reduction and by rows."""
    for block_q, block_kv in sorted({IMPLEMENTATION.tile(problem), (64, 64)}):
        made = case.pattern().layout(case.Q, case.K, block_q=block_q, block_kv=block_kv, q_offset=terms.q_offset)
        layout = made.to("cuda")
        out, lse = IMPLEMENTATION.forward(problem, q, k, v, layout, terms)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        for deterministic in (False, True):
            asked = type(problem)(**vars(problem) | {"deterministic": deterministic})
            IMPLEMENTATION.backward(asked, dout, dlse, q, k, v, out, lse, layout, terms)


def by_gathers(case: Case, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
    """Both directions over gathered columns, where the head sizes have such kernels; lists whole and cut."""
    launch = IMPLEMENTATION.launch_gather
    for choice in IMPLEMENTATION.capability.gathers:
        if choice.reads(problem):
            made = build_gather(case.pattern(), case.Q, case.K, block_q=choice.block_q, q_offset=terms.q_offset)
            layout = made.to("cuda")
            for split in (None, 1):
                out, lse = launch.forward(problem, q, k, v, layout, terms, split=split)
                if not choice.backward:
                    continue
                given = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, layout, terms
                launch.backward(problem, *given, split=split)


def run(case: Case, dtype: str, *parts: Callable[..., None]) -> bool:
    """Whether the case was computed."""
    problem = inputs.problem_of(case, dtype, "cuda", backward=dtype != "float32")
    capability = IMPLEMENTATION.capability
    if reasons(problem, capability) and not gathers_alone(problem, capability):
        return False
    given = inputs.make(case, dtype, "cuda")
    while given.q.ndim < 4:
        given = given._replace(q=given.q[None], k=given.k[None], v=given.v[None])
    for part in parts:
        part(case, problem, *given[:3], inputs.terms_of(case, given))
    torch.cuda.synchronize()
    return True


def main(names: list[str]) -> None:
    cases = [case for case in SMALL if not names or case.name in names]
    for dtype, parts in {"bfloat16": (by_tiles, by_gathers), "float32": (by_gathers,)}.items():
        done = [case.name for case in cases if run(case, dtype, *parts)]
        print(f"{len(done)} cases in {dtype}: {', '.join(done)}")


if __name__ == "__main__":
    main(sys.argv[1:])
