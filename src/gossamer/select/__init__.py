"""Selections: what the data chooses, as functions of tensors on their device, which read nothing back to the host."""

from gossamer.select.blocks import SelectedBlocks, topk_blocks
from gossamer.select.entry import attention_forward
from gossamer.select.sparse_k import CausalSparseK, SparseK, last_topk, sparsek, sparsek_causal
from gossamer.select.sparse_k_attention import sparsek_attention
from gossamer.select.sparse_k_explain import SparseKExplanation, explain_sparsek

__all__ = ["CausalSparseK", "SelectedBlocks", "SparseK", "SparseKExplanation", "explain_sparsek", "last_topk"]
__all__ += ["attention_forward", "sparsek", "sparsek_attention", "sparsek_causal", "topk_blocks"]
