"""Kernels from JAX: launches as `kernels.launch` describes them, bound to calls of XLA's foreign function interface."""
