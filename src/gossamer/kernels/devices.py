"""What every launch asks of a device, and the memory of results."""

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


def template(like: Tensor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype | None = None) -> Tensor:
    """A shape and a type, without the memory, for `empty_from`: no other allocation costs the host as little."""
    return like.new_empty((1,), dtype=dtype).expand(shape)


def empty_from(template: Tensor) -> Tensor:
    """An uninitialised contiguous tensor."""
    return torch.empty_like(template, memory_format=torch.contiguous_format)
