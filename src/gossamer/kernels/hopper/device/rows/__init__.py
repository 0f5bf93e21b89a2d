"""Kernels without matrix products that gather the columns of single rows, for a GatherLayout with groups of one row."""
