"""The compiled kernels by kind: called with its configuration, each gives a function of torch tensors and numbers.

Types and order of the arguments are those of the entry of the same name in `device.entries`; see `store` as well.
"""

from __future__ import annotations

from functools import cache

from gossamer.kernels.hopper.device.parameters import Role
from gossamer.kernels.hopper.store import Kernel

forward = Kernel("forward")
backward = Kernel("backward")
wide = Kernel("wide")
kept = Kernel("kept")
query_gradient = Kernel("query_gradient")
gather = Kernel("gather")
rows = Kernel("rows")
merge = Kernel("merge")
gated = Kernel("gated")
select = Kernel("select")
tiled = Kernel("tiled")
tiled_columns = Kernel("tiled_columns")
column_lists = Kernel("column_lists")
sum_parts = Kernel("sum_parts")
preprocess = Kernel("preprocess")
postprocess = Kernel("postprocess")


@cache
def flat(name: str, roles: tuple[Role, ...]) -> Kernel:
    """A kind of kernel in the form of `device.flat`."""
    return Kernel(name, roles)
