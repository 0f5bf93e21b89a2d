"""Tiny models with random weights, saved where an engine reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from gossamer.integrations.transformers.sparsek import SparseKConfig

BASE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip
TWO_KINDS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
# Of the usual range embeddings that are tied would make every probability 0 or 1.
GEMMA = {"initializer_range": 0.06, "query_pre_attn_scalar": 32, **TWO_KINDS}


def config(kind: str) -> Any:
    """The configuration of a model."""
    made, more = {
        "llama": (transformers.LlamaConfig, {}),
        "mistral": (transformers.MistralConfig, {"sliding_window": 16}),
        "gemma2": (transformers.Gemma2Config, GEMMA),
        "gemma3": (transformers.Gemma3TextConfig, GEMMA),
        "sparsek": (SparseKConfig, {"k_keep": 12, "window": 6}),
        "gpt_oss": (transformers.GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1, **TWO_KINDS}),
    }[kind]
    return made(**{**BASE, **more})


def saved(kind: str, folder: Path) -> Any:
    """A model of transformers, which computes attention as it is written down; it is also in the folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), attn_implementation="eager").float().eval()
    for name, x in model.named_parameters():
        if "sink" in name or "slope" in name:
            torch.nn.init.normal_(x)
    model.save_pretrained(folder)
    return model
