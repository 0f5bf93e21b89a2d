"""Steps that run Triton kernels: described with every argument by its name, bound past Triton's own look-up.

That look-up takes several times as long as a small kernel. All that a kernel is compiled for is in the key of its step,
so a bound step passes addresses and numbers alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from gossamer.kernels.launch import ALIGNMENT, BYTES, Argument, Builder, Constant, Group, Kernel, Operand


class Pointer(NamedTuple):
    """The facts of an array for which Triton compiles."""

    dtype: str
    aligned: bool


class Blocks(NamedTuple):
    """The facts of a tensor descriptor for which Triton compiles."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Programs(NamedTuple):
    """The launch of a kernel: the key of its step."""

    grid: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    signature: tuple[
        Any, ...
    ]  # of each argument a Pointer, Blocks, the number that it is or PLAIN, or a tuple of these


# What is compiled for in place of integers in a tuple that a kernel names in `do_not_specialize`: Triton compiles for
# integers that are 1 or divisible by 16, and leaves that out for whole parameters alone.
PLAIN, PLAIN_WIDE = 7, 2**40 + 7  # of 32 bits, and of 64: strides of large tensors


def plain_like(n: int) -> int:
    """What is compiled for in place of an integer: of as many bits."""
    return PLAIN if -(2**31) <= n < 2**31 else PLAIN_WIDE


def power(n: int, least: int = 1, most: int | None = None) -> int:
    """The power of two that holds n, within these."""
    found = max(least, 1 << (n - 1).bit_length())
    return found if most is None else min(most, found)


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a head size."""
    return power(size, 16)


class Strides(NamedTuple):
    """The strides of (B, heads, rows), as one parameter of a kernel."""

    b: int
    h: int
    n: int


def strides(x: Operand) -> Strides:
    """The strides of (B, heads, rows)."""
    return Strides(*x.strides[:3])


def step(
    b: Builder, implementation: str, name: str, function: Any, grid: tuple[int, ...], values: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Add a launch of a Triton kernel, if it has any programs.

    Args:
        name: by which the implementation finds the function again.
        values: every argument by its name in the kernel: the name of an array, a constant, or a NamedTuple of them,
            which the kernel takes as one parameter. Triton compiles for each of its fields as for a parameter.
        options: of the launch (num_warps and others).
    """
    if not all(grid):
        return
    assert set(values) == set(parameters(function)), set(values) ^ set(parameters(function))
    given = [values[parameter] for parameter in parameters(function)]
    plain = getattr(function, "do_not_specialize", None) or ()
    signature = tuple(_specialization(b, values[name], name in plain) for name in parameters(function))
    key = Programs(grid, tuple(options.items()), signature)
    passes: Any = "arrays" if knobs.runtime.interpret else "addresses"
    b.step(Kernel(implementation, name, key, passes), *(_argument(b, x) for x in given))


def step_of_form(
    b: Builder, implementation: str, name: str, function: Any, grid: tuple[int, ...], values: Mapping[str, Any],
    options: Mapping[str, Any], form: Any = None,
) -> None:  # fmt: skip
    """Add a launch of a Triton kernel by `step`: it takes what it has of the values, by name.

    Args:
        values: of arguments, and of the fields of those that are a NamedTuple.
        form: the NamedTuple of what the kernel is compiled for, which it takes as FORM.
    """
    own = {
        parameter: filled(kind or form, values) if parameter not in values and (kind or form) else values[parameter]
        for parameter, kind in parameters(function).items()
    }
    step(b, implementation, name, function, grid, own, options)


def filled(kind: Any, values: Mapping[str, Any]) -> Any:
    """A NamedTuple of the values of its fields' names."""
    return kind(*(values[field] for field in kind._fields))


def _specialization(b: Builder, x: Any, plain: bool) -> Any:
    """The facts of an argument that Triton compiles for; of one that is `plain`, no values of integers in a tuple."""
    if isinstance(x, tuple):
        return _like(x, (plain_like(y) if plain and type(y) is int else _specialization(b, y, plain) for y in x))
    if not isinstance(x, str) or x not in b:
        return x
    block = b.block_of(x)
    known = b[x]
    if block is not None:
        return Blocks(known.dtype, known.shape, known.strides, block)
    return Pointer(known.dtype, known.aligned)


def _argument(b: Builder, x: Any) -> Argument:
    """An argument of a step; tuples in which no array is are constants."""
    if not isinstance(x, tuple):
        return x if isinstance(x, str) and x in b else Constant(x)
    members = tuple(_argument(b, member) for member in x)
    return Constant(x) if all(isinstance(member, Constant) for member in members) else Group(members)


def _like(kind: Any, members: Iterable[Any]) -> Any:
    """A tuple of other members, with the names of its fields."""
    return type(kind)(*members) if hasattr(kind, "_fields") else tuple(members)


def without_values(function: Any, signature: Iterable[Any]) -> tuple[Any, ...]:
    """A signature whose tuples that a kernel names in `do_not_specialize`, of integers alone, have no values."""
    plain = getattr(function, "do_not_specialize", None) or ()
    named = zip(parameters(function), signature, strict=True)
    return tuple(_like(x, map(plain_like, x)) if name in plain and isinstance(x, tuple) else x for name, x in named)


@lru_cache
def parameters(function: Any) -> dict[str, Any]:
    """A kernel's arguments in order, and the NamedTuple that its annotation names for one that is a tuple."""
    hints = get_type_hints(function.fn)
    kinds = {name: hints.get(name) for name in inspect.signature(function.fn).parameters}
    return {name: kind if hasattr(kind, "_fields") else None for name, kind in kinds.items()}


class _Type(str):
    """Stands for the type of an array's elements."""

    @property
    def itemsize(self) -> int:
        return BYTES[self]


class _Memory:
    """Stands for an array while a kernel is compiled."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        self.dtype = _Type(dtype)
        self.address = 0 if aligned else ALIGNMENT // 2

    def data_ptr(self) -> int:
        return self.address


def _stand_in(argument: Any) -> Any:
    if isinstance(argument, Pointer):
        return _Memory(argument.dtype, argument.aligned)
    if isinstance(argument, Blocks):
        dtype, *lists = argument
        return TensorDescriptor(_Memory(dtype, True), *map(list, lists))
    return _like(argument, map(_stand_in, argument)) if isinstance(argument, tuple) else argument


def _stand_ins(function: Any, signature: Iterable[Any]) -> list[Any]:
    """A stand-in for each argument of a signature; parameters whose names are in capitals are constants."""
    named = zip(parameters(function), signature, strict=False)
    return [constants(x) if name.isupper() else _stand_in(x) for name, x in named]


def constants(form: Any) -> Any:
    """A constant of a kernel; each field of a tuple is one, which Triton before 3.9 does not see by itself."""
    if knobs.runtime.interpret or not isinstance(form, tuple):
        return form
    return _like(form, (constants(x) if isinstance(x, tuple) else tl.constexpr(x) for x in form))


def _with_names(kind: Any, argument: Any) -> Any:
    """An argument whose tuples have the fields of `kind`, which the interpreter wants."""
    if not isinstance(kind, tuple) or isinstance(kind, Pointer | Blocks):
        return argument
    return _like(kind, map(_with_names, kind, argument))


def compiled_for(function: Any, signature: Iterable[Any], options: Mapping[str, Any], sm: int) -> Any:
    """Triton's compiled kernel for a GPU of compute capability `sm` that need not be there, of a step's signature."""
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    given = {"debug": False, **options}
    bind = create_function_from_signature(function.signature, function.params, backend)
    arguments, specialization, rest = bind(*_stand_ins(function, signature), **given)
    parsed, types, constants, attributes = function._pack_args(backend, given, arguments, specialization, rest)
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def launcher(function: Any, programs: Programs) -> Callable[..., None]:
    """The function that runs a kernel on the current stream, with all its arguments in order."""
    grid, options = programs.grid, dict(programs.options)
    if knobs.runtime.interpret:
        return lambda *arguments: function[grid](*map(_with_names, programs.signature, arguments), **options)
    compiled = function.warmup(*_stand_ins(function, programs.signature), grid=grid, **options)
    x, y, z, *_ = *grid, 1, 1
    whole = x, y, z  # as a compiled kernel wants it
    hooked = compiled[whole]  # loads the kernel
    run, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata
    import torch

    device, stream = torch.cuda.current_device(), torch._C._cuda_getCurrentRawStream
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook

    def quick(*arguments: Any) -> None:
        if enter.calls or leave.calls:  # of a profiler
            hooked(*arguments)
        else:
            run(*whole, stream(device), handle, metadata, None, None, None, *arguments)

    return quick
