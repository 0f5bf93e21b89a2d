"""Triton kernels that sort particles and gather what the kernels of sums and lists read; their launches, as data."""
