"""Steps that an engine recorded, run again through the attention of its layers, beside a definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.integrations.vllm.attending import PagedAttention, Step
from gossamer.integrations.vllm.trace import Layers, read
from gossamer.kernels.contract import Terms
from gossamer.testing.tolerance import plain
from tests.support.definition import dense

TRACES = Path(__file__).parent / "data" / "vllm"
MEMORY = {"heads inside slots": (0, 2, 1, 3), "slots inside heads": (0, 1, 2, 3)}  # of (pages, heads, slots, size)


def recorded(name: str) -> list[tuple[Layers, Step]]:
    return list(read(TRACES / f"{name}.jsonl.xz"))


class Found(NamedTuple):
    """What a step gave, and what is right."""

    out: Tensor  # (T, H, D)
    exact: Tensor  # (T, H, D) float64
    plain: Tensor  # by dense attention in the type of the inputs


class Replay:
    """A layer with a cache of NaN, to which the steps of a trace write random keys and values."""

    def __init__(self, layers: Layers, pages: int, memory: str, dtype: torch.dtype, device: str) -> None:
        self.layers, self.g = layers, torch.Generator().manual_seed(0)
        H, G, D = layers.num_heads, layers.num_kv_heads, layers.head_size
        order = MEMORY[memory]
        shape = [(pages, G, layers.page_size, 2 * D)[n] for n in order]
        self.cache = torch.full(shape, torch.nan, dtype=dtype, device=device).permute(order)
        self.rows = torch.full((pages * layers.page_size, G, 2 * D), torch.nan, dtype=dtype)  # as they should be there
        self.sinks = torch.randn(H, generator=self.g) if layers.sinks else None
        self.layer = PagedAttention(
            H, D, D**-0.5, G, sliding_window=layers.sliding_window, logits_soft_cap=layers.softcap,
            sinks=None if self.sinks is None else self.sinks.to(device),
        )  # fmt: skip
        self.layer.process_weights_after_loading(dtype)

    def inputs(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the tokens of a step, on the host."""
        T, layers = len(step.slot_mapping), self.layers
        heads = layers.num_heads, layers.num_kv_heads, layers.num_kv_heads
        q, k, v = (torch.randn(T, n, layers.head_size, generator=self.g).to(self.cache.dtype) for n in heads)
        return q, k, v

    def write(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Keep in mind what a step writes."""
        for row, slot in zip(torch.cat([k, v], -1), step.slot_mapping.tolist(), strict=True):
            if slot >= 0:
                self.rows[slot] = row

    def wanted(self, q: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """By the definition and by dense attention, of what was written."""
        layers, size = self.layers, self.layers.page_size
        exact, low = torch.zeros(q.shape, dtype=torch.float64), torch.zeros_like(q)
        edges = step.query_start_loc.tolist()
        for r, used in enumerate(step.seq_lens.tolist()):
            first, end = edges[r : r + 2]
            if first == end:
                continue
            i, j = torch.arange(used - (end - first), used)[:, None], torch.arange(used)
            keep = j <= i if layers.sliding_window is None else (j <= i) & (j > i - layers.sliding_window)
            slots = step.block_table[r].long()[j // size] * size + j % size
            rows = self.rows[slots].masked_fill(~keep.any(0)[:, None, None], 0)
            k, v = (x.transpose(0, 1)[None] for x in rows.chunk(2, -1))
            one = q[first:end].transpose(0, 1)[None]
            sinks = None if self.sinks is None else self.sinks.double()
            out, _ = dense(one.double(), k.double(), v.double(), keep, sinks, layers.softcap)
            exact[first:end] = out[0].transpose(0, 1)
            terms = Terms(layers.head_size**-0.5, 0, softcap=layers.softcap, sink_logits=self.sinks)
            out, _ = plain(one, k, v, keep[None, None], terms)
            low[first:end] = out[0].transpose(0, 1)
        return exact, low

    def run(self, step: Step, device: str) -> Found:
        """A step through the layer, as the engine runs it."""
        q, k, v = self.inputs(step)
        self.write(k, v, step)
        out = torch.full_like(q, torch.nan, device=device)
        there = [x.to(device) for x in (q, k, v)]
        moved = to(step, device)
        self.layer.do_kv_cache_update(None, *there[1:], self.cache, moved.slot_mapping)
        assert self.layer.forward(None, *there, self.cache, moved, out) is out
        return Found(out.cpu(), *self.wanted(q, step))


def to(step: Step, device: str) -> Step:
    return Step(
        step.num_actual_tokens, step.query_start_loc.to(device), step.seq_lens.to(device), step.max_seq_len,
        step.block_table.to(device), step.slot_mapping.to(device),
    )  # fmt: skip


def replayed(name: str, memory: str, dtype: torch.dtype, device: str) -> Iterator[tuple[Replay, list[Found]]]:
    """Each layer of a trace, after all of its steps, with what they gave."""
    steps = recorded(name)
    pages = 1 + max(int(step.block_table.max()) for _, step in steps if step.block_table.numel())
    for layers in dict.fromkeys(layers for layers, _ in steps):
        replay = Replay(layers, pages, memory, dtype, device)
        yield replay, [replay.run(step, device) for of, step in steps if of == layers]


def check(replay: Replay, found: list[Found]) -> None:
    """Errors are at most twice those of plain attention in the type; the cache holds what was written, else NaN."""
    out, exact, low = (torch.cat([x[n] for x in found]).double() for n in range(3))
    bound = 2 * (low - exact).abs().max() + torch.finfo(replay.cache.dtype).eps * exact.abs().max()
    assert (out - exact).abs().max() <= bound
    there = replay.cache.transpose(1, 2).flatten(0, 1).cpu()
    torch.testing.assert_close(there, replay.rows, equal_nan=True, rtol=0, atol=0)
