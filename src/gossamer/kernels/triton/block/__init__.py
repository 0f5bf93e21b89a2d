"""Kernels over the tiles of a block layout, for heads of up to 256."""
