"""Steps of an engine's layers on a GPU, through what vLLM calls: new keys and values are written, then attended to.

python benchmarks/engine_steps.py                            # decoding: 32 layers, B 32, 4096 keys, pages of 16
python benchmarks/engine_steps.py --page 64 --keys 131072 --sequences 4
python benchmarks/engine_steps.py --tokens 2048 --sequences 1 --keys 32768 --page 64   # a chunk of a prompt

H 32, G 8, D 128, bfloat16; every second layer has a window of --window keys. Each layer has a cache of its own, as in a
model. Host: microseconds of a layer to enqueue a step, the median of 25, each with metadata of its own. Device: of the
step as one replayed graph, of its writes alone, and of FA4's calls over the same caches, where it is there (decoding);
of a chunk, whose structure an engine does not capture, the milliseconds of an eager step. One sequence of the first two
layers is checked against float64 first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.bench.latency import graph_ms
from gossamer.bench.measure import time_call
from gossamer.integrations.vllm.attending import PagedAttention, Step
from gossamer.torch.paged_kernel import FEW

H, G, D = 32, 8, 128
SAMPLES = 25
LOOSE = 2**-6  # of the largest result: roundings of bfloat16


class Model:
    """Layers with caches of their own, and the tensors of a step that an engine writes anew in each."""

    def __init__(self, o: argparse.Namespace) -> None:
        self.o, n = o, -(-o.keys // o.page)
        device, R, T = o.device, o.sequences, o.sequences * o.tokens
        windows = [o.window if layer % 2 else None for layer in range(o.layers)]
        self.layers = [PagedAttention(H, D, D**-0.5, G, sliding_window=window) for window in windows]
        P = 1 + R * n
        # Slots before heads, K and V side by side: vLLM's usual memory.
        shape = P, o.page, G, 2 * D
        self.caches = [
            torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in self.layers
        ]  # fmt: skip
        heads = (H, G, G)
        self.qkv = [torch.randn(T, x, D, device=device, dtype=torch.bfloat16) for x in heads]
        self.out = torch.empty_like(self.qkv[0])
        self.edges = torch.arange(R + 1, dtype=torch.int32, device=device) * o.tokens
        self.lengths = torch.full((R,), o.keys, dtype=torch.int32, device=device)
        order = 1 + torch.randperm(R * n, generator=torch.Generator().manual_seed(0))
        self.table = order.view(R, n).int().to(device)
        at = torch.arange(o.keys - o.tokens, o.keys, device=device)
        self.slots = (self.table[:, at // o.page] * o.page + at % o.page).flatten().long()

    def metadata(self) -> Step:
        return Step(len(self.out), self.edges, self.lengths, self.o.keys, self.table, self.slots)

    def write(self) -> None:
        _, k, v = self.qkv
        for layer, cache in zip(self.layers, self.caches, strict=True):
            layer.do_kv_cache_update(None, k, v, cache, self.slots)

    def step(self) -> None:
        step, (q, k, v) = self.metadata(), self.qkv
        for layer, cache in zip(self.layers, self.caches, strict=True):
            layer.do_kv_cache_update(None, k, v, cache, step.slot_mapping)
            layer.forward(None, q, k, v, cache, step, self.out)

    def fa4(self) -> Callable[[], None]:
        """The attention of the layers by FA4.

        Raises:
            ImportError: it is not installed.
        """
        from flash_attn.cute.interface import flash_attn_varlen_func

        q, _, _ = self.qkv
        given = {"page_table": self.table, "seqused_k": self.lengths, "cu_seqlens_q": self.edges}

        def run() -> None:
            for layer, cache in zip(self.layers, self.caches, strict=True):
                k, v = cache.transpose(1, 2).split(D, -1)
                window = layer.sliding_window
                ahead = (None, None) if window is None else (window - 1, 0)
                flash_attn_varlen_func(
                    q, k, v, causal=True, window_size=ahead, max_seqlen_q=self.o.tokens, **given
                )  # fmt: skip

        return run

    def check(self) -> float:
        """The largest error of a sequence in two layers, as a share of its largest result."""
        worst, o, (q, k, v) = 0.0, self.o, self.qkv
        for layer, cache in zip(self.layers[:2], self.caches, strict=False):
            layer.do_kv_cache_update(None, k, v, cache, self.slots)
            layer.forward(None, q, k, v, cache, self.metadata(), self.out)
            rows = cache[self.table[-1].long()].transpose(1, 2).flatten(0, 1)[: o.keys].double()
            wanted = self._dense(q[-o.tokens :].double(), *rows.split(D, -1), layer.sliding_window)
            worst = max(worst, float((self.out[-o.tokens :] - wanted).abs().max() / wanted.abs().max()))
        return worst

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        i = torch.arange(self.o.keys - self.o.tokens, self.o.keys, device=q.device)[:, None]
        j = torch.arange(self.o.keys, device=q.device)
        keep = (j <= i) & (j > i - (window or self.o.keys))
        outs = []
        for h in range(H):
            s = q[:, h] @ k[:, h * G // H].T * D**-0.5
            outs.append(s.masked_fill(~keep, -torch.inf).softmax(-1) @ v[:, h * G // H])
        return torch.stack(outs, 1)


def host_us(model: Model) -> float:
    """Microseconds of a layer."""
    spent = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        model.step()
        spent.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return 1e6 * statistics.median(spent) / len(model.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 32), ("sequences", 32), ("tokens", 1), ("keys", 4096), ("page", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--device", default="cuda", help="cpu: the check alone")
    o = parser.parse_args()
    with torch.no_grad():
        model = Model(o)
        error = model.check()
        print(f"{o}\nerror {error:.1e} of the largest result")
        if error > LOOSE:
            raise SystemExit(f"over {LOOSE:.1e}")
        if o.device == "cpu":
            return
        for _ in range(3):
            model.step()
        told: dict[str, Any] = {"host, us a layer": host_us(model)}
        if o.tokens > FEW:
            told["an eager step, ms"] = time_call(model.step, torch.device(o.device)).p50
        else:
            told["a step as a graph, ms"] = graph_ms(model.step)
            told["its writes, ms"] = graph_ms(model.write)
            try:
                told["FA4, ms"] = graph_ms(model.fa4())
            except Exception as reason:  # it may be missing, or take no such caches
                print(f"FA4: {type(reason).__name__}: {reason}")
        for name, value in told.items():
            print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
