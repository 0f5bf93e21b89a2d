"""The JAX front end: run where jax is installed and torch is not (`make jax`), on four host devices."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

# Compiling is most of what these tests do: without optimization, one thread a worker, and by the emitters that take
# half the time, where jaxlib still has them: XLA ends a process whose flags it does not know.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
if importlib.util.find_spec("jaxlib") and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Says how many rows gather together in the calls that follow: 0 for tiles, None for what takes the least."""
    from gossamer.jax import api, choice, prepared

    chosen: Any = choice.gathered_rows

    def these(rows: int | None) -> None:
        for memo in (api._known, prepared._on_device):
            memo.clear()
        monkeypatch.setattr(choice, "gathered_rows", chosen if rows is None else lambda *_: rows)

    return these


collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["test_*.py"]
