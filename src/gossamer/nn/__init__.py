"""Modules of torch around the operators of gossamer; `gossamer.nn` needs torch."""

from gossamer.nn.sparse_k import SparseKAttention
from gossamer.nn.sparse_k_cache import SparseKCache
from gossamer.nn.splash import SplashAttention

__all__ = ["SparseKAttention", "SparseKCache", "SplashAttention"]
