"""The compiled kernel: called with its configuration, `lists` gives a function of arrays and numbers."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from gossamer.kernels.hopper.store import Kernel, directory

DEVICE = Path(__file__).with_name("device")  # beside `configurations`, all that the kernel is made from


class ListsKernel(Kernel):
    """Kept as the others are, for the device that is there."""

    def build(self, *key: Any) -> Any:
        from gossamer.kernels.neighbors.device import entries

        return entries.lists(*key)

    def path(self, *key: Any) -> Path:
        """The file of a configuration: its name depends on the sources here as well."""
        name = f"{super().path(*key).stem} {_fingerprint()}"
        return directory() / "neighbors" / f"{self.name}-{hashlib.sha256(name.encode()).hexdigest():.32}.o"


lists = ListsKernel("lists")


@cache
def _fingerprint() -> str:
    found = hashlib.sha256()
    for path in [*sorted(DEVICE.glob("*.py")), DEVICE.with_name("configurations.py")]:
        found.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
