"""The launches of the kernels of alpha-entmax, Triton and Hopper alike, as data."""
