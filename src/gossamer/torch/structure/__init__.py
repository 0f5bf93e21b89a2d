"""Structure made on the device: what is attended, told by tensors, becomes a layout by operations of torch.

Nothing is read back to the host: data may change from call to call in a compiled function and in a captured graph.
"""

from gossamer.torch.structure.base import Structure
from gossamer.torch.structure.chosen import BlockIndices, Indices
from gossamer.torch.structure.documents import DocumentIds
from gossamer.torch.structure.pages import Pages
from gossamer.torch.structure.sequences import PackedSequences

__all__ = ["BlockIndices", "DocumentIds", "Indices", "PackedSequences", "Pages", "Structure"]
