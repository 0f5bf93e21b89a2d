"""Attention by operations of torch: O(N * tile) memory, on a CPU and on any device torch runs on.

On a CPU its flash attention operator computes blocks of rows with one interval of keys each (`flash.py`), and tiles of
any layout (`flash_tiles.py`). What that operator lacks, soft caps and biases by head among it, is computed by matrix
products of tiles (`bmm.py`), as everything is on a GPU.

All walk the rows alone, forward and backward. In the backward each batch of query tiles recomputes its scores once,
finishes its own dq, and adds its share of dk and dv to whole key tiles; walking the columns as well would compute
every score twice, and would need a second plan and the transposed masks.
"""

from gossamer.kernels.blocked.implementation import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
