"""Calls of the kernels of SparseK, in parts that memory holds."""
