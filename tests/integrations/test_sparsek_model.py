"""`SparseKForCausalLM` of transformers: whole sequences, caches, files, gradients."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer as gs

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention

from gossamer.integrations.transformers.sparsek import SparseKConfig, SparseKForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 512, "k_keep": 6, "window": 3,
}  # fmt: skip


def made(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    model = SparseKForCausalLM(SparseKConfig(**{**SIZES, **more})).to(dtype).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.slope)
    return model


CACHE = "cache" if "cache" in signature(LlamaAttention.forward).parameters else "past_key_values"  # its name by version
ids = torch.randint(1, 200, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@torch.no_grad()
def test_chunks_and_steps_give_what_whole_sequences_do(dtype: torch.dtype) -> None:
    model = made(dtype)
    whole, cache, parts = model(ids, use_cache=False).logits, DynamicCache(config=model.config), []
    for begin, end in ((0, 17), (17, 30), *((n, n + 1) for n in range(30, 40))):
        parts.append(model(ids[:, begin:end], **{CACHE: cache}, use_cache=True).logits)
    bound = 0.15 if dtype == torch.bfloat16 else 2e-5  # activations of 16 bits may tip a kept key
    error = (torch.cat(parts, 1) - whole).abs()
    assert error.mean() < bound / 5 and (dtype == torch.bfloat16 or error.max() < bound)


@torch.no_grad()
def test_a_folder_holds_a_model(tmp_path: Path) -> None:
    model = made()
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is SparseKForCausalLM and (read.config.k_keep, read.config.window) == (6, 3)
    assert torch.equal(read(ids).logits, model(ids).logits)
    mask = torch.ones_like(ids)
    found = read.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(model(found).logits[:, 39:-1].argmax(-1), found[:, 40:])


def test_all_keys_kept_is_a_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = made(k_keep=1000)
    sizes = {name: n for name, n in SIZES.items() if name not in ("k_keep", "window")}
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    _, more = llama.load_state_dict(model.state_dict(), strict=False)
    assert {name.split("self_attn.")[1] for name in more} == {"score.weight", "slope"}
    torch.testing.assert_close(model(ids).logits, llama(ids).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("use_cache", [False, True])
def test_scores_learn(use_cache: bool) -> None:
    """Also behind a cache, where the gradient is that of the new tokens."""
    model = made()
    cache = DynamicCache(config=model.config) if use_cache else None
    if use_cache:
        with torch.no_grad():
            model(ids[:, :20], **{CACHE: cache})
    model(ids[:, 20:], labels=ids[:, 20:], **{CACHE: cache}, use_cache=use_cache).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.score.weight.grad.abs().sum() > 0 and layer.self_attn.slope.grad.abs().sum() > 0


def test_what_is_refused() -> None:
    model = made()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with pytest.raises(ValueError, match=r"attention_mask must be .* of ones, or None: SparseK computes no padding"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"position_ids must count up by 1"):
        model(ids, position_ids=torch.arange(20).repeat(2)[None])
    with pytest.raises(gs.Unsupported, match="a cache of a fixed size is not read by SparseK; use a DynamicCache"):
        model(ids, **{CACHE: StaticCache(config=model.config, max_cache_len=64)})
