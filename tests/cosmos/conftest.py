"""The simulation: run where jax is installed and torch is not (`make cosmos`), one thread a worker."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

collect_ignore_glob = [] if importlib.util.find_spec("jax") else ["test_*.py"]
