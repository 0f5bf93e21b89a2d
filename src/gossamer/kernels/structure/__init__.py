"""Structure made on a GPU in few launches: what the array operations of `layouts.device` define, in Triton.

Nothing is read back and nothing is added in an order that is left open: the same numbers give the same arrays.
"""
