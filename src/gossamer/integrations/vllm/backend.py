"""The classes that vLLM asks for: what is computed, the metadata of a step, and the attention of a layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)

from gossamer.integrations.vllm.attending import CACHES, PagedAttention, Step
from gossamer.integrations.vllm.options import Options, options_of
from gossamer.integrations.vllm.registration import NAME
from gossamer.integrations.vllm.trace import Recorder
from gossamer.plan.problem import Unsupported
from gossamer.torch.decoding import WIDEST
from gossamer.torch.paged_kernel import FEW

LEAST_CAPABILITY = 8  # of a GPU: that of its kernels


class Backend(AttentionBackend):
    """Exact attention over pages of any size and memory layout."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHES)

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= LEAST_CAPABILITY)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *others: Any, **more: Any
    ) -> str | None:
        """Why a combination is not computed."""
        if kv_cache_dtype in (None, "auto", str(dtype).removeprefix("torch.")):
            return None
        return f"a cache of {kv_cache_dtype} for queries of {dtype} not supported"


class Builder(AttentionMetadataBuilder[Step]):
    """Makes the metadata of each step: references to the engine's own tensors."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise Unsupported(f"a context that is spread over devices is not computed by {NAME}")
        record, self.recorder = options_of(vllm_config).record, None
        if record is not None and parallel.rank == 0:
            layer = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
            self.recorder = Recorder(record, layer_names, layer, kv_cache_spec.block_size)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Batches of decoding: these are one kernel, which reads lengths and tables on the device."""
        if kv_cache_spec.head_size > WIDEST:
            return AttentionCGSupport.NEVER
        if max_decode_query_len(vllm_config) > FEW:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """The metadata of a step.

        Raises:
            Unsupported: what the engine asks for is not computed.
        """
        given = common_attn_metadata
        if given.causal is not True:
            raise Unsupported(f"causal must be True for all requests with {NAME}; got {given.causal}")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "encoder_seq_lens", "dcp_local_seq_lens"):
            if getattr(given, name) is not None:
                raise Unsupported(f"{name} of a request are not computed by {NAME}")
        step = Step(
            given.num_actual_tokens, given.query_start_loc, given.seq_lens, given.max_seq_len,
            given.block_table_tensor, given.slot_mapping, given.max_query_len,
        )  # fmt: skip
        if self.recorder is not None:
            self.recorder.add(step)
        return step


class Impl(PagedAttention, AttentionImpl[Step]):
    """The attention of a layer with the options of its engine."""

    def __init__(self, *args: Any, **named: Any) -> None:
        options: Options = options_of(get_current_vllm_config())
        invariant = envs.VLLM_BATCH_INVARIANT
        super().__init__(
            *args, restrict=options.restrict, batch_invariant=invariant, count_mass=options.kept_mass, **named
        )
