"""The compiled kernel: called with its configuration, `gated` gives a function of torch tensors and numbers."""

from __future__ import annotations

from gossamer.cute.store import Kernel

gated = Kernel("gossamer.sparse_k.hopper.entries:gated", ("sparse_k/hopper", "kernels/hopper/device"))
