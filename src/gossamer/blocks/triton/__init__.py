"""Key blocks chosen by their scores on a GPU in three launches: what `blocks.api` defines in operations, in Triton.

Nothing is read back and nothing is added in an order that is left open: the same numbers give the same lists.
"""
