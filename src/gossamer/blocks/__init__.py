"""Key blocks that scores choose, as functions of tensors on their device, which read nothing back to the host.

`api.py`: the function. The definition, in operations of torch: `scores.py`, `lists.py`. `operator.py`: the operator
that takes the kernels of `triton/` where they compute a call.
"""

from gossamer.blocks.api import SelectedBlocks, topk_blocks

__all__ = ["SelectedBlocks", "topk_blocks"]
