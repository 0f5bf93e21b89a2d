"""A launch bound to torch: one function of the tensors of a call, in which all that repetitions share is settled.

The function is written as Python, as a person would write it out: memory, views, kernels one after the other. Launches
that differ in numbers, shapes and lists alone share its text, which is compiled once.
"""

from __future__ import annotations

import importlib
import linecache
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import count
from typing import Any, NoReturn, cast
from weakref import finalize

import torch
from torch import _C, Tensor

from gossamer.kernels.contract import Implementation
from gossamer.kernels.launch import (
    BYTES,
    EDGE,
    Array,
    Constant,
    Descriptor,
    Group,
    Kernel,
    Prepared,
    Step,
    View,
    compact,
    dtype_of,
    names_of,
)
from gossamer.plan.table import NAMES, load
from gossamer.torch.functions import FUNCTIONS
from gossamer.torch.memory import MOST_WAITING_BYTES, Workspace, allocator, lasting, part_at, stream_array

MOST_TEXTS = 512
SHARED = "shared memory"  # the name of what the small arrays of a call are parts of
PART = 256  # bytes, of which parts begin at multiples

_numbers = count(1)


def bind(
    prepared: Prepared, device: torch.device, parameters: tuple[str, ...], made: bool = False
) -> Callable[..., tuple[Tensor, ...]]:
    """The function that runs a launch, from its `parameters` in order to its results; some may be of no use to it.

    Args:
        made: each call makes the arrays of the layout, which follow the parameters in its order.
    """
    if device.type != "cuda":
        return _Writer(prepared, device, made).function(parameters)
    with torch.cuda.device(device):  # for which kernels are compiled
        return _Writer(prepared, device, made).function(parameters)


def written(
    body: list[str], parameters: Iterable[str], scope: dict[str, Any], device: torch.device, operations: bool
) -> Callable[..., Any]:  # fmt: skip
    """The function of these lines, which closes over the names in `scope` and runs on its device from any other.

    Args:
        operations: whether some lines are operations, which autograd would see.
    """
    if operations:
        scope |= {"below_autograd": _C._AutoDispatchBelowAutograd}
        body = ["with below_autograd():", *(f"    {line}" for line in body)]
    if device.type == "cuda":
        # Not as a call of itself: a function that refers to itself, and all lists that it holds, wait for the
        # garbage collector, and those in the pool of a compiled CUDA graph would be found there.
        # Past `torch.cuda.current_device`, which makes sure that CUDA is there: tensors of it are.
        scope |= {"current": torch._C._cuda_getDevice, "change_to": torch.cuda.set_device, "here": device.index}
        body = [
            "before = current()",
            "if before != here: change_to(here)",
            "try:",
            *(f"    {line}" for line in body),
            "finally:",
            "    if before != here: change_to(before)",
        ]
    call = f"    def call({', '.join(parameters)}):", *(f"        {line}" for line in body)
    lines = [f"def make({', '.join(scope)}):", *call]
    return _compiled("\n".join([*lines, "    return call", ""]))(**scope)


def kernel_of(kernel: Kernel) -> Callable[..., Any]:
    """The function that a step runs."""
    if kernel.implementation == EDGE:
        return FUNCTIONS[kernel.name](*kernel.key)
    if kernel.implementation in NAMES:
        return cast(Implementation, load(kernel.implementation)).kernel(kernel.name, *kernel.key)
    return cast(Callable[..., Any], getattr(importlib.import_module(kernel.implementation), kernel.name)(*kernel.key))


class _Writer:
    """Writes the function of one launch."""

    def __init__(self, prepared: Prepared, device: torch.device, made: bool = False) -> None:
        self.launch, self.device = prepared.launch, device
        self.layout = {} if made else prepared.layout
        self.made = tuple(prepared.layout) if made else ()
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}  # what the function closes over
        self.names: dict[str, str] = {}  # of arrays that exist at this point, in the text
        self.addresses: dict[str, str] = {}
        self.last: dict[str, int] = {}  # the last step that uses an array of a call
        self.views = dict(self.launch.views)
        self.shares = device.type == "cuda"  # whether small arrays are parts of one memory, which waits on a stream
        self.parts: dict[str, View] = {}  # tensors of it, by their names in the text
        self.views_of_type = False  # whether the text makes a view of another type, by an operation

    def function(self, parameters: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
        self.names = {name: name for name in parameters} | {name: _plain(name) for name in self.made}
        given = tuple(self.names.values())
        self._find_last_uses()
        shared = self._share() if self.shares else 0
        for at, step in enumerate(self.launch.steps):
            self._step(step)
            dead = [name for name, last in self.last.items() if last == at and name in self.names]
            if dead:
                self.lines.append("; ".join(f"{self.names[name]} = None" for name in dead))
        results = "".join(f"{self.array(name)}, " for name in self.launch.results)
        if shared:
            workspace = Workspace(self.device, shared, self.parts.values())
            self.scope |= {"take": workspace.take, "leave": workspace.leave}
            parts = "".join(f"{name}, " for name in self.parts)
            self.lines.insert(0, f"waiting, {self.names[SHARED]}, ({parts}) = take()")
            self.lines.append("if waiting is not None: leave(waiting)")
        self.lines.append(f"return ({results})")
        call = written(self.lines, given, self.scope, self.device, operations=self.views_of_type)
        # Of an array that is passed by its address alone the text has no name: the function itself keeps it alive.
        call.layout = tuple(self.layout.values())  # type: ignore[attr-defined]
        return call

    def _find_last_uses(self) -> None:
        """Where the memory of what no result is may be given back: after the step that reads it last."""
        for at, step in enumerate(self.launch.steps):
            for name in names_of(step.arguments):
                self.last |= dict.fromkeys(self._with_bases(name), at)
        own = {name for name, array in self.launch.arrays.items() if array.lifetime == "call"}
        made = {made.name for step in self.launch.steps for made in step.returns}
        keep = {base for name in self.launch.results for base in self._with_bases(name)}
        self.last = {
            name: at for name, at in self.last.items()
            if name not in keep and (name in own or name in made or name in self.views)
        }  # fmt: skip

    def _with_bases(self, name: str) -> Iterator[str]:
        """An array, and those that it is a view of."""
        yield name
        while name in self.views:
            name = self.views[name].of
            yield name

    def _share(self) -> int:
        """Make the arrays of a call that are no results parts of one memory, the smallest first; its size in bytes.

        To allocate a small array costs the host as much as a large one. Those of one fill lie together, and are filled
        at once.
        """
        arrays = {name: array for name, array in self.launch.arrays.items() if name in self.last}
        sizes = {name: -(-max(BYTES[x.dtype] * math.prod(x.shape), 1) // PART) * PART for name, x in arrays.items()}
        fills: dict[tuple[str, float | None], list[str]] = {}
        size = 0
        for name in sorted(arrays, key=sizes.__getitem__):
            if size + sizes[name] > MOST_WAITING_BYTES:
                break
            size += sizes[name]
            array = arrays[name]
            fills.setdefault((array.dtype if array.fill else "int32", array.fill), []).append(name)
        if fills:
            self.names[SHARED] = _plain(SHARED)
        at = 0
        for (dtype, fill), names in fills.items():
            first = at
            for name in names:
                array = arrays[name]
                offset = at // BYTES[array.dtype]
                self.views[name] = View(SHARED, array.dtype, array.shape, compact(array.shape), offset)
                at += sizes[name]
            if fill is not None:
                n = BYTES[dtype]
                name = f"filled_{len(self.parts)}"
                self.parts[name] = View(SHARED, dtype, ((at - first) // n,), (1,), first // n)
                self.lines.append(f"{name}.fill_({self._constant(fill)})")
        return size

    def _part(self, view: View) -> View | None:
        """A view as one of the shared memory; None where it is of another array."""
        if view.of == SHARED:
            return view
        base = self.views.get(view.of)
        part = self._part(base) if isinstance(base, View) else None
        if part is None:
            return None
        begin = part.offset * BYTES[part.dtype] // BYTES[view.dtype]
        return view._replace(of=SHARED, offset=begin + view.offset)

    def _constant(self, value: Any, name: str = "c") -> str:
        """What the function closes over."""
        name = f"{_plain(name)}_{len(self.scope)}"
        self.scope[name] = value
        return name

    def array(self, name: str) -> str:
        """The text of a tensor, which is made before if it must be."""
        if name not in self.names:
            self.names[name] = self._made(name)
        return self.names[name]

    def _made(self, name: str) -> str:
        if name in self.layout:
            return self._constant(self.layout[name], name)
        view = self.views.get(name)
        if isinstance(view, View):
            part = self._part(view)
            if part is not None:
                self.parts[_plain(name)] = part
                self.last.pop(name, None)
                return _plain(name)
            base = self.array(view.of)
            array = self.launch.arrays.get(view.of)
            if array is not None and array.dtype != view.dtype:
                self.lines.append(
                    f"{_plain(name)} = {base}.view({self._constant(getattr(torch, view.dtype), 'dtype')})"
                )
                base = _plain(name)
                self.views_of_type = True
            self.scope["part_at"] = part_at
            lie = self._constant(view.shape, "shape"), self._constant(view.strides, "strides")
            offset = self._constant(view.offset, "offset")
            self.lines.append(f"{_plain(name)} = part_at({base}, {', '.join(lie)}, {offset})")
            return _plain(name)
        if isinstance(view, Descriptor):
            from triton.tools.tensor_descriptor import TensorDescriptor

            self.scope["TensorDescriptor"] = TensorDescriptor
            rest = ", ".join(self._constant(list(x)) for x in (view.shape, view.strides, view.block))
            self.lines.append(f"{_plain(name)} = TensorDescriptor({self.array(view.of)}, {rest})")
            return _plain(name)
        return self._memory(name, self.launch.arrays[name])

    def _memory(self, name: str, array: Array) -> str:
        dtype: torch.dtype = getattr(torch, array.dtype)
        if array.lifetime == "launch":
            return self._constant(lasting(self.device, dtype, array.shape, array.fill or 0.0), name)
        if array.lifetime == "stream":
            made = f"{self._constant(stream_array(dtype, array.shape, array.fill or 0.0, self.device), 'of_stream')}()"
        else:
            self.scope["empty"] = allocator(self.device)
            strides = compact(array.shape) if array.strides is None else array.strides
            lie = self._constant(array.shape, "shape"), self._constant(strides, "strides")
            made = f"empty({', '.join(lie)}, {self._constant(dtype, 'dtype')})"
            if array.fill is not None:
                made += f".fill_({self._constant(array.fill)})"
        self.lines.append(f"{_plain(name)} = {made}")
        return _plain(name)

    def _address(self, name: str) -> str:
        """The text of an array's address; that of a view needs no view."""
        if name not in self.addresses:
            view = self.views.get(name)
            if isinstance(view, Descriptor):
                return self.array(name)
            if name in self.layout:
                array = self.layout[name]
                self.addresses[name] = self._constant(array.data_ptr(), f"{name}_at")
            else:
                if view is None:
                    address = f"{self.array(name)}.data_ptr()"
                else:
                    address = f"{self._address(view.of)} + {self._constant(view.offset * BYTES[view.dtype])}"
                self.lines.append(f"{_plain(name)}_at = {address}")
                self.addresses[name] = f"{_plain(name)}_at"
        return self.addresses[name]

    def _exchanged(self, name: str) -> str:
        """The text of an array as a kernel of the tvm-ffi convention takes it: lasting ones are converted once."""
        array = self.launch.arrays.get(name)
        if name in self.layout or (array is not None and array.lifetime == "launch"):
            key = f"{name} exchanged"
            if key not in self.names:
                from tvm_ffi import from_dlpack

                self.names[key] = self._constant(from_dlpack(self.scope[self.array(name)]), name)
            return self.names[key]
        return self.array(name)

    def _group(self, group: Group, form: Callable[[str], str]) -> str:
        """The text of a tuple; one in which nothing changes is made once."""
        texts = [
            form(x) if isinstance(x, str) else
            self._constant(x.value) if isinstance(x, Constant) else self._group(x, form)
            for x in group.members
        ]  # fmt: skip
        if all(name in self.layout for name in names_of((group,))):
            return self._constant(tuple(self.scope[text] for text in texts), "group")
        return f"({', '.join(texts)},)"

    def _step(self, step: Step) -> None:
        form = {"arrays": self.array, "addresses": self._address, "exchanged": self._exchanged}[step.kernel.passes]
        arrays = [at for at, x in enumerate(step.arguments) if not isinstance(x, Constant)]
        first = max(arrays, default=-1) + 1  # of the constants at the end, which are passed together
        given = [
            form(x) if isinstance(x, str) else
            self._constant(x.value) if isinstance(x, Constant) else self._group(x, form)
            for x in step.arguments[:first]
        ]  # fmt: skip
        rest = tuple(x.value for x in step.arguments[first:] if isinstance(x, Constant))
        if rest:
            given.append(f"*{self._constant(rest, 'rest')}")
        run = f"{self._constant(kernel_of(step.kernel), f'run_{step.kernel.name}')}({', '.join(given)})"
        if not step.returns:
            self.lines.append(run)
            return
        self.names |= {made.name: _plain(made.name) for made in step.returns}
        names = ", ".join(_plain(made.name) for made in step.returns)
        if step.kernel.implementation == EDGE:
            self.lines.append(f"{names} = {run}")
            return
        # What an implementation returns would reach the user as it is.
        wrong = self._constant(partial(_wrong, step), "wrong")
        self.lines.append(f"found = {run}")
        self.lines.append(f"if type(found) is not tuple or len(found) != {len(step.returns)}: {wrong}(found)")
        self.lines.append(f"{names}, = found")
        for made in step.returns:
            if made.like is not None:
                name, shape = _plain(made.name), self._constant(made.like.shape, "shape")
                dtype = self._constant(getattr(torch, made.like.dtype), "dtype")
                wrong_if = f"{name}.shape != {shape} or {name}.dtype is not {dtype} or not {name}.is_contiguous()"
                self.lines.append(f"if {wrong_if}: {wrong}(found)")


def _wrong(step: Step, found: Any) -> NoReturn:
    """Say what a function of an implementation must return."""
    kernel = step.kernel
    likes = ", ".join(
        made.name if made.like is None else f"{made.name} {made.like.shape} {made.like.dtype}" for made in step.returns
    )
    got = ", ".join(
        f"{tuple(x.shape)} {dtype_of(x)}{' not contiguous' * (not x.is_contiguous())}"
        if isinstance(x, Tensor) else type(x).__name__
        for x in (found if isinstance(found, tuple) else (found,))
    )  # fmt: skip
    raise AssertionError(
        f"{kernel.name} of {kernel.implementation} must return contiguous tensors, in a tuple: {likes}; got {got}"
    )


def _plain(name: str) -> str:
    """A name as Python allows it."""
    return re.sub(r"\W|^(?=\d)", "_", name)


@lru_cache(MOST_TEXTS)
def _compiled(text: str) -> Callable[..., Callable[..., tuple[Tensor, ...]]]:
    """The function that a text defines; tracebacks show its lines."""
    file = f"<launch {next(_numbers)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    found: dict[str, Any] = {}
    exec(compile(text, file, "exec"), found)
    make = found["make"]
    finalize(make, linecache.cache.pop, file, None).atexit = False
    return make
