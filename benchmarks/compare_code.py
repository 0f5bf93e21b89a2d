"""Machine code of the Hopper kernels beside that of another version of gossamer, without a GPU.

    python benchmarks/compare_code.py COMMIT                # or a folder that holds src/gossamer and tests
    python benchmarks/compare_code.py COMMIT -k "backward"  # as pytest selects tests

Compared is every kernel that a test of compilation asks for: each version runs its own such tests, in a process of its
own, and what `Kernel.object` gives there is recorded. Kernels that were compiled before are read from where they are
kept. Two kernels are equal if a GPU runs the same instructions with the same constants, registers, stack and shared
memory (`machine_code` in tests/support/cubins.py). Printed are kernels that differ, and those that one version alone
has, with the kernel of the other version whose code they have, if there is one; then it exits with 1. What a test says
of registers or stack is printed as well, and decides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
STORES = ("gossamer.cute.store", "gossamer.kernels.hopper.store")  # the module of `Kernel`, and where it was before
ASKS = re.compile(r"(?<!patch)\.object\(")  # in the source of a test that compiles


class Recorder:
    """A plugin of pytest: tests that compile alone, and the object files that they are given, written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, dict[str, str]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if ASKS.search(inspect.getsource(item.function))]

    def pytest_sessionstart(self) -> None:
        kind = _store().Kernel
        given = kind.object

        def recorded(kernel: Any, *key: Any) -> bytes:
            data: bytes = given(kernel, *key)
            # `flat` gives the same device code in another form.
            if getattr(kernel, "roles", None) is None:
                file = f"{len(self.names)}.o"
                (self.folder / file).write_bytes(data)
                self.names.setdefault(f"{kernel.name} {', '.join(map(repr, key))}", file)
            return data

        kind.object = recorded

    def pytest_sessionfinish(self) -> None:
        (self.folder / "names.json").write_text(json.dumps(self.names))


def _store() -> Any:
    for name in STORES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise SystemExit(f"compare_code.py: a version must have one of {', '.join(STORES)}")


def record(folder: Path, selection: str) -> int:
    """Runs the tests of the version in the current folder; returns what pytest returns."""
    files = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if ASKS.search(file.read_text())]
    options = ["-q", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", selection]
    return int(pytest.main([*options, *files], plugins=[Recorder(folder)]))


@contextlib.contextmanager
def version(given: str) -> Iterator[Path]:
    """The folder of a version: it lies there as long as the context lasts."""
    if Path(given).is_dir():
        yield Path(given).resolve()
        return
    command = ["git", "archive", "--format=tar", given, "src", "tests", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise SystemExit(f"compare_code.py: a version must be a folder or a commit, got {given!r}; git says: {said}")
    with tempfile.TemporaryDirectory(prefix="gossamer-code-") as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


def codes(tree: Path, selection: str) -> dict[str, str]:
    """The machine code of each kernel of a version, by the kernel's name and its configuration."""
    from tests.support.cubins import machine_code

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--record", folder, "-k", selection]
        code = subprocess.run(command, cwd=tree, env=environment, check=False, stdout=sys.stderr).returncode
        if code > pytest.ExitCode.TESTS_FAILED:
            raise SystemExit(f"compare_code.py: the tests of {tree} end with {code}")
        names = json.loads((Path(folder) / "names.json").read_text())
        return {name: machine_code((Path(folder) / file).read_bytes()) for name, file in names.items()}


def compare(now: dict[str, str], before: dict[str, str]) -> tuple[list[str], bool]:
    """(lines to print, whether each kernel of one version has the code of one of the other: of its own name first)."""
    lines = [f"differs: {name}" for name in now if now[name] != before.get(name, now[name])]
    equal = not lines
    for label, other, mine, its in (("new", "before", now, before), ("gone", "now", before, now)):
        alike = {code: name for name, code in its.items() if name not in mine}
        for name in mine.keys() - its.keys():
            known = alike.get(mine[name])
            equal = equal and known is not None
            lines.append(f"{label}: {name}" + (f"; {other} {known}" if known else f"; no kernel {other} has its code"))
    return sorted(lines), equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", nargs="?", metavar="COMMIT", help="or a folder that holds src/gossamer and tests")
    parser.add_argument("-k", dest="selection", default="", help="as pytest selects tests")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.record:
        return record(a.record, a.selection)
    if a.against is None:
        parser.error("COMMIT is missing")
    sys.path.insert(0, str(ROOT))
    now = codes(ROOT, a.selection)
    with version(a.against) as tree:
        before = codes(tree, a.selection)
    lines, equal = compare(now, before)
    print("\n".join(lines))
    print(f"{len(now)} kernels now, {len(before)} before: {'all equal' if equal else 'NOT equal'}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
