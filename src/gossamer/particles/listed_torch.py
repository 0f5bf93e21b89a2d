"""Lists of neighbours by kernels on tensors of torch, and attention over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.gpu import processors
from gossamer.kernels.launch import (
    ALIGNMENT,
    INPUTS,
    Builder,
    Direction,
    Kernel,
    Operand,
    Prepared,
    dtype_of,
    operand_of,
)
from gossamer.memo import Memo, Memos
from gossamer.particles import fused_torch
from gossamer.particles import groups as group_lists
from gossamer.particles.attend import Attending
from gossamer.particles.cells import Cells
from gossamer.particles.geometry import Sizes, times_all
from gossamer.particles.groups import (
    SM,
    SMALLEST,
    Groups,
    Most,
    call_of,
    launched,
    shapes_of,
    type_of,
)
from gossamer.particles.kernels import compiled
from gossamer.particles.kernels.neighbors.configurations import POINT, STEP
from gossamer.particles.neighbors import Neighbors
from gossamer.torch.bind import bind

ITEMS = ("items", "column_items", "segments")  # of `groups.items_of`

_lists: Memo[Any] = Memo()  # launches, by what they follow from
_making_items: Memo[Any] = Memo()
_bound: Memo[Any] = Memo()
_items: Memos[tuple[Tensor, ...]] = Memos()  # the items of lists, by heads


def serves(cells: Cells) -> bool:
    """Whether kernels list the neighbours of these particles."""
    if not fused_torch.serves(cells):
        return False
    major, minor = torch.cuda.get_device_capability(cells.runs.points.device)
    return 10 * major + minor == SM


def lists_of(cells: Cells, capacity: int, room: int) -> tuple[Tensor, Tensor, Groups]:
    """places, sizes and groups."""
    runs = cells.runs
    arrays = runs.points, runs.order, *runs.tree, runs.known
    key = runs.points.shape, runs.order.shape, capacity, room, cells.radius, cells.box, runs.points.device
    run = _lists.get(key)
    if run is None:
        operands = {name: operand_of(x) for name, x in zip(fused_torch.RUNS, arrays, strict=True)}
        described = _described(operands, capacity, room, cells.reach, cells.sizes)
        run = _lists.put(key, bind(described, runs.points.device, fused_torch.RUNS))
    with torch.no_grad():
        columns, bits, theirs, mine, counts, far, sizes, places, keys, particles = run(*arrays)
    return places, sizes, Groups(columns, keys, bits, theirs, mine, counts, far, particles)


def _described(operands: dict[str, Operand], capacity: int, room: int, reach: float, box: Sizes) -> Prepared:
    """The launch that makes lists: the arrays of `shapes_of`, then names."""
    b, (N,) = Builder(operands), operands["order"].shape
    launches = fused_torch.launches()
    config, numbers = call_of(reach, box)
    records = launches.add_records(b, (), POINT)
    made = [b.array(name, type_of(name), shape) for name, shape in shapes_of(N, capacity, room).items()]
    kernel = Kernel(compiled.MODULE, "lists", (config,), "exchanged")
    b.step(kernel, records, *fused_torch.TREE, *made, *numbers)
    return b.done(*made, *launches.add_names(b, capacity))


def most(cells: Cells) -> Most:
    """The longest list of a particle, and of a group."""
    _, sizes, groups = lists_of(cells, 1, STEP)
    return Most(*torch.stack([sizes.max(), groups.counts.max()]).tolist())


def attends(groups: Groups | None, call: Attending, q: Tensor, v: Tensor) -> bool:
    """Whether these kernels compute a call; in float32 others do, which have kernels for gradients too."""
    (*_, D), (*_, E) = q.shape, v.shape
    return (
        groups is not None
        and q.dtype == v.dtype
        and v.dtype != torch.float32
        and group_lists.attends(call, dtype_of(v), D, E)
    )


def forward(call: Attending, neighbors: Neighbors, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (N, H, E) and lse (N, H), by particles; NaN where lists are cut."""
    if call.scale is None:  # no products: those of zeros
        q = k = v.new_zeros(*v.shape[:2], SMALLEST)
    out, lse = _run("forward", call, neighbors, q, v, q, k, v)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def backward(
    call: Attending, neighbors: Neighbors, to_x: bool, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv and, if `to_x`, dx, by particles; None for what has no such term."""
    if call.scale is None:
        q = k = v.new_zeros(*v.shape[:2], SMALLEST)
    *gradients, rows, columns = _run("backward", call, neighbors, q, v, dout, dlse, q, k, v, out, lse)
    dq, dk, dv = (x.squeeze(0).transpose(0, 1) for x in gradients)
    dx = None
    if to_x and call.spread is not None:
        _, d = neighbors.cells.x.shape
        dx = times_all((rows.sum(0) + columns.sum(0))[:, :d], call.pull)
    return (None, None, dv, dx) if call.scale is None else (dq, dk, dv, dx)


def _run(
    direction: Direction, call: Attending, neighbors: Neighbors, q: Tensor, v: Tensor, *given: Tensor
) -> tuple[Tensor, ...]:
    """What a launch gives; `given` as `kernels.launch.INPUTS` has it."""
    groups = neighbors.groups
    assert groups is not None
    items = _items_of(neighbors, groups, q.shape[1])
    key = direction, call, q.shape, v.shape, v.dtype, groups.columns.shape, v.device
    run = _bound.get(key)
    if run is None:
        arrays = dict(zip((*ITEMS, *Groups._fields), (*items, *groups), strict=True))
        shapes = {name: tuple(x.shape) for name, x in arrays.items()}
        N, H, D = q.shape
        made = launched(direction, call, H, N, D, v.shape[2], dtype_of(v), processors(v.device), shapes)
        run = _bound.put(key, bind(made.prepared, v.device, (*INPUTS[direction], *arrays)))
    # As kernels see them: (1, H, N, size), and (1, H, N).
    results: tuple[Tensor, ...] = run(*[_read(x).unsqueeze(0).transpose(1, 2) for x in given], *items, *groups)
    return results


def _items_of(neighbors: Neighbors, groups: Groups, H: int) -> tuple[Tensor, ...]:
    """The items of lists for so many heads: kept as long as the lists."""
    kept = _items.of(neighbors)
    found = kept.get(H)
    if found is None:
        counts = groups.counts
        key = counts.shape, groups.room, H, counts.device
        run = _making_items.get(key)
        if run is None:
            described = fused_torch.launches().items_of(operand_of(counts), groups.room, H)
            run = _making_items.put(key, bind(described, counts.device, ("counts",)))
        with torch.inference_mode(False), torch.no_grad():
            found = run(counts)
        if not (counts.is_cuda and torch.cuda.is_current_stream_capturing()):  # else they are made at each replay
            kept.put(H, found)
    return found


def _read(x: Tensor) -> Tensor:
    """x if it is contiguous and at an address of whole lines, as kernels read it, else a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
