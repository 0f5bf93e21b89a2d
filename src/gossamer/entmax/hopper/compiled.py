"""The compiled kernels by kind: called with its configuration, each gives a function of torch tensors and numbers.

Types and order of the arguments are those of the entry of the same name in `hopper.entries`; see `cute.store` as well.
"""

from __future__ import annotations

from gossamer.cute.store import Kernel

SOURCES = ("entmax/hopper", "kernels/hopper/device/gather/rows.py", "kernels/hopper/device/gather/serve.py")


def _kind(name: str) -> Kernel:
    return Kernel(f"gossamer.entmax.hopper.entries:{name}", SOURCES)


support_lists = _kind("support_lists")
long_rows = _kind("long_rows")
long_rows_columns = _kind("long_rows_columns")
column_lists = _kind("column_lists")
