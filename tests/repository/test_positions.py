"""Nothing but kernels reads by position what is not alike: a tuple of several things, the columns of a table.

Told from the source. A subscript reads by position where an integer is written in it, of any sign and in a slice too:
`x[0]`, `x[-2:]`, `x[:, 10]`. That is right where all that could be meant is alike:

- Shapes and strides: `x.shape[2]`, `x.stride()[0]`, what is annotated `Shape`.
- Sequences: what is annotated `list[X]`, `tuple[X, ...]`, `Sequence[X]` or `range`, where X is a type; what is made as
  a list, by `list()`, by `sorted()`, or as a tuple of a generator; the slices of any of these.
- The elements along the first axis of what is annotated as an array. A column of one is not: it has a name.
- Neighbours, `x[1:]` beside `x[:-1]` in one statement.

A name stands for what its function, or else its file, says of it: its annotation, or else all that is assigned to it.
Attributes and functions are known by their annotations anywhere in the package, where all of one name agree. What
cannot be told is wrong: give its parts names.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "gossamer"
ROOMS = ("layouts", "torch", "jax", "plan", "kernels")
DEVICE = SRC / "kernels" / "hopper" / "device"
SEQUENCES = {"list", "Sequence", "Iterable", "Iterator"}
FUNCTIONS = {"list", "sorted"}
SHAPES = {"shape", "strides", "stride", "size"}  # attributes and methods
ARRAYS = {"Tensor", "ndarray", "Array"}
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Kind = str | None  # "sequence", "array", or None for what cannot be told


class Wrong(NamedTuple):
    line: int
    text: str


def traced() -> set[Path]:
    """The modules whose functions a compiler traces: mypy reads the same list."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    (names,) = (each["module"] for each in settings if each.get("disallow_untyped_defs") is False)
    return {ROOT / "src" / Path(*name.split(".")).with_suffix(".py") for name in names}


def host_code() -> list[Path]:
    """The files that the rule is for."""
    files = (path for room in ROOMS for path in sorted((SRC / room).rglob("*.py")))
    return [path for path in files if DEVICE not in path.parents and path not in traced()]


def is_position(index: ast.expr | None) -> bool:
    """Whether an integer is written in a subscript."""
    if isinstance(index, ast.UnaryOp):
        index = index.operand
    if isinstance(index, ast.Slice):
        return any(map(is_position, (index.lower, index.upper, index.step)))
    if isinstance(index, ast.Tuple):
        return any(map(is_position, index.elts))
    return isinstance(index, ast.Constant) and type(index.value) is int


def annotated(node: ast.expr | None) -> Kind:
    """What an annotation says."""
    if isinstance(node, ast.BinOp):  # X | None
        kinds = {annotated(side) for side in (node.left, node.right) if ast.unparse(side) != "None"}
        return kinds.pop() if len(kinds) == 1 else None
    if isinstance(node, ast.Subscript) and not getattr(node.slice, "elts", True):  # tuple[()]
        return None
    if isinstance(node, ast.Subscript):
        name, (of, *rest) = (
            last_name(node.value),
            node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice],
        )
        alike = name in SEQUENCES or (name == "tuple" and [ast.unparse(x) for x in rest] == ["..."])
        return "sequence" if alike and last_name(of) != "Any" else None
    name = last_name(node)
    return "sequence" if name in ("Shape", "Size", "range") else "array" if name in ARRAYS else None


def last_name(node: ast.expr | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def known() -> dict[str, Kind]:
    """What attributes and functions of the package are, by their names."""
    found: dict[str, set[Kind]] = defaultdict(set)
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign):
                found[last_name(node.target)].add(annotated(node.annotation))
            elif isinstance(node, ast.FunctionDef):
                found[node.name].add(annotated(node.returns))
    return {name: kinds.pop() for name, kinds in found.items() if len(kinds) == 1}


class Names:
    """What the names of a function, or of a file outside its functions, stand for."""

    def __init__(self, root: ast.AST, outer: Names | None = None) -> None:
        self.outer = outer
        self.annotations: dict[str, Kind] = {}
        self.assigned: dict[str, list[ast.expr | None]] = defaultdict(list)
        for node in ast.walk(root) if outer is not None else outside(root):
            if isinstance(node, ast.arguments):
                self.annotations |= {
                    arg.arg: annotated(arg.annotation) for arg in (*node.posonlyargs, *node.args, *node.kwonlyargs)
                }
                if node.vararg is not None:  # of `*x: X`, the elements need not be alike
                    self.annotations[node.vararg.arg] = None
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.annotations[node.target.id] = annotated(node.annotation)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, (ast.For, ast.comprehension)):
                self._assign(node.target, None)
            elif isinstance(node, ast.NamedExpr):
                self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.assigned[target.id].append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            pairs = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for at, each in enumerate(target.elts):
                self._assign(each, value.elts[at] if pairs else None)

    def kind(self, node: ast.expr | None) -> Kind:
        """What an expression is."""
        if isinstance(node, ast.Name):
            if node.id in self.annotations:
                return self.annotations[node.id]
            if node.id in self.assigned:
                values = self.assigned.pop(node.id)  # a name made of itself ends here
                kinds = {self.kind(value) for value in values}
                self.assigned[node.id] = values
                return kinds.pop() if len(kinds) == 1 else None
            return self.outer.kind(node) if self.outer is not None else None
        if isinstance(node, ast.Attribute):
            return "sequence" if node.attr in SHAPES else known().get(node.attr)
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name == "tuple" and isinstance(node.args[0], ast.GeneratorExp):
                return "sequence"
            own = isinstance(node.func, ast.Attribute) and name in SHAPES
            return "sequence" if own or name in FUNCTIONS else known().get(name)
        if isinstance(node, ast.Subscript):
            return self.kind(node.value) if isinstance(node.slice, ast.Slice) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # [0] * n
            return self.kind(node.left)
        return "sequence" if isinstance(node, (ast.List, ast.ListComp)) else None


def outside(root: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a file that are in no function."""
    for node in ast.iter_child_nodes(root):
        if not isinstance(node, Function):
            yield node
            yield from outside(node)


def wrong_positions(source: str) -> list[Wrong]:
    """What the rule forbids in a file."""
    tree = ast.parse(source)
    found: list[Wrong] = []
    visit(tree, Names(tree), set(), found)
    return sorted(set(found))


def visit(node: ast.AST, names: Names, neighbours: set[str], found: list[Wrong]) -> None:
    if isinstance(node, Function) and names.outer is None:  # functions inside share the names of the outermost
        names = Names(node, names)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.While)):
        neighbours = neighbours_in(node)
    if isinstance(node, ast.Subscript) and is_position(node.slice):
        kind, text = names.kind(node.value), ast.unparse(node)
        alike = kind == "sequence" or (kind == "array" and not isinstance(node.slice, ast.Tuple))
        if not alike and text not in neighbours:
            found.append(Wrong(node.lineno, text))
    for child in ast.iter_child_nodes(node):
        visit(child, names, neighbours, found)


def neighbours_in(statement: ast.AST) -> set[str]:
    """`x[1:]` and `x[:-1]` where a statement has both."""
    texts = {ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Subscript)}
    bases = {text.removesuffix("[1:]") for text in texts if text.endswith("[1:]")}
    return {text for base in bases if f"{base}[:-1]" in texts for text in (f"{base}[1:]", f"{base}[:-1]")}


@pytest.mark.parametrize("path", host_code(), ids=lambda path: path.relative_to(SRC).as_posix())
def test_no_tuple_of_several_things_is_read_by_position(path: Path) -> None:
    found = wrong_positions(path.read_text())
    assert not found, "\n" + "\n".join(f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in found)


WRONG: dict[str, str] = {
    "a tuple's elements": "def f(kind):\n    return kind[1][-2:-1]",
    "an annotated tuple": "def f(tile: tuple[int, int]):\n    return tile[0]",
    "a tuple of anything": "def f(key: tuple[Any, ...]):\n    return key[0]",
    "arguments": "def f(*rest: Tensor):\n    return rest[3:]",
    "arguments of a function inside": "def f():\n    def g(*rest: Tensor):\n        return rest[3:]\n    return g",
    "a column": "def f(items: np.ndarray):\n    return items[:, 10]",
    "columns": "def f(items: Tensor):\n    return items[:, 2:4]",
    "a row and a column": "def f(items: Tensor, n: int):\n    return items[1, :n]",
    "a result": "def f():\n    found = g()\n    return found[0]",
    "one of two": "def f(x):\n    found = [1, 2]\n    found = g()\n    return found[0]",
    "the letters of a type": "def f(x):\n    return str(x.dtype)[6:]",
    "one end of neighbours": "def f(x):\n    return x[1:] - 1",
    "a constant": "SIZES = ((64, 64), (128, 128))\ndef f():\n    return SIZES[0]",
    "what is written": "def f(found):\n    found[0] = 1",
    "a loop's": "def f(x):\n    for pair in x:\n        print(pair[1])",
}
RIGHT: dict[str, str] = {
    "a shape": "def f(x):\n    return x.shape[2], x.stride()[0], x.size()[:2], x.strides[-1]",
    "a name of a shape": "def f(x):\n    known = x.shape\n    return known[2]",
    "a described shape": "def f(shape: Shape):\n    return shape[:-1]",
    "a list": "def f(found: list[int]):\n    return found[0]",
    "a list or nothing": "def f(found: list[int] | None):\n    return found[0]",
    "a tuple of like ones": "def f(found: tuple[int, ...]):\n    return found[-1]",
    "a list that is made": "def f(x):\n    found, more = [], sorted(x)\n    return found[0], more[1:][0]",
    "a list that is repeated": "def f(n):\n    busy = [0] * n\n    return busy[0]",
    "a tuple that is made": "def f(x):\n    found = tuple(y for y in x)\n    return found[0]",
    "a constant": "SIZES: tuple[int, ...] = (64, 128)\ndef f():\n    return SIZES[0]",
    "neighbours": "def f(x):\n    return x[1:] - x[:-1]",
    "elements of an array": "def f(x: np.ndarray):\n    return x[0], x[:2]",
    "names": "def f(items, n):\n    a, *_ = items\n    return a, items[:, SLOT], items[n], items[:, None], items['a']",
}


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found(source: str) -> None:
    assert wrong_positions(source)


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(source: str) -> None:
    assert not wrong_positions(source)


def test_the_rule_is_for_host_code() -> None:
    names = {path.relative_to(SRC).as_posix() for path in host_code()}
    assert {"torch/api.py", "plan/partition.py", "kernels/launch.py", "kernels/hopper/schedule/rows.py"} <= names
    assert not {"kernels/hopper/device/entries.py", "kernels/triton/block/forward.py"} & names
