"""What a call makes on its device, recorded once and written out as one function.

Structure, lists and work items follow from tensors by some tens of operations of torch and launches of Triton kernels,
which shapes, types and options choose, and no number that is on the device. So those of the first call are written
down, and its repetitions run them in order: no check, no choice, no walk through the code that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gossamer.kernels.relaunch import Launched, launching
from gossamer.torch.bind import written
from gossamer.torch.key import unseen
from gossamer.torch.memory import outlasting

Remade = Callable[..., tuple[Tensor, ...]]

# What gives the host numbers of a tensor without an operation that a mode of operations would see.
_READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})


class Recorded(NamedTuple):
    """What was made, and the function that makes it again from other tensors; None where the host read numbers."""

    made: tuple[Tensor, ...]
    again: Remade | None


class _Step(NamedTuple):
    """An operation or a launch."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: Any  # tensors in lists and tuples
    written: tuple[Tensor, ...]  # tensors that it writes
    launched: bool  # takes addresses


def record(make: Callable[[], Sequence[Tensor]], given: Sequence[Tensor], device: torch.device) -> Recorded:
    """What `make` gives, and how it is made again from tensors that are as those given: shapes, strides, types.

    Args:
        make: a function of the numbers in `given` alone. What else it reads is there for good.
        device: where all is made.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Recorded(tuple(make()), None)  # what it makes belongs to the graph
    seen = _Operations()
    with torch.inference_mode(False), torch.no_grad(), unseen(), launching(seen.launch), _Reads(seen), seen:
        made = tuple(make())
    tensors = tuple(x for x in made if isinstance(x, Tensor))
    return Recorded(made, None if seen.read else _function(seen.steps, given, tensors, device))


class _Operations(TorchDispatchMode):
    """Writes down the operations and launches of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        results = func(*args, **named)
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            # Integers as places give a shape that shapes say; truth values, and bytes, are counted for it.
            known = func is torch.ops.aten.index.Tensor
            self.read |= not known or any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args))
        into = [
            x for at, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in _tensors(args[at] if at < len(args) else named.get(argument.name))
        ]  # fmt: skip
        self.steps.append(_Step(func, args, named, results, tuple(into), False))
        return results

    def launch(self, launched: Launched) -> None:
        """Run a launch, which may write all its arrays, and write it down."""
        with _disable_current_modes(), _C.DisableTorchFunction():  # an interpreter's own operations are not the call's
            launched()
        arrays = tuple(_tensors(launched.arguments))
        self.steps.append(_Step(launched.run, launched.arguments, {}, (), arrays, launched.by_address))


class _Reads(TorchFunctionMode):
    """Says so where the host reads numbers of a tensor."""

    def __init__(self, seen: _Operations) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self.seen.read = True
        return func(*args, **(kwargs or {}))


def _function(steps: list[_Step], given: Sequence[Tensor], made: tuple[Tensor, ...], device: torch.device) -> Remade:
    """The function that runs the steps."""
    steps, same = _varying(steps, given)
    kept = _needed(steps, made)
    # Those that are the same every time are held for good: never in memory that belongs to a graph.
    outer: dict[int, Tensor] = {}
    produced = {id(x) for step in kept for x in _tensors(step.results)} | {id(x) for x in given}
    for x in (*(x for step in kept for x in _tensors((step.arguments, step.named))), *made):
        if id(x) not in produced:
            outer[id(x)] = x
    moved = {n: x for n, x in outer.items() if n in same}
    outer |= dict(zip(moved, outlasting(device, lambda: [x.clone() for x in moved.values()]), strict=True))
    writer = _Writer(outer)
    parameters = [f"given_{at}" for at in range(len(given))]
    writer.names = {id(x): name for x, name in zip(given[::-1], parameters[::-1], strict=True)}
    last = {id(x): at for at, step in enumerate(kept) for x in _tensors((step.arguments, step.named, step.results))}
    for x in (*given, *made):
        last.pop(id(x), None)
    for at, step in enumerate(kept):
        writer.write(step)
        dead = [writer.names[n] for n, end in last.items() if end == at and n in writer.names and n not in outer]
        if dead:
            writer.lines.append(f"{' = '.join(dead)} = None")
    writer.lines.append(f"return ({''.join(f'{writer.text(x)}, ' for x in made)})")
    writer.scope["below_autograd"] = _C._AutoDispatchBelowAutograd
    body = ["with below_autograd():", *(f"    {line}" for line in writer.lines)]
    return written(body, parameters, writer.scope, device)


def _varying(steps: list[_Step], given: Sequence[Tensor]) -> tuple[list[_Step], set[int]]:
    """The steps whose results follow from what is given, and the tensors that are the same every time, by identity."""
    memory = {_memory(x) for step in steps for x in step.written}
    follows, same, left = {id(x) for x in given}, set[int](), []
    for step in steps:
        results = list(_tensors(step.results))
        random = not step.launched and torch.Tag.nondeterministic_seeded in getattr(step.function, "tags", ())
        if (
            step.written or random or any(_memory(x) in memory for x in results)
            or any(id(x) in follows for x in _tensors((step.arguments, step.named)))
        ):  # fmt: skip
            follows.update(map(id, results))
            left.append(step)
        else:
            same.update(map(id, results))
    return left, same


def _needed(steps: list[_Step], made: tuple[Tensor, ...]) -> list[_Step]:
    """The steps that what is made needs."""
    wanted, kept = {id(x) for x in made}, []
    for step in reversed(steps):
        if step.written or any(id(x) in wanted for x in _tensors(step.results)):
            wanted.update(id(x) for x in _tensors((step.arguments, step.named)))
            kept.append(step)
    return kept[::-1]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(value: Any) -> Iterable[Tensor]:
    """The tensors in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class _Writer:
    """Writes steps as Python."""

    def __init__(self, outer: dict[int, Tensor]) -> None:
        self.outer = outer
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}  # what the function closes over
        self.names: dict[int, str] = {}  # of tensors, by identity

    def name(self, x: Tensor) -> str:
        """A new name of a tensor; one that is returned by a step that writes it keeps its own."""
        return self.names.setdefault(id(x), f"t{len(self.names)}")

    def constant(self, value: Any) -> str:
        """What the function closes over."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def text(self, value: Any) -> str:
        """The text of an argument."""
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.names[id(value)] = self.constant(self.outer[id(value)])
            return self.names[id(value)]
        if isinstance(value, (list, tuple)) and any(True for _ in _tensors(value)):
            inside = "".join(f"{self.text(x)}, " for x in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.constant(value)

    def write(self, step: _Step) -> None:
        """Append the line of a step."""
        if step.launched:
            given = [f"{self.text(x)}.data_ptr()" if isinstance(x, Tensor) else self.text(x) for x in step.arguments]
        else:
            given = [*map(self.text, step.arguments), *(f"{name}={self.text(x)}" for name, x in step.named.items())]
        call = f"{self.constant(step.function)}({', '.join(given)})"
        results = step.results
        if isinstance(results, Tensor):
            self.lines.append(f"{self.name(results)} = {call}")
        elif any(True for _ in _tensors(results)):
            names = "".join(f"{self.name(x) if isinstance(x, Tensor) else '_'}, " for x in results)
            self.lines.append(f"{names}= {call}")
        else:
            self.lines.append(call)
