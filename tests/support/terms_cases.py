"""Score terms drawn at their extremes: integers of every type and size, both signs, 16 bits, strides, far offsets."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def lengths(r: random.Random, B: int, K: int, device: str) -> Tensor:
    """key_lengths (B,): around the keys there are, and at both ends of the type."""
    dtype = r.choice(INTEGERS)
    held = torch.iinfo(dtype)
    wrap = [2**31 - 1, 2**31, 2**32 + 10, 2**63 - 1, -(2**31), -(2**32) + 5]
    some = [
        0,
        1,
        K // 2,
        K // 2,
        K - 1,
        K,
        K + 1,
        -1,
        held.min,
        held.max,
        *(n for n in wrap if held.min <= n <= held.max),
    ]
    drawn = [max(held.min, min(held.max, r.choice(some))) for _ in range(B)]
    return placed(r, torch.tensor(drawn, dtype=dtype, device=device))


def vector(r: random.Random, H: int, most: float, dtype: torch.dtype, device: str) -> Tensor:
    """A float parameter (H,) of either sign, in any type: a value of `dtype` that the drawn type holds."""
    kind = r.choice([compute_dtype(dtype), *FLOATS])
    drawn = torch.tensor([r.choice([1.0, 1.0, most]) * r.uniform(-1, 1) for _ in range(H)], dtype=torch.float64)
    return placed(r, drawn.to(torch.float32).to(device, kind))


def placed(r: random.Random, x: Tensor) -> Tensor:
    """The values of x (n,) at a stride, one value for all, or where a 16-byte load would fault."""
    where = r.choice(["plain", "plain", "strided", "shared", "unaligned"])
    if where == "strided":
        return torch.stack([x, torch.zeros_like(x)], 1)[:, 0]
    if where == "unaligned":
        return torch.cat([x[:1], x])[1:]
    return x[:1].expand(len(x)) if where == "shared" else x


def number(r: random.Random, x: float) -> Any:
    """A number of Python or one of numpy's; every drawn one is held by float32."""
    return r.choice([float, np.float32, np.float64])(x)


def offset(r: random.Random, Q: int, K: int, far: bool) -> Any:
    """q_offset: the default, near, or as far as there are positions; an int, one of numpy's or a tensor."""
    if r.random() < 0.5:
        return None
    most = 2**31 - 2**16 - max(Q, K)
    drawn = r.choice([0, 5, -9, K + 3, K - Q, -K - Q] + [20 * K, -20 * K, 10**6, -(10**6), most, -most] * far)
    return r.choice([int, int, np.int64, torch.tensor])(drawn)


def terms(
    r: random.Random, names: tuple[str, ...], B: int, H: int, K: int, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Some of the named terms."""
    most = 30.0 if dtype == torch.float64 else 1.0
    optional = {
        "softcap": lambda: number(r, r.choice([2.0, 0.01, 1e4, 1e-18, 1e18])),
        "scale": lambda: number(r, r.choice([-0.3, 0.0, 1.0, 1e-35, 3.0])),
        "key_lengths": lambda: lengths(r, B, K, device),
        "alibi_slopes": lambda: vector(r, H, most, dtype, device),
        "sink_logits": lambda: vector(r, H, 40.0, dtype, device).requires_grad_(),
    }
    return {name: optional[name]() for name in names if r.random() < 0.25}
