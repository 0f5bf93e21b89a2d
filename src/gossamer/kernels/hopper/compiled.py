"""The compiled kernels by kind: called with its configuration, each gives a function of torch tensors and numbers.

Types and order of the arguments are those of the entry of the same name in `device.entries`; see `cute.store` as well.
"""

from __future__ import annotations

from functools import partial

from gossamer.cute.store import Kernel
from gossamer.kernels.hopper.device.parameters import parameters

SOURCES = ("kernels/hopper/device",)


def _kind(name: str) -> Kernel:
    return Kernel(f"gossamer.kernels.hopper.device.entries:{name}", SOURCES, partial(parameters, name))


forward = _kind("forward")
backward = _kind("backward")
wide = _kind("wide")
kept = _kind("kept")
query_gradient = _kind("query_gradient")
gather = _kind("gather")
rows = _kind("rows")
merge = _kind("merge")
sum_parts = _kind("sum_parts")
preprocess = _kind("preprocess")
postprocess = _kind("postprocess")
