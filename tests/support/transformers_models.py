"""Tiny random models of transformers, from configurations: nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

with warnings.catch_warnings():  # what its imports warn of is not gossamer's to mend
    warnings.simplefilter("ignore")
    hf = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import masking_utils
    from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay
    from transformers.models.gemma4.modeling_gemma4 import sliding_window_mask_function as window_of_sides
    from transformers.models.t5gemma2.modeling_t5gemma2 import sliding_window_mask_function as window_of_halves

__all__ = [
    "DECODERS", "OTHERS", "VOCABULARY", "WINDOW", "_bidirectional_window_overlay", "hf", "masking_utils", "model_of",
    "window_of_halves", "window_of_sides",
]  # fmt: skip

VOCABULARY = 99
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOW = 8
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _encoder(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "head_dim")} | changes


def _bart() -> Any:
    return hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip


def _t5() -> Any:
    return hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def _gemma3_images() -> Any:
    text = hf.Gemma3TextConfig(**TEXT, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=8)
    vision = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4
    )
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=98)
    config.pad_token_id, config.eos_token_id = 0, None
    return config


def _vit() -> Any:
    return hf.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )


def _llama4() -> Any:
    return hf.Llama4TextConfig(
        **TEXT, intermediate_size_mlp=48, attention_chunk_size=WINDOW, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"], moe_layers=[], **EXPERTS,
    )  # fmt: skip


# (model class, configuration) of each family: decoders first.
DECODERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", lambda: hf.LlamaConfig(**TEXT)),
    "mistral": ("MistralForCausalLM", lambda: hf.MistralConfig(**TEXT, sliding_window=WINDOW)),
    "qwen2": (
        "Qwen2ForCausalLM",
        lambda: hf.Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=WINDOW, layer_types=LAYERS),
    ),
    "qwen3": ("Qwen3ForCausalLM", lambda: hf.Qwen3Config(**TEXT)),
    "gemma2": (
        "Gemma2ForCausalLM",
        lambda: hf.Gemma2Config(**TEXT, sliding_window=WINDOW, layer_types=LAYERS, attn_logit_softcapping=5.0),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        lambda: hf.Gemma3TextConfig(**TEXT, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=8),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        lambda: hf.GptOssConfig(**TEXT, **EXPERTS, sliding_window=WINDOW, layer_types=LAYERS),
    ),
    "olmo2": ("Olmo2ForCausalLM", lambda: hf.Olmo2Config(**{k: v for k, v in TEXT.items() if k != "head_dim"})),
    "olmo3": (
        "Olmo3ForCausalLM",
        lambda: hf.Olmo3Config(
            **{k: v for k, v in TEXT.items() if k != "head_dim"}, sliding_window=WINDOW, layer_types=LAYERS
        ),
    ),
    "cohere2": ("Cohere2ForCausalLM", lambda: hf.Cohere2Config(**TEXT, sliding_window=WINDOW, layer_types=LAYERS)),
    "llama4": ("Llama4ForCausalLM", _llama4),
    "gemma3_images": ("Gemma3ForConditionalGeneration", _gemma3_images),
}
OTHERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "modernbert": (
        "ModernBertModel",
        lambda: hf.ModernBertConfig(
            **_encoder(local_attention=WINDOW, layer_types=LAYERS, global_attn_every_n_layers=2, cls_token_id=1),
            sep_token_id=2,
        ),
    ),
    "bert": ("BertModel", lambda: hf.BertConfig(**_encoder())),
    "vit": ("ViTModel", _vit),
    "bart": ("BartModel", _bart),
    "t5": ("T5Model", _t5),
    "embedding_gemma": (
        "Gemma3TextModel",
        lambda: hf.Gemma3TextConfig(
            **TEXT, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=8, use_bidirectional_attention=True
        ),
    ),
}


def model_of(family: str, **changes: Any) -> Any:
    """A model with random weights, sinks among them, in evaluation mode."""
    kind, make = (DECODERS | OTHERS)[family]
    config = make()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = getattr(hf, kind)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of 0.02 would make nearly uniform probabilities, which hide a wrong mask.
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.mul_(4)
            elif not parameter.isfinite().all():
                parameter.zero_()
    return model
