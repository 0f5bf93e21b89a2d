"""The kernels that sort particles, and those of sums, on tensors of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.launch import ALIGNMENT, Builder, Kernel, Operand, Prepared, operand_of
from gossamer.kernels.packages import has_triton
from gossamer.memo import Memo
from gossamer.particles.calls import CHANNELS, call_of
from gossamer.particles.cells import Cells, Runs
from gossamer.particles.geometry import EXPONENT, Sizes, times
from gossamer.particles.kernels import compiled
from gossamer.particles.kernels.radial.functions import digest
from gossamer.particles.laws import RadialKernel
from gossamer.torch.bind import bind
from gossamer.torch.key import recorded

TREE = ("clusters", "blocks", "groups")
RUNS = ("points", "order", *TREE, "known")  # what launches read of `Runs`
LEAST_CAPABILITY = (8, 0)  # that Triton's kernels are compiled for
FACTOR = 2.0 ** (EXPONENT - 2)  # of masses, which is multiplied at once
MOST_BOUND = 16  # launches that are kept for a law: for each term, and shapes of what particles bring

_sorting: Memo[Callable[[Tensor], Runs]] = Memo()
_sums: Memo[Sums] = Memo()


@cache
def launches() -> Any:
    """The module that describes launches of Triton's kernels; None without Triton."""
    return importlib.import_module("gossamer.particles.triton.launch") if has_triton() else None


@cache
def available(device: torch.device) -> bool:
    """Whether kernels of sums run on a device."""
    if not _able(device) or missing_packages():
        return False
    return compiled.compiles_for(*torch.cuda.get_device_capability(device))


@cache
def _able(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or launches() is None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def sorts(x: Tensor) -> bool:
    """Whether kernels sort these particles; a compiler, and modes of operators, see operations."""
    simple = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_neg()
    return simple and len(x) > 0 and not recorded() and _able(x.device)


def serves(cells: Cells) -> bool:
    """Whether kernels compute sums of these particles."""
    points = cells.runs.points
    return points.dtype == torch.float32 and cells.num_particles > 0 and available(points.device)


def sorting(x: Tensor, box: Sizes, unit: float) -> Callable[[Tensor], Runs]:
    """What gives the runs of such positions: `in_torch.runs_of` by kernels."""
    operand = operand_of(x)
    return _sorting.get_or_make((operand, box, unit, x.device), lambda: _sorter(operand, box, unit, x.device))


def _sorter(operand: Operand, box: Sizes, unit: float, device: torch.device) -> Callable[[Tensor], Runs]:
    run = bind(launches().cells(operand, box, unit), device, ("x",))

    def runs_of(x: Tensor) -> Runs:
        with torch.no_grad():
            order, points, low, high, *tree, known = run(x)
        return Runs(order, points, low, high, tuple(tree), known)

    return runs_of


class Sums:
    """The kernels of a law within a radius, in a box: sums, and their gradients."""

    def __init__(self, law: Any, radius: float, box: Sizes) -> None:
        self.law, self.radius, self.box = law, radius, box
        self._bound: Memo[Any] = Memo(MOST_BOUND)

    def weighted(self, runs: Runs, values: Tensor) -> Tensor:
        """The sums of `particles.terms.weighted`: (N,) or (N, C), as the values are."""
        sums = self._run("sum", runs, values)
        return torch.cat(sums, 1) if len(sums) != 1 else sums[0]

    def weighted_slopes(self, runs: Runs, g: Tensor, values: Tensor, both: bool = True) -> tuple[Tensor, Tensor]:
        """The gradients of these sums to positions, and with `both` to values."""
        d, slopes = len(runs.points), self._run("sum_slopes", runs, values, g, both)
        if len(slopes) == 1:
            (one,) = slopes
            return one[:, :d], one[:, 3:]
        return torch.stack([x[:, :d] for x in slopes]).sum(0), torch.cat([x[:, 3:] for x in slopes], 1)

    def force(self, runs: Runs, mass: Tensor, before: float = 1.0, after: float = 1.0) -> Tensor:
        """Forces; `before` and `after` are factors of masses and of sums, powers of two."""
        if not 1 / FACTOR <= before <= FACTOR:
            mass, before = times(mass, before), 1.0
        (force,), d = self._run("force", runs, mass, factors=(before, after)), len(runs.points)
        return force if d == 3 else force[:, :d].contiguous()

    def force_slopes(self, runs: Runs, g: Tensor, mass: Tensor, both: bool = True) -> tuple[Tensor, Tensor]:
        """The gradients of forces to positions, and with `both` to masses."""
        (slopes,) = self._run("force_slopes", runs, mass, g, both)
        return slopes[:, : len(runs.points)], slopes[:, 3:].reshape(-1) if both else slopes[:, :0]

    def count(self, runs: Runs) -> Tensor:
        """(N,): the number of particles within the radius of each, itself included."""
        (counts,) = self._run("count", runs)
        return counts[:, 0]

    def _run(
        self, term: str, runs: Runs, a: Tensor | None = None, b: Tensor | None = None, values: bool = True,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The sums of a term, some channels at a time; `a` and `b` (N,) or (N, C) are what particles bring."""
        given = {name: x.resolve_neg() for name, x in (("a", a), ("b", b)) if x is not None}
        arrays = runs.points, runs.order, *runs.tree, runs.known
        facts = [(x.shape, x.stride(), x.data_ptr() % ALIGNMENT == 0) for x in given.values()]
        key = (term, values, factors, runs.points.shape, runs.order.shape, runs.points.device, *facts)
        run = self._bound.get(key)
        if run is None:
            operands = {name: operand_of(x) for name, x in zip(RUNS, arrays, strict=True)}
            operands |= {name: operand_of(x) for name, x in given.items()}
            run = self._bound.put(
                key, bind(self._described(term, operands, values, *factors), arrays[0].device, tuple(operands))
            )
        with torch.no_grad():
            found: tuple[Tensor, ...] = run(*arrays, *given.values())
        return found

    def _described(
        self, term: str, operands: dict[str, Operand], values: bool, before: float = 1.0, after: float = 1.0
    ) -> Prepared:
        b, (d, *_) = Builder(operands), operands["points"].shape
        (N,), flat = operands["order"].shape, "a" in operands and len(operands["a"].shape) == 1
        names = [_columns(b, name) for name in ("a", "b") if name in operands]
        C = b[names[0]].shape[1] if names else 0
        step, outs = CHANNELS.get(term, 1), []
        for at in range(0, max(C, 1), step):
            channels = min(step, C - at) if term in CHANNELS else 1
            config, numbers = call_of(term, self.law, self.radius, self.box, channels, values, after)
            brought = [
                name if b[name].shape[1] <= step or term not in CHANNELS else _some(b, name, at, channels)
                for name in names
            ]  # fmt: skip
            records = launches().add_records(b, brought, config.width, f"{at}_", before)
            plain_sum = flat and term == "sum"
            out = b.array(f"{at}_out", "float32", (N,) if plain_sum else (N, config.outputs))
            outs.append(out)
            written = b.view(f"{at}_column", out, (N, 1), (1, 1)) if plain_sum else out
            b.step(
                Kernel(compiled.MODULE, "radial", (config,), "exchanged"), records, *TREE, "order", "known", written,
                *numbers,
            )  # fmt: skip
        assert d <= 3
        return b.done(*outs)


def _columns(b: Builder, name: str) -> str:
    """(N, C) of what has one number a particle, or C."""
    known = b[name]
    if len(known.shape) == 2:
        return name
    return b.view(f"{name}_columns", name, (*known.shape, 1), (*known.strides, 1))


def _some(b: Builder, name: str, at: int, channels: int) -> str:
    """Some columns."""
    (N, _), (rows, columns) = b[name].shape, b[name].strides
    return b.view(f"{name}_{at}", name, (N, channels), (rows, columns), at * columns)


def sums_of(law: Any, radius: float, box: Sizes) -> Sums:
    """The kernels of a law, whose launches are kept."""
    key = law, radius, box, isinstance(law, RadialKernel) and digest(law.function)
    return _sums.get_or_make(key, lambda: Sums(law, radius, box))


def count(cells: Cells) -> Tensor:
    """(N,): the number of particles within the radius of each, itself included."""
    return sums_of(None, cells.reach, cells.sizes).count(cells.runs)
