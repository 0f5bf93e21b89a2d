"""A call of an implementation as data: its kernels in order, their arguments by name, and the memory that they need.

`Implementation.prepare` describes one direction of a call; an edge (`gossamer.torch`) binds the description to a
function of its own arrays. The order of a kernel's arguments is written once, where its step is described. Nothing
here imports a framework, and a `Launch` holds no array: those of the layout lie beside it, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import local
from typing import Any, Literal, NamedTuple

Direction = Literal["forward", "backward"]
RESULTS: dict[Direction, tuple[str, ...]] = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
INPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("q", "k", "v"), "backward": ("dout", "dlse", "q", "k", "v", "out", "lse"),
}  # fmt: skip
Shape = tuple[int, ...]
ALIGNMENT = 16  # bytes: what wide loads, and TMA, want of addresses
EDGE = "edge"  # the implementation of steps that every edge offers itself, such as `Builder.copy`
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1,
         "uint8": 1, "bool": 1}  # fmt: skip


def compute_dtype(dtype: str) -> str:
    """The type of the arithmetic and of lse, by name; `kernels.row_formulas` has it for a tensor's dtype."""
    return "float64" if dtype == "float64" else "float32"


class Vectors(NamedTuple):
    """The tensors among the score terms, in the order of a call; None for those that it has not."""

    key_lengths: Any = None  # (B,)
    sink_logits: Any = None  # (H,)
    alibi_slopes: Any = None  # (H,) or (B, H)


VECTORS, NO_VECTORS = Vectors._fields, Vectors()


class Operand(NamedTuple):
    """The type, shape, strides and alignment of an array, without the array."""

    dtype: str
    shape: Shape
    strides: Shape  # in elements
    aligned: bool = True  # whether its address is a multiple of ALIGNMENT

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other, in the order of its dimensions."""
        return all(
            n == 1 or s == want for n, s, want in zip(self.shape, self.strides, compact(self.shape), strict=True)
        )


class Array(NamedTuple):
    """Memory that a launch allocates: a result, or a workspace that one kernel writes and another reads."""

    dtype: str
    shape: Shape
    fill: float | None = None  # what it holds at first; None: anything
    # "call": allocated for each call. "stream": one for each CUDA stream, filled once; every kernel restores that value
    # before it ends, and a captured graph has one of its own. "launch": allocated once, and only read by kernels.
    lifetime: Literal["call", "stream", "launch"] = "call"
    strides: Shape | None = None  # of a result alone; None: contiguous


class View(NamedTuple):
    """A strided view of another array."""

    of: str
    dtype: str
    shape: Shape
    strides: Shape
    offset: int = 0  # in elements, from the first one of `of`


class Descriptor(NamedTuple):
    """A tensor descriptor of an array, which loads blocks of it by TMA."""

    of: str
    shape: Shape
    strides: Shape
    block: Shape


class Kernel(NamedTuple):
    """Names the function that a step calls.

    It is `kernel(name, *key)` of an implementation of the table. For an operation, `implementation` is the path of a
    module, and the function is `getattr(module, name)(*key)`.
    """

    implementation: str  # a name of the table, EDGE, or an operation's module
    name: str
    key: tuple[Any, ...] = ()  # hashable
    # How arrays are passed. "arrays": arrays of the framework. "exchanged": the same, but those that outlive the call
    # (of the layout, or of lifetime "launch") are converted once, by DLPack. "addresses": raw pointers.
    passes: Literal["arrays", "exchanged", "addresses"] = "arrays"


class Constant(NamedTuple):
    """A constant among the arguments of a step; a plain string there names an array."""

    value: float | int | bool | str | tuple[Any, ...] | None


class Group(NamedTuple):
    """Arguments of a step that a kernel takes as one tuple, arrays among them."""

    members: tuple[Argument, ...]


Argument = str | Constant | Group


class Returned(NamedTuple):
    """An array that a function step returns."""

    name: str
    like: Operand | None  # the dtype and shape that it must have; None: not checked


class Step(NamedTuple):
    """One kernel with its arguments in the order of its call, and what it returns if it makes arrays."""

    kernel: Kernel
    arguments: tuple[Argument, ...]
    returns: tuple[Returned, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One direction of a call, as data."""

    arguments: tuple[str, ...]  # arrays that the caller gives, in order
    results: tuple[str, ...]  # arrays that it gets, in order
    steps: tuple[Step, ...]
    arrays: Mapping[str, Array]
    views: Mapping[str, View | Descriptor]
    layout: tuple[str, ...]  # arrays of the layout, which `Prepared.layout` holds


class Prepared(NamedTuple):
    """A launch, and the arrays of the layout that it names."""

    launch: Launch
    layout: Mapping[str, Any]


class Launched(NamedTuple):
    """A launch that code of a framework made itself, not by a `Launch`."""

    run: Callable[..., None]
    arguments: tuple[Any, ...]  # arrays and numbers
    by_address: bool  # `run` takes addresses of arrays

    def __call__(self) -> None:
        """Launch it."""
        given = [x.data_ptr() if self.by_address and hasattr(x, "data_ptr") else x for x in self.arguments]
        self.run(*given)

    def start(self) -> None:
        """Launch it, or leave that to the function which `launching` named."""
        through = observer()
        if through is None:
            self()
        else:
            through(self)


_thread = local()


@contextmanager
def launching(through: Callable[[Launched], None] | None) -> Iterator[None]:
    """Within it each `Launched` of this thread is left to a function, or, of None, to none."""
    before = observer()
    _thread.through = through
    try:
        yield
    finally:
        _thread.through = before


def observer() -> Callable[[Launched], None] | None:
    """The function that each `Launched` of this thread is left to now."""
    found: Callable[[Launched], None] | None = getattr(_thread, "through", None)
    return found


def compact(shape: Iterable[int]) -> Shape:
    """The strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass
class Builder:
    """Describes a launch step by step.

    Args:
        operands: what the caller gives, by name, in the order of the call; a result among them is written where it is.
    """

    operands: Mapping[str, Operand]
    _known: dict[str, Operand] = field(default_factory=dict)
    _arrays: dict[str, Array] = field(default_factory=dict)
    _views: dict[str, View | Descriptor] = field(default_factory=dict)
    _layout: dict[str, Any] = field(default_factory=dict)
    _steps: list[Step] = field(default_factory=list)
    _last: list[tuple[str, str]] = field(default_factory=list)  # copies that are made when all else is done

    def __getitem__(self, name: str) -> Operand:
        """The operand of an array."""
        return self._known[name] if name in self._known else self.operands[name]

    def __contains__(self, name: str) -> bool:
        return name in self._known or name in self.operands

    def array(
        self, name: str, dtype: str, shape: Shape, fill: float | None = None,
        lifetime: Literal["call", "stream", "launch"] = "call",
    ) -> str:  # fmt: skip
        """Memory of a launch, contiguous."""
        assert name not in self, name
        self._arrays[name] = Array(dtype, tuple(shape), fill, lifetime)
        self._known[name] = Operand(dtype, tuple(shape), compact(shape))
        return name

    def result(
        self, name: str, dtype: str, shape: Shape, *, in_place: bool = True, columns: int | None = None,
        made: str | None = None,
    ) -> str:  # fmt: skip
        """The name of the array that a kernel writes for a result: itself, or a buffer that is copied to it last.

        Args:
            in_place: whether kernels can write directly into a result that the caller passes.
            columns: how many columns a row has in memory, padding included; None: as the result.
            made: the dtype that the kernel writes; None: that of the result.
        """
        whole = columns in (None, shape[-1]) and made in (None, dtype)
        if name in self.operands:
            if in_place:
                return name
        else:
            self.array(name, dtype, shape)
            if whole:
                return name
        memory = self.padded(f"{name}_made", made or dtype, shape, columns or shape[-1])
        self._last.append((memory, name))
        return memory

    def padded(self, name: str, dtype: str, shape: Shape, columns: int, fill: float | None = None) -> str:
        """The name of an array of `shape` whose rows have `columns` columns in memory; `fill`: its initial value."""
        memory = (*shape[:-1], columns)
        made = self.array(name, dtype, memory, fill)
        return made if columns == shape[-1] else self.view(f"{name}_columns", made, shape, compact(memory))

    def layout(self, **arrays: Any) -> list[str]:
        """Register arrays of the layout under these names, which are returned in order."""
        for name, array in arrays.items():
            assert name not in self, name
            self._layout[name] = array
            self._known[name] = operand_of(array)
        return list(arrays)

    def view(
        self, name: str, of: str, shape: Shape, strides: Shape, offset: int = 0, dtype: str | None = None
    ) -> str:  # fmt: skip
        """Elements of another array, in place.

        Args:
            dtype: as which memory of the launch is read; None: as what it is.
        """
        assert name not in self, name
        base = self[of]
        dtype = dtype or base.dtype
        aligned = base.aligned and offset * BYTES[dtype] % ALIGNMENT == 0
        self._views[name] = View(of, dtype, tuple(shape), tuple(strides), offset)
        self._known[name] = Operand(dtype, tuple(shape), tuple(strides), aligned)
        return name

    def descriptor(self, name: str, of: str, block: Shape) -> str:
        """A tensor descriptor of blocks of an array."""
        assert name not in self, name
        base = self[of]
        self._views[name] = Descriptor(of, base.shape, base.strides, block)
        self._known[name] = base
        return name

    def block_of(self, name: str) -> Shape | None:
        """The blocks of a tensor descriptor; None of anything else."""
        view = self._views.get(name)
        return view.block if isinstance(view, Descriptor) else None

    def step(self, kernel: Kernel, *arguments: Argument | float | None) -> None:
        """Append a kernel that writes its results into its arguments: names of arrays, and numbers."""
        given = tuple(x if isinstance(x, (str, Constant, Group)) else Constant(x) for x in arguments)
        unknown = set(names_of(given)).difference(self._known, self.operands)
        assert not unknown, f"{kernel.implementation}.{kernel.name} is given {sorted(unknown)}, and nothing is named so"
        self._steps.append(Step(kernel, given))

    def function(self, kernel: Kernel, *arguments: str | None, returns: Mapping[str, Operand | None]) -> None:
        """Append a function of the framework that returns new arrays; several are returned as a tuple.

        Args:
            returns: the dtype and shape that each result must have, by name; None: not checked.
        """
        given = tuple(Constant(None) if x is None else x for x in arguments)
        unknown = set(names_of(given)).difference(self._known, self.operands)
        assert not unknown, f"{kernel.implementation}.{kernel.name} is given {sorted(unknown)}, and nothing is named so"
        for name in returns:
            assert name not in self, name
        self._steps.append(Step(kernel, given, tuple(Returned(*item) for item in returns.items())))
        self._known.update({name: known for name, known in returns.items() if known is not None})

    def copy(self, source: str, target: str) -> None:
        """Copy an array into another of the same shape, whose type may differ."""
        self.step(Kernel(EDGE, "copy"), source, target)

    def copied(self, source: str, columns: int | None = None, fill: float | None = None) -> str:
        """A contiguous copy of an array; of `columns` memory columns, of which those of the array are written.

        Args:
            fill: what the other columns hold; None: anything.
        """
        known = self[source]
        if columns is None or columns == known.shape[-1]:
            columns, fill = known.shape[-1], None
        copy = self.padded(f"{source}_copy", known.dtype, known.shape, columns, fill)
        self.copy(source, copy)
        return copy

    def contiguous(self, name: str) -> str:
        """The array itself where it is contiguous and aligned, else a copy."""
        known = self[name]
        return name if known.contiguous and known.aligned else self.copied(name)

    def include(self, prepared: Prepared, given: Mapping[str, str], prefix: str) -> None:
        """Append the steps, arrays and views of another launch.

        Args:
            given: the array here for each of its arguments and, where wanted, of its results.
            prefix: of all other names.
        """

        def of(name: str) -> str:
            return given.get(name, prefix + name)

        launch = prepared.launch
        for name, array in launch.arrays.items():
            if name not in given:
                self._arrays[of(name)] = array
        for name, view in launch.views.items():
            self._views[of(name)] = view._replace(of=of(view.of))
        self._layout.update({of(name): array for name, array in prepared.layout.items()})
        for step in launch.steps:
            arguments = tuple(_renamed(x, of) for x in step.arguments)
            returns = tuple(made._replace(name=of(made.name)) for made in step.returns)
            self._steps.append(Step(step.kernel, arguments, returns))

    def done(self, *results: str) -> Prepared:
        """Append the pending copies of results; return the finished launch with the arrays of its layout.

        Args:
            results: the names of the results, in the order in which the caller gets them.
        """
        for source, target in self._last:
            self.copy(source, target)
        launch = Launch(
            tuple(self.operands), results, tuple(self._steps), self._arrays, self._views, tuple(self._layout)
        )
        return Prepared(launch, self._layout)


def names_of(arguments: Iterable[Argument]) -> Iterator[str]:
    """The names of the arrays among arguments, and among those of their groups."""
    for x in arguments:
        if isinstance(x, str):
            yield x
        elif isinstance(x, Group):
            yield from names_of(x.members)


def _renamed(argument: Argument, of: Callable[[str], str]) -> Argument:
    if isinstance(argument, Group):
        return Group(tuple(_renamed(x, of) for x in argument.members))
    return of(argument) if isinstance(argument, str) else argument


def with_own(prepared: Prepared, results: Mapping[str, Operand]) -> Prepared:
    """The same launch, which allocates these results itself, with the strides that its caller would have given."""
    launch = prepared.launch
    own = {name: Array(x.dtype, x.shape, strides=x.strides) for name, x in results.items()}
    rest = tuple(name for name in launch.arguments if name not in own)
    return prepared._replace(launch=replace(launch, arguments=rest, arrays={**launch.arrays, **own}))


def dtype_of(array: Any) -> str:
    """The name of the type of an array's elements, whatever framework has it."""
    return str(array.dtype).removeprefix("torch.")


def operand_of(array: Any) -> Operand:
    """The `Operand` of an array or tensor of the layout; an empty one for anything else."""
    if hasattr(array, "__array_interface__"):  # of numpy
        return Operand(str(array.dtype), array.shape, compact(array.shape))
    if not hasattr(array, "data_ptr"):
        return Operand("", (), ())
    return Operand(dtype_of(array), tuple(array.shape), tuple(array.stride()), array.data_ptr() % ALIGNMENT == 0)


def one_function(
    implementation: str, problem: Any, layout: Any, direction: Direction, scoring: Any, operands: Mapping[str, Operand],
    function: str | None = None,
) -> Prepared:  # fmt: skip
    """A launch of one step, for an implementation that has one function of the framework for each direction.

    `kernel(function, problem, scoring)` of the implementation gives it. It takes what `INPUTS` lists, then the layout
    and the `VECTORS`, None for each that the call has not, and returns (out, lse), or (dq, dk, dv) and, where there
    are sinks, dsink_logits.

    Args:
        function: its name; None: that of the direction.
    """
    b = Builder(operands)
    b.layout(layout=layout)
    given = [name if name in operands else None for name in (*INPUTS[direction], "layout", *VECTORS)]
    given[len(INPUTS[direction])] = "layout"
    of = {f"d{name}": (x.dtype, x.shape) for name, x in operands.items() if name in ("q", "k", "v", "sink_logits")}
    if direction == "forward":
        (*rows, _), (*_, columns) = operands["q"].shape, operands["v"].shape
        of = {"out": (problem.dtype, (*rows, columns)), "lse": (compute_dtype(problem.dtype), tuple(rows))}
    made = {f"{name}_made" if name in operands else name: name for name in of}
    likes = {own: Operand(dtype, shape, compact(shape)) for own, (dtype, shape) in zip(made, of.values(), strict=True)}
    b.function(Kernel(implementation, function or direction, (problem, scoring)), *given, returns=likes)
    for own, name in made.items():
        if own != name:
            b.copy(own, name)
    return b.done(*of)
