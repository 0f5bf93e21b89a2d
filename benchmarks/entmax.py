"""Times of entmax and top-k by kernels on a GPU, beside AdaSplash-2 and dense causal softmax, checked against float64.

    python benchmarks/entmax.py                     # all rows, in one run
    python benchmarks/entmax.py --only gaussian_1 top_8_long --out FILE  # rows are added to a file of results
    python benchmarks/entmax.py --warm              # every call once: what is compiled is then in the caches

Sixteen heads, bfloat16, causal. A time is the median of replays of a CUDA graph, all of a case in turns; the backward
is a graph of both directions less one of the forward that saves for it, which need not take what a forward alone does.
AdaSplash is timed where all keys are candidates, alpha is 1.5 (for others it waits for the device, as no graph can) and
heads have 64 numbers, with the one configuration of each of its kernels that it chose itself among all on an H200 at
8192 tokens: its own choice takes longer than all of this (`--all-configurations`).
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import gossamer as gs
from gossamer.bench.measure import device_name
from gossamer.bench.results import append_records

HEADS, TILE, ROUNDS = 16, 64, 5
CHECKED = 1024  # the last queries of one head, in float64
CUDA = torch.device("cuda")


class Case(NamedTuple):
    """Scores and what is computed of them."""

    sigma: float = 1.0
    clusters: int = 0  # of key tiles, each seen by the query tiles of one
    alpha: float = 1.5
    top_k: int | None = None
    N: int = 8192
    D: int = 64


LONG = 65536
CASES = {
    "gaussian_1": Case(1.0), "gaussian_2": Case(2.0), "gaussian_4": Case(4.0), "clustered": Case(1.0, clusters=5),
    "flat": Case(0.5), "alpha_1.25": Case(1.0, alpha=1.25), "top_8": Case(top_k=8), "top_32": Case(top_k=32),
    "top_64": Case(top_k=64), "gaussian_1_wide": Case(D=128), "gaussian_1_32768": Case(N=32768),
    "top_8_long": Case(top_k=8, N=LONG), "top_32_long": Case(top_k=32, N=LONG), "top_64_long": Case(top_k=64, N=LONG),
}  # fmt: skip
MEMORY = Case(top_k=32, N=131072)
# What AdaSplash-2 chose: num_warps, num_stages and sizes of tiles.
CHOSEN = {"_get_tau_v3": 4}


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and dout (1, HEADS, N, D), scores of deviation sigma; in clusters tiles like one in several."""
    generator = torch.Generator(CUDA).manual_seed(0)
    q, k, v, dout = (torch.randn(1, HEADS, case.N, case.D, device=CUDA, generator=generator) for _ in range(4))
    q *= case.sigma
    if case.clusters:
        of_tile = torch.randint(case.clusters, (2, HEADS, case.N // TILE), device=CUDA, generator=generator)
        for x, which in zip((q, k), of_tile, strict=True):
            # Along an axis of its own each cluster adds 8 to the scores of its pairs.
            axes = torch.nn.functional.one_hot(which.repeat_interleave(TILE, 1), case.D)
            x += (8 * case.D**0.5) ** 0.5 * axes
    return [x.bfloat16() for x in (q, k, v, dout)]


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return gs.entmax_attention(
        q, k, v, causal=True, alpha=case.alpha, top_k=case.top_k, implementation="kernels", **options
    )


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out and dq of the last CHECKED queries of one head, from the definition."""
    rows = slice(max(0, len(q) - CHECKED), len(q))
    q, k, v, dout = q.double()[rows], k.double(), v.double(), dout.double()[rows]
    scale, a = q.shape[1] ** -0.5, case.alpha - 1
    s = (scale * q @ k.T).masked_fill_(
        torch.arange(len(k), device=CUDA) > torch.arange(rows.start, rows.stop, device=CUDA)[:, None], -torch.inf
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
    return {name: median(values) for name, values in found.items()}


def adasplash_ways(every: bool) -> Callable[..., Tensor] | None:
    """AdaSplash-2, where it is installed.

    Args:
        every: whether it chooses among all of its configurations.
    """
    try:
        kernels = importlib.import_module("adasplash.adasplash_v2")
        from adasplash import adasplash
    except ImportError as reason:
        print(f"adasplash: {reason}")
        return None
    for name, kernel in vars(kernels).items():
        if not every and hasattr(kernel, "configs"):
            stages = CHOSEN.get(name, 3)
            kernel.configs = [
                c for c in kernel.configs
                if (c.num_warps, c.num_stages) == (4, stages) and set(c.kwargs.values()) <= {128}
            ]  # fmt: skip
    return adasplash


def dense_ways() -> Iterable[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Dense causal softmax."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    yield "cuDNN dense", cudnn
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as reason:
        print(f"FA4: {reason}")
        return

    def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    yield "FA4 dense", fa4


def ways(case: Case, adasplash: Callable[..., Tensor] | None) -> Iterable[tuple[str, Callable[..., Tensor]]]:
    """What is timed of a case."""
    yield "gossamer", lambda q, k, v: ours(case, q, k, v)
    if case.top_k is None and case.D == 64 and case.alpha == 1.5 and adasplash is not None:
        yield "adasplash", lambda q, k, v: adasplash(q, k, v, alpha=case.alpha)
    if case.top_k is not None or case.D != 64:
        yield from dense_ways()


def run(name: str, case: Case, adasplash: Callable[..., Tensor] | None, warm: bool) -> Iterable[dict[str, Any]]:
    """Check and time a case: a row for each way."""
    *x, dout = inputs(case)
    q, k, v = (t.requires_grad_() for t in x)
    found = list(ways(case, adasplash))
    if warm:
        for _, function in found:
            torch.autograd.grad(function(q, k, v), (q, k, v), dout)
        return
    out, aux = ours(case, q, k, v, return_aux=True)
    (dq,) = torch.autograd.grad(out, q, dout)
    expected = exact(case, *(t.detach()[0, 0] for t in (q, k, v, dout)))
    support = aux.support.float()
    known = {
        "support": round(support.mean().item(), 1), "largest_support": int(support.max()),
        "error_out": error(out, expected["out"]), "error_dq": error(dq, expected["dq"]),
    }  # fmt: skip
    del out, aux, dq, expected
    graphs = {}
    for way, function in found:
        graphs[f"{way} forward"] = graph(lambda f=function: f(q.detach(), k.detach(), v.detach()))
        graphs[f"{way} saved"] = graph(lambda f=function: f(q, k, v))
        graphs[f"{way} both"] = graph(lambda f=function: torch.autograd.grad(f(q, k, v), (q, k, v), dout))
    ms = times(graphs)
    for way, _ in found:
        forward, saved, both = (ms[f"{way} {kind}"] for kind in ("forward", "saved", "both"))
        row = {"benchmark": "entmax", "case": name, **case._asdict(), "way": way, "forward_ms": round(forward, 4),
               "saved_forward_ms": round(saved, 4), "backward_ms": round(both - saved, 4)}  # fmt: skip
        yield row | (known if way == "gossamer" else {})


def memory(case: Case) -> dict[str, Any]:
    """Bytes beyond inputs and results: of a forward, of what it saves for a backward, and of the backward's peak."""
    *x, dout = inputs(case)
    row: dict[str, Any] = {"benchmark": "entmax", "case": "memory", **case._asdict(), "way": "gossamer"}
    size = sum(t.nbytes for t in x) + dout.nbytes
    for save in ("none", "lists", "tau"):
        q, k, v = (t.detach().requires_grad_(save != "none") for t in x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = ours(case, q, k, v, save="lists" if save == "none" else save)
        row[f"{save}_forward_share"] = round((torch.cuda.max_memory_allocated() - before - out.nbytes) / size, 4)
        if save == "none":
            continue
        held = torch.cuda.memory_allocated() - before - out.nbytes
        row[f"{save}_saved_bytes_a_row"] = round(held / (HEADS * case.N), 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        peak = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in gradients)
        row[f"{save}_backward_share"] = round(peak / size, 4)
        del out, gradients
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, "memory"]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--all-configurations", action="store_true")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    adasplash, rows = adasplash_ways(a.all_configurations), []
    for name in a.only:
        found = [memory(MEMORY)] if name == "memory" else run(name, CASES[name], adasplash, a.warm)
        for row in found:
            rows.append({"device": device_name(CUDA)} | row)
            print(json.dumps(rows[-1]), flush=True)
    if a.out is not None:
        append_records(rows, a.out, ("device",))


if __name__ == "__main__":
    main()
