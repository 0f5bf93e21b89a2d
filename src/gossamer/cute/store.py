"""Compiled kernels: made when first asked for, kept in memory and as object files on disk.

A file holds what `export_to_c` writes, and then its SHA-256: 32 bytes at the end, which readers of ELF files ignore.
The file's name has a digest of all that the kernel depends on, so that a file is never out of date, only unused, and
processes that compile the same kernel at the same time may replace each other's file. A loaded kernel is a plain
tvm-ffi function, which costs less to call than the compiler's own result. An operation registers its kernels with the
sources that they are compiled from: an edit of these compiles its kernels again and no others.
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
    """A kernel that an operation registers: called with a configuration, it returns the compiled function.

    Args:
        entry: "module:function", which takes a configuration and returns an `Entry`.
        sources: folders and files of the package that it is compiled from, besides `cute`.
        arrays: a function from its configuration to its array arguments; None: it has no flat form.
        roles: of these arrays, if it is compiled in the flat form of `cute.flat`; None: in its entry's own form.
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
        """This kernel in the flat form of `cute.flat`, whose arrays have these roles."""
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
        # Without the package's name: `bench/against.py` loads another version under another name.
        return _digest(self.entry.partition(".")[2], self.sources, key if self.roles is None else (key, self.roles))

    def path(self, *key: Any) -> Path:
        """The file of a configuration."""
        return directory() / self._folder / f"{self.name}-{self.digest(*key)}.o"

    @property
    def _folder(self) -> str:
        """The operation's folder in the cache: its package's name, and "hopper" for attention."""
        _, room, name, *_ = self.module.split(".")
        return name if room == "kernels" else room

    def object(self, *key: Any) -> bytes:
        """The object file of a configuration: from disk, or compiled and written there."""
        with _lock:
            # Without a GPU the compiler must be told the architecture.
            os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)
            return self._read(key) or self._compile(key)

    def _read(self, key: Any) -> bytes | None:
        if "CUTE_DSL_KEEP" in os.environ:  # the user wants the compiler's intermediate files: compile again
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
        if _digest_of(self.sources) != _fingerprint(self.sources):
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
    return _digest_of(sources)


def files_of(sources: tuple[str, ...]) -> list[Path]:
    """The files that a kernel's machine code depends on: those of its sources and of `cute`."""
    places = [PACKAGE / source for source in ("cute", *sources)]
    return sorted({file for place in places for file in ([place] if place.suffix else place.rglob("*.py"))})


def _digest_of(sources: tuple[str, ...]) -> str:
    """The digest of the sources that a kernel is made from and of the versions of the compiler."""
    digest = hashlib.sha256()
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in files_of(sources):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
