"""The way a call is computed, by kernels or by operations of torch, and the reasons.

By default kernels compute the calls that were checked on a GPU (`checked`), as far as they take them, and read nothing
back. `implementation="kernels"` computes all that the kernels take.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.hopper.key_bounds import Bounds
from gossamer.entmax.options import MOST_LISTED
from gossamer.kernels.packages import has_triton
from gossamer.patterns import Causal, Dense, Pattern
from gossamer.patterns.base import Intervals
from gossamer.patterns.compose import And
from gossamer.patterns.handles import pattern_of
from gossamer.plan.problem import Unsupported

if TYPE_CHECKING:
    from gossamer.entmax.options import Options

DTYPES = frozenset({"float16", "bfloat16", "float32"})
LARGEST_HEAD = 256
MOST_KEPT = 256
MOST_PAIRS = 2**31 - 2**20  # of all lists: the name of a pair is an int32


def reasons(q: Tensor, k: Tensor, v: Tensor, options: Options) -> list[str]:
    """The reasons for which kernels do not take a call, from shapes and options alone; none if they take it."""
    refusals = []
    device, interpreting = q.device.type, os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not (interpreting and device == "cpu"):
        refusals.append(f"tensors are on {device}, the kernels run on cuda")
    elif not has_triton():
        refusals.append("triton is not installed")
    elif device == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        refusals.append("the kernels need compute capability 8.0 or later")
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        refusals.append(f"q, k and v are {dtype}, the kernels take {', '.join(sorted(DTYPES))}")
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        refusals.append(f"heads of {q.shape[3]} and {v.shape[3]}, the kernels take up to {LARGEST_HEAD}")
    if options.top_k is not None and options.top_k > MOST_KEPT:
        refusals.append(f"{options.top_k} keys of a row, the kernels keep up to {MOST_KEPT}")
    if q.shape[0] * q.shape[1] * q.shape[2] * (options.top_k or MOST_LISTED) > MOST_PAIRS:
        refusals.append(f"more than {MOST_PAIRS} pairs in the lists of all rows")
    positions = options.q_positions is not None or options.k_positions is not None
    if options.attended.data:
        refusals.append("a mask, a layout or a structure made on the device; the kernels take patterns and positions")
    elif interval_pattern(options, positions, q.shape[2], k.shape[2]) is None:
        refusals.append("a pattern whose rows do not each keep one run of keys, shared by all heads")
    return refusals


def by_kernels(q: Tensor, k: Tensor, v: Tensor, number: float | None, options: Options) -> bool:
    """Whether kernels compute a call.

    Args:
        number: alpha of all heads, where it is given as a number.

    Raises:
        Unsupported: they were asked for and cannot.
    """
    if options.implementation == "torch" or (options.implementation is None and not checked(q, number)):
        return False
    refusals = reasons(q, k, v, options)
    if refusals and options.implementation == "kernels":
        raise Unsupported('implementation="kernels" does not take this call: ' + "; ".join(refusals))
    return not refusals


def checked(q: Tensor, number: float | None) -> bool:
    """Whether the kernels were checked on a GPU for such a call: alpha given as a number, in 16 bits, on sm_90."""
    if not q.is_cuda or number is None or q.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(q.device) == (9, 0)


class Run(NamedTuple):
    """Each row sees one run of keys."""

    kind: Bounds
    intervals: Intervals | None = None


def interval_pattern(options: Options, positions: bool, Q: int, K: int) -> Run | None:
    """The keys that rows may see by pattern and `causal`, where each row sees one run of them.

    Args:
        positions: whether the call has positions, which say then what `causal` means.
    """
    return _run(pattern_of(options.attended.handle), options.causal and not positions, Q, K)


@lru_cache(64)
def _run(pattern: Pattern, causal: bool, Q: int, K: int) -> Run | None:
    if isinstance(pattern, Dense):
        return Run("causal" if causal else "every")
    if isinstance(pattern, Causal):
        return Run("causal")
    whole = And(pattern, Causal()) if causal else pattern
    parts, _ = whole.distinct()
    if len(parts) != 1:
        return None
    sizes = Dense._sizes(Q, K)
    (part,) = parts
    intervals = part.lower(sizes).intervals(sizes)
    return None if intervals is None else Run("intervals", intervals)
