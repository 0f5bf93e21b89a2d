"""Compiled kernels on disk: read again, replaced when damaged, never wrong, and made in advance by a command."""

from __future__ import annotations

import ast
import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.cli.compile import shipped
from gossamer.cute import store
from gossamer.cute.store import DIRECTORY, Kernel
from gossamer.kernels.hopper import compiled, missing_packages
from gossamer.kernels.hopper.shipped import DTYPES, SIZES

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
MODULES = ("kernels.hopper", "entmax.hopper", "sparse_k.hopper", "particles.kernels")
KEY = ("bfloat16", 64, 128)  # of the smallest kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """An empty cache."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    caplog.set_level(logging.INFO, logger="gossamer")
    return tmp_path


def fresh() -> Kernel:
    """The merge kernel as a new process has it: nothing in memory."""
    return Kernel(compiled.merge.entry, compiled.merge.sources, compiled.merge.arrays)


def test_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.directory() == Path("/somewhere/gossamer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.directory() == Path.home() / ".cache" / "gossamer"
    monkeypatch.setenv(DIRECTORY, "/elsewhere")
    assert store.directory() == Path("/elsewhere")


@needs_compiler
def test_a_name_holds_what_the_kernel_depends_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fresh()
    path = kernel.path(*KEY)
    assert path == kernel.path(*KEY) and path.parent == folder / "hopper"
    assert path != kernel.path("float16", 64, 128)
    with monkeypatch.context() as m:
        m.setenv("CUTE_DSL_LINEINFO", "1")
        assert path != kernel.path(*KEY)
    with monkeypatch.context() as m:
        m.setattr(store, "_fingerprint", lambda sources: "other sources")
        assert path != kernel.path(*KEY)
    assert path == kernel.path(*KEY)


def kinds() -> dict[str, Kernel]:
    """Every kind of kernel by its entry."""
    values = [x for name in MODULES for x in vars(importlib.import_module(f"gossamer.{name}.compiled")).values()]
    return {kind.entry: kind for kind in values if isinstance(kind, Kernel)}


def test_every_module_of_kernels_is_known_here() -> None:
    files = {file.relative_to(store.PACKAGE).parent.as_posix() for file in store.PACKAGE.rglob("compiled.py")}
    assert files == {name.replace(".", "/") for name in MODULES}


@pytest.mark.parametrize(
    ("edited", "rooms"),
    [
        ("cute/tiles.py", {"kernels", "entmax", "sparse_k", "particles"}),
        ("entmax/hopper/support/kernel.py", {"entmax"}),
        ("entmax/hopper/long_rows/kernel.py", {"entmax"}),
        ("entmax/launch/selection.py", set()),
        ("sparse_k/hopper/kernel.py", {"sparse_k"}),
        ("particles/kernels/radial/gravity.py", {"particles"}),
        ("particles/kernels/attention/query.py", {"particles"}),
        ("kernels/hopper/launch/forward.py", set()),
        ("kernels/hopper/device/backward/kernel.py", {"kernels", "sparse_k", "particles"}),
    ],
)
def test_an_edit_compiles_kernels_of_its_operation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str, rooms: set[str]
) -> None:
    package = tmp_path / "gossamer"
    shutil.copytree(store.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "PACKAGE", package)
    monkeypatch.setattr(store.importlib.metadata, "version", lambda name: "1.0")
    before = {entry: store._digest_of(kind.sources) for entry, kind in kinds().items()}
    path = package / edited
    path.write_text(path.read_text() + "\n")
    changed = {entry for entry, kind in kinds().items() if store._digest_of(kind.sources) != before[entry]}
    assert {entry.split(".")[1] for entry in changed} == rooms
    # Sums and lists of particles share nothing with their attention.
    assert "attention/" not in edited or {entry.rpartition(":")[2] for entry in changed} == {"attention"}
    path.with_name("another.py").write_text("")
    monkeypatch.setattr(store.importlib.metadata, "version", lambda name: "1.1")
    assert all(store._digest_of(kind.sources) != before[entry] for entry, kind in kinds().items())


def modules_of(path: Path) -> Iterator[str]:
    """What a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def file_of(module: str) -> Path | None:
    """The file of a module of the package; None for what is none."""
    path = store.PACKAGE.joinpath(*module.split(".")[1:])
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


@pytest.mark.parametrize("entry", list(kinds()))
def test_sources_are_all_that_a_kernel_is_made_from(entry: str) -> None:
    """What is not digested cannot change a kernel: neither modules of the host, nor files, nor the environment."""
    sources, seen = set(store.files_of(kinds()[entry].sources)), set()
    outside = {"io", "os", "pathlib", "platform", "shutil", "subprocess", "tempfile"}
    allowed = {"cutlass", "numpy", *sys.stdlib_module_names} - outside
    waiting = [file_of(entry.partition(":")[0])]
    while waiting:
        path = waiting.pop()
        if path is None or path in seen:
            continue
        seen.add(path)
        assert path in sources, f"{path} is not among the sources of {entry}"
        for module in modules_of(path):
            if module.startswith("gossamer."):
                waiting.append(file_of(module))
            else:
                assert module.partition(".")[0] in allowed, f"{path} imports {module}"
    assert len(seen) > 5


@needs_compiler
def test_compiled_once_then_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = fresh()
    found = kernel(*KEY)
    assert callable(found) and kernel(*KEY) is found
    assert [r.message.split()[0] for r in caplog.records] == ["compiled"]
    assert callable(fresh()(*KEY))
    assert [r.message.split()[0] for r in caplog.records] == ["compiled", "read"]
    assert list((folder / "hopper").iterdir()) == [kernel.path(*KEY)]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_made_again(folder: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    path = fresh().path(*KEY)
    fresh()(*KEY)
    good = path.read_bytes()
    bad = {"cut": good[: len(good) // 2], "changed": b"\0" + good[1:], "empty": b""}[damage]
    path.write_bytes(bad)
    caplog.clear()
    assert callable(fresh()(*KEY))
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert "is damaged: compiling merge again" in caplog.records[0].message
    caplog.clear()
    assert callable(fresh()(*KEY)) and "read" in caplog.records[0].message


@needs_compiler
def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv(DIRECTORY, str(folder / "file"))
    assert callable(fresh()(*KEY))
    assert f"{DIRECTORY} names another folder" in caplog.records[-1].message


@needs_compiler
def test_sources_that_change_while_compiling(folder: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(store, "_digest_of", lambda sources: "edited")
    monkeypatch.setattr(store, "_fingerprint", lambda sources: "before the edit")
    assert callable(fresh()(*KEY))
    assert "changed meanwhile" in caplog.records[-1].message
    assert not (folder / "hopper").exists()


@needs_compiler
def test_processes_that_make_the_same_kernel(folder: Path) -> None:
    code = f"from gossamer.kernels.hopper.compiled import merge; assert callable(merge(*{KEY!r}))"
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    several = [subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}) for _ in range(2)]
    assert [process.wait(timeout=300) for process in several] == [0, 0]
    assert list((folder / "hopper").iterdir()) == [fresh().path(*KEY)]


def test_the_table() -> None:
    found = shipped()
    assert len(found) <= 170 and len(found) == len({(kernel.kind, kernel.arguments) for kernel in found})
    for kernel in found:
        assert isinstance(kernel.kernel, Kernel) and kernel.dtype in DTYPES
    for size in SIZES:
        for dtype in DTYPES:
            kinds = {kernel.kind for kernel in found if kernel.dtype == dtype and size in kernel.sizes}
            assert kinds >= {"forward", "merge"}


@needs_compiler
@pytest.mark.slow
def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.cli import compile as command

    everything = command._choose(["64"], ["float16"])
    assert {kernel.kind for kernel in everything} >= {"forward", "merge"}
    monkeypatch.setattr(command, "_choose", lambda *given: [k for k in everything if k.kind == "merge"][:1])
    for said in ("1 kernels compiled", "0 kernels compiled"):
        done = CliRunner().invoke(app, ["compile", "--head-dim", "64", "--jobs", "1"])
        assert done.exit_code == 0 and said in done.output and str(folder) in done.output.replace("\n", "")
    done = CliRunner().invoke(app, ["compile", "--list"])
    assert done.output.startswith("ready") and "merge" in done.output
    done = CliRunner().invoke(app, ["compile", "--list", "--jax"])
    assert done.output.startswith("absent") and "merge" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_80"], "--arch must be sm_90a"),
        (["--head-dim", "65"], "--head-dim must be one of 64 | 96"),
        (["--dtype", "float32"], "--dtype must be one of bfloat16 | float16"),
    ],
)
def test_the_command_refuses(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.kernels.hopper.missing_packages", list)
    done = CliRunner().invoke(app, ["compile", *arguments])
    assert done.exit_code == 2 and said in done.output


@needs_compiler
def test_the_command_compiles_nothing_that_it_could_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, "/dev/null/kernels")
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", lambda *a, **k: pytest.fail("kernels are compiled"))
    done = CliRunner().invoke(app, ["compile", "--head-dim", "64"])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"gossamer: the cache of kernels ({DIRECTORY} names another folder): '/dev/null/")
    assert done.stderr.endswith("cannot be written: Not a directory\n") and done.stdout == ""


def test_the_command_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.kernels.hopper.missing_packages", lambda: ["needs the package nvidia-cutlass-dsl"])
    done = CliRunner().invoke(app, ["compile"])
    assert done.exit_code == 2 and "needs the package nvidia-cutlass-dsl" in done.output
