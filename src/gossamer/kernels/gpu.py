"""What launches ask of a GPU."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors it has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
