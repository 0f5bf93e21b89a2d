"""The Triton kernels of entmax by name, as a bound launch asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.entmax.triton import (
    columns,
    finish,
    gather,
    large,
    select,
    tiled,
    tiled_backward,
    tiles,
    transpose,
)
from gossamer.kernels import relaunch
from gossamer.kernels.launch import Builder

MODULE = "gossamer.entmax.launch.kernels"
KERNELS = {
    function.fn.__name__: function
    for function in (
        select.select_kernel, select.order_contenders_kernel, finish.finish_kernel, large.list_groups_kernel,
        large.large_kernel, gather.gather_out_kernel, tiled.tiled_kernel, gather.gather_dq_kernel,
        transpose.count_kernel, transpose.order_keys_kernel, transpose.place_kernel, transpose.order_kernel,
        columns.columns_kernel, tiled_backward.tiled_dq_kernel, tiles.tile_ranges_kernel,
        tiled_backward.tiled_columns_kernel,
    )
}  # fmt: skip


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
        given: arguments in the order of the kernel: names of arrays, and numbers.
        named: the others, and options of the launch (num_warps, num_stages, maxnreg).
    """
    names = list(relaunch.parameters(function))
    values = dict(zip(names, given, strict=False))
    values |= {name: x for name, x in named.items() if name in names}
    # Triton 3.10 stops fusing multiplications and additions unless asked.
    options = {name: x for name, x in named.items() if name not in names} | {"enable_fp_fusion": True}
    relaunch.step(b, MODULE, function.fn.__name__, function, grid, values, options)
