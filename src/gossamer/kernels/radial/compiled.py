"""The compiled kernels: called with its configuration, `radial` gives a function of arrays and numbers."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

from gossamer.kernels.hopper.store import Kernel, directory

BESIDE = ("configurations", "functions", "gravity")
DEVICE = Path(__file__).with_name("device")  # with those beside it all that kernels are made from
OLDEST = 8  # the major compute capability that kernels are compiled for
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a")


class Sums(Kernel):
    """Kept as the others are, for the device that is there."""

    def build(self, *key: Any) -> Any:
        from gossamer.kernels.radial.device import entries

        return entries.radial(*key)

    def path(self, *key: Any) -> Path:
        """The file of a configuration: its name depends on the sources here as well."""
        name = f"{super().path(*key).stem} {_fingerprint()}"
        return directory() / "radial" / f"{self.name}-{hashlib.sha256(name.encode()).hexdigest():.32}.o"


radial = Sums("radial")


def compiles_for(major: int, minor: int) -> bool:
    """Whether there are kernels for a device of this compute capability; then, if nothing else is asked for, for it."""
    if major >= OLDEST:
        sm = f"sm_{major}{minor}"
        os.environ.setdefault("CUTE_DSL_ARCH", f"{sm}a" if major >= 9 else sm)
    return major >= OLDEST


@cache
def _fingerprint() -> str:
    found = hashlib.sha256()
    for path in [*sorted(DEVICE.glob("*.py")), *(DEVICE.with_name(f"{name}.py") for name in BESIDE)]:
        found.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
