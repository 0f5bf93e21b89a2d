"""`SparseKConfig`: the sizes of a model of the `transformers` library whose layers attend by SparseK."""

from __future__ import annotations

from transformers import AutoConfig, LlamaConfig


class SparseKConfig(LlamaConfig):
    """Sizes of a `SparseKForCausalLM`: those of a Llama, and what each key head keeps.

    Attributes:
        k_keep: how many keys are kept.
        window: how many keys before the query it sees in any case.
    """

    model_type = "sparsek"
    k_keep: int = 256
    window: int = 256


AutoConfig.register(SparseKConfig.model_type, SparseKConfig, exist_ok=True)
