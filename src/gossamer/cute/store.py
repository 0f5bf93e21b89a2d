"""Compiled kernels: made when first asked for, kept in memory and as object files on disk.

A file holds what `export_to_c` writes and 32 bytes more, its SHA-256: readers of ELF files ignore what follows. It is
called through a plain tvm-ffi function, which costs less than calling the compiler's own result. Its name is a digest
of all that it depends on, so that an entry is never wrong, only unused; processes that make the same one at the same
time replace it by the same one. An operation registers its kernels with the sources that they are made from: an edit of
these compiles its kernels again and no others.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any
from uuid import uuid4

from gossamer.cute.parameters import Parameter, Role

DIRECTORY = "GOSSAMER_CACHE_DIR"
ARCHITECTURE = "sm_90a"
DIGEST = 32
FUNCTION = "kernel"  # what a kernel is called inside of its object file
PACKAGE = Path(__file__).parents[1]

Arrays = Callable[..., tuple[Parameter, ...]]

_lock = RLock()  # the compiler is not made for threads
log = logging.getLogger("gossamer")


class Kernel:
    """A kind of kernel, which an operation registers: called with its configuration, gives the function.

    Args:
        entry: "module:function", which takes a configuration and returns an `Entry`.
        sources: folders and files of the package whose text its machine code depends on, beside `cute`.
        arrays: what the arrays among its arguments are, from its configuration; None: it is never passed flat.
        roles: of these arrays, for the form in which `cute.flat` passes them; None: as its entry takes them.
    """

    def __init__(
        self, entry: str, sources: tuple[str, ...], arrays: Arrays | None = None, roles: tuple[Role, ...] | None = None
    ) -> None:
        self.entry, self.sources, self.arrays, self.roles = entry, sources, arrays, roles
        self.module, _, self.name = entry.partition(":")
        self._kept: dict[Any, Callable[..., None]] = {}
        self._flat: dict[tuple[Role, ...], Kernel] = {}

    def __call__(self, *key: Any) -> Callable[..., None]:
        return self._kept.get(key) or self._make(key)

    def flat(self, roles: tuple[Role, ...]) -> Kernel:
        """The kind in the form of `cute.flat`."""
        with _lock:
            if roles not in self._flat:
                self._flat[roles] = Kernel(self.entry, self.sources, self.arrays, roles)
            return self._flat[roles]

    def _make(self, key: Any) -> Callable[..., None]:
        with _lock:
            kernel = self._kept.get(key)
            if kernel is None:
                kernel = self._kept[key] = _loaded(self.object(*key))
            return kernel

    def build(self, *key: Any) -> Any:
        """The compiled kernel of a configuration; the compiler is imported here."""
        from gossamer.cute.entry import compiled

        entry = getattr(importlib.import_module(self.module), self.name)(*key)
        if self.roles is None:
            return compiled(entry.kernel, *entry.arguments)
        from gossamer.cute.flat import compile_flat

        assert self.arrays is not None, f"{self.entry} is never passed flat"
        own = self.arrays(*key)
        return compile_flat(entry, tuple(p._replace(role=role) for p, role in zip(own, self.roles, strict=True)))

    def digest(self, *key: Any) -> str:
        """The digest of all that the object file of a configuration depends on: its sources, the compiler, the form."""
        # Another version in the same process has another package name, and the same kernels.
        return _digest(self.entry.partition(".")[2], self.sources, key if self.roles is None else (key, self.roles))

    def path(self, *key: Any) -> Path:
        """The file of a configuration."""
        return directory() / self._folder / f"{self.name}-{self.digest(*key)}.o"

    @property
    def _folder(self) -> str:
        """The operation's: "hopper" for those of attention."""
        _, room, name, *_ = self.module.split(".")
        return name if room == "kernels" else room

    def object(self, *key: Any) -> bytes:
        """The object file of a configuration: from disk, or compiled and written there."""
        with _lock:
            # Without a GPU the compiler cannot see for what it compiles.
            os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)
            return self._read(key) or self._compile(key)

    def _read(self, key: Any) -> bytes | None:
        if "CUTE_DSL_KEEP" in os.environ:  # the compiler shall write what it makes on the way
            return None
        path = self.path(*key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:
            log.warning("%s is damaged: compiling %s again", path, self.name)
            return None
        log.info("read %s %s from %s", self.name, key, path)
        return data[:-DIGEST]

    def _compile(self, key: Any) -> bytes:
        start = perf_counter()
        made = self.build(*key)
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "kernel.o"
            made.export_to_c(str(local), function_name=FUNCTION)
            data = local.read_bytes()
        log.info("compiled %s %s in %.1f s", self.name, key, perf_counter() - start)
        if _text(self.sources) != _fingerprint(self.sources):
            log.warning("the sources of the kernels changed meanwhile: %s is not kept on disk", self.name)
            return data
        path = self.path(*key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new name and then a rename: no process ever reads half a file.
            part = path.with_name(f"{path.name}.{uuid4().hex}")
            part.write_bytes(data + hashlib.sha256(data).digest())
            part.replace(path)
        except OSError as error:
            log.warning("cannot keep the compiled %s: %s (%s names another folder)", self.name, error, DIRECTORY)
        return data


def directory() -> Path:
    """The folder of compiled kernels: $GOSSAMER_CACHE_DIR, or gossamer in the user's cache folder."""
    given = os.environ.get(DIRECTORY)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"


def _loaded(data: bytes) -> Callable[..., None]:
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "kernel.o"
        local.write_bytes(data)
        return getattr(load_module(str(local), enable_tvm_ffi=True), FUNCTION)


def _digest(entry: str, sources: tuple[str, ...], key: Any) -> str:
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k != "CUTE_DSL_ARCH")
    architecture = os.environ.get("CUTE_DSL_ARCH", ARCHITECTURE)
    what = (_fingerprint(sources), architecture, platform.machine(), settings, FUNCTION, entry, key)
    return f"{hashlib.sha256(repr(what).encode()).hexdigest():.32}"


@cache
def _fingerprint(sources: tuple[str, ...]) -> str:
    """The digest of the sources as they were when this process first asked."""
    return _text(sources)


def files_of(sources: tuple[str, ...]) -> list[Path]:
    """The files that a kernel's machine code depends on: those of its sources and of `cute`."""
    places = [PACKAGE / source for source in ("cute", *sources)]
    return sorted({file for place in places for file in ([place] if place.suffix else place.rglob("*.py"))})


def _text(sources: tuple[str, ...]) -> str:
    """The digest of the sources that a kernel is made from and of the versions of the compiler."""
    digest = hashlib.sha256()
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in files_of(sources):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
