"""A launch bound to torch: one function of the tensors of a call, in which all that repetitions share is settled.

The function is written as Python, as a person would write it out: memory, views, kernels one after the other. Launches
that differ in numbers, shapes and lists alone share its text, which is compiled once.
"""

from __future__ import annotations

import importlib
import linecache
import re
from collections.abc import Callable, Iterable
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
    dtype_of,
    names_of,
)
from gossamer.plan.table import NAMES, load
from gossamer.torch.functions import FUNCTIONS
from gossamer.torch.memory import Workspace, lasting, stream_array, template

MOST_TEXTS = 512

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


def on_device(body: list[str], scope: dict[str, Any], device: torch.device) -> list[str]:
    """The lines of a function that run on a device, whichever is the current one."""
    if device.type != "cuda":
        return body
    # Not as a call of itself: a function that refers to itself, and all lists that it holds, wait for the
    # garbage collector, and those in the pool of a compiled CUDA graph would be found there.
    scope |= {"current": torch.cuda.current_device, "change_to": torch.cuda.set_device, "here": device.index}
    return [
        "before = current()",
        "if before != here: change_to(here)",
        "try:",
        *(f"    {line}" for line in body),
        "finally:",
        "    if before != here: change_to(before)",
    ]


def written(body: list[str], parameters: Iterable[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """The function of these lines, which closes over the names in `scope`."""
    lines = [f"def make({', '.join(scope)}):", f"    def call({', '.join(parameters)}):", *(f"        {x}" for x in body)]
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

    def __init__(self, prepared: Prepared, device: torch.device, made: bool) -> None:
        self.launch, self.device = prepared.launch, device
        self.layout = {} if made else prepared.layout
        self.made = tuple(prepared.layout) if made else ()
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}  # what the function closes over
        self.names: dict[str, str] = {}  # of arrays that exist at this point, in the text
        self.addresses: dict[str, str] = {}
        self.last: dict[str, int] = {}  # the last step that uses an array of a call

    def function(self, parameters: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
        self.names = {name: name for name in parameters} | {name: _plain(name) for name in self.made}
        given = tuple(self.names.values())
        self._find_last_uses()
        pooled = self._pooled()
        for at, step in enumerate(self.launch.steps):
            self._step(step)
            dead = [name for name, last in self.last.items() if last == at and name in self.names]
            if dead:
                self.lines.append("; ".join(f"{self.names[name]} = None" for name in dead))
        results = "".join(f"{self.array(name)}, " for name in self.launch.results)
        if pooled:
            self.lines.append("if workspace is not None: leave(workspace)")
        self.lines.append(f"return ({results})")
        body = self.lines
        if any(isinstance(view, View) for view in self.launch.views.values()):
            self.scope["below_autograd"] = _C._AutoDispatchBelowAutograd
            body = ["with below_autograd():", *(f"    {line}" for line in body)]
        call = written(on_device(body, self.scope, self.device), given, self.scope)
        # Of an array that is passed by its address alone the text has no name: the function itself keeps it alive.
        call.layout = tuple(self.layout.values())  # type: ignore[attr-defined]
        return call

    def _find_last_uses(self) -> None:
        """Where the memory of what no result is may be given back: after the step that reads it last."""
        for at, step in enumerate(self.launch.steps):
            for base in names_of(step.arguments):
                while base in self.launch.views:
                    self.last[base] = at
                    base = self.launch.views[base].of
                self.last[base] = at
        own = {name for name, array in self.launch.arrays.items() if array.lifetime == "call"}
        made = {made.name for step in self.launch.steps for made in step.returns}
        keep = set(self.launch.results)
        self.last = {
            name: at for name, at in self.last.items()
            if name not in keep and (name in own or name in made or name in self.launch.views)
        }  # fmt: skip

    def _pooled(self) -> bool:
        """Take the float32 workspaces of a call from the memory that waits on its stream, where they are small."""
        if self.device.type != "cuda":
            return False
        arrays = {
            name: array for name, array in self.launch.arrays.items()
            if array.lifetime == "call" and array.dtype == "float32" and array.fill is None
            and name not in self.launch.results
        }  # fmt: skip
        workspace = Workspace(self.device, *(array.shape for array in arrays.values()))
        if not arrays or not workspace.small:
            return False
        self.scope |= {"take": workspace.take, "leave": workspace.leave}
        self.lines.append(f"workspace, ({''.join(f'{_plain(name)}, ' for name in arrays)}) = take()")
        for name in arrays:
            self.names[name] = _plain(name)
            self.last.pop(name, None)
        return True

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
        view = self.launch.views.get(name)
        if isinstance(view, View):
            base = self.array(view.of)
            array = self.launch.arrays.get(view.of)
            if array is not None and array.dtype != view.dtype:
                self.lines.append(
                    f"{_plain(name)} = {base}.view({self._constant(getattr(torch, view.dtype), 'dtype')})"
                )
                base = _plain(name)
            shape, strides = self._constant(view.shape, "shape"), self._constant(view.strides, "strides")
            offset = f"{base}.storage_offset() + {self._constant(view.offset, 'offset')}"
            self.lines.append(f"{_plain(name)} = {base}.as_strided({shape}, {strides}, {offset})")
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
            if array.strides is None:
                like = self._constant(template(self.device, dtype, array.shape), "like")
                self.scope |= {"empty_like": torch.empty_like, "contiguous": torch.contiguous_format}
                made = f"empty_like({like}, memory_format=contiguous)"
            else:
                shape, strides = self._constant(array.shape, "shape"), self._constant(array.strides, "strides")
                options = f"dtype={self._constant(dtype, 'dtype')}, device={self._constant(self.device, 'device')}"
                self.scope["empty_strided"] = torch.empty_strided
                made = f"empty_strided({shape}, {strides}, {options})"
            if array.fill is not None:
                made += f".fill_({self._constant(array.fill)})"
        self.lines.append(f"{_plain(name)} = {made}")
        return _plain(name)

    def _address(self, name: str) -> str:
        """The text of an array's address; that of a view needs no view."""
        if name not in self.addresses:
            view = self.launch.views.get(name)
            if isinstance(view, Descriptor):
                return self.array(name)
            if name in self.layout:
                array = self.layout[name]
                self.addresses[name] = self._constant(array.data_ptr(), f"{name}_at")
            elif view is not None and name not in self.names:
                offset = view.offset * BYTES[view.dtype]
                self.addresses[name] = f"({self._address(view.of)} + {self._constant(offset)})"
            else:
                self.lines.append(f"{_plain(name)}_at = {self.array(name)}.data_ptr()")
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
