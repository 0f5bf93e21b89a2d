"""Kernels over the tiles of a block layout for heads wider than 256, by slices of D and E."""
