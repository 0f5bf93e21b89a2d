"""A kernel as a framework calls it whose arrays are contiguous alone, and whose functions return what they write (JAX).

Arrays of any strides are passed as flat memory and, among the numbers, as an offset, a shape and strides. What is only
read comes first, with what is kept (`cute.parameters`); then all results, of which those that are kept are the same
memory again; then the numbers: of each such array in order, and those of the kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor

from gossamer.cute.entry import Entry, compiled
from gossamer.cute.parameters import Parameter

ALIGNMENT = 16


def compile_flat(entry: Entry, parameters: tuple[Parameter, ...]) -> Any:
    """The compiled kernel in this form; the roles of its parameters may differ from its own."""
    flat = Flat(entry, parameters)
    return compiled(flat, *flat.arguments)


class Flat:
    """A kernel in this form, and the types of its arguments."""

    def __init__(self, entry: Entry, parameters: tuple[Parameter, ...]) -> None:
        self.kernel = entry.kernel
        arrays, self.numbers = entry.arguments[: len(parameters)], entry.arguments[len(parameters) :]
        self.parameters = [(p, x) for p, x in zip(parameters, arrays, strict=True) if x is not None]
        self.missing = [at for at, x in enumerate(arrays) if x is None]
        given = [(p, x) for p, x in self.parameters if p.role != "made"]
        results = [(p, x) for p, x in self.parameters if p.role != "read"]
        self.places = {p.name: at for at, (p, _) in enumerate(given + results)}  # of what is kept, the result
        self.arguments = [_memory(p, x) for p, x in given + results]
        for p, x in self.parameters:
            if p.rank:
                self.arguments += [Int64(0), *[Int32(1)] * p.rank, *[Int64(1)] * len(_strides(x))]
        self.arguments += self.numbers

    @cute.jit
    def __call__(self, *given):
        self.run(given)

    def run(self, given: tuple[Any, ...]) -> None:
        numbers = iter(given[len(self.parameters) + sum(p.role == "kept" for p, _ in self.parameters) : -1])
        arrays = [_view(p, x, given[self.places[p.name]], numbers) for p, x in self.parameters]
        for at in self.missing:
            arrays.insert(at, None)
        self.kernel(*arrays, *numbers, given[-1])


def _memory(parameter: Parameter, fake: Any) -> Any:
    """The type of an array as it is passed."""
    if not parameter.rank:
        return fake
    return make_fake_compact_tensor(fake.element_type, (cute.sym_int64(),), stride_order=(0,), assumed_align=ALIGNMENT)


def _strides(fake: Any) -> list[Any]:
    """The strides of an array that are not known when its kernel is compiled."""
    return [stride for stride in fake.stride if not isinstance(stride, int)]


def _view(parameter: Parameter, fake: Any, given: Any, numbers: Any) -> Any:
    """An array from its memory and the next numbers."""
    if not parameter.rank:
        return given
    offset, shape = next(numbers), tuple(next(numbers) for _ in range(parameter.rank))
    strides = tuple(
        stride if isinstance(stride, int) else cute.assume(next(numbers), divby=stride.divisibility)
        for stride in fake.stride
    )
    start = given.iterator + offset
    return cute.make_tensor(start.align(fake._assumed_align), cute.make_layout(shape, stride=strides))
