"""The kernels of attention that `gossamer compile` makes in advance."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

from gossamer.cute.configurations import Clears
from gossamer.cute.shipped import Shipped
from gossamer.kernels.hopper.choice import (
    HEAD_SIZES,
    SMALL,
    WIDE,
    TileCall,
    backward_config,
    forward_config,
    kept_config,
    query_config,
    wide_config,
)

MODULE = "gossamer.kernels.hopper.compiled"
DTYPES = ("bfloat16", "float16")
SIZES = (*((size, size) for size in HEAD_SIZES), (192, 128))  # (D, E) for which kernels are made in advance


@cache
def shipped() -> tuple[Shipped, ...]:
    """At most 166 kernels, each once. What is not here is compiled when it is needed, and kept as well."""
    found: dict[tuple[str, tuple[Any, ...]], Shipped] = {}

    def add(kind: str, *arguments: Any, dtype: str, size: tuple[int, int]) -> None:
        known = found.get((kind, arguments))
        sizes = frozenset({size}) if known is None else known.sizes | {size}
        found[kind, arguments] = Shipped(MODULE, kind, arguments, dtype, sizes)

    for size, dtype in itertools.product(SIZES, DTYPES):
        _, E = size
        block_q = 192 if max(size) <= 64 else 128
        for score in ("fold", "softcap") if dtype == "bfloat16" else ("fold",):
            tile = TileCall(dtype, *size, block_q, 128, score)
            add("forward", forward_config(tile), dtype=dtype, size=size)
            query = query_config(tile)
            add("query_gradient", query, dtype=dtype, size=size)
            if max(size) > WIDE:
                columns: Any = wide_config(tile)
                add("wide", columns, dtype=dtype, size=size)
                if score == "fold":
                    add("wide", replace(columns, keeps=True), dtype=dtype, size=size)
                    add("kept", kept_config(dtype, query.D, 128, 128), dtype=dtype, size=size)
            else:
                for with_dq in (True, False) if score == "fold" else (True,):
                    columns = backward_config(tile, with_dq)
                    add("backward", columns, dtype=dtype, size=size)
                if dtype == "bfloat16":
                    add("backward", backward_config(tile, True, narrow=True), dtype=dtype, size=size)
        for lengths in (False, True):  # one query behind keys that grow has them
            add("forward", forward_config(TileCall(dtype, *size, 64, 64, "fold", lengths)), dtype=dtype, size=size)
        if max(size) <= WIDE:
            columns = backward_config(TileCall(dtype, *size, 64, 64, "fold"), False)
            add("backward", columns, dtype=dtype, size=size)
        if SMALL < max(size) <= WIDE:
            for block in (64, 128):
                of_columns = backward_config(TileCall(dtype, *size, block, block, "fold"), False)
                add("backward", replace(of_columns, keeps=True), dtype=dtype, size=size)
                add("kept", kept_config(dtype, query.D, block, block), dtype=dtype, size=size)
        add("merge", dtype, E, 64, dtype=dtype, size=size)
        add("preprocess", dtype, columns.E, 0, dtype=dtype, size=size)
        if max(size) <= WIDE:
            add("preprocess", dtype, columns.E, columns.D, dtype=dtype, size=size)
            add("postprocess", dtype, columns.D, dtype=dtype, size=size)
        for width, block in ((columns.D, 128), (columns.E, 128), (query.D, block_q)):
            add("sum_parts", dtype, width, block, dtype=dtype, size=size)
    scaled = forward_config(TileCall("bfloat16", 128, 128, 128, 128, "scale"))
    add("forward", scaled, dtype="bfloat16", size=(128, 128))
    for width, block_q in ((64, 192), (128, 128)):  # packed sequences, which may be padded
        packed = TileCall("bfloat16", width, width, block_q, 128, "fold", clears=Clears.INTERVALS)
        add("forward", forward_config(packed), dtype="bfloat16", size=(width, width))
        add("backward", backward_config(packed, True), dtype="bfloat16", size=(width, width))
    return tuple(found.values())
