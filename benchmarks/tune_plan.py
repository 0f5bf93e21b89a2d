"""Every way that a plan could compute a small problem, timed and estimated: beside what the planner takes it for.

python benchmarks/tune_plan.py -N 512 1024 2048 4096
python benchmarks/tune_plan.py -N 2048 --cases bigbird_2048_0.1 csr_2048_0.01

The break-even cases of these sizes, forward, bfloat16. Device microseconds of one call in a replayed CUDA graph, the
estimate of `explain` behind a slash, and SDPA of the same causality (the faster of flash and cuDNN). Results are
compared with materialised scores in float32 first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bound import bound
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import gossamer as gs
from gossamer.bench.latency import graph_ms
from gossamer.kernels.contract import Scoring
from gossamer.layouts import cached_gather, cached_layout
from gossamer.plan.choice import costs, machine_of
from gossamer.plan.costs import costs_of
from gossamer.plan.plan import Plan, plan_of
from gossamer.plan.problem import Problem
from gossamer.testing.inputs import problem_of
from gossamer.testing.sweeps import BREAKEVEN

LOOSE = 2**-5  # of the largest result


def layouts(plan: Plan, pattern: gs.Pattern, device: torch.device) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """(name, implementation, what makes its layout) of each option, in the order of `costs`."""
    p = plan.problem
    sizes = pattern, p.Q, p.K
    for i, (bq, bk, *_) in plan.options:
        yield f"{i.name} {bq} x {bk}", i, lambda bq=bq, bk=bk: cached_layout(
            *sizes, block_q=bq, block_kv=bk, q_offset=0, device=device
        )  # fmt: skip
    for i, gather in plan.gather_options:
        yield f"{i.name} gather {gather.choice.block_q}", i, lambda rows=gather.choice.block_q: cached_gather(
            *sizes, block_q=rows, q_offset=0, device=device
        )  # fmt: skip


def materialised(q: Tensor, k: Tensor, v: Tensor, pattern: gs.Pattern) -> Tensor:
    """In float32, head by head."""
    N = q.shape[2]
    mask = torch.from_numpy(pattern.materialize(N, N, 0)).to(q.device)
    out = torch.empty_like(q, dtype=torch.float32)
    for h in range(q.shape[1]):
        scores = (q[0, h].float() @ k[0, h].float().T) / math.sqrt(q.shape[3])
        out[0, h] = torch.softmax(scores.masked_fill(~mask, -math.inf), -1).nan_to_num(0) @ v[0, h].float()
    return out


def sdpa_us(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Of the faster backend."""
    times = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            times.append(1000 * graph_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)))
    return min(times)


def measure(name: str, p: Problem, pattern: gs.Pattern, x: list[Tensor]) -> None:
    """Prints the line of a case."""
    q, k, v = x
    # Those that compute every pair, or on the host, are no options.
    plan = plan_of(p)
    plan = replace(plan, implementations=tuple(i for i in plan.implementations if i.name in ("hopper", "triton")))
    machine, measured, scoring = machine_of(p, pattern), costs_of(p).measured, Scoring(p.D**-0.5, 0)
    counts = costs(pattern, p.Q, p.K, tiles=plan.tiles, gathers=plan.gathers, q_offset=0, machine=machine)
    want, cells = materialised(q, k, v, pattern), []
    for at, (option, implementation, make) in enumerate(layouts(plan, pattern, q.device)):
        layout = make()
        prepare = partial(implementation.prepare, p, layout, "forward", scoring)
        call = bound(prepare, {"q": q, "k": k, "v": v})
        out, _ = call()
        error = float((out.float() - want).abs().max() / want.abs().max())
        assert error <= LOOSE, f"{name} by {option}: error {error:.3f}"
        us = 1000 * graph_ms(call)
        guess = "-"
        if measured and at < len(counts) and math.isfinite(counts[at]):
            guess = f"{1e6 * counts[at]:.0f}"
        cells.append((us, f"{option} {us:.1f}/{guess}"))
    causal = isinstance(pattern, gs.SlidingWindow | gs.Dilated | gs.Tree)
    print(
        f"{name:24s} SDPA {sdpa_us(q, k, v, causal):.1f} | " + ", ".join(cell for _, cell in sorted(cells)), flush=True
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-N", "--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--cases", nargs="+", help="only these of them, without the name of the sweep")
    a = parser.parse_args()
    g = torch.Generator("cuda").manual_seed(0)
    for case in BREAKEVEN:
        name = case.name.removeprefix("breakeven_")
        if case.Q in a.lengths and (a.cases is None or name in a.cases):
            shape, problem = (case.B, case.H, case.Q, case.D), problem_of(case, "bfloat16", "cuda", backward=False)
            x = [torch.randn(shape, device="cuda", generator=g).bfloat16() for _ in range(3)]
            measure(name, problem, case.pattern(), x)


if __name__ == "__main__":
    main()
