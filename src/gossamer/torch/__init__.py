"""The torch edge: `attention` and `explain` on torch tensors, as operators with fakes, autograd and autocast."""

from gossamer.torch.api import attention
from gossamer.torch.explain import Explanation, explain
from gossamer.torch.merge import merge

__all__ = ["Explanation", "attention", "explain", "merge"]
