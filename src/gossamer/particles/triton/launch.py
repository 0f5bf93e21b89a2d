"""The launches of particles on tensors of torch, as data: order and boxes, records, names of groups.

Each takes operands, and describes steps for `torch.bind`; sums and lists add the kernels of `particles.kernels`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from gossamer.cute.row_items import ITEM
from gossamer.kernels import relaunch
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared, compute_dtype
from gossamer.particles.geometry import BITS, LEVELS, ROUNDING, RUN, WHOLE, Sizes
from gossamer.particles.kernels.neighbors.configurations import ROWS, STEP
from gossamer.particles.kernels.radial.configurations import FAR
from gossamer.particles.triton import box_kernels, order_kernels

MODULE = __name__
BLOCK = 256  # particles of a program
PARTS = 256  # programs that reduce extents, at most
EXTENTS, PART = 1024, 1024  # particles that a program reads at once
CLUSTER, FAN, _ = LEVELS


def _launcher(function: Any, *key: Any) -> Callable[..., None]:
    return relaunch.launcher(function, relaunch.Programs(*key))


extents, keys, boxes, records, names, items = (
    partial(_launcher, function)
    for function in (
        order_kernels.extents_kernel, order_kernels.keys_kernel, box_kernels.boxes_kernel, box_kernels.records_kernel,
        box_kernels.names_kernel, box_kernels.items_kernel,
    )
)  # fmt: skip


def cells(x: Operand, box: Sizes, unit: float) -> Prepared:
    """The fields of `cells.Runs` of positions x (N, d) in a box, both multiplied by `unit`, in order; the tree's apart.

    Args:
        x: of any type and strides.
    """
    b = Builder({"x": x})
    (N, d), dtype = x.shape, compute_dtype(x.dtype)
    wide, P = dtype == "float64", -(-N // WHOLE) * WHOLE
    each = -(-N // (PARTS * EXTENTS)) * EXTENTS
    programs = -(-N // each)
    lengths = {
        name: _bits(number) if wide else number
        for name, number in zip(
            ("unit", "size_x", "size_y", "size_z"), (unit, *(size or 1.0 for size in (*box, 1.0, 1.0))), strict=False
        )
    }  # fmt: skip
    periodic = sum((size is not None) << axis for axis, size in enumerate(box))
    of = {"x": "x", "stride_n": x.strides[0], "stride_d": x.strides[1], "N": N, "D": d}
    of |= {"PERIODIC": periodic, "WIDE": wide, **lengths}
    parts, key = b.array("parts", dtype, (7, programs)), b.array("keys", "int32", (N,))
    known = b.array("known", dtype, (1,))
    _step(b, "extents", order_kernels.extents_kernel, programs, {**of, "parts": parts, "each": each, "BLOCK": EXTENTS})
    of_keys = {
        "parts": parts,
        "keys": key,
        "known": known,
        "P": programs,
        "PARTS": relaunch.power(programs),
        "BLOCK": BLOCK,
    }
    _step(b, "keys", order_kernels.keys_kernel, -(-N // BLOCK), {**of, **of_keys, "BITS": BITS[d]})
    b.function(Kernel(EDGE, "sorted_places"), key, returns={"sorted": Operand("int64", (N,), (1,))})
    shapes = {"points": (d, P // RUN, RUN), "low": (d, P // RUN), "high": (d, P // RUN)}
    names, n = ("clusters", "blocks", "groups"), P
    for name, size in zip(names, LEVELS, strict=True):
        n = -(-n // size)
        shapes[name] = n, 8
    made = {"order": b.array("order", "int32", (N,))}
    made |= {name: b.array(name, dtype, shape) for name, shape in shapes.items()}
    of |= {**made, "sorted": "sorted", "G": n, "P": P, "rounding": _bits(ROUNDING) if wide else ROUNDING, "RUN": RUN}
    of |= {"CLUSTER": CLUSTER, "BLOCK": WHOLE, "FAN": FAN, "PART": PART}
    _step(b, "boxes", box_kernels.boxes_kernel, n + P // WHOLE, of)
    return b.done(*made, known)


def add_records(b: Builder, brought: Sequence[str], width: int, prefix: str = "", factor: float = 1.0) -> str:
    """Add the step that makes the records (P, width) of particles, and give their name, which begins with `prefix`.

    Args:
        brought: up to two arrays (N, C) of float32, of any strides, whose columns follow the positions.
        factor: of the first of them.
    """
    (d, T, run), (N,) = b["points"].shape, b["order"].shape
    made = b.array(f"{prefix}records", "float32", (T * run, width))
    of: dict[str, Any] = {"points": "points", "order": "order", "records": made, "N": N, "P": T * run}
    for name, array in zip_longest("ab", brought):
        (_, columns), strides = (b[array].shape, b[array].strides) if array else ((0, 0), (0, 0))
        of |= {name: array or "points", name.upper(): columns}
        of |= dict(zip((f"stride_{name}n", f"stride_{name}c"), strides, strict=True))
    of |= {"factor": factor, "far": FAR, "D": d, "WIDTH": width, "BLOCK": BLOCK}
    _step(b, "records", box_kernels.records_kernel, T * run // BLOCK, of)
    return made


def add_names(b: Builder, capacity: int) -> tuple[str, str]:
    """Add the step that makes `keys` and `particles` of `groups.Groups`; returns their names."""
    (N,), (T,), (listed,) = (b[name].shape for name in ("order", "counts", "columns"))
    key, particles = b.array("keys", "int32", (listed,)), b.array("particles", "int32", (T * ROWS,))
    programs = -(-T * ROWS // PART)
    of: dict[str, Any] = {name: name for name in ("order", "known", "columns", "counts", "sizes")}
    of |= {"keys": key, "particles": particles, "N": N, "T": T, "C": listed // T, "M": capacity, "programs": programs}
    _step(b, "names", box_kernels.names_kernel, programs + -(-listed // PART), {**of, "ROWS": ROWS, "BLOCK": PART})
    return key, particles


def items_of(counts: Operand, room: int, H: int) -> Prepared:
    """`groups.items_of` of lists with room for so many columns, for H heads: its arrays in order."""
    b, (T,) = Builder({"counts": counts}), counts.shape
    shapes = {"items": (H * T, ITEM), "column_items": (H * T, ITEM), "segments": (T, 8)}
    made = {name: b.array(name, "int32", shape) for name, shape in shapes.items()}
    of = {"counts": "counts", **made, "T": T, "C": room, "n": H * T, "STEP": STEP, "ITEM": ITEM, "BLOCK": BLOCK}
    _step(b, "items", box_kernels.items_kernel, -(-H * T // BLOCK), of)
    return b.done(*made)


def _step(b: Builder, name: str, function: Any, programs: int, values: Mapping[str, Any]) -> None:
    # Positions of all devices have the same bits: no product is fused with a sum.
    relaunch.step(
        b, MODULE, name, function, (programs,), {name: values[name] for name in relaunch.parameters(function)},
        {"num_warps": 4, "enable_fp_fusion": False},
    )  # fmt: skip


def _bits(x: float) -> int:
    """The bits of a float64."""
    (bits,) = struct.unpack("q", struct.pack("d", x))
    return int(bits)
