"""Times of entmax and top-k by kernels on a GPU, beside AdaSplash-2 and dense causal softmax, checked against float64.

    python benchmarks/entmax.py                     # 8192 tokens: Gaussian and clustered scores, top-k
    python benchmarks/entmax.py --tokens 32768      # one head is then checked in part
    python benchmarks/entmax.py --only gaussian_1 top_8 --head-dim 128

Sixteen heads, bfloat16, causal. A time is the median of replays of a CUDA graph, all of a case in turns; the backward
is a graph of both directions less the forward. AdaSplash is timed where alpha is 1.5 and all keys are candidates.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import gossamer as gs

HEADS, TILE, ROUNDS = 16, 64, 5
CHECKED = 1024  # the last queries of one head, in float64


class Case(NamedTuple):
    """Scores and what is computed of them."""

    sigma: float = 1.0
    clusters: int = 0  # of key tiles, each seen by the query tiles of one
    alpha: float = 1.5
    top_k: int | None = None


CASES = {
    "gaussian_1": Case(1.0), "gaussian_2": Case(2.0), "gaussian_4": Case(4.0), "clustered": Case(1.0, clusters=5),
    "flat": Case(0.5), "alpha_1.25": Case(1.0, alpha=1.25), "top_8": Case(1.0, top_k=8),
    "top_32": Case(1.0, top_k=32), "top_64": Case(1.0, top_k=64),
}  # fmt: skip


def inputs(case: Case, N: int, D: int) -> list[Tensor]:
    """q, k, v and dout (1, HEADS, N, D), scores of deviation sigma; in clusters tiles like one in several."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, HEADS, N, D, device="cuda", generator=generator) for _ in range(4))
    q *= case.sigma
    if case.clusters:
        of_tile = torch.randint(case.clusters, (2, HEADS, N // TILE), device="cuda", generator=generator)
        for x, which in zip((q, k), of_tile, strict=True):
            # Along an axis of its own each cluster adds 8 to the scores of its pairs.
            axes = torch.nn.functional.one_hot(which.repeat_interleave(TILE, 1), D)
            x += (8 * D**0.5) ** 0.5 * axes
    return [x.bfloat16() for x in (q, k, v, dout)]


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gs.entmax_attention(q, k, v, causal=True, alpha=case.alpha, top_k=case.top_k, implementation="kernels")


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out and dq of the last CHECKED queries of one head, from the definition."""
    rows = slice(max(0, len(q) - CHECKED), len(q))
    q, k, v, dout = q.double()[rows], k.double(), v.double(), dout.double()[rows]
    scale, a = q.shape[1] ** -0.5, case.alpha - 1
    s = (scale * q @ k.T).masked_fill_(
        torch.arange(len(k), device="cuda") > torch.arange(rows.start, rows.stop, device="cuda")[:, None], -torch.inf
    )
    if case.top_k is not None:
        least = torch.topk(s, case.top_k, dim=1).values[:, -1:]
        s = s.masked_fill(s < least, -torch.inf)
    low = a * s.amax(1, keepdim=True) - 1
    width = 1.0
    for _ in range(54):
        width /= 2
        low = torch.where(((a * s - low - width).clamp_(min=0) ** (1 / a)).sum(1, keepdim=True) >= 1, low + width, low)
    p = (a * s - low).clamp_(min=0) ** (1 / a)
    p = p / p.sum(1, keepdim=True)
    u = torch.where(p > 0, p ** (1 - a), 0.0)
    dp = dout @ v.T
    ds = u * (dp - (u * dp).sum(1, keepdim=True) / u.sum(1, keepdim=True))
    return {"out": p @ v, "dq": scale * ds @ k}


def error(found: Tensor, expected: Tensor) -> float:
    """Euclidean, relative, over those last queries of the first head."""
    part = found[0, 0, -len(expected) :].double()
    return float((part - expected).norm() / expected.norm())


def graph(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A function captured after one run."""
    function()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        function()
    return made


def times(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, made in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            made.replay()
            start.record()
            made.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in found.items()}


def ways(case: Case) -> Iterable[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """What is timed of a case."""
    yield "gossamer", lambda q, k, v: ours(case, q, k, v)
    if case.alpha == 1.5 and case.top_k is None:
        try:
            from adasplash import adasplash
        except ImportError as reason:
            print(f"adasplash: {reason}")
        else:
            yield "adasplash", lambda q, k, v: adasplash(q, k, v, alpha=1.5)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    yield "cuDNN dense", dense


def run(name: str, case: Case, N: int, D: int) -> None:
    """Check and time a case."""
    *x, dout = inputs(case, N, D)
    q, k, v = (t.requires_grad_() for t in x)
    out, aux = gs.entmax_attention(
        q, k, v, causal=True, alpha=case.alpha, top_k=case.top_k, implementation="kernels", return_aux=True
    )
    (dq,) = torch.autograd.grad(out, q, dout)
    expected = exact(case, *(t.detach()[0, 0] for t in (q, k, v, dout)))
    support = aux.support.float()
    wrong = error(out, expected["out"]), error(dq, expected["dq"])
    shown = " and ".join(f"{x:.1e}" for x in wrong)
    print(f"{name}: support {support.mean():.1f}, at most {support.max():.0f}; errors of out and dq {shown}")
    graphs = {}
    for way, function in ways(case):
        graphs[f"{way} forward"] = graph(lambda f=function: f(q.detach(), k.detach(), v.detach()))
        graphs[f"{way} both"] = graph(lambda f=function: torch.autograd.grad(f(q, k, v), (q, k, v), dout))
    found = times(graphs)
    for way in dict.fromkeys(key.rsplit(" ", 1)[0] for key in found):
        forward, both = found[f"{way} forward"], found[f"{way} both"]
        print(f"    {way}: forward {forward:.3f} ms, backward {both - forward:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), default=list(CASES))
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {given.tokens} tokens, {HEADS} heads of {given.head_dim}")
    for name in given.only:
        run(name, CASES[name], given.tokens, given.head_dim)


if __name__ == "__main__":
    main()
