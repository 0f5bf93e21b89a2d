"""Lists of neighbours by kernels on tensors of torch, and attention over them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.gpu import processors
from gossamer.kernels.launch import ALIGNMENT, Direction, dtype_of
from gossamer.memo import Memos
from gossamer.particles import fused_torch
from gossamer.particles import groups as group_lists
from gossamer.particles.attend import Attending
from gossamer.particles.cells import Cells
from gossamer.particles.geometry import times
from gossamer.particles.groups import (
    SM,
    SMALLEST,
    Groups,
    Launched,
    Most,
    call_of,
    items_of,
    launched,
    named,
    shapes_of,
    type_of,
)
from gossamer.particles.kernels.compiled import lists
from gossamer.particles.kernels.neighbors.configurations import ROWS, STEP
from gossamer.particles.kernels.radial.configurations import FAR
from gossamer.particles.neighbors import Neighbors
from gossamer.torch.bind import bind

_items: Memos[dict[str, Tensor]] = Memos()  # the items of lists, by heads


def serves(cells: Cells) -> bool:
    """Whether kernels list the neighbours of these particles."""
    if not fused_torch.serves(cells):
        return False
    major, minor = torch.cuda.get_device_capability(cells.runs.points.device)
    return 10 * major + minor == SM


def lists_of(cells: Cells, capacity: int, room: int) -> tuple[Tensor, Tensor, Groups]:
    """places, sizes and groups."""
    runs, N = cells.runs, cells.num_particles
    d, T, run = runs.points.shape
    config, numbers = call_of(cells.reach, cells.sizes)
    with torch.no_grad(), torch.cuda.device(runs.points.device):
        particles = runs.points.new_zeros(T * run, 4)
        particles[:, :d] = runs.points.reshape(d, -1).T
        particles[N:, 0] = FAR
        made = {
            name: torch.empty(shape, dtype=getattr(torch, type_of(name)), device=particles.device)
            for name, shape in shapes_of(N, capacity, room).items()
        }  # fmt: skip
        lists(config)(particles, *runs.tree, *made.values(), *numbers)
        columns = made["columns"]
        keys = torch.where(columns < 0, -1, runs.order[columns.clamp(0, N - 1)])
        places, sizes, over = made.pop("places"), made.pop("sizes"), made["counts"] > room
        place = torch.arange(ROWS * len(over), dtype=torch.int32, device=particles.device)
        known = torch.isfinite(runs.points).all()
        particles = named(runs.order, sizes > capacity, over, known, place, torch)
    return places, sizes, Groups(**made, keys=keys, particles=particles)


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
    out, lse = _run("forward", call, neighbors, {"q": q, "k": k, "v": v})
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def backward(call: Attending, neighbors: Neighbors, **given: Tensor) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dx of what `kernels.launch.INPUTS` names, by particles; None for what has no such term."""
    if call.scale is None:
        v = given["v"]
        given["q"] = given["k"] = v.new_zeros(*v.shape[:2], SMALLEST)
    *gradients, rows, columns = _run("backward", call, neighbors, given)
    dq, dk, dv = (x[0].transpose(0, 1) for x in gradients)
    dx = None
    if call.bandwidth is not None:
        _, d = neighbors.cells.x.shape
        dx = times((rows.sum(0) + columns.sum(0))[:, :d], call.pull)
    return (None, None, dv, dx) if call.scale is None else (dq, dk, dv, dx)


def _run(direction: Direction, call: Attending, neighbors: Neighbors, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    groups = neighbors.groups
    assert groups is not None
    N, H, D = given["q"].shape
    *_, E = given["v"].shape
    n = H * len(groups.counts)
    items = _items.of(neighbors).get_or_make(
        H, lambda: items_of(groups, torch.arange(n, dtype=torch.int32, device=groups.counts.device), torch)
    )
    arrays = {**groups._asdict(), **items}
    shapes = tuple((name, tuple(x.shape)) for name, x in arrays.items())
    bound, names = _bound(direction, call, (H, N, D, E), dtype_of(given["v"]), shapes, given["v"].device)
    seen = {name: _read(x).transpose(0, 1)[None] for name, x in given.items()}
    results: tuple[Tensor, ...] = bound(*(({**seen, **arrays})[name] for name in names))
    return results


def _read(x: Tensor) -> Tensor:
    """x if it is contiguous and at an address of whole lines, as kernels read it, else a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


@lru_cache(maxsize=256)
def _bound(
    direction: Direction, call: Attending, sizes: tuple[int, int, int, int], dtype: str, shapes: Any,
    device: torch.device,
) -> Any:  # fmt: skip
    made: Launched = launched(direction, call, *sizes, dtype, processors(device), dict(shapes))
    return bind(made.prepared, device, made.given), made.given
