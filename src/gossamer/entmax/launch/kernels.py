"""The Triton kernels of entmax by name, as a bound launch asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.entmax.triton import (
    columns,
    finish,
    gather,
    large,
    parameters,
    select,
    tiled,
    tiled_backward,
    tiles,
    transpose,
)
from gossamer.kernels import relaunch
from gossamer.kernels.launch import Builder

MODULE = "gossamer.entmax.launch.kernels"
# What a kernel that takes its constants as one, FORM, is compiled for.
FORMS = {
    select.select_kernel: parameters.SelectForm,
    select.order_contenders_kernel: None,
    finish.finish_kernel: parameters.FinishForm,
    large.list_groups_kernel: None,
    large.large_kernel: parameters.LargeForm,
    gather.gather_out_kernel: parameters.GatherForm,
    tiled.tiled_kernel: parameters.TileForm,
    gather.gather_dq_kernel: parameters.QueryForm,
    transpose.count_kernel: parameters.PairForm,
    transpose.order_keys_kernel: parameters.OrderForm,
    transpose.place_kernel: parameters.PairForm,
    transpose.order_kernel: parameters.PairForm,
    columns.columns_kernel: parameters.KeyForm,
    tiled_backward.tiled_dq_kernel: parameters.TileForm,
    tiles.tile_ranges_kernel: None,
    tiled_backward.tiled_columns_kernel: parameters.TileForm,
}
KERNELS = {function.fn.__name__: function for function in FORMS}


def __getattr__(name: str) -> Callable[..., Callable[..., None]]:
    """What launches a kernel by the key of its step."""
    if name not in KERNELS:
        raise AttributeError(name)
    return lambda *key: relaunch.launcher(KERNELS[name], relaunch.Programs(*key))


def step(
    b: Builder, function: Any, grid: tuple[int, ...], given: tuple[Any, ...], named: Mapping[str, Any]
) -> None:  # fmt: skip
    """Add a launch of a kernel.

    Args:
        given: arguments in the order of the kernel: names of arrays, and numbers, in tuples where it takes these.
        named: its constants, and options of the launch (num_warps, num_stages, maxnreg).
    """
    kinds, form = relaunch.parameters(function), FORMS[function]
    values = {name: kind(*x) if kind else x for (name, kind), x in zip(kinds.items(), given, strict=False)}
    if form is not None:
        values["FORM"] = form(**{name: x for name, x in named.items() if name in form._fields})
    values |= {name: x for name, x in named.items() if name in kinds}
    constants = kinds if form is None else form._fields
    # Triton 3.10 stops fusing multiplications and additions unless asked.
    options = {name: x for name, x in named.items() if name not in constants} | {"enable_fp_fusion": True}
    relaunch.step(b, MODULE, function.fn.__name__, function, grid, values, options)
