"""The kernels of sums on tensors of torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.hopper import missing_packages
from gossamer.particles.calls import CHANNELS, call_of
from gossamer.particles.cells import Cells
from gossamer.particles.kernels.compiled import compiles_for, radial
from gossamer.particles.kernels.radial.configurations import FAR


@cache
def available(device: torch.device) -> bool:
    """Whether kernels run on a device."""
    if device.type != "cuda" or torch.version.hip or missing_packages():
        return False
    return compiles_for(*torch.cuda.get_device_capability(device))


def serves(cells: Cells) -> bool:
    """Whether kernels compute sums of these particles."""
    points = cells.runs.points
    return points.dtype == torch.float32 and cells.num_particles > 0 and available(points.device)


def weighted(cells: Cells, law: Any, values: Tensor) -> Tensor:
    """The sums of `particles.terms.weighted`."""
    sums = [_run("sum", law, cells, cells.reach, part) for part in values.split(CHANNELS["sum"], 1)]
    return torch.cat(sums, 1) if len(sums) != 1 else sums.pop()


def weighted_slopes(cells: Cells, law: Any, g: Tensor, values: Tensor, both: bool = True) -> Tensor:
    """The gradients of these sums to positions, and with `both` to values."""
    most, (d, _, _) = CHANNELS["sum_slopes"], cells.runs.points.shape
    parts = zip(values.split(most, 1), g.split(most, 1), strict=True)
    slopes = [_run("sum_slopes", law, cells, cells.reach, torch.cat(part, 1), both) for part in parts]
    if len(slopes) == 1:
        return slopes.pop()
    return torch.cat([torch.stack([x[:, :d] for x in slopes]).sum(0), *(x[:, d:] for x in slopes)], 1)


def force(cells: Cells, law: Any, radius: float, mass: Tensor) -> Tensor:
    return _run("force", law, cells, radius, mass[:, None])


def force_slopes(cells: Cells, law: Any, radius: float, g: Tensor, mass: Tensor, both: bool = True) -> Tensor:
    return _run("force_slopes", law, cells, radius, torch.cat([mass[:, None], g], 1), both)


def count(cells: Cells) -> Tensor:
    """(N,): the number of particles within the radius of each, itself included."""
    return _run("count", None, cells, cells.reach, cells.runs.points.new_zeros(cells.num_particles, 0))[:, 0]


def _run(term: str, law: Any, cells: Cells, radius: float, payload: Tensor, values: bool = True) -> Tensor:
    runs, (N, n) = cells.runs, payload.shape
    config, numbers = call_of(term, law, radius, cells.sizes, {"sum": n, "sum_slopes": n // 2}.get(term, 1), values)
    d, T, run = runs.points.shape
    with torch.no_grad():
        particles = payload.new_zeros(T * run, config.width)
        particles[:, :d] = runs.points.reshape(d, -1).T
        particles[N:, 0] = FAR
        particles[:N, 3 : 3 + n] = payload[runs.order]
        out = payload.new_empty(N, config.outputs)
        with torch.cuda.device(payload.device):
            radial(config)(particles, *runs.tree, runs.order, out, *numbers)
    if term in ("force_slopes", "sum_slopes"):
        return out if d == 3 else torch.cat([out[:, :d], out[:, 3:]], 1)
    return out[:, :d] if term == "force" else out
