"""The rooms of the package form no circle, and each imports only what it may: read from the source, not by importing.

Imports inside functions count as well, those for type checkers, and modules that are named in a string (as importlib
takes them), but for the few that are listed here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from gossamer.plan.table import NAMES

SRC = Path(__file__).parents[2] / "src"
# A room imports those before it. What bench and cli import of `gossamer` itself is the public interface.
ROOMS = (
    "memo", "numbers", "patterns", "layouts", "plan", "kernels", "jax", "torch", "select", "particles", "cosmos", "nn",
    "integrations", "testing", "bench", "cli",
)  # fmt: skip
PUBLIC = ("bench", "cli")
# For type checkers alone: what a public method returns, and what a handle stands for.
TYPES = {("patterns.base", "layouts"), ("patterns.handles", "patterns.base")}
# By name: the table, whose whole use it is (a failed import is a reason there); and the lists of neighbours that a mask
# of traced positions is, which the room above has.
BY_NAME = {("plan.table", "kernels"), ("jax.sparsity", "particles")}


class Allowed(NamedTuple):
    """The packages that files may import: at once, and inside functions or for types alone."""

    always: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()


def allowed(always: str = "", later: str = "") -> Allowed:
    return Allowed(frozenset(always.split()), frozenset(later.split()))


# By room, folder or file: the longest name that fits says it.
FRAMEWORKS = {
    "": allowed(),
    "memo": allowed(),
    "numbers": allowed(),
    "patterns": allowed("numpy", "scipy"),
    "layouts": allowed("numpy", "torch"),
    "layouts.device": allowed(),
    "plan": allowed("numpy"),
    "kernels": allowed("torch triton"),
    "kernels.contract": allowed(),
    "kernels.reference": allowed("torch"),
    "kernels.blocked": allowed("numpy torch"),
    "kernels.small": allowed("torch triton"),
    "kernels.triton": allowed("numpy torch triton"),
    "kernels.hopper": allowed("numpy torch cutlass tvm_ffi"),
    "kernels.radial": allowed("cutlass"),
    "kernels.neighbors": allowed("cutlass"),
    "kernels.radial.functions": allowed("numpy"),
    "jax": allowed("numpy jax"),
    "jax.kernels.targets": allowed("numpy jax", "jax_tvm_ffi"),
    "jax.nnx": allowed("numpy jax flax"),
    "kernels.hopper.schedule.item_kernels": allowed("triton"),
    "kernels.hopper.schedule.item_words": allowed("triton"),
    "torch": allowed("numpy torch", "rich"),
    "torch.bind": allowed("torch", "triton tvm_ffi"),
    "select": allowed("torch"),
    "particles": allowed("numpy"),
    "cosmos": allowed("numpy jax", "h5py matplotlib PIL"),
    "particles.in_jax": allowed("jax"),
    "particles.attend_jax": allowed("jax"),
    "particles.blocked_jax": allowed("jax"),
    "particles.in_torch": allowed("torch"),
    "particles.attend_torch": allowed("torch"),
    "particles.fused_jax": allowed("numpy jax"),
    "particles.fused_torch": allowed("torch"),
    "particles.once_jax": allowed("jax"),
    "particles.once_torch": allowed("torch"),
    "particles.listed_jax": allowed("numpy jax"),
    "particles.listed_torch": allowed("torch"),
    "nn": allowed("torch"),
    "integrations": allowed("numpy torch", "transformers"),
    "testing": allowed("numpy torch"),
    "bench": allowed("numpy torch", "rich matplotlib"),
    "cli": allowed("numpy typer rich", "matplotlib torch"),
}


NAMED = re.compile(rf"gossamer\.((?:{'|'.join(ROOMS)})(?:\.\w+)*)\.?")


class Import(NamedTuple):
    source: str  # without "gossamer."
    target: str  # likewise, of our own; "" for gossamer itself; else a package of others with "!" before
    later: bool  # inside a function, or for type checkers

    @property
    def ours(self) -> bool:
        return not self.target.startswith("!")


def modules() -> dict[str, Path]:
    """Every file of the package by its name without "gossamer."."""
    found = {}
    for file in (SRC / "gossamer").rglob("*.py"):
        parts = file.relative_to(SRC / "gossamer").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def room(name: str) -> str:
    return name.partition(".")[0]


def statements(tree: ast.AST, later: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import, and whether it is made later or never: inside a function, or for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, later
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        yield from statements(node, later or function or types)


def of_file(name: str, text: str) -> set[Import]:
    found = set()
    for node, later in statements(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative import"
            module = node.module or ""
            targets = [f"{module}.{a.name}" if f"{module}.{a.name}"[9:] in MODULES else module for a in node.names]
        else:
            targets = [a.name for a in node.names]
        for target in targets:
            top, _, rest = target.partition(".")
            if top == "gossamer":
                found.add(Import(name, rest, later))
            elif top not in sys.stdlib_module_names:
                found.add(Import(name, f"!{top}", later))
    texts = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    names = {match[1] for x in texts if isinstance(x, str) and (match := NAMED.fullmatch(x))}
    # A file of its own room is started as a process.
    return found | {Import(name, target, later=True) for target in names if room(target) != room(name)}


IMPORTS = {found for name, file in MODULES.items() for found in of_file(name, file.read_text())}


def wrong_rooms(imports: Iterable[Import]) -> list[str]:
    """The imports of a room that is not before the one that they are in."""
    found = []
    for source, target, _ in (one for one in imports if one.ours and one.source):
        if (source, target) in TYPES | BY_NAME or room(source) == room(target):
            continue
        right = room(source) in PUBLIC if not target else ROOMS.index(room(target)) < ROOMS.index(room(source))
        if not right:
            found.append(f"{source} imports {target or 'gossamer'}")
    return found


def wrong_frameworks(imports: Iterable[Import]) -> list[str]:
    """The imports of packages that a file may not import there."""
    found = []
    for source, target, later in (one for one in imports if not one.ours):
        place = max((p for p in FRAMEWORKS if p in ("", source) or source.startswith(f"{p}.")), key=len)
        may = FRAMEWORKS[place].always | (FRAMEWORKS[place].later if later else frozenset())
        if target[1:] not in may:
            found.append(f"{source} imports {target[1:]}" + " later" * later)
    return found


def circle(imports: Iterable[Import], inside: str) -> list[str]:
    """A circle among the files of a room, or nothing."""
    graph: dict[str, set[str]] = {}
    for source, target, _ in imports:
        # A folder's own name is what outsiders import: it is made of its files.
        if room(source) == room(target) == inside and target != inside and (source, target) not in TYPES:
            graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_is_a_room() -> None:
    assert {room(name) for name in MODULES if name} == set(ROOMS)


def test_rooms_form_no_circle() -> None:
    assert not wrong_rooms(IMPORTS)


@pytest.mark.parametrize("inside", ROOMS)
def test_files_of_a_room_form_no_circle(inside: str) -> None:
    assert not circle(IMPORTS, inside)


def test_which_files_import_which_packages() -> None:
    assert not wrong_frameworks(IMPORTS)


def test_kernels_see_layouts_and_never_patterns_or_one_another() -> None:
    for name in NAMES:
        inside = [one for one in IMPORTS if one.ours and f"{one.source}.".startswith(f"kernels.{name}.")]
        assert inside
        for _, target, _ in inside:
            other = target.split(".")[1] if room(target) == "kernels" else name
            assert room(target) in ("memo", "layouts", "plan", "kernels")
            assert other == name or other not in NAMES


def test_what_is_wrong_is_found() -> None:
    """The checks above, of a few lines that are wrong."""
    text = "import torch\ndef f():\n    from gossamer.layouts import build\n    import scipy, gossamer\n"
    found = of_file("patterns.new", text + "    importlib.import_module('gossamer.torch.api')\n")
    wrong = ["patterns.new imports gossamer", "patterns.new imports layouts.build", "patterns.new imports torch.api"]
    assert sorted(wrong_rooms(found)) == wrong
    assert wrong_frameworks(found) == ["patterns.new imports torch"]
    back = of_file("patterns.base", "def g():\n    from gossamer.patterns.csr import CSR\n")
    assert {"patterns.base", "patterns.csr"} <= set(circle(IMPORTS | back, "patterns"))
