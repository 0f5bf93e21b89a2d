"""Marks of tests that need a GPU of compute capability 9.0 and the compiler."""

from __future__ import annotations

import pytest
import torch

from gossamer.kernels.hopper import missing_packages

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
PROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if HOPPER else 1
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
    pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages())),
]
