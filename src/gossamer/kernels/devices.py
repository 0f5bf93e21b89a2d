"""What every launch asks of a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 elsewhere (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def elsewhere(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one, where its kernels would not be run."""
    return x.is_cuda and x.device.index != torch.cuda.current_device()
