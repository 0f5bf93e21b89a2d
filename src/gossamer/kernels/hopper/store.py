"""Compiled kernels: made when first asked for, kept in memory and as object files on disk.

A file holds what `export_to_c` writes and 32 bytes more, its SHA-256: readers of ELF files ignore what follows. It is
called through a plain tvm-ffi function, which costs less than calling the compiler's own result. Its name is a digest
of all that it depends on, so that an entry is never wrong, only unused; processes that make the same one at the same
time replace it by the same one.
"""

from __future__ import annotations

import hashlib
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

from gossamer.kernels.hopper.device.parameters import Role, parameters

DIRECTORY = "GOSSAMER_CACHE_DIR"
ARCHITECTURE = "sm_90a"
DIGEST = 32
FUNCTION = "kernel"  # what a kernel is called inside of its object file
DEVICE = Path(__file__).with_name("device")  # all that kernels are made from; what calls them is in no object file

_lock = RLock()  # the compiler is not made for threads
log = logging.getLogger("gossamer")


class Kernel:
    """A kind of kernel, named as its entry in `device.entries`: called with its configuration, gives the function.

    Args:
        roles: of its arrays, for the form in which `device.flat` passes them; None: as its entry takes them.
    """

    def __init__(self, name: str, roles: tuple[Role, ...] | None = None) -> None:
        self.name, self.roles = name, roles
        self._kept: dict[Any, Callable[..., None]] = {}

    def __call__(self, *key: Any) -> Callable[..., None]:
        return self._kept.get(key) or self._make(key)

    def _make(self, key: Any) -> Callable[..., None]:
        with _lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = _loaded(self.object(*key))
            return found

    def build(self, *key: Any) -> Any:
        """What the compiler makes of a configuration; it is imported here."""
        from gossamer.kernels.hopper.device import entries

        entry = getattr(entries, self.name)(*key)
        if self.roles is None:
            return entries.compiled(entry.kernel, *entry.arguments)
        from gossamer.kernels.hopper.device.flat import compile_flat

        own = parameters(self.name, *key)
        return compile_flat(entry, tuple(p._replace(role=role) for p, role in zip(own, self.roles, strict=True)))

    def digest(self, *key: Any) -> str:
        """Of all that the object file of a configuration depends on: its sources, the compiler, the form."""
        return _digest(self.name, key if self.roles is None else (key, self.roles))

    def path(self, *key: Any) -> Path:
        """The file of a configuration."""
        return directory() / "hopper" / f"{self.name}-{self.digest(*key)}.o"

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
        if _sources() != _fingerprint():
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


def _digest(name: str, key: Any) -> str:
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k != "CUTE_DSL_ARCH")
    architecture = os.environ.get("CUTE_DSL_ARCH", ARCHITECTURE)
    what = (_fingerprint(), architecture, platform.machine(), settings, FUNCTION, name, key)
    return f"{hashlib.sha256(repr(what).encode()).hexdigest():.32}"


@cache
def _fingerprint() -> str:
    """The sources as they were when this process first asked."""
    return _sources()


def _sources() -> str:
    """Digest of the sources that kernels are made from and of the versions of the compiler."""
    found = hashlib.sha256()
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        found.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in sorted(DEVICE.rglob("*.py")):
        found.update(f"{path.relative_to(DEVICE).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
