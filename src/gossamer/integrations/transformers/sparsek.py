"""`SparseKForCausalLM`: a Llama whose layers attend by SparseK, as a model of the `transformers` library.

Imported by its own name, and with it transformers' models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from gossamer.integrations.transformers.sparsek_config import SparseKConfig
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k import sparsek_attention
from gossamer.sparse_k.scored_keys import CHANNELS, bits_of, scores_of, scores_of_tokens, with_scores


class SparseKLayerAttention(LlamaAttention):
    """A Llama's attention over the keys that scores keep, and a window; a cache holds scores behind the keys."""

    def __init__(self, config: SparseKConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = self.k_proj.out_features // self.head_dim
        self.score = nn.Linear(config.hidden_size, heads, bias=False)
        self.slope = nn.Parameter(self.score.weight.new_zeros(heads))

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any = None,
        cache: Any = None, past_key_values: Any = None, *, position_ids: Tensor, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        B, m, _ = hidden_states.shape
        linear = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (each(hidden_states).view(B, m, -1, self.head_dim).transpose(1, 2) for each in linear)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        u = scores_of_tokens(hidden_states, self.score.weight, self.slope, position_ids).transpose(1, 2)
        cache = past_key_values if cache is None else cache  # its name of earlier versions
        if cache is not None:
            if getattr(cache, "is_compileable", False):
                raise Unsupported("a cache of a fixed size is not read by SparseK; use a DynamicCache")
            scored, v = cache.update(with_scores(k, u), v, self.layer_idx)
            before = scored[:, :, : scored.shape[2] - m]
            u = torch.cat([scores_of(bits_of(before)), u], 2)  # of these tokens the own, which has a gradient
            k = scored[..., :-CHANNELS]
        out = sparsek_attention(q, k, v, u, k_keep=self.config.k_keep, window=self.config.window, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class SparseKForCausalLM(LlamaForCausalLM):
    """A Llama whose layers attend by `sparsek_attention`, with a linear layer for the scores of each key head's keys.

    All keys stay in the cache. Sequences of a batch have one length: padding before tokens, and several sequences in a
    row, are refused.
    """

    config_class = SparseKConfig

    def __init__(self, config: SparseKConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = SparseKLayerAttention(config, index)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, **given: Any,
    ) -> Any:  # fmt: skip
        """Logits, as of a `LlamaForCausalLM`.

        Raises:
            ValueError: attention_mask leaves tokens out, or position_ids do not count up.
        """
        if attention_mask is not None and (attention_mask.ndim != 2 or not bool(attention_mask.all())):
            raise ValueError("attention_mask must be (batch, keys) of ones, or None: SparseK computes no padding")
        if position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any()):
            raise ValueError("position_ids must count up by 1: SparseK computes one sequence in a row")
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **given)


AutoModelForCausalLM.register(SparseKConfig, SparseKForCausalLM, exist_ok=True)
