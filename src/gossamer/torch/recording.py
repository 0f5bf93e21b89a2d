"""What a call makes on its device, recorded once and written out as one function.

Structure, lists and work items follow from tensors by some tens of operations of torch and launches of Triton kernels,
which shapes, types and options choose, and no number that is on the device. So those of the first call are written
down, and its repetitions run them in order: no check, no choice, no walk through the code that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gossamer.kernels.launch import Launched, launching
from gossamer.torch.bind import PART, written
from gossamer.torch.key import unseen
from gossamer.torch.memory import allocator, hold_for_graphs, outlasting, part_at

# What gives the host numbers of a tensor without an operation that a mode of operations would see.
_READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})

_aten = torch.ops.aten
_dispatch_modes = _C._len_torch_dispatch_stack
META = torch.device("meta")  # of what stands for memory that is allocated
_EMPTY = frozenset({_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default})


MOST_SHARED_BYTES = 2**20  # of an array that nobody wants later, and that waits for the others to be left


def _by_operation(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Tensor:
    """As `part_at`, by an operation, which modes see."""
    return x.as_strided(shape, strides, x.storage_offset() + start)


class Place(NamedTuple):
    """Where a result lies."""

    memory: int | Tensor  # which of those that the function gives; a tensor is the same every time
    shape: tuple[int, ...] | None = None  # of a part of it
    strides: tuple[int, ...] = ()
    start: int = 0  # behind its begin

    def of(self, memory: Sequence[Tensor], view: Callable[..., Tensor] = part_at) -> Tensor:
        """The result, by `view` where it is a part."""
        x = self.memory if isinstance(self.memory, Tensor) else memory[self.memory]
        return x if self.shape is None else view(x, self.shape, self.strides, self.start)


class Again:
    """Makes again what was recorded, of tensors that are like those of the first time.

    Its results are parts of fewer tensors: `run` makes these, and `parts` gives the results. Whoever passes results on,
    or saves them for a backward, does so with the few.
    """

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], places: tuple[Place, ...], at: tuple[int, ...]) -> None:
        """`at`: which of the `places` each result has; `run` has attributes `outer` and `held`, see `_function`."""
        self.run, self.places, self.at = run, places, at
        self.held: int = run.held  # type: ignore[attr-defined]
        whole = [x.memory for x in places if x.shape is None and type(x.memory) is int]
        self._as_made = len(whole) == len(places) and list(at) == whole  # the results are what `run` gives

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The results."""
        made = self.run(*given)
        return made if self._as_made else self.parts(made)

    def parts(self, memory: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, of what `run` gives."""
        if _dispatch_modes():  # one of them writes down what is done here, to do it again
            with _C._AutoDispatchBelowAutograd():
                found = [x.of(memory, _by_operation) for x in self.places]
        else:
            found = [x.of(memory) for x in self.places]
        return tuple([found[at] for at in self.at])


class Recorded(NamedTuple):
    """What was made, and what makes it again from other tensors; None where the host read numbers."""

    made: tuple[Tensor, ...]
    again: Again | None


class _Step(NamedTuple):
    """An operation or a launch."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: Any  # tensors in lists and tuples
    written: tuple[Tensor, ...]  # tensors that it writes
    launched: bool  # takes addresses


class _Part(NamedTuple):
    """A view, or a part of memory: of which tensor, and where it begins behind that one's begin, in elements."""

    whole: Tensor
    start: int

    def is_all(self, x: Tensor) -> bool:
        """Whether a view is of all of it, as it lies."""
        return self.start == 0 and x.shape == self.whole.shape and x.stride() == self.whole.stride()


def record(
    make: Callable[[], Sequence[Any]], given: Sequence[Tensor], device: torch.device, together: bool = False
) -> Recorded:  # fmt: skip
    """What `make` gives, and how it is made again from tensors that are as those given: shapes, strides, types.

    Args:
        make: a function of the numbers in `given` alone. What else it reads is there for good.
        device: where all is made.
        together: whether results are passed on by their memory, and are parts of as few tensors as may be.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Recorded(tuple(make()), None)  # what it makes belongs to the graph
    seen = _Operations()
    with torch.inference_mode(False), torch.no_grad(), unseen(), launching(seen.launch), _Reads(seen), seen:
        made = tuple(make())
    tensors = tuple(x for x in made if isinstance(x, Tensor))
    return Recorded(made, None if seen.read else _function(seen.steps, given, tensors, device, together))


class Repeats:
    """Makes something of tensors that are alike from call to call: it is recorded once, outside of captured graphs."""

    def __init__(self) -> None:
        self._again: Again | None = None
        self._refused = False

    def __call__(self, make: Callable[[], Sequence[Any]], given: Sequence[Tensor]) -> tuple[Any, ...]:
        """What `make` gives, a function of the tensors `given`."""
        first, *_ = given
        capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._again is not None:
            if capturing:
                hold_for_graphs(self._again)
            return self._again(*given)
        if self._refused:
            return tuple(make())
        made, self._again = record(make, given, first.device)
        self._refused = self._again is None and not capturing
        return made


class _Operations(TorchDispatchMode):
    """Writes down the operations and launches of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        with launching(None):  # those of an operator are its own
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


def _function(
    steps: list[_Step], given: Sequence[Tensor], made: tuple[Tensor, ...], device: torch.device, together: bool
) -> Again:  # fmt: skip
    """What runs the steps. The function has what it holds as its attribute `outer`, and how many bytes as `held`."""
    steps, same = _varying(steps, given)
    kept = _needed(steps, made)
    # Those that are the same every time are held for good: never in memory that belongs to a graph.
    outer: dict[int, Tensor] = {}
    produced = {id(x) for step in kept for x in _tensors(step.results)} | {id(x) for x in given}
    for x in (*(x for step in kept for x in _tensors((step.arguments, step.named))), *made):
        if id(x) not in produced:
            outer[id(x)] = x
    moved = {n: x for n, x in outer.items() if n in same}
    outer |= dict(zip(moved, outlasting(device, lambda: [*map(_copy, moved.values())]), strict=True))
    kept, parts = _parts(kept)
    kept, parts = _shared(kept, parts, made, device, together)
    writer = _Writer(outer, parts, given, device)
    parameters = [f"given_{at}" for at in range(len(given))]
    writer.names = {id(x): name for x, name in zip(given[::-1], parameters[::-1], strict=True)}
    places = {id(x): writer.place(x) for x in made}
    results = writer.results
    last: dict[int, int] = {}
    for at, step in enumerate(kept):
        for x in _tensors((step.arguments, step.named, step.results)):
            last[id(writer.named_by(x))] = last[id(writer.whole(x))] = at
    for x in (*given, *results):
        last.pop(id(x), None)
    for at, step in enumerate(kept):
        writer.write(step)
        dead = [writer.names[n] for n, end in last.items() if end == at and n in writer.names and n not in outer]
        if dead:
            writer.lines.append(f"{' = '.join(dead)} = None")
    text = "".join(f"{writer.text(x)}, " for x in results)
    writer.lines.append(f"return ({text})")
    function = written(writer.lines, parameters, writer.scope, device, writer.operations)
    function.held = sum(x.nbytes for x in moved.values())  # type: ignore[attr-defined]
    function.outer = tuple(outer.values())  # type: ignore[attr-defined]  # the text may have their addresses alone
    order = list(places)
    return Again(function, tuple(places.values()), tuple([order.index(id(x)) for x in made]))


def _parts(steps: list[_Step]) -> tuple[list[_Step], dict[int, _Part]]:
    """The steps that compute, and what the others make: views, which the function makes where a tensor is wanted.

    An operation costs the host several times as much as a view by strides, and a launch needs the address alone.
    """
    parts: dict[int, _Part] = {}
    left = []
    for step in steps:
        sources = {_memory(x): x for x in _tensors((step.arguments, step.named))}
        results = list(_tensors(step.results))
        of = [sources.get(_memory(x)) for x in results]
        view = bool(results) and not step.launched and not step.written
        if view and all(y is not None and y is not x and y.dtype is x.dtype for x, y in zip(results, of, strict=True)):
            for x, y in zip(results, of, strict=True):
                assert y is not None
                whole, start = _part_of(y, parts)
                parts[id(x)] = _Part(whole, start + int(x.storage_offset() - y.storage_offset()))
        else:
            left.append(step)
    return left, parts


def _part_of(x: Tensor, parts: dict[int, _Part]) -> _Part:
    """Where a tensor lies: in another one, or all of itself."""
    return parts.get(id(x), _Part(x, 0))


def _shared(
    steps: list[_Step], parts: dict[int, _Part], made: tuple[Tensor, ...], device: torch.device, together: bool
) -> tuple[list[_Step], dict[int, _Part]]:  # fmt: skip
    """The steps with fewer allocations: arrays become parts of one memory.

    Of results those of one type are, where they are `together`. Of the others those are whose addresses alone are
    wanted, and which are small: their memory is given back when all have been read.
    """
    results = {id(_part_of(x, parts).whole) for x in made}
    read = (_tensors((step.arguments, step.named)) for step in steps if not step.launched)
    seen = {id(_part_of(x, parts).whole) for tensors in read for x in tensors}
    groups: dict[torch.dtype | None, list[_Step]] = {}
    for step in steps:
        x = step.results
        if step.launched or step.function not in _EMPTY or not (x.is_contiguous() and x.device == device and x.numel()):
            continue
        if id(x) in results:
            if together:
                groups.setdefault(x.dtype, []).append(step)
        elif id(x) not in seen and x.nbytes <= MOST_SHARED_BYTES:
            groups.setdefault(None, []).append(step)
    first: list[_Step] = []
    moved: dict[int, _Part] = {}
    for dtype, group in groups.items():
        if len(group) > 1:
            ends = [0, *accumulate(-(-step.results.nbytes // PART) * PART for step in group)]
            memory = torch.empty(ends[-1] // (dtype or torch.uint8).itemsize, dtype=dtype or torch.uint8, device="meta")
            first.append(_Step(_aten.empty.memory_format, (), {}, memory, (), False))
            for step, start in zip(group, ends, strict=False):
                moved[id(step.results)] = _Part(memory, start // step.results.itemsize)
    for n, part in parts.items():
        into = moved.get(id(part.whole))
        if into is not None:
            parts[n] = _Part(into.whole, into.start + part.start)
    left = [step for step in steps if step.launched or id(step.results) not in moved]
    return first + left, parts | moved


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


def _copy(x: Tensor) -> Tensor:
    """A tensor of the same numbers and strides, which a clone of a view has not."""
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


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

    def __init__(
        self, outer: dict[int, Tensor], parts: dict[int, _Part], given: Sequence[Tensor], device: torch.device
    ) -> None:
        self.outer, self.parts, self.device = outer, parts, device
        self.given = {id(x) for x in given}
        self.results: list[Tensor] = []  # what the function gives
        self.lines: list[str] = []
        self.operations = False  # whether there are some
        self.scope: dict[str, Any] = {}  # what the function closes over
        self.names: dict[int, str] = {}  # of tensors, by identity
        self.addresses: dict[int, str] = {}  # likewise

    def whole(self, x: Tensor) -> Tensor:
        """The tensor of which one is a view; itself where it is none."""
        return _part_of(x, self.parts).whole

    def named_by(self, x: Tensor) -> Tensor:
        """The tensor whose name stands for one: that of which it is a view of all; else itself."""
        part = _part_of(x, self.parts)
        return part.whole if part.is_all(x) else x

    def place(self, x: Tensor) -> Place:
        """Where a result lies."""
        if id(x) in self.outer:
            return Place(self.outer[id(x)])
        whole, start = part = _part_of(x, self.parts)
        if id(whole) in self.outer:
            return Place(Place(0, tuple(x.shape), x.stride(), start).of([self.outer[id(whole)]]))
        if id(whole) in self.given:  # each may begin elsewhere in its memory
            whole, part = x, _Part(x, 0)
        at = next((at for at, y in enumerate(self.results) if y is whole), len(self.results))
        if at == len(self.results):
            self.results.append(whole)
        return Place(at) if part.is_all(x) else Place(at, tuple(x.shape), x.stride(), start)

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
            value = self.named_by(value)
            if id(value) not in self.names:
                self._make(value)
            return self.names[id(value)]
        if isinstance(value, (list, tuple)) and any(True for _ in _tensors(value)):
            inside = "".join(f"{self.text(x)}, " for x in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.constant(value)

    def _make(self, x: Tensor) -> None:
        if id(x) in self.outer:
            self.names[id(x)] = self.constant(self.outer[id(x)])
            return
        whole, start = self.parts[id(x)]
        base = self.text(whole)
        self.scope["part_at"] = part_at
        lie = f"{self.constant(tuple(x.shape))}, {self.constant(x.stride())}"
        self.lines.append(f"{self.name(x)} = part_at({base}, {lie}, {start})")

    def address(self, x: Tensor) -> str:
        """The text of an address, for which a view is not made."""
        if id(x) in self.outer:
            return self.constant(self.outer[id(x)].data_ptr())
        whole, start = _part_of(x, self.parts)
        if id(whole) in self.outer:
            return self.constant(self.outer[id(whole)].data_ptr() + start * x.itemsize)
        if id(whole) not in self.addresses:
            base = self.text(whole)
            self.addresses[id(whole)] = f"{base}_at"
            self.lines.append(f"{base}_at = {base}.data_ptr()")
        base = self.addresses[id(whole)]
        return f"{base} + {start * x.itemsize}" if start else base

    def write(self, step: _Step) -> None:
        """Append the line of a step."""
        results = step.results
        if step.launched:
            given = [self.address(x) if isinstance(x, Tensor) else self.text(x) for x in step.arguments]
        elif step.function in _EMPTY and results.is_contiguous() and results.device in (self.device, META):
            self.scope["empty"] = allocator(self.device)
            lie = f"{self.constant(tuple(results.shape))}, {self.constant(results.stride())}"
            self.lines.append(f"{self.name(results)} = empty({lie}, {self.constant(results.dtype)})")
            return
        else:
            self.operations = True
            given = [*map(self.text, step.arguments), *(f"{name}={self.text(x)}" for name, x in step.named.items())]
        call = f"{self.constant(step.function)}({', '.join(given)})"
        if isinstance(results, Tensor):
            self.lines.append(f"{self.name(results)} = {call}")
        elif any(True for _ in _tensors(results)):
            names = "".join(f"{self.name(x) if isinstance(x, Tensor) else '_'}, " for x in results)
            self.lines.append(f"{names}= {call}")
        else:
            self.lines.append(call)
