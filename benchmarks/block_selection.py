"""What `topk_blocks` costs on a GPU: alone, and as a part of attention on the blocks that it chooses.

    python benchmarks/block_selection.py                    # prints a line a row
    python benchmarks/block_selection.py --out FILE         # adds them to a file of results as well
    PYTHONPATH=FOLDER python benchmarks/block_selection.py  # beside the package `fastvideo_kernel` in that folder

Every time is of a captured graph, replayed, in turns. `mean_ms` and `bound_ms` are the selection alone. `made` is a
forward and its backward with all of it in the step: the selection, its structure, the transpose, work items; `kept` the
same on a layout that was made before; `share` what made takes over kept. `peer_ms` is the sparse branch of video sparse
attention as `fastvideo_kernel` has it in Triton, likewise from q and k to the gradients: means of blocks, their
scores, a mask of the topk, attention. It is checked on gossamer's own lists, and `agree` is the share of lists that
both choose.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.bench.measure import device_name, medians_in_turns
from gossamer.bench.results import append_records

CUDA = torch.device("cuda")
medians = partial(medians_in_turns, device=CUDA, budget_s=0.4)  # milliseconds of calls
BLOCK = 64


class Case(NamedTuple):
    shape: tuple[int, ...]
    topk: int


CASES = {"32768": Case((1, 8, 32768, 128), 56), "131072": Case((1, 8, 131072, 128), 59)}


class Peer(NamedTuple):
    """What is called of `fastvideo_kernel`."""

    block_mean: Callable[..., Tensor]
    topk_mask: Callable[..., Tensor]
    attention: Callable[..., tuple[Tensor, Tensor]]

    def choose(self, q: Tensor, k: Tensor, sizes: Tensor, topk: int) -> Tensor:
        with torch.no_grad():
            means = [self.block_mean(x, sizes, BLOCK) for x in (q, k)]
            return self.topk_mask(torch.matmul(means[0], means[1].mT) / q.shape[3] ** 0.5, topk)

    def step(self, x: list[Tensor], dout: Tensor, sizes: Tensor, topk: int) -> tuple[Tensor, ...]:
        return self.attend(x, dout, sizes, self.choose(x[0], x[1], sizes, topk))

    def attend(self, x: list[Tensor], dout: Tensor, sizes: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        out, _ = self.attention(*x, mask, sizes)
        return out, *torch.autograd.grad(out, x, dout)


def find_peer() -> Peer | None:
    os.environ["FASTVIDEO_VSA_TRITON"] = "1"
    try:
        fused = importlib.import_module("fastvideo_kernel.triton_kernels.fused_compress_topk")
        attention = importlib.import_module("fastvideo_kernel.block_sparse_attn")
    except ImportError as error:
        print(f"without a peer: {error}")
        return None
    return Peer(fused.fused_block_mean, fused.fused_topk_mask, attention.block_sparse_attn)


def step(x: list[Tensor], dout: Tensor, pattern: Callable[[], Any]) -> tuple[Tensor, ...]:
    out = gs.attention(*x, pattern())
    return out, *torch.autograd.grad(out, x, dout)


def mask_of(lists: Tensor, C: int) -> Tensor:
    kept = torch.zeros((*lists.shape[:3], C), dtype=torch.bool, device=CUDA)
    return kept.scatter(3, lists.long(), True)


def measure(name: str, peer: Peer | None) -> dict[str, Any]:
    """The row of a case."""
    shape, topk = CASES[name]
    x = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dout = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    C = shape[2] // BLOCK
    choose = {
        score: partial(gs.topk_blocks, *x[:2], topk=topk, causal=False, score=score) for score in ("mean", "bound")
    }
    chosen = choose["mean"]()
    layout = gs.device_layout(*x, pattern=chosen)
    calls: dict[str, Callable[[], Any]] = {
        "mean": lambda: choose["mean"]().indices,
        "bound": lambda: choose["bound"]().indices,
        "made": partial(step, x, dout, choose["mean"]),
        "kept": partial(step, x, dout, lambda: layout),
    }
    row: dict[str, Any] = {"case": name, "topk": topk, "share_of_blocks": topk / C}
    if peer is not None:
        sizes = torch.full((C,), BLOCK, dtype=torch.int32, device=CUDA)
        calls["peer"] = partial(peer.step, x, dout, sizes, topk)
        compare(step(x, dout, lambda: layout), peer.attend(x, dout, sizes, mask_of(chosen.indices, C)), name)
        plain = gs.topk_blocks(*x[:2], topk=topk, causal=False, local=0, first=0)
        both = mask_of(plain.indices, C) == peer.choose(x[0], x[1], sizes, topk)
        row["agree"] = both.all(-1).float().mean().item()
    graphs = {kind: captured(call) for kind, call in calls.items()}
    for graph, _ in graphs.values():
        graph.replay()
    compare(graphs["made"][1], graphs["kept"][1], name)
    times = medians({kind: graph.replay for kind, (graph, _) in graphs.items()})
    row |= {f"{kind}_ms": t for kind, t in times.items()} | {"share": times["made"] / times["kept"] - 1}
    if peer is not None:
        row["peer_over_made"] = times["peer"] / times["made"]
    return row


def compare(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], name: str) -> None:
    """out and gradients, each by its Euclidean error."""
    for a, b in zip(found, wanted, strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        assert error < 0.02, f"{name}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    peer, rows = find_peer(), []
    for name in a.cases:
        rows.append(measure(name, peer))
        print(
            "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
        )
        torch.cuda.empty_cache()
    if a.out is not None:
        append_records([{"device": device_name(CUDA)} | row for row in rows], a.out, ("device",))


if __name__ == "__main__":
    main()
