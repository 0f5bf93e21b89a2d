"""Modules of torch around the operations of gossamer; `gossamer.nn` needs torch."""

from gossamer.entmax.nn import SplashAttention
from gossamer.sparse_k.cache import SparseKCache
from gossamer.sparse_k.nn import SparseKAttention

__all__ = ["SparseKAttention", "SparseKCache", "SplashAttention"]
