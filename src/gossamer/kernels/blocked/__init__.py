"""Attention tile by tile in framework ops: O(N * tile) memory, on a CPU and on any device torch runs on.

It walks the rows alone, forward and backward. In the backward each batch of query tiles recomputes its scores once,
finishes its own dq, and adds its share of dk and dv to whole key tiles; walking the columns as well would compute
every score twice, and would need a second plan and the transposed masks.
"""

from gossamer.kernels.blocked.implementation import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
