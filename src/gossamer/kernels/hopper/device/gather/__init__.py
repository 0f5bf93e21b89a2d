"""Kernels that gather scattered rows of their operands, for a GatherLayout with groups of 64 rows."""
