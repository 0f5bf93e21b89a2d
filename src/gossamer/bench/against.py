"""Another version of gossamer beside this one in the same process, under a name of its own.

Its files stay as they are, so that kernels which were compiled for them are found, and tracers, which read functions
from their files, see the lines that run. What is executed is each file with the word `gossamer` replaced by the other
name: imports anywhere in it, those inside of functions too, modules that are named in strings, the operators'
namespace and what patterns ask of their own class so lead to the version itself, whenever they run. Swapped entries of
`sys.modules` would hold only until a function imports something.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gossamer.bench.peer import Peer, Prepared, Refusal
from gossamer.bench.results import RENAMED
from gossamer.bench.run import attend
from gossamer.bench.workload import chosen
from gossamer.cute.store import DIRECTORY, directory
from gossamer.patterns import Pattern
from gossamer.testing.cases import Case
from gossamer.testing.inputs import Inputs

INSIDE = "src/gossamer"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Source:
    """The files of a version, and the name of its rows."""

    package: Path  # the folder `gossamer`
    label: str

    @property
    def name(self) -> str:
        """The name of its rows."""
        return f"gossamer at {self.label}"


@contextlib.contextmanager
def source_of(given: str) -> Iterator[Source]:
    """The files of a version, which lie there as long as the context lasts.

    Args:
        given: a folder or an archive (.tar, .zip, compressed or not) that holds src/gossamer or gossamer, or else a
            commit of the repository that this version runs from.

    Raises:
        ValueError: it is none of these.
    """
    with tempfile.TemporaryDirectory(prefix="gossamer-against-") as temporary:
        folder, path = Path(temporary), Path(given)
        label = path.resolve().name
        if path.is_dir():
            folder = path.resolve()
        elif path.exists():
            _extract(path, folder)
        else:
            label = _check_out(given, folder)
        yield Source(_package(folder, given), label)


def _package(folder: Path, given: str) -> Path:
    inside = [folder / INSIDE, folder / "gossamer", folder, *folder.glob(f"*/{INSIDE}")]
    for package in inside:
        if package.name == "gossamer" and (package / "__init__.py").is_file():
            return package
    raise ValueError(f"a version must hold {INSIDE}/__init__.py, or gossamer/__init__.py; {given!r} has neither")


def _extract(archive: Path, folder: Path) -> None:
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
    else:
        raise ValueError(f"a version must be a commit, a folder, or a tar or zip archive; {str(archive)!r} is none")


def _check_out(commit: str, folder: Path) -> str:
    """Puts the package of a commit into a folder; returns the commit in twelve digits."""
    here = Path(__file__).parent
    accepted = f"a version must be a folder, an archive or a commit of the repository of {here}, got {commit!r}"

    def git(*arguments: str, where: Path = here) -> bytes:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=where, capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise ValueError(f"{accepted}; git cannot be run: {error}") from None
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise ValueError(f"{accepted}; git says: {message[-1]}")
        return done.stdout

    root = Path(git("rev-parse", "--show-toplevel").decode().strip())
    revision = git("rev-parse", "--verify", "--short=12", "--end-of-options", f"{commit}^{{commit}}").decode().strip()
    archive = folder / "package.tar"
    archive.write_bytes(git("archive", "--format=tar", revision, INSIDE, where=root))
    _extract(archive, folder)
    return revision


def name_among(names: Sequence[str], implementation: str | None) -> str | None:
    """The name of an implementation in a version that has these names: its name now, or an older one."""
    if implementation in names:
        return implementation
    return next((old for old, new in RENAMED.items() if new == implementation), implementation)


class Version:
    """A version that is loaded: `load("plan.table")` is its module `gossamer.plan.table`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        number = next(_numbers)
        self.name = "gossamer_against" + (f"_{number}" if number > 1 else "")
        # Both keep compiled kernels in one folder: its default would have the other name.
        os.environ.setdefault(DIRECTORY, str(directory()))
        sys.meta_path.insert(0, _Finder(self.name, source.package))
        self.package: Any = importlib.import_module(self.name)

    def load(self, module: str) -> Any:
        """One of its modules, imported when first asked for."""
        return importlib.import_module(f"{self.name}.{module}")

    def named(self, implementation: str | None) -> str | None:
        """The name of an implementation in this version."""
        return name_among(self.load("plan.table").NAMES, implementation)

    def pattern(self, case: Case) -> Pattern:
        """The pattern of the version's own case of that name.

        Raises:
            Refusal: it has none, or one of other sizes.
        """
        own_case = next((own for own in self.load("testing.cases").CASES if own.name == case.name), None)
        if own_case is None:
            raise Refusal(f"has no case {case.name}")
        names = [field.name for field in fields(case) if field.name not in ("pattern", "tags", "dtypes", "devices")]
        other = [name for name in names if getattr(own_case, name, None) != getattr(case, name)]
        if other:
            raise Refusal(f"has another case {case.name}: {', '.join(other)}")
        return own_case.pattern()


class _Finder(MetaPathFinder):
    """Finds the modules of a version in its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, *rest = fullname.split(".")
        if top != self.name:
            return None
        stem = self.folder.joinpath(*rest)
        package = (stem / "__init__.py").is_file()
        file = stem / "__init__.py" if package else stem.with_name(f"{stem.name}.py")
        if not file.is_file():
            return None
        loader = _Loader(fullname, str(file))
        return spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=[str(stem)] if package else None
        )


class _Loader(SourceFileLoader):
    """Executes a file under the other name; its bytecode is not kept, since it is not that of the file."""

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode()
        other = re.sub(r"\bgossamer\b", fullname.partition(".")[0], text)
        return compile(other, self.path, "exec", dont_inherit=True)


def against(version: Version, case: Case, implementation: str | None) -> Peer:
    """The version on a case, in the form of a peer."""
    implementation = version.named(implementation)

    @cache
    def pattern() -> Pattern:
        return version.pattern(case)

    def own(inputs: Inputs) -> Inputs:
        return inputs._replace(pattern=pattern())

    def prepare(inputs: Inputs, matmul_tflops: float) -> Prepared:
        given, call = own(inputs), version.package.attention
        return Prepared(lambda q, k, v: attend(given, q, k, v, implementation, call))

    return Peer(
        version.source.name,
        prepare,
        compiles=True,
        chosen=lambda inputs: chosen(own(inputs), implementation, explain=version.package.explain),
    )
