"""Hopper kernels of alpha-entmax and exact top-k, in CuTe DSL: see docs/kernels/entmax.md."""
