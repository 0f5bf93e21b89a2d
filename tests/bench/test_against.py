"""Another version of gossamer in the same process: it is the other one to the last import, and is compared as it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import gossamer as gs
from gossamer.bench import against as module
from gossamer.bench.against import Version, source_of
from gossamer.bench.compare import Pair, pairs, verdict
from gossamer.bench.peer import Refusal
from gossamer.bench.results import read_records
from gossamer.bench.rows import Row
from gossamer.cli import app
from gossamer.cute.store import DIRECTORY, directory
from gossamer.kernels.hopper import missing_packages
from gossamer.testing.cases import case
from tests.support.modes import Seen

PACKAGE = Path(gs.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
runner = CliRunner()
LATE = """
def late():
    import gossamer
    from gossamer.only_before import MARK
    return gossamer.__version__, MARK, gossamer.Causal, type(gossamer.SlidingWindow(3) | gossamer.Causal())
"""
ANOTHER_CALL = """
def attention(*a, _attention=__getattr__("attention"), **k):
    import time
    time.sleep({sleep})
    return {factor} * _attention(*a, **k)
"""


@pytest.fixture(autouse=True)
def folder_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a version names it, for both."""
    monkeypatch.setenv(DIRECTORY, str(directory()))


def copy_to(folder: Path, version: str = "0.0.9", more: str = "") -> Path:
    """The files of this version with another number, a module that only they have, and what `more` says."""
    package = folder / "src" / "gossamer"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "__init__.py").read_text()
    assert text.count(f'"{gs.__version__}"') == 1
    (package / "__init__.py").write_text(text.replace(gs.__version__, version) + LATE + more)
    (package / "only_before.py").write_text("MARK = 'before'\n")
    return folder


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_to(tmp_path_factory.mktemp("copy") / "before")


@pytest.fixture(scope="module")
def version(before: Path) -> Iterator[Version]:
    with pytest.MonkeyPatch.context() as patch, source_of(str(before)) as source:
        patch.setenv(DIRECTORY, str(directory()))
        yield Version(source)


def gradients(package: Any, x: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [y.clone().requires_grad_() for y in x]
    out = package.attention(*leaves, package.SlidingWindow(9) | package.BigBird(16))
    return (out, *torch.autograd.grad(out.square().sum(), leaves))


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 70, 16, generator=generator) for _ in range(3)]


def test_both_run_in_one_process(version: Version) -> None:
    assert (version.package.__version__, version.source.label) == ("0.0.9", "before")
    for now, old in zip(gradients(gs, tensors()), gradients(version.package, tensors()), strict=True):
        assert torch.equal(now, old)
    x = tensors()
    assert version.package.explain(*x).implementation == gs.explain(*x).implementation


def test_nothing_of_it_is_of_this_version(version: Version) -> None:
    gradients(version.package, tensors())
    for name in version.load("plan.table").NAMES:
        version.load("plan.table").load(name)
    version.load("integrations.flex")
    loaded = {name: found for name, found in sys.modules.items() if name.partition(".")[0] == version.name}
    assert len(loaded) > 50
    for name, found in loaded.items():
        assert Path(str(found.__file__)).is_relative_to(version.source.package)
        for key, value in ((key, value) for key, value in vars(found).items() if not key.startswith("__")):
            home = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None)
            assert str(home).partition(".")[0] != "gossamer", f"{name}.{key}"


def test_imports_inside_of_functions_are_its_own(version: Version) -> None:
    number, mark, causal, union = version.package.late()
    assert (number, mark) == ("0.0.9", "before")
    assert causal is version.package.Causal is not gs.Causal
    assert union.__module__.startswith(f"{version.name}.patterns.")
    with pytest.raises(ValueError, match="pattern must be None, a Pattern"):
        gs.attention(*tensors(), causal())


def test_it_has_operators_of_its_own(version: Version) -> None:
    for package, namespace in ((version.package, version.name), (gs, "gossamer")):
        with Seen() as seen:
            package.attention(*tensors(), package.Causal())
        assert [name for name in seen.names if name.startswith("gossamer")] == [f"{namespace}.forward.default"]


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_kernels_of_the_same_sources_are_compiled_once(version: Version) -> None:
    from gossamer.kernels.hopper.shipped import shipped

    for now, old in zip(shipped()[:3], version.load("kernels.hopper.shipped").shipped(), strict=False):
        theirs = getattr(version.load("kernels.hopper.compiled"), old.kind)
        assert theirs is not now.kernel
        assert theirs.path(*old.arguments) == now.kernel.path(*now.arguments)


def test_patterns_are_of_its_own_cases(version: Version) -> None:
    found = version.pattern(case("window"))
    assert isinstance(found, version.package.SlidingWindow) and repr(found) == repr(case("window").pattern())
    with pytest.raises(Refusal, match="has no case nowhere"):
        version.pattern(replace(case("window"), name="nowhere"))
    with pytest.raises(Refusal, match="has another case window: Q, softcap"):
        version.pattern(replace(case("window"), Q=7, softcap=1.0))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=x", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_version_is_a_commit_a_folder_or_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "repository" / "src" / "gossamer"
    package.mkdir(parents=True)
    git(tmp_path / "repository", "init")
    commits = []
    for number in ("first", "second"):
        (package / "__init__.py").write_text(number)
        git(package, "add", ".")
        git(package, "commit", "-m", number)
        commits.append(git(package, "rev-parse", "HEAD"))
    monkeypatch.setattr(module, "__file__", str(package / "against.py"))
    archives = [tmp_path / "a.tar.gz", tmp_path / "b.zip"]
    with tarfile.open(archives[0], "w:gz") as tar:
        tar.add(tmp_path / "repository" / "src", "some-name/src")
    with zipfile.ZipFile(archives[1], "w") as packed:
        packed.write(package / "__init__.py", "gossamer/__init__.py")
    for given, label, text in (
        ("HEAD~1", commits[0][:12], "first"), (commits[1], commits[1][:12], "second"),
        (str(tmp_path / "repository"), "repository", "second"), (str(package), "gossamer", "second"),
        *((str(archive), archive.name, "second") for archive in archives),
    ):  # fmt: skip
        with source_of(given) as source:
            assert (source.label, source.name) == (label, f"gossamer at {label}")
            assert (source.package / "__init__.py").read_text() == text
        assert source.package.exists() == (tmp_path in source.package.parents)  # what was unpacked is gone


def test_what_is_no_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for given, why in ((tmp_path, "must hold src/gossamer/__init__.py"), (tmp_path / "file", "is none")):
        with pytest.raises(ValueError, match=why), source_of(str(given)):
            pass
    monkeypatch.setattr(module, "__file__", str(tmp_path / "against.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    done = runner.invoke(app, ["bench", "window", "--device", "cpu", "--against", "HEAD"])
    assert done.exit_code == 2
    message = (
        f"gossamer: --against: a version must be a folder, an archive or a commit of the repository of {tmp_path}, "
    )
    assert done.stderr.startswith(f"{message}got 'HEAD'; git says: fatal: not a git repository")
    git(tmp_path, "init")
    for unknown in ("nothing", "--all"):
        done = runner.invoke(app, ["bench", "window", "--device", "cpu", f"--against={unknown}"])
        assert done.exit_code == 2 and f"got {unknown!r}; git says: fatal: Needed a single revision" in done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    done = runner.invoke(app, ["bench", "window", "--device", "cpu", "--against", "HEAD"])
    assert done.exit_code == 2 and "git cannot be run" in done.stderr


def test_bench_refuses_a_sweep_against_another_version() -> None:
    if not torch.cuda.is_available():
        done = runner.invoke(app, ["bench", "window", "--device", "cuda", "--against", "HEAD"])
        assert done.exit_code == 2 and "--device cuda needs an NVIDIA GPU" in done.stderr
    from gossamer.cli import bench
    from gossamer.testing.sweeps import LADDER

    work = next(iter(LADDER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_choose", lambda *a, **k: [work])
        done = runner.invoke(app, ["bench", "--tag", "ladder", "--device", "cpu", "--against", "HEAD"])
    assert done.exit_code == 2 and "--against takes cases, not those of a sweep, got --tag ladder" in done.stderr


def test_a_slow_version_is_told_by_its_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in a process of its own each, in two runs; nothing is kept where no file is named."""
    monkeypatch.chdir(tmp_path)
    slow = copy_to(tmp_path / "slow", more=ANOTHER_CALL.format(sleep=0.2, factor=1.0))
    common = ["bench", "window", "--device", "cpu", "--budget", "0.01", "--against", str(slow)]
    done = runner.invoke(app, [*common, "--repeat", "2", "--prepare", "2"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "benchmarks").exists() and "added" not in done.stdout
    (forward,) = (line for line in done.stdout.splitlines() if "window forward float32" in line and "│" in line)
    ratios = [float(found) for found in forward.split("│")[-2].split()]
    assert len(ratios) == 2 and all(0 < ratio < 0.5 for ratio in ratios)
    (slowest,) = (line for line in done.stdout.splitlines() if line.startswith("slowest row: window backward"))
    assert len(re.findall(r"\d\.\d{4}", slowest)) == 2
    assert "the geometric mean of 4 ratios" in done.stdout


def test_a_version_with_wrong_numbers_is_not_compared(tmp_path: Path) -> None:
    wrong = copy_to(tmp_path / "wrong", more=ANOTHER_CALL.format(sleep=0, factor=1.1))
    out = tmp_path / "rows.jsonl"
    common = ["bench", "window", "--device", "cpu", "--budget", "0.01", "--against", str(wrong)]
    done = runner.invoke(app, [*common, "--out", str(out)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert done.stdout.count("not compared: window") == 2
    assert "not compared: window forward float32: gossamer at wrong blocked failed: out of head 0" in done.stdout
    rows = read_records(out)
    assert {(row["implementation"], row["status"], row["peer"]) for row in rows} == {
        ("gossamer blocked", "ok", False), ("gossamer at wrong blocked", "failed", True)
    }  # fmt: skip


def pair(name: str, now: float, before: float = 1.0, turns: int = 2, direction: str = "forward") -> Pair:
    rows = [Row(name, who, direction, who != "gossamer x", turns=turns) for who in ("gossamer x", "gossamer at y x")]  # type: ignore[arg-type]
    rows[0].p50_ms, rows[1].p50_ms = now, before
    (found,) = pairs(rows, "gossamer at y")
    return found


def test_a_row_is_slow_that_is_slow_in_every_run() -> None:
    tags = {"a": frozenset({"one"}), "b": frozenset({"one", "two"}), "c": frozenset({"two"})}
    once = [pair("a", 1.03), pair("b", 0.99), pair("a", 1.01), pair("b", 1.03)]
    assert verdict(once, tags) == [
        "one: 1.0149, the geometric mean of 4 ratios, SLOWER than 1.005",
        "two: 1.0098, the geometric mean of 2 ratios, SLOWER than 1.005",
        "slowest row: a forward  (1.0300, 1.0100)",
        "0 of 2 rows above 1.02 in all 2 runs",
    ]
    twice = [pair("c", 2.05, 2.0), pair("c", 2.06, 2.0), pair("a", 1.0, turns=1)]
    twice[1].now.time = twice[0].now.time = "x"
    failed = pair("b", 1.0)
    failed.before.fail("refused", "has no case b")
    assert verdict([*twice, failed], tags)[1:] == [
        "slowest row: c forward  (1.0250, 1.0300)",
        "1 of 1 rows above 1.02 in all 2 runs; SLOWER: c forward  (1.0250, 1.0300)",
        "not compared: a forward : not timed in turns, since both together do not fit into memory",
        "not compared: b forward : gossamer at y x refused: has no case b",
    ]
    assert verdict([pair("a", 1.0), pair("a", 1.004, direction="backward")], tags)[0].endswith("within 1.005")


@pytest.fixture
def compare_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compare_host

    monkeypatch.setattr(compare_host, "CALLS", 3)
    monkeypatch.setattr(compare_host, "QUEUES", 1)
    monkeypatch.setattr(compare_host, "FIRST_KEYS", 20)
    return compare_host


def test_host_time_beside_a_slow_version(compare_host: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = copy_to(tmp_path / "slow", more=ANOTHER_CALL.format(sleep=0.03, factor=1.0))
    compare_host.main([str(slow), "-N", "20", "--rounds", "2"])
    _, *lines, _ = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "N 20, forward", "N 20, with gradients", "N 20, and backward", "one query, keys grow, cache with room",
        "one query, keys grow, cache copied",
    ]  # fmt: skip
    for line in lines:
        now, before, more = (float(cell) for cell in line[48:].split()[:3])
        assert 0 < now < before - 15_000 and more < -15_000


def test_host_time_is_not_told_of_wrong_numbers(compare_host: Any, tmp_path: Path) -> None:
    wrong = copy_to(tmp_path / "wrong", more=ANOTHER_CALL.format(sleep=0, factor=1.1))
    with pytest.raises(SystemExit, match=r"a result is wrong: error 0\.1"):
        compare_host.main([str(wrong), "-N", "20", "--rounds", "1"])


def test_host_time_says_what_is_slower(compare_host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for now, before, within in ((10.4, 10.0, True), (10.6, 10.0, False), (102.9, 100.0, True), (104.0, 100.0, False)):
        assert compare_host.report("row", [[now] * 3, [before] * 3], False) == within
    assert [line.split()[6] for line in capsys.readouterr().out.splitlines()] == ["within", "SLOWER"] * 2


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_host_time_without_a_gpu(before: Path) -> None:
    """In a process of its own, since what torch is asked of its device is replaced."""
    command = [sys.executable, str(BENCHMARKS / "compare_host.py"), str(before), "--empty", "--rounds", "1", "-N", "26"]
    done = subprocess.run(
        [*command, "--implementations", "hopper", "small"], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr  # 1: slower, on a machine that does other things as well
    lines = done.stdout.splitlines()[1:-1]
    kept = [line for line in lines if " left out; " not in line]
    assert [line[:48].rpartition(", ")[2].strip() for line in kept] == ["hopper"] * 5 + ["small"] * 3
    for line in kept:
        now, old = (float(cell) for cell in line[48:].split()[:2])
        assert now > 0 and old > 0
    assert len(lines) == 10 and all(line.count("implementation='small' cannot compute") == 2 for line in lines[8:])
