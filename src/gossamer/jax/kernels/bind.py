"""A launch as operations of JAX: each kernel is a call of its target, whose results are the memory that it writes.

Memory that a launch names is an array of JAX that steps replace, one after the other: what a kernel writes first is
a result of its call alone, what it adds to is given to it and is its result in the same place. XLA has all memory, of
workspaces too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gossamer.cute.parameters import Parameter, Role
from gossamer.jax.kernels import targets
from gossamer.jax.kernels.functions import FUNCTIONS, WRITES
from gossamer.jax.kernels.views import Place, read, written
from gossamer.kernels.launch import EDGE, Constant, Group, Launch, Operand, Step, View, compact, names_of


def run(
    launch: Launch, operands: Mapping[str, Operand], layout: Mapping[str, Array], given: Mapping[str, Array]
) -> dict[str, Array]:
    """What a launch writes and makes, by name: flat where `operands` or the launch says how it lies.

    Args:
        operands: of all that the caller gives, as the launch was prepared for; results among them are made here.
        layout: the arrays that the launch names so.
        given: the caller's arrays, each in the memory that its operand describes.
    """
    bound = _Run(launch, operands, layout, given)
    for step in launch.steps:
        bound.step(step)
    return bound.memory


class _Run:
    """The memory of one call, and what is known of it."""

    def __init__(
        self, launch: Launch, operands: Mapping[str, Operand], layout: Mapping[str, Array], given: Mapping[str, Array]
    ) -> None:  # fmt: skip
        self.launch, self.layout = launch, layout
        self.known = dict(operands)
        self.memory: dict[str, Array] = dict(given)
        for name, array in launch.arrays.items():
            self.known[name] = Operand(array.dtype, array.shape, array.strides or compact(array.shape))
        for name, x in layout.items():
            self.known[name] = Operand(str(x.dtype), x.shape, compact(x.shape))

    def step(self, step: Step) -> None:
        if step.kernel.implementation == EDGE:
            self._function(step)
        elif step.kernel.implementation == targets.TRITON:
            self._triton(step)
        else:
            self._kernel(step)

    def _place(self, name: str) -> tuple[str, Place]:
        """The memory that an array is in, and where."""
        view = self.launch.views.get(name)
        if view is None:
            known = self.known[name]
            return name, Place(known.shape, known.strides)
        assert isinstance(view, View), f"{name} is a descriptor, of which these kernels take none"
        base, place = self._place(view.of)
        return base, Place(view.shape, view.strides, place.offset + view.offset)

    def _filled(self, base: str) -> Array | None:
        """The memory as it is now; what it is filled with before any step; None for what nothing has written."""
        if base in self.layout:
            return self.layout[base]
        if base in self.memory:
            return self.memory[base]
        array = self.launch.arrays.get(base)
        if array is None or array.fill is None:
            return None
        return jnp.full(array.shape, array.fill, jnp.dtype(array.dtype))

    def _value(self, name: str) -> Array:
        """An array in its own shape."""
        base, place = self._place(name)
        memory, known = self._filled(base), self.known[base]
        if memory is None:
            return jnp.zeros(place.shape, jnp.dtype(known.dtype))
        return read(memory, place)

    def _function(self, step: Step) -> None:
        name, key = step.kernel.name, step.kernel.key
        given = [self._value(x) if isinstance(x, str) else None for x in step.arguments]
        made = FUNCTIONS[name](*key, *given)
        if step.returns:
            every = made if isinstance(made, tuple) else (made,)
            for returned, x in zip(step.returns, every, strict=True):
                self.memory[returned.name] = x
                self.known[returned.name] = Operand(str(x.dtype), x.shape, compact(x.shape))
            return
        targets_of = step.arguments[-WRITES[name] :]
        for target, value in zip(targets_of, made, strict=True):
            assert isinstance(target, str)
            base, place = self._place(target)
            memory = self._filled(base)
            if memory is None:
                memory = jnp.zeros(_size(self.known[base]), value.dtype)
            self.memory[base] = written(memory, place, value)

    def _kernel(self, step: Step) -> None:
        kernel = step.kernel
        of_kernel = targets.arrays(kernel)
        given: list[Array] = []
        made: list[tuple[str, jax.ShapeDtypeStruct]] = []
        places: dict[int, int] = {}
        numbers: list[Any] = []
        roles: list[Role] = []
        for parameter, name in zip(of_kernel, step.arguments, strict=False):
            assert not isinstance(name, Group), "of kernels in Triton alone"
            if isinstance(name, Constant):  # an argument that this one does not read
                roles.append(parameter.role)
                continue
            base, place = self._place(name)
            role, memory = self._role(parameter, base)
            roles.append(role)
            if parameter.rank:
                numbers += _numbers(parameter, place)
            if role != "made":
                assert memory is not None, f"{name} is read before anything has written it"
                memory = memory.reshape(-1) if parameter.rank else self._whole(name, memory, place)
                given.append(memory)
            if role != "read":
                if role == "kept":
                    places[len(given) - 1] = len(made)
                made.append((base, self._struct(base, bool(parameter.rank))))
        rest = [x.value for x in step.arguments[len(of_kernel) :] if isinstance(x, Constant)]
        numbers += [np.float32(x) if isinstance(x, float) else np.int32(x) for x in rest]  # type: ignore[arg-type]
        name = targets.target(kernel, roles, len(numbers))
        call = jax.ffi.ffi_call(name, [struct for _, struct in made], input_output_aliases=places)
        found = call(*given, **{targets.number(at): x for at, x in enumerate(numbers)})
        for (base, _), x in zip(made, found, strict=True):
            array = self.launch.arrays.get(base)
            if array is None or array.lifetime != "launch":  # what stands for an argument stays as it is
                self.memory[base] = x

    def _triton(self, step: Step) -> None:
        """A kernel in Triton: of the launch's own memory it may write all that it is given."""
        bases = {name: self._place(name) for name in names_of(step.arguments)}
        assert not any(place.offset for _, place in bases.values()), "a kernel in Triton is given whole arrays"
        every = dict.fromkeys(base for base, _ in bases.values())
        written = [base for base in every if base in self.launch.arrays]
        there = {base: self._filled(base) for base in every}
        given = [base for base in every if there[base] is not None]
        assert set(every) == {*given, *written}, f"{set(every) - {*given, *written}} are read before they are written"
        places = {base: at for at, base in enumerate(given)}
        aliases = {places[base]: at for at, base in enumerate(written) if base in places}
        places |= {base: len(given) + at for at, base in enumerate(written) if base not in places}
        pointers = {name: places[base] for name, (base, _) in bases.items()}
        call = targets.triton(step, pointers, len(given) + len(written))
        run = jax.ffi.ffi_call(call.target, [self._struct(x, True) for x in written], input_output_aliases=aliases)
        results = run(*(there[base].reshape(-1) for base in given), **call.attributes)  # type: ignore[union-attr]
        self.memory |= dict(zip(written, results, strict=True))

    def _role(self, parameter: Parameter, base: str) -> tuple[Role, Array | None]:
        """What an array is to this call of a kernel, and its memory before."""
        if parameter.role == "read":
            return "read", self._filled(base)
        array = self.launch.arrays.get(base)
        if parameter.role == "made" and array is not None and array.lifetime == "launch":
            return "made", None
        memory = self._filled(base)
        return ("made" if memory is None else "kept"), memory

    def _whole(self, name: str, memory: Array, place: Place) -> Array:
        """A contiguous array as a kernel takes it, in its own shape."""
        if name in self.launch.views:
            return read(memory, place)
        return memory.reshape(place.shape)

    def _struct(self, base: str, flat: bool) -> jax.ShapeDtypeStruct:
        known = self.known[base]
        shape = (_size(known),) if flat else known.shape
        return jax.ShapeDtypeStruct(shape, jnp.dtype(known.dtype))


def _size(known: Operand) -> int:
    """Elements of contiguous memory, in whatever order its dimensions lie."""
    return int(np.prod(known.shape, dtype=np.int64))


def _numbers(parameter: Parameter, place: Place) -> list[Any]:
    """The offset, the shape and the strides of an array, by which a kernel reads it: see `cute.flat`."""
    assert len(place.shape) == parameter.rank, f"{parameter.name} has {parameter.rank} dimensions, got {place.shape}"
    strides = place.strides if parameter.rank == 3 else place.strides[:-1]  # 16-bit rows are contiguous
    return [np.int64(place.offset), *map(np.int32, place.shape), *map(np.int64, strides)]
