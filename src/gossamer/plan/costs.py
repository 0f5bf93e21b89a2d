"""The costs of work on a device, in seconds and bytes a second, from one file a device in `devices/`.

Each number has its source there, and `benchmarks/measure_costs.py` writes them. A GPU without a file of its compute
capability takes the nearest one: its seconds are wrong there, and only how they compare counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.plan.capability import GatherChoice
from gossamer.plan.problem import Problem

FOLDER = Path(__file__).parent / "devices"
HEADS = (64, 128, 256)  # head sizes are rounded up to these
BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
COMMAND = "benchmarks/measure_costs.py"  # which measures what names no other source
ANY, DEVICE = "any", "device"  # the costs of every implementation that has none of its own, and those of no type


class Cost(NamedTuple):
    """A number of a file."""

    of: str  # an implementation, its tile or gather layout; `ANY`; `DEVICE`
    cost: str
    value: float  # seconds; of `bytes`, bytes a second
    by: str = COMMAND  # or the row that measured it, or what it is derived from
    bits: int | None = None  # of a number of q, k and v
    direction: str = "forward"
    head: int = 128  # the larger of D and E


@dataclass(frozen=True)
class File:
    """The costs that were measured on one device.

    A cost without a number for a direction or a head size takes as much longer there than where it was measured as a
    pair of the implementation `scale` does, whose pairs were timed most often.
    """

    device: str
    sm: int | None  # compute capability of a GPU
    processors: int  # over which the costs of the whole device are spread; 1 on a CPU
    estimates: tuple[str, ...]  # the types for which `explain` gives seconds
    scale: dict[str, str]  # an implementation by bits
    costs: tuple[Cost, ...]

    @property
    def bits(self) -> list[int]:
        """The types that were measured, by their bits."""
        return [int(bits) for bits in self.scale]


def read(text: str) -> File:
    """The content of a file."""
    content = json.loads(text)
    del content["units"]
    content["costs"] = tuple(cost for row in content["costs"] for cost in _costs(**row))
    return File(**content | {"estimates": tuple(content["estimates"])})


def _costs(value: float | dict[str, dict[str, float]], **fields: Any) -> Iterator[Cost]:
    """The numbers of a line: one, or those of each direction and head size."""
    if not isinstance(value, dict):
        yield Cost(value=value, **fields)
        return
    for direction, heads in value.items():
        for head, one in heads.items():
            yield Cost(value=one, direction=direction, head=int(head), **fields)


@cache
def files() -> dict[str, File]:
    """Every device that was measured, by the name of its file."""
    return {path.stem: read(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


class TileCosts(NamedTuple):
    """A tile that an implementation walks, and what it takes."""

    block_q: int
    block_kv: int
    pair: float  # a pair of a full tile
    bits: float = 0.0  # what a pair takes more in a tile with a bit for each
    row: float = 0.0  # a query row: fetching and storing it, beginning and ending its loop
    step: float = 0.0  # a full tile in a list whose processor has nothing else to do; of a GPU


class GatherCosts(NamedTuple):
    """A gather layout that an implementation reads, and what it takes."""

    choice: GatherChoice
    pair: float  # an executed pair
    column: float  # a gathered column
    row: float  # a row of the output
    step: float  # of a list whose processor has nothing else to do; of a GPU


@dataclass(frozen=True, eq=False)
class DeviceCosts:
    """The costs of problems of one type, head size and direction, in seconds of the device or of one processor."""

    file: File
    bits: int
    direction: str
    head: int
    processors: int
    measured: bool  # on this kind of device and for this type: else the seconds say nothing to a user

    def of_device(self, cost: str) -> float:
        """`start`: beginning and ending a launch; `combine`: a second one that combines parts; `call`: of parts, with
        the host's; `views`: what making them must save; `bytes`: a second.
        """
        return next(row.value for row in self.file.costs if row.of == DEVICE and row.cost == cost)

    def tile(self, name: str, block_q: int, block_kv: int) -> TileCosts:
        """The cost of an implementation's tile; one that was not measured counts as fast as the file's `scale`."""
        names = f"{name} {block_q} x {block_kv}", name, ANY, self.file.scale[str(self.bits)]
        pair, bits, row = (self._whole(names, cost) for cost in ("pair", "bits", "row"))
        step = 0.0
        if self.file.sm is not None:
            step = self._one(names, "step") + block_q * block_kv * self._one(names, "step_pair")
        return TileCosts(block_q, block_kv, pair, bits, row, step)

    def has(self, name: str) -> bool:
        """Whether an implementation was measured."""
        return any(row.of == name or row.of.startswith(f"{name} ") for row in self.file.costs)

    def gather(self, name: str, choice: GatherChoice) -> GatherCosts:
        """The cost of a gather layout; the pairs of groups of one row are their columns.

        Those of `hopper` are taken to be as fast as Triton's.
        """
        names = f"{name} gather {choice.block_q}", *([f"triton gather {choice.block_q}"] * (name == "hopper"))
        pair = self._whole(names, "pair") if choice.block_q > 1 else 0.0
        step = self._one(names, "step") if self.file.sm is not None else 0.0
        return GatherCosts(choice, pair, self._whole(names, "column"), self._whole(names, "row"), step)

    @property
    def gathers_from(self) -> float:
        """The seconds a useful pair of the best tile from which on gather layouts are counted."""
        return self._whole((ANY,), "gathers_from")

    def _whole(self, names: Iterable[str], cost: str) -> float:
        return self._one(names, cost) * self.file.processors / self.processors

    def _one(self, names: Iterable[str], cost: str) -> float:
        measured = next((rows for name in names if (rows := self._rows(name, cost))), None)
        if measured is None:
            raise LookupError(
                f"no {cost!r} of {' or '.join(names)} for {self.bits} bits in the file of {self.file.device}"
            )
        row = _nearest(measured, self.direction, self.head)
        return row.value * self._scale(self.direction, self.head) / self._scale(row.direction, row.head)

    def _scale(self, direction: str, head: int) -> float:
        row = _nearest(self._rows(self.file.scale[str(self.bits)], "pair"), direction, head)
        return row.value * head / row.head

    def _rows(self, of: str, cost: str) -> list[Cost]:
        return [row for row in self.file.costs if (row.of, row.cost, row.bits) == (of, cost, self.bits)]


def _nearest(rows: list[Cost], direction: str, head: int) -> Cost:
    return min(rows, key=lambda row: (row.direction != direction, abs(log2(row.head / head))))


def costs_of(problem: Problem) -> DeviceCosts:
    """The costs of a problem's device, for its type, head size and direction."""
    p = problem
    return _costs_of(p.device, p.sm or 0, p.processors, p.dtype, p.backward, max(p.D, p.E))


@lru_cache(64)
def _costs_of(device: str, sm: int, processors: int, dtype: str, backward: bool, size: int) -> DeviceCosts:
    matching = [file for file in files().values() if (file.sm is None) == (device == "cpu")]
    file = min(matching, key=lambda file: abs((file.sm or 0) - sm))
    return DeviceCosts(
        file,
        bits=min(file.bits, key=lambda bits: abs(bits - BITS[dtype])),
        direction="backward" if backward else "forward",
        head=next((head for head in HEADS if size <= head), size),
        processors=processors if device == "cuda" else file.processors,
        measured=file.sm == sm and dtype in file.estimates and size <= max(HEADS),
    )
