"""Each folder imports only what its contract names, and no files form a circle: read from the source, not by importing.

Imports inside functions count as well, those for type checkers, and modules that are named in a string (as importlib
takes them).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from gossamer.plan.table import NAMES
from tests.support.thorough import more

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


class Contract(NamedTuple):
    """What the files of a folder may import, "name*" for a folder with those inside it."""

    ours: frozenset[str]
    types: frozenset[str]  # for type checkers alone: what a public method returns, and what a handle stands for
    named: frozenset[str]  # in strings: what is loaded on its first use


def may(ours: str = "", types: str = "", named: str = "") -> Contract:
    return Contract(*(frozenset(text.split()) for text in (ours, types, named)))


# From the ground up. "gossamer" are the public interfaces, which name any room, and which no room below imports.
CONTRACTS = {
    "memo": may(),
    "checks": may(),
    "patterns": may("checks", types="layouts"),
    "layouts*": may("memo checks patterns layouts*"),
    "plan": may("memo checks patterns layouts", named="kernels*"),
    "cute": may(),
    # The implementations of `attention` see layouts, never one another.
    "kernels": may("patterns plan"),
    "kernels.reference": may("plan kernels"),
    "kernels.blocked": may("memo layouts plan kernels"),
    "kernels.small": may("plan kernels"),
    "kernels.structure": may("kernels"),
    "kernels.triton*": may("memo layouts plan kernels kernels.triton*"),
    "kernels.hopper": may("cute layouts plan kernels kernels.hopper*"),
    "kernels.hopper.device*": may("cute kernels.hopper.device*"),
    "kernels.hopper.launch": may("cute memo layouts plan kernels kernels.hopper*"),
    "kernels.hopper.schedule": may("cute memo layouts kernels"),
    # The edges of `attention`.
    "jax*": may(
        "memo checks patterns layouts* plan cute kernels kernels.hopper* jax*",
        named="particles kernels*",
    ),
    "torch*": may("memo checks patterns layouts* plan kernels kernels.structure kernels.triton* torch*"),
    # Operations: none sees another.
    "entmax": may("memo checks patterns layouts plan kernels jax* torch* entmax*"),
    "entmax.launch": may("kernels kernels.hopper kernels.triton* entmax*"),
    "entmax.triton": may("kernels.triton.gather"),
    "entmax.hopper*": may("cute kernels.hopper.device.gather entmax.hopper*"),
    "sparse_k": may("memo checks patterns plan kernels torch sparse_k*"),
    "sparse_k.launch": may("kernels kernels.hopper sparse_k*"),
    "sparse_k.triton": may(),
    "sparse_k.thresholds_triton": may("kernels"),
    "sparse_k.hopper": may("cute kernels.hopper.device*"),
    "blocks": may("memo checks patterns plan kernels jax* torch* blocks*"),
    "blocks.triton": may("kernels"),
    "particles": may("memo checks layouts plan cute kernels kernels.hopper jax* torch* particles*"),
    "particles.triton": may("cute kernels particles particles.kernels* particles.triton"),
    "particles.kernels": may("cute plan kernels kernels.hopper* particles.kernels*"),
    "particles.kernels.radial*": may("cute checks particles.kernels.radial*"),
    "particles.kernels.neighbors*": may("cute particles.kernels.radial* particles.kernels.neighbors*"),
    "particles.kernels.attention": may("cute kernels.hopper.device*"),
    "cosmos": may("checks particles"),
    "nn": may("entmax sparse_k"),
    "integrations*": may("checks patterns layouts plan torch* blocks sparse_k integrations*"),
    "testing": may("patterns plan kernels kernels.reference torch"),
    "bench": may("gossamer cute patterns kernels kernels.reference particles integrations testing"),
    "cli": may("gossamer cute checks patterns layouts plan kernels.hopper testing bench cosmos", named="*"),
}
INTERFACES = ("", "jax")  # files of that name, without "gossamer."
OPERATIONS = ("entmax", "sparse_k", "blocks", "particles")
USERS = {"cosmos": ("particles",), "nn": ("entmax", "sparse_k", "particles")}  # of operations
# Tests of the core that take seconds.
CORE = ("torch/test_attention_op.py", "torch/test_host_cost.py", "torch/test_known_calls.py", "plan")


class Allowed(NamedTuple):
    """The packages that files may import: at once, and inside functions or for types alone."""

    always: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()


def allowed(always: str = "", later: str = "") -> Allowed:
    return Allowed(frozenset(always.split()), frozenset(later.split()))


# The packages of others by folder or file: the longest name that fits says it.
FRAMEWORKS = {
    "": allowed(),
    "memo": allowed(),
    "checks": allowed("numpy"),
    "patterns": allowed("numpy", "scipy"),
    "layouts": allowed("numpy", "torch"),
    "layouts.device": allowed(),
    "plan": allowed("numpy"),
    "cute": allowed("cutlass"),
    "kernels": allowed("torch triton"),
    "kernels.arrays": allowed("numpy", "torch"),
    "kernels.contract": allowed(),
    "kernels.relaunch": allowed("triton", "torch"),
    "kernels.reference": allowed("torch"),
    "kernels.blocked": allowed("numpy torch"),
    "kernels.small": allowed("torch triton"),
    "kernels.triton": allowed("numpy triton", "torch"),
    "kernels.triton.gather.device_items": allowed("torch"),
    "kernels.triton.one_query.launch_one_query": allowed("torch triton"),
    "kernels.triton.paged.copy_slots": allowed("torch triton"),
    "kernels.hopper": allowed("numpy torch cutlass tvm_ffi"),
    "jax": allowed("numpy jax"),
    "jax.kernels.targets": allowed("numpy jax", "jax_tvm_ffi jaxlib"),
    "jax.nnx": allowed("numpy jax flax"),
    "kernels.hopper.schedule.item_kernels": allowed("triton"),
    "kernels.hopper.schedule.item_words": allowed("triton"),
    "torch": allowed("numpy torch", "rich"),
    "torch.bind": allowed("torch", "triton tvm_ffi"),
    "entmax": allowed("numpy torch"),
    "entmax.checks": allowed(),
    "entmax.in_jax": allowed("numpy jax"),
    "entmax.rows_jax": allowed("jax"),
    "entmax.selection_jax": allowed("jax"),
    "entmax.thresholds_jax": allowed("jax"),
    "entmax.launch": allowed("torch triton"),
    "entmax.triton": allowed("torch triton"),
    "entmax.hopper": allowed("cutlass"),
    "sparse_k": allowed("torch"),
    "sparse_k.launch": allowed("torch triton"),
    "sparse_k.triton": allowed("triton"),
    "sparse_k.thresholds_triton": allowed("torch triton"),
    "sparse_k.hopper": allowed("cutlass"),
    "blocks": allowed("torch"),
    "blocks.checks": allowed(),
    "blocks.in_jax": allowed("jax"),
    "blocks.lists_jax": allowed("jax"),
    "blocks.triton": allowed("torch triton"),
    "particles": allowed("numpy"),
    "particles.kernels": allowed("cutlass"),
    "particles.kernels.radial.functions": allowed("numpy"),
    "cosmos": allowed("numpy jax", "h5py matplotlib PIL"),
    "particles.triton": allowed("triton"),
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
    "integrations.transformers.sparsek": allowed("torch transformers"),
    "integrations.transformers.sparsek_config": allowed("transformers"),
    "integrations.vllm": allowed("torch", "vllm"),
    "integrations.vllm.backend": allowed("torch vllm"),
    "integrations.vllm.sparsek_model": allowed("torch vllm"),
    "testing": allowed("numpy torch"),
    "bench": allowed("numpy torch", "rich matplotlib"),
    "cli": allowed("numpy typer rich", "matplotlib torch"),
}

ROOMS = sorted({key.rstrip("*").partition(".")[0] for key in CONTRACTS})
NAMED = re.compile(rf"gossamer\.((?:{'|'.join(ROOMS)})(?:\.\w+)*)\.?(?::\w+)?")


Way = Literal["at once", "later", "types", "named"]  # later: inside a function


class Import(NamedTuple):
    source: str  # without "gossamer."
    target: str  # likewise, of our own; "" for gossamer itself; else a package of others with "!" before
    way: Way

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


def statements(tree: ast.AST, way: Way = "at once") -> Iterator[tuple[ast.Import | ast.ImportFrom, Way]]:
    """Every import, and how it is made."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, way
        inner = way
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and way == "at once":
            inner = "later"
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            inner = "types"
        yield from statements(node, inner)


def of_file(name: str, text: str) -> set[Import]:
    found = set()
    for node, way in statements(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative import"
            module = node.module or ""
            targets = [f"{module}.{a.name}" if f"{module}.{a.name}"[9:] in MODULES else module for a in node.names]
        else:
            targets = [a.name for a in node.names]
        for target in targets:
            top, _, rest = target.partition(".")
            if top == "gossamer":
                found.add(Import(name, rest, way))
            elif top not in sys.stdlib_module_names:
                found.add(Import(name, f"!{top}", way))
    texts = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    names = {match[1] for x in texts if isinstance(x, str) and (match := NAMED.fullmatch(x))}
    return found | {Import(name, target, "named") for target in names}


IMPORTS = {found for name, file in MODULES.items() for found in of_file(name, file.read_text())}


def folder(name: str) -> str:
    """The folder of a module; a file of no folder is one of its own, and an interface is of none."""
    if name in INTERFACES:
        return "gossamer"
    path = MODULES[name].relative_to(SRC / "gossamer").parent
    return ".".join(path.parts) or name


def inside(name: str, places: Iterable[str]) -> bool:
    """Whether a folder is one of the places."""
    return any(name == place or (place.endswith("*") and f"{name}.".startswith(tree_of(place))) for place in places)


def tree_of(place: str) -> str:
    """The beginning of the names of "name*" and all inside it; of "*", of every name."""
    return "" if place == "*" else f"{place[:-1]}."


def contract(of: str) -> Contract:
    """That of a folder: the one with the longest name that fits."""
    key = max((key for key in CONTRACTS if inside(of, [key])), key=lambda key: len(key.rstrip("*")))
    return CONTRACTS[key]


def target_of(one: Import) -> str:
    """The folder that an import leads to."""
    return folder(one.target) if one.target in MODULES and one.target else one.target or "gossamer"


def wrong_imports(imports: Iterable[Import]) -> list[str]:
    """The imports that the contract of their folder does not name."""
    found = []
    for one in (one for one in imports if one.ours and one.source not in INTERFACES):
        mine, own = contract(folder(one.source)), folder(one.source)
        target = target_of(one)
        places = mine.ours | (mine.types if one.way == "types" else mine.named if one.way == "named" else frozenset())
        if target != own and not inside(target, places):
            found.append(f"{one.source} imports {one.target or 'gossamer'}")
    return found


def wrong_frameworks(imports: Iterable[Import]) -> list[str]:
    """The imports of packages that a file may not import there."""
    found = []
    for source, target, way in (one for one in imports if not one.ours):
        place = max((p for p in FRAMEWORKS if p in ("", source) or source.startswith(f"{p}.")), key=len)
        allowed_here = FRAMEWORKS[place].always | (FRAMEWORKS[place].later if way != "at once" else frozenset())
        if target[1:] not in allowed_here:
            found.append(f"{source} imports {target[1:]}" + " later" * (way != "at once"))
    return found


def circle(imports: Iterable[Import]) -> list[str]:
    """A circle among files, or nothing. What is for type checkers alone is never imported."""
    graph: dict[str, set[str]] = {}
    for source, target, way in (one for one in imports if one.ours):
        # A folder's own name is what outsiders import: it is made of its files. A name in a string is loaded when used.
        if way not in ("types", "named") and source and target and not f"{source}.".startswith(f"{target}."):
            graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_has_a_contract() -> None:
    folders = {folder(name) for name in MODULES if name not in INTERFACES}
    assert all(any(inside(one, [key]) for key in CONTRACTS) for one in folders)
    for key in CONTRACTS:
        assert any(inside(one, [key]) for one in folders), f"{key} is no folder"
    for room in OPERATIONS:
        assert room in CONTRACTS and not any(inside(other, contract(room).ours) for other in {*OPERATIONS} - {room})
    for name in NAMES:
        backend = contract(f"kernels.{name}").ours
        assert not any(inside(f"kernels.{other}", backend) for other in {*NAMES} - {name})


def test_folders_import_what_their_contracts_name() -> None:
    assert not wrong_imports(IMPORTS)


def test_files_form_no_circle() -> None:
    assert not circle(IMPORTS)


def test_which_files_import_which_packages() -> None:
    assert not wrong_frameworks(IMPORTS)


def test_every_name_of_a_contract_is_used() -> None:
    for key, mine in CONTRACTS.items():
        within = [one for one in IMPORTS if one.ours and one.source not in INTERFACES]
        of_key = [one for one in within if contract(folder(one.source)) is mine]
        targets = {target_of(one) for one in of_key}
        unused = [
            place for place in mine.ours | mine.types | mine.named if not any(inside(x, [place]) for x in targets)
        ]
        assert not unused, f"{key} imports nothing of {unused}"


def test_what_is_wrong_is_found() -> None:
    """The checks above, of a few lines that are wrong."""
    text = "import torch\ndef f():\n    from gossamer.layouts import build\n    import scipy, gossamer\n"
    found = of_file("patterns.pairs", text + "    importlib.import_module('gossamer.torch.api')\n")
    wrong = [f"patterns.pairs imports {name}" for name in ("gossamer", "layouts.build", "torch.api")]
    assert sorted(wrong_imports(found)) == wrong
    assert wrong_frameworks(found) == ["patterns.pairs imports torch"]
    back = of_file("patterns.base", "def g():\n    from gossamer.patterns.csr import CSR\n")
    assert {"patterns.base", "patterns.csr"} <= set(circle(IMPORTS | back))
    other = of_file("entmax.api", "from gossamer.sparse_k.operator import sparsek\n")
    assert wrong_imports(other) == ["entmax.api imports sparse_k.operator"]
    up = of_file("jax.api", "from gossamer.entmax.in_jax import entmax_attention\n")
    up |= of_file("jax.api", "from gossamer.jax import attention\n")
    assert sorted(wrong_imports(up)) == ["jax.api imports entmax.in_jax", "jax.api imports jax"]


@pytest.mark.slow
@pytest.mark.parametrize("gone", [OPERATIONS, *more(*(((name,),) for name in OPERATIONS))], ids="-".join)
def test_the_core_runs_without_operations(tmp_path: Path, gone: tuple[str, ...]) -> None:
    """Their folders are off the path, with those that use them: the tests of `attention` from torch pass."""
    gone += tuple(user for user, used in USERS.items() if {*used} & {*gone})
    ignored = shutil.ignore_patterns("__pycache__", *gone)
    shutil.copytree(SRC / "gossamer", tmp_path / "gossamer", ignore=ignored)
    tests = [ROOT / "tests" / name for name in CORE]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    check = f"import gossamer; assert {str(tmp_path)!r} in gossamer.__file__"
    for one in ([sys.executable, "-c", check], command):
        done = subprocess.run(one, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
