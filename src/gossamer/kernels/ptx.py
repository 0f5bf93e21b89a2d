"""A step that runs a Triton kernel, as PTX for a launcher that passes arrays first and numbers behind them.

Triton's own launcher passes arguments in the order of the function. XLA gives a kernel its operands, then its results;
one array may stand for several arguments, and a result may lie where an operand does. So the parameters of the entry
are declared anew: each array once, in the order that is asked for, then numbers. The code reads them by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from gossamer.kernels.launch import Constant, Group, Step
from gossamer.kernels.relaunch import Programs, compiled_for

ENTRY = re.compile(r"\.entry\s+(?P<name>\w+)\((?P<parameters>[^)]*)\)")
POINTER = ".param .u64"
# The version of the text: the oldest that knows a GPU (Triton writes the newest), for whatever compiles it.
VERSIONS = ((120, 87), (100, 86), (90, 80), (80, 76))
SCRATCH = 2  # pointers that Triton adds at most, to memory that these kernels do not ask for


class Number(NamedTuple):
    """A number that a kernel is given."""

    value: float | int
    type: str  # as Triton calls it: i32, i64, u64, fp32


class Call(NamedTuple):
    """A launch of a kernel."""

    name: str
    text: str  # PTX
    warps: int  # of a program
    shared: int  # bytes of shared memory
    grid: tuple[int, int, int]
    numbers: tuple[Number, ...]


def call_of(function: Any, step: Step, sm: int, places: Mapping[str, int], pointers: int) -> Call:
    """The launch of a step on a GPU of compute capability `sm`.

    Args:
        function: of Triton, that the step names.
        places: of each of the step's arrays which of the `pointers` is its address; the others are not read.
    """
    programs = Programs(*step.kernel.key)
    compiled = _compiled(function, programs.signature, programs.options, sm)
    metadata = compiled.metadata
    assert not (metadata.global_scratch_size or metadata.profile_scratch_size), f"{metadata.name} asks for memory"
    types = compiled.src.signature.values()
    given = [leaf for x, kind in zip(step.arguments, types, strict=True) for leaf in _leaves(x, kind)]
    order = tuple(None if isinstance(x, Number) else places[x] for x in given)
    text, scratch = _arranged(compiled.asm["ptx"], order, pointers)
    numbers = [x for x in given if isinstance(x, Number)] + [Number(0, "u64")] * scratch
    x, y, z, *_ = *programs.grid, 1, 1
    return Call(metadata.name, text, metadata.num_warps, metadata.shared, (x, y, z), tuple(numbers))


@lru_cache(512)
def _compiled(function: Any, signature: tuple[Any, ...], options: tuple[tuple[str, Any], ...], sm: int) -> Any:
    version = next(version for least, version in VERSIONS if sm >= least)
    return compiled_for(function, signature, {**dict(options), "ptx_version": version}, sm)


def _leaves(argument: Any, kind: Any) -> Iterator[str | Number]:
    """The names of arrays and the numbers that a kernel is given for an argument of a step, of a type."""
    x: Any = argument.value if isinstance(argument, Constant) else argument
    if kind == "constexpr":
        return
    if isinstance(kind, tuple):
        for member in zip(x.members if isinstance(x, Group) else x, kind, strict=True):
            yield from _leaves(*member)
    elif isinstance(x, str):
        yield x
    else:
        yield Number(x, kind)


@lru_cache(512)
def _arranged(text: str, places: tuple[int | None, ...], pointers: int) -> tuple[str, int]:
    """PTX with other parameters, and how many pointers Triton added behind them.

    Args:
        places: of each parameter the pointer that is passed for it; None: a number.
        pointers: how many are passed.
    """
    entry = ENTRY.search(text)
    assert entry is not None, "PTX without an entry"
    name, declared = entry["name"], [line.strip() for line in entry["parameters"].split(",")]
    scratch = len(declared) - len(places)
    assert 0 <= scratch <= SCRATCH and all(x.startswith(POINTER) for x in declared[len(places) :]), declared
    numbers = [at for at, place in enumerate(places) if place is None] + [*range(len(places), len(declared))]
    order = {at: pointers + n for n, at in enumerate(numbers)}
    order |= {at: place for at, place in enumerate(places) if place is not None}
    kinds = [POINTER] * pointers + [kind for kind, _, _ in (declared[at].rpartition(" ") for at in numbers)]
    parameters = ",\n".join(f"\t{kind} {name}_given_{at}" for at, kind in enumerate(kinds))
    read = re.compile(rf"\b{name}_param_(?P<at>\d+)\b")
    body = read.sub(lambda m: f"{name}_given_{order[int(m['at'])]}", text[entry.end() :])
    return f"{text[: entry.start()]}.entry {name}(\n{parameters}\n){body}", scratch
