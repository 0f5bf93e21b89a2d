"""The pattern of a mask function of FlexAttention, `mask_mod(b, h, q_idx, kv_idx)` over tensors of indices."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import CellType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.checks import raised, show
from gossamer.patterns import Pattern
from gossamer.patterns.grid import Sizes
from gossamer.torch.block_mask import MaskMod

# Pairs on which a mask function is evaluated at once.
PAIRS_AT_ONCE = 2**22
MOST_SEEN = 1000  # objects that are looked through for a function's tensors
_NOTHING = CellType()  # what a function closes over before it is given a value
_PROCESS = object()  # an address means nothing to another process, nor after its function is gone


@dataclass(frozen=True, eq=False, repr=False)
class FlexMask(Pattern):
    """The pairs that a mask function of FlexAttention keeps: see `from_flex`, which checks these arguments.

    Args:
        mask_mod: called with int64 tensors on `device`; q_idx counts rows from 0, whatever `q_offset` is.
        Q, K: rows and keys of a call.
        B, H: batch elements and query heads that it tells apart; 1 where it does not.
        b, h: the batch element and head that it is called with where B and H are 1.
    """

    mask_mod: MaskMod
    Q: int
    K: int
    B: int
    H: int
    device: torch.device
    b: int = 0
    h: int = 0

    def __repr__(self) -> str:
        apart = "".join(f", {name}={n}" for name, n in (("B", self.B), ("H", self.H)) if n > 1)
        return f"from_flex({getattr(self.mask_mod, '__name__', show(self.mask_mod))}, {self.Q}, {self.K}{apart})"

    def _key(self) -> tuple[Any, ...]:
        return _PROCESS, id(self.mask_mod), self.Q, self.K, self.B, self.H, str(self.device), self.b, self.h

    @property
    def lead(self) -> tuple[int, int]:
        return self.B, self.H

    def at(self, b: int, h: int) -> Pattern:
        if self.lead == (1, 1):
            return self
        return FlexMask(self.mask_mod, self.Q, self.K, 1, 1, self.device, b, h)

    @property
    def reads_positions(self) -> bool:
        return False

    def _check(self, Q: int, K: int) -> None:
        if (Q, K) != (self.Q, self.K):
            raise ValueError(f"{self!r} is for Q={self.Q} and K={self.K}, needs Q={Q} and K={K}")

    def _keep(self, i: np.ndarray, j: np.ndarray, sizes: Sizes) -> np.ndarray:
        # Indices that exist: a mask function may read tensors by them.
        return self._evaluate(np.clip(i - sizes.q_offset, 0, self.Q - 1), np.clip(j, 0, self.K - 1))

    def _evaluate(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Memo or not, for rows and keys that broadcast against each other; some pairs at a time."""
        shape = np.broadcast_shapes(rows.shape, keys.shape)
        rows, keys = (x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in (rows, keys))
        if math.prod(shape) > PAIRS_AT_ONCE:
            axis = next(axis for axis, n in enumerate(shape) if n > 1)
            half = shape[axis] // 2

            def part(x: np.ndarray, of: slice) -> np.ndarray:
                return x[(slice(None),) * axis + (of,)] if x.shape[axis] > 1 else x

            halves = [self._evaluate(part(rows, of), part(keys, of)) for of in (slice(half), slice(half, None))]
            return np.concatenate(halves, axis=axis)
        # One dimension after the other, so that what reads rows alone is computed once for each of them.
        function = self.mask_mod
        for axis in reversed(range(len(shape))):
            if shape[axis] > 1:
                function = torch.vmap(function, (None, None, *(0 if x.shape[axis] > 1 else None for x in (rows, keys))))
        arrays = np.int64(self.b), np.int64(self.h), rows.squeeze(), keys.squeeze()
        kept = mapped(lambda: call(function, *(torch.as_tensor(x, device=self.device) for x in arrays)), self.device)
        if kept.dtype != torch.bool or kept.numel() != math.prod(shape):
            raise ValueError(
                f"mask, a function mask_mod(b, h, q_idx, kv_idx), must return a boolean for each pair; of pairs of "
                f"shape {shape} it returns shape {tuple(kept.shape)}, {kept.dtype}"
            )
        return kept.numpy().reshape(shape)


def mapped(function: Callable[[], Tensor], device: torch.device) -> Tensor:
    """The result of a function of transforms by vmap, on the CPU, from wherever it is called.

    An operator of a compiled graph runs with vmap left out of the dispatcher; a thread of its own has the default.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Tensor:
        with torch.no_grad(), torch.cuda.stream(stream):  # no stream is no change
            return function().cpu()

    if not torch._C._dispatch_tls_is_dispatch_key_excluded("FuncTorchBatched"):
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a mask function, or of a transform of one."""
    try:
        return function(*arguments)
    except Exception as error:
        hint = "; device= says where it is evaluated" if "device" in str(error) else ""
        raise ValueError(f"mask, a function mask_mod(b, h, q_idx, kv_idx), raised {raised(error)}{hint}") from error


def device_of(mask_mod: MaskMod) -> torch.device:
    """The device of a mask function's tensors, as far as they are seen: a GPU if any is on one, else the CPU."""
    waiting: list[Any] = [mask_mod]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_SEEN:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.device
        waiting += _inside(value)
    return torch.device("cpu")


def _inside(value: Any) -> list[Any]:
    """The items of a collection or an object, and all that a function closes over, reads or has as arguments."""
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__func__, value.__self__]
    if inspect.isfunction(value):
        cells = (cell for cell in value.__closure__ or () if cell != _NOTHING)
        names = (value.__globals__.get(name) for name in value.__code__.co_names)
        return [*(cell.cell_contents for cell in cells), *names, *(value.__defaults__ or ())]
    return [] if isinstance(value, (type, Tensor, ModuleType)) else list(getattr(value, "__dict__", {}).values())
