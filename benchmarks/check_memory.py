"""The Hopper kernels on the smoke cases, forward and both backwards, tiles and gathers, for a tool that watches memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/check_memory.py

Without the caching allocator every tensor is an allocation of its own, so that an access past its end is seen. Names of
cases run these alone; `structure` runs calls whose structure is made on the device, by whatever kernels make it,
`particles` sums over neighbours, `neighbors` attention between them, and `entmax` entmax and the k largest scores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bound import bound
from torch import Tensor

import gossamer as gs
from gossamer import particles as gp
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.hopper import IMPLEMENTATION
from gossamer.kernels.hopper.launch import gather
from gossamer.kernels.hopper.launch.backward import backward
from gossamer.kernels.hopper.launch.forward import forward
from gossamer.kernels.launch import VECTORS, Prepared
from gossamer.layouts.gather import build_gather
from gossamer.plan.capability import gathers_alone, reasons
from gossamer.plan.problem import Problem
from gossamer.testing import inputs
from gossamer.testing.cases import SMALL, Case


def both(
    forward: Callable[..., Prepared], backward: Callable[..., Prepared] | None, problem: Problem, layout: Any,
    terms: Terms, q: Tensor, k: Tensor, v: Tensor, **options: Any,
) -> None:  # fmt: skip
    """A forward, then dq by reduction and by rows, by the functions that describe them."""
    scoring = Scoring(terms.scale, terms.q_offset, terms.softcap)
    vectors = {name: getattr(terms, name) for name in VECTORS if getattr(terms, name) is not None}
    given = {"q": q, "k": k, "v": v}
    out, lse = bound(partial(forward, problem, layout, scoring, **options), given | vectors)()
    saved = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse), **given, "out": out, "lse": lse}
    for deterministic in (False, True) if backward else ():
        asked = replace(problem, deterministic=deterministic)
        bound(partial(backward, asked, layout, scoring, **options), saved | vectors)()


def by_tiles(case: Case, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
    """By each size of tiles."""
    for block_q, block_kv in sorted({IMPLEMENTATION.tile(problem), (64, 64)}):
        made = case.pattern().layout(case.Q, case.K, block_q=block_q, block_kv=block_kv, q_offset=terms.q_offset)
        both(forward, backward, problem, made.to("cuda"), terms, q, k, v)


def by_gathers(case: Case, problem: Problem, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
    """Over gathered columns, where the head sizes have such kernels; lists whole and cut."""
    for choice in IMPLEMENTATION.capability.gathers:
        if choice.reads(problem):
            made = build_gather(case.pattern(), case.Q, case.K, block_q=choice.block_q, q_offset=terms.q_offset)
            for split in (None, 1):
                back = gather.backward if choice.backward else None
                both(gather.forward, back, problem, made.to("cuda"), terms, q, k, v, split=split)


def run(case: Case, dtype: str, *parts: Callable[..., None]) -> bool:
    """Whether the case was computed."""
    problem = inputs.problem_of(case, dtype, "cuda", backward=dtype != "float32")
    capability = IMPLEMENTATION.capability
    if reasons(problem, capability) and not gathers_alone(problem, capability):
        return False
    x = inputs.make(case, dtype, "cuda").batched()
    for part in parts:
        part(case, problem, *x.qkv, x.terms)
    torch.cuda.synchronize()
    return True


B, H, G, N, D = 2, 4, 2, 300, 64  # of the calls whose structure is made on the device


def structures() -> dict[str, Callable[[list[Tensor]], Tensor]]:
    """Calls of q, k and v by their kind of structure, with numbers that the device alone knows."""
    g = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randint, device="cuda", generator=g, dtype=torch.int32)
    ends, ids = draw(1, N + 1, (B,)), draw(0, 2, (B, N)).cumsum(1) // 20
    blocks, keys = draw(-2, 6, (B, G, -(-N // 64), 3)), draw(-2, N + 3, (B, G, N, 20))
    edges = torch.tensor([0, 0, 33, 200, N], device="cuda", dtype=torch.int32)
    return {
        "lengths": lambda x: gs.attention(*x, gs.SlidingWindow(50), q_offset=ends - N, key_lengths=ends),
        "steps": lambda x: gs.attention(*x, gs.Strided(40, 20), q_offset=ends - N, key_lengths=ends),
        "documents": lambda x: gs.attention(*x, gs.DocumentIds(ids) & gs.Causal()),
        "blocks": lambda x: gs.attention(*x, gs.BlockIndices(blocks, 64) & gs.Causal()),
        "keys": lambda x: gs.attention(*x, gs.Indices(keys)),
        "packed": lambda x: gs.varlen(*(y[0].transpose(0, 1) for y in x), edges, pattern=gs.Causal()),
    }


def run_structures(dtype: torch.dtype) -> None:
    for name, call in structures().items():
        x = [torch.randn(B, n, N, D, device="cuda", dtype=dtype, requires_grad=True) for n in (H, G, G)]
        call(x).float().square().sum().backward()
        torch.cuda.synchronize()
        print(f"structure by {name} in {dtype}")


def run_particles() -> None:
    """Sums over neighbours and their gradients, of every way to find images, and of few particles."""
    for N, d, radius, box in ((700, 3, 0.2, 1.0), (300, 3, 0.45, 1.0), (500, 2, 0.1, (None, 1.0)), (33, 1, 0.1, None)):
        x, mass, values = (torch.rand(*size, device="cuda", requires_grad=True) for size in ((N, d), (N,), (N, 3)))
        cells, law = gp.Cells.build(x, radius, box), gp.ShortRangeGravity(radius / 5.5)
        (gp.radial_sum(cells, values, gp.Gaussian(radius / 3)) ** 2).sum().backward()
        torch.autograd.grad((gp.radial_sum(cells, mass, gp.Gaussian(radius / 3)) ** 2).sum(), x)
        (gp.radial_force(cells, mass, law) ** 2).sum().backward()
        torch.cuda.synchronize()
        print(f"{N} particles, box {box}, finite: {bool(x.grad.isfinite().all())}")


def run_entmax() -> None:
    """By lists, by tiles, of both, of the k largest; keys that every row lists; keys alone."""
    for dtype, size, options in (
        (torch.bfloat16, 4.0, {}), (torch.bfloat16, 0.1, {}), (torch.float16, 0.5, {"save": "tau"}),
        (torch.bfloat16, 1.0, {"top_k": 8}), (torch.bfloat16, 1.0, {"top_k": 64}), (torch.float32, 1.0, {"alpha": 1.25}),
    ):  # fmt: skip
        g = torch.Generator("cuda").manual_seed(0)
        q, k, v = (torch.randn(B, n, N, D, device="cuda", generator=g) for n in (H, G, G))
        q[..., :4] += 1
        k[:, :, 7, :4] += 8
        x = [(t * s).to(dtype).requires_grad_() for t, s in zip((q, k, v), (size, 1.0, 1.0), strict=True)]
        out = gs.entmax_attention(*x, causal=True, implementation="kernels", **options)
        out.float().square().sum().backward()
        torch.cuda.synchronize()
        print(f"entmax in {dtype}, {size}, {options}, finite: {all(bool(t.grad.isfinite().all()) for t in x)}")
    keys = gs.topk_keys(x[0].bfloat16(), x[1].bfloat16(), k_keep=8, causal=True, implementation="kernels")
    print(f"keys up to {int(keys.max())}")


def run_neighbors() -> None:
    """Attention between neighbours and its gradients; of lists that are cut, and where differences are folded."""
    for N, radius, capacity, D in ((700, 0.2, None, 64), (130, 0.3, None, 128), (300, 0.2, 8, 24), (1, 0.2, None, 64)):
        x = torch.rand(N, 3, device="cuda", requires_grad=True)
        neighbors = gp.Neighbors.allocate(x, radius, 1.0, capacity)
        for kernel, bandwidth in (("dot", None), ("dot+gaussian", radius / 3)):
            q, k, v = (torch.randn(N, 2, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            out = gp.neighbor_attention(q, k, v, neighbors, kernel=kernel, bandwidth=bandwidth)
            out.float().square().sum().backward(retain_graph=True)
            torch.cuda.synchronize()
            print(f"{N} particles, {kernel}, capacity {capacity}, finite: {bool(q.grad.isfinite().all())}")


def main(names: list[str]) -> None:
    if not names or "entmax" in names:
        run_entmax()
    if not names or "particles" in names:
        run_particles()
    if not names or "neighbors" in names:
        run_neighbors()
    if not names or "structure" in names:
        run_structures(torch.bfloat16)
    cases = [case for case in SMALL if not names or case.name in names]
    for dtype, parts in {"bfloat16": (by_tiles, by_gathers), "float32": (by_gathers,)}.items():
        done = [case.name for case in cases if run(case, dtype, *parts)]
        print(f"{len(done)} cases in {dtype}: {', '.join(done)}")


if __name__ == "__main__":
    main(sys.argv[1:])
