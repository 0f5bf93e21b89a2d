"""Calls of the kernels of alpha-entmax, Triton and Hopper alike."""
