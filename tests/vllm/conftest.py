"""The real engine on a CPU: run where vllm is installed (`make vllm`), in one process."""

from __future__ import annotations

import importlib.util
import os

INSTALLED = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
if INSTALLED:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
