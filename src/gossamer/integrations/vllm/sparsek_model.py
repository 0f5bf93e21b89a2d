"""`SparseKForCausalLM` as a model of vLLM, and the backend of its layers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from gossamer.integrations.vllm.attending_sparsek import PagedSparseK
from gossamer.integrations.vllm.backend import Backend, Impl
from gossamer.integrations.vllm.registration import NAME_OF_SPARSEK
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k.scored_keys import CHANNELS, scores_of_tokens, with_scores


class SparseKImpl(PagedSparseK, Impl):
    """The attention of a layer with the options of its engine."""


class SparseKBackend(Backend):
    """SparseK attention over pages of keys that bring their scores along."""

    @staticmethod
    def get_name() -> str:
        return NAME_OF_SPARSEK

    @staticmethod
    def get_impl_cls() -> type[SparseKImpl]:
        return SparseKImpl

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False


class SparseKAttention(nn.Module):
    """A Llama's attention over the keys that scores keep, and a window."""

    def __init__(
        self, config: Any, hidden_size: int, num_heads: int, num_kv_heads: int, max_position_embeddings: int,
        quant_config: Any, bias: bool, bias_o_proj: bool, cache_config: Any, prefix: str, attn_type: str,
    ) -> None:  # fmt: skip
        super().__init__()
        parts, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        if num_heads % parts or num_kv_heads % parts:
            raise Unsupported(
                f"key heads of a SparseK layer must divide among devices; got {num_kv_heads} of {num_heads} heads, and "
                f"{parts} devices"
            )
        self.heads, self.kv_heads = num_heads // parts, num_kv_heads // parts
        self.own = slice(rank * self.kv_heads, (rank + 1) * self.kv_heads)  # of the scores of all key heads
        self.size = D = getattr(config, "head_dim", None) or hidden_size // num_heads
        self.qkv_proj = QKVParallelLinear(
            hidden_size, D, num_heads, num_kv_heads, bias=bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            num_heads * D, hidden_size, bias=bias_o_proj, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self.score = nn.Linear(hidden_size, num_kv_heads, bias=False)
        self.slope = nn.Parameter(self.score.weight.new_zeros(num_kv_heads))
        self.rotary_emb = get_rope(
            D, max_position=max_position_embeddings, rope_parameters=getattr(config, "rope_parameters", None)
        )
        self.attn = Attention(
            self.heads, D + CHANNELS, D**-0.5, num_kv_heads=self.kv_heads, cache_config=cache_config,
            quant_config=quant_config, attn_type=attn_type, prefix=f"{prefix}.attn", attn_backend=SparseKBackend,
            head_size_v=D, k_keep=config.k_keep, window=config.window,
        )  # fmt: skip

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        heads, size = (self.heads, self.kv_heads, self.kv_heads), self.size
        q, k, v = self.qkv_proj(hidden_states)[0].split([n * size for n in heads], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        u = scores_of_tokens(hidden_states, self.score.weight[self.own], self.slope[self.own], positions)
        q, k = q.unflatten(-1, (-1, size)), k.unflatten(-1, (-1, size))
        found = self.attn(F.pad(q, (0, CHANNELS)), with_scores(k, u), v.contiguous())
        return self.o_proj(found)[0]


class SparseKDecoderLayer(LlamaDecoderLayer):
    """A Llama's layer with `SparseKAttention`."""

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=SparseKAttention)


class SparseKForCausalLM(LlamaForCausalLM):
    """The model that `gossamer.integrations.transformers.sparsek` saves."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SparseKDecoderLayer)
