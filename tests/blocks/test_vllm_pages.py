"""Layers of an engine that attend to chosen pages in steps of few tokens: `restrict="topk_pages:..."`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.integrations.vllm import kept_mass
from gossamer.integrations.vllm.attending import PagedAttention, Step
from gossamer.integrations.vllm.options import PageChoice, options_of

H, G, D, SIZE, R, MOST = 4, 2, 16, 16, 3, 300
CHOICE = PageChoice(4, 1, 1)


class Engine:
    """Sequences that grow, and one layer's cache; pages of a sequence that ends are used again."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, **more: Any) -> None:
        self.device, self.dtype = device, dtype
        self.layer = PagedAttention(H, D, D**-0.5, G, restrict=CHOICE, **more)
        n = -(-MOST // SIZE)
        # Slots before heads, K and V side by side, as in an engine.
        shape = 1 + R * n, SIZE, G, 2 * D
        self.cache = torch.full(shape, torch.nan, dtype=dtype, device=device).transpose(1, 2)
        self.table = 1 + torch.randperm(R * n).view(R, n).int().to(device)
        self.used = [0] * R

    def step(self, tokens: list[int]) -> tuple[Tensor, Tensor, Step]:
        """(q, out, what the layer was told)."""
        slots = []
        for r, new in enumerate(tokens):
            j = torch.arange(self.used[r], self.used[r] + new)
            slots.append(self.table[r].cpu()[j // SIZE].long() * SIZE + j % SIZE)
            self.used[r] += new
        q, k, v = (torch.randn(sum(tokens), heads, D, device=self.device).to(self.dtype) for heads in (H, G, G))
        edges = torch.tensor([0, *torch.tensor(tokens).cumsum(0)], dtype=torch.int32, device=self.device)
        used = torch.tensor(self.used, dtype=torch.int32, device=self.device)
        step = Step(len(q), edges, used, max(self.used), self.table, torch.cat(slots).to(self.device), max(tokens))
        out = torch.full_like(q, torch.nan)
        self.layer.do_kv_cache_update(None, k, v, self.cache, step.slot_mapping)
        self.layer.forward(None, q, k, v, self.cache, step, out)
        return q, out, step

    def bounds(self) -> gs.PageBounds:
        """Of all keys that there are, by a look at each page."""
        k = self.cache[..., :D].transpose(1, 2).cpu()
        low, high = torch.zeros(len(k), G, D, dtype=self.dtype), torch.zeros(len(k), G, D, dtype=self.dtype)
        for r, used in enumerate(self.used):
            for p in range(-(-used // SIZE)):
                page, there = int(self.table[r, p]), min(SIZE, used - p * SIZE)
                low[page], high[page] = k[page, :there].amin(0), k[page, :there].amax(0)
        return gs.PageBounds(low.to(self.device), high.to(self.device))

    def over(self, q: Tensor, step: Step, choice: PageChoice | None) -> tuple[Tensor, Tensor]:
        """(out, lse) over the pages of a choice, or over all."""
        table, used = step.block_table, step.seq_lens
        if choice is not None:
            found = gs.topk_pages(q, self.bounds(), step.query_start_loc, table, used, SIZE, **choice._asdict())
            table, used = found.block_table, found.seqused_k
        k, v = self.cache.transpose(1, 2).split(D, -1)
        out, lse = gs.varlen(
            q, k, v, step.query_start_loc, pattern=gs.Causal(), block_table=table, seqused_k=used, return_lse=True
        )
        return out, lse


def check(device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    engine, limit = Engine(device, dtype), 1e-5 if dtype == torch.float32 else 2e-2
    for tokens in ([200, 40, 9], [1, 1, 1], [1, 60, 2], [1, 1, 1], [3, 1, 1], [1, 0, 1]):
        q, out, step = engine.step(tokens)
        chosen, _ = engine.over(q, step, CHOICE)
        whole, _ = engine.over(q, step, None)
        if max(tokens) > 8:  # exact
            assert torch.allclose(out, whole, atol=limit)
        else:
            assert torch.allclose(out, chosen, atol=limit) and not torch.allclose(out, whole, atol=limit)
    # A sequence ends, and another has its pages.
    engine.used[0] = 0
    engine.step([30, 1, 1])
    q, out, step = engine.step([1, 1, 1])
    assert torch.allclose(out, engine.over(q, step, CHOICE)[0], atol=limit)


def test_steps() -> None:
    check()


def test_the_mass_that_is_kept() -> None:
    torch.manual_seed(0)
    kept_mass()
    engine = Engine(count_mass=True)
    engine.step([250, 100, 40])
    assert not kept_mass()
    least, total, rows = 1.0, 0.0, 0
    for _ in range(3):
        q, _, step = engine.step([1, 2, 1])
        true = (engine.over(q, step, CHOICE)[1] - engine.over(q, step, None)[1]).exp()
        least, total, rows = min(least, float(true.min())), total + float(true.sum()), rows + true.numel()
    (found,) = kept_mass()
    assert found.rows == rows and 0 < found.mean <= total / rows * 1.00001 and 0 <= found.least <= least * 1.00001
    assert not kept_mass()


def test_layers_with_a_window_attend_as_the_model_does() -> None:
    layer = PagedAttention(H, D, D**-0.5, G, restrict=CHOICE, sliding_window=20)
    assert layer.chosen is None and layer.pattern == gs.SlidingWindow(19)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_sharing_target_layer_name": "layers.0"}, "topk_pages is not computed by layers that read the cache"),
        ({"count_mass": True, "logits_soft_cap": 5.0}, "kept_mass is not counted"),
        ({"count_mass": True, "sinks": torch.zeros(H)}, "kept_mass is not counted"),
    ],
)
def test_layers_that_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(gs.Unsupported, match=message):
        PagedAttention(H, D, D**-0.5, G, restrict=CHOICE, **more)


class Config:
    def __init__(self, **options: Any) -> None:
        self.additional_config = {"gossamer": options}


def test_options() -> None:
    assert options_of(Config(restrict="topk_pages:64,first:2,local:4")).restrict == PageChoice(64, 2, 4)
    assert options_of(Config(restrict="topk_pages:8", kept_mass=True)) == (PageChoice(8, 1, 2), True, None)
    for options, message in (
        ({"restrict": "topk_pages:2"}, "topk_pages must be at least first [+] local = 3"),
        ({"restrict": "topk_pages:0"}, 'restrict must be "window:KEYS"'),
        ({"restrict": "topk_pages:9,local:0"}, 'restrict must be "window:KEYS"'),
        ({"restrict": "window:9", "kept_mass": True}, "kept_mass must be True or False, and False without topk_pages"),
        ({"restrict": "topk_pages:9", "kept_mass": 1}, "kept_mass must be True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of(Config(**options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype)
