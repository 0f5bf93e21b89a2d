"""The compiled kernel: called with its configuration, `forward` gives a function of torch tensors and numbers."""

from __future__ import annotations

from gossamer.cute.store import Kernel

forward = Kernel("gossamer.sparse_k.hopper.entries:forward", ("sparse_k/hopper", "kernels/hopper/device"))
