"""Triton kernels of alpha-entmax attention and exact top-k for NVIDIA GPUs: see docs/kernels/entmax.md.

A row's candidates are selected while the scores are streamed once; all that follows reads these alone. Rows with more
candidates than a buffer holds are computed by kernels that pass over the scores several times.
"""
