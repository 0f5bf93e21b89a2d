"""Key blocks that scores choose, as functions of tensors on their device, which read nothing back to the host."""

from gossamer.blocks.api import SelectedBlocks, topk_blocks

__all__ = ["SelectedBlocks", "topk_blocks"]
