"""The JAX front end: run where jax is installed and torch is not (`make jax`), on four host devices."""

from __future__ import annotations

import importlib.util
import os

# Compiling is most of what these tests do; one thread a worker.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["test_*.py"]
