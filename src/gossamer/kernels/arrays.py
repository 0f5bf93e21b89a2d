"""The arrays that work is made of: numpy's on the host, torch's tensors where only a device knows the lists.

What numpy and torch have by one name is called by it, through `namespace`; here is what they say differently. torch is
imported for its tensors alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


def namespace(x: Array) -> Any:
    """numpy for its arrays, torch for tensors."""
    return np if isinstance(x, np.ndarray) else importlib.import_module("torch")


def placed(x: Array, device: Any) -> Array:
    """An array where kernels read it: a tensor on a torch device, or itself where `device` is None."""
    if device is None:
        return x
    return namespace(None).as_tensor(x).to(device)


def places(n: int, like: Array) -> Array:
    """0, 1, ..., n - 1, int64, where `like` is."""
    return np.arange(n) if isinstance(like, np.ndarray) else namespace(like).arange(n, device=like.device)


def zeros(shape: Sequence[int], like: Array) -> Array:
    """int32, where `like` is."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, np.int32)
    torch = namespace(like)
    return torch.zeros(shape, dtype=torch.int32, device=like.device)


def int32(x: Array) -> Array:
    """Towards zero."""
    return x.astype(np.int32) if isinstance(x, np.ndarray) else x.int()


def int64(x: Array) -> Array:
    return x.astype(np.int64) if isinstance(x, np.ndarray) else x.long()


def ratio(x: Array, y: Array) -> Array:
    """Of integers, in float32."""
    return x.astype(np.float32) / y.astype(np.float32) if isinstance(x, np.ndarray) else x / y


def ascending(x: Array) -> Array:
    """Where the elements are, smallest first; equal ones in order."""
    return np.argsort(x, kind="stable") if isinstance(x, np.ndarray) else namespace(x).argsort(x, stable=True)


def descending(x: Array) -> Array:
    """Where the elements are, largest first; equal ones in order."""
    if isinstance(x, np.ndarray):
        return np.argsort(-x, kind="stable")
    _, order = namespace(x).sort(x, descending=True, stable=True)
    return order


def words(x: Array) -> Array:
    """The same numbers as a kernel reads them: int32, and one behind the other."""
    return np.ascontiguousarray(x).view(np.int32) if isinstance(x, np.ndarray) else x.contiguous()


def copied(x: Array) -> Array:
    return x.copy() if isinstance(x, np.ndarray) else x.clone()
