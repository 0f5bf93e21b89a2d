"""Selections: what the data chooses, as functions of tensors on their device, which read nothing back to the host."""

from gossamer.select.blocks import SelectedBlocks, topk_blocks
from gossamer.select.entry import attention_forward
from gossamer.select.sparse_k import CausalSparseK, SparseK, last_topk, sparsek, sparsek_causal
from gossamer.select.sparse_k_attention import sparsek_attention

__all__ = ["CausalSparseK", "SelectedBlocks", "SparseK", "last_topk", "sparsek", "sparsek_attention"]
__all__ += ["attention_forward", "sparsek_causal", "topk_blocks"]
