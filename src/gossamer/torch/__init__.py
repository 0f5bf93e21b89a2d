"""The torch edge: `attention` and `explain` on torch tensors, as operators with fakes, autograd and autocast."""

from gossamer.torch.api import attention

__all__ = ["attention"]
