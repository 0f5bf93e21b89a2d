"""The arguments of a random call: tensors as they lie in memory, patterns in each accepted form, and mistakes."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any, NamedTuple

import numpy as np
import soak_oracle as oracle
import torch
from soak_calls import WITHOUT_POSITIONS, Call, Vector
from soak_patterns import pattern_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import gossamer as gs


def laid_out(where: str, x: Tensor) -> Tensor:
    """The values of x (B, heads, N, size) in memory of other strides, with NaN around them where there is room.

    "one head" and "one batch" expand the first head or batch element of x, whose other values are not used.
    """
    B, heads, N, size = x.shape
    if where == "one head":
        return x[:, :1].expand(x.shape)
    if where == "one batch":
        return x[:1].expand(x.shape)
    if where == "positions first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if where == "columns":
        return x.mT.contiguous().mT
    if where == "features first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    shapes = {
        "within NaN": ((heads + 1, N + 1, 2, B, size + 8), lambda y: y[1:, :N, 1, :, :size].permute(2, 0, 1, 3)),
        "unaligned": ((x.numel() + 1,), lambda y: y[1:].view(x.shape)),
        "every other row": ((B, heads, 2 * N, size), lambda y: y[:, :, 1::2]),
        "part of a row": ((B, heads, N, 2 * size + 1), lambda y: y[..., size : 2 * size]),
    }
    if where not in shapes:
        return x
    shape, view = shapes[where]
    return view(torch.full(shape, math.nan, dtype=x.dtype, device=x.device)).copy_(x)


def vector(given: Vector, device: str) -> Tensor:
    """The tensor (B,), (H,) or (B, H) of some values, as it lies in memory; an expanded one repeats the first."""
    values = torch.tensor(given.values, dtype=given.dtype)
    n = len(values)
    if given.place == "expanded":
        return values[:1].to(device).expand(values.shape)
    if given.place == "strided":
        room = torch.zeros(2 * n, *values.shape[1:], dtype=given.dtype)
        room[::2] = values
        return room.to(device)[::2]
    if given.place == "unaligned":
        return torch.cat([values.new_zeros(1), values.flatten()]).to(device)[1:].view(values.shape)
    return values.to(device)


def scale_of(c: Call) -> Any:
    """The argument `scale`: a number, or a tensor that is read, learned, or constant in the type of the inputs."""
    if not c.scale_tensor:
        return c.scale
    if c.scale_tensor == "read":
        return torch.tensor(c.scale, dtype=torch.float64)
    dtype = torch.float32 if c.dtype != torch.float64 else torch.float64
    scale = torch.tensor(c.scale, dtype=dtype, device=c.device)
    return torch.nn.Parameter(scale) if c.scale_tensor == "learned" else scale


class PatternArgument(NamedTuple):
    """The `pattern` argument, and what it means."""

    pattern: Any
    alive: Any  # what the argument does not keep alive itself
    counts: Tensor  # `oracle.kept`
    mask: Tensor | None = None  # a mask, which may be written to between calls


def pattern_argument(c: Call) -> PatternArgument:
    """The `pattern` argument of a call in its form."""
    B, H, _, Q, K, _, _ = c.shape
    r = random.Random(c.seed + 1)
    # A form without positions is made of the pattern at the default ones.
    offset = K - Q if c.form in WITHOUT_POSITIONS or c.form == "reordered" else c.offset
    counts = oracle.kept(c.spec, B, H, Q, K, offset, c.device, c.merge)
    if c.form == "none":
        return PatternArgument(None, None, counts)
    if c.form == "mask":
        mask = counts > 0
        if r.random() < 0.3:  # broadcast over queries
            mask = mask[:, :, :1].clone()
        while mask.ndim > 2 and mask.shape[0] == 1 and r.random() < 0.5:
            mask = mask[0]
        shown = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(-1, -1, Q, -1).long()
        return PatternArgument(mask, None, shown, mask)
    if c.form == "mask function":
        kept = (counts > 0).expand(B, H, Q, K)
        function = lambda b, h, i, j: kept[b, h, i, j]  # noqa: E731
        return PatternArgument(create_block_mask(function, B, H, Q, K, c.device, c.blocks), kept, counts)
    if c.form == "sparse":
        kept = (counts[0, 0] > 0).float().cpu()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            sparse = kept.to_sparse_csr()
        return PatternArgument(sparse.to(c.device), None, counts)
    if c.form == "reordered":
        return PatternArgument(gs.CSR.from_torch((counts[0, 0] > 0).float().to_sparse_coo()).reordered(), None, counts)
    pattern = pattern_of(c.spec, Q, K, r)
    if c.form == "handle":
        return PatternArgument(pattern.handle, pattern, counts)
    if c.form == "block mask":
        return PatternArgument(gs.to_flex(pattern, Q, K, block_size=c.blocks, device=c.device), None, counts)
    if c.form in ("layout", "device layout"):
        layout = pattern.layout(Q, K, block_q=c.blocks[0], block_kv=c.blocks[1], q_offset=offset)
        return PatternArgument(layout.to(c.device) if c.form == "device layout" else layout, None, counts)
    return PatternArgument(pattern, None, counts)


def make_mistake(c: Call, arguments: dict[str, Any]) -> None:
    """Change the arguments by the mistake of a call."""
    q, k, v = (arguments[name] for name in "qkv")
    B, H, _, Q, K, _, _ = c.shape
    one = q.detach()
    changed: dict[str, Any] = {
        "q of integers": {"q": torch.ones(q.shape, dtype=torch.int32, device=c.device)},
        "k of another head size": {"k": torch.cat([k, k], -1)},
        "v with a key more": {"v": torch.cat([v, v[..., :1, :]], -2)},
        "heads that G does not divide": {"k": torch.stack([one] * (H + 1)), "q": one, "v": one},
        "no values": {"v": v[..., :0, :]},
        "softcap of 0": {"softcap": 0.0},
        "softcap of nan": {"softcap": math.nan},
        "scale of inf": {"scale": math.inf},
        "lengths of floats": {"key_lengths": torch.ones(B, device=c.device)},
        "lengths for another batch": {"key_lengths": torch.ones(B + 1, dtype=torch.int32, device=c.device)},
        "slopes for another head": {"alibi_slopes": torch.ones(H + 1, device=c.device)},
        "slopes that require grad": {"alibi_slopes": torch.ones(H, device=c.device).requires_grad_()},
        "a distance without slopes": {"alibi_slopes": None, "alibi_distance": "signed"},
        "a distance of text": {"alibi_slopes": torch.ones(H, device=c.device), "alibi_distance": "both"},
        "scale of a vector": {"scale": torch.ones(H, device=c.device)},
        "sinks on integers": {"sink_logits": torch.ones(H, dtype=torch.int64, device=c.device)},
        "q_offset of 2**31": {"q_offset": 2**31},
        "q_offset of 0.5": {"q_offset": 0.5},
        "a list of patterns": {"pattern": [gs.Causal()] * H},
        "a mask of floats": {"pattern": torch.zeros(Q, K, device=c.device)},
        "a mask of another size": {"pattern": torch.ones(Q + 1, K + 1, dtype=torch.bool, device=c.device)},
        "an unknown implementation": {"implementation": "fast"},
        "merge of a window": {"pattern": gs.Causal(), "merge": "lse"},
        "k of another type": {"k": k.to(torch.float32 if c.dtype != torch.float32 else torch.float64)},
        "q of one dimension": {"q": q.reshape(-1)},
        "numpy q": {"q": np.zeros(tuple(q.shape))},
        "return_lse of 1": {"return_lse": 1},
        "deterministic of 1": {"deterministic": 1},
        "softcap of text": {"softcap": "2"},
        "q_offset of two numbers": {"q_offset": torch.zeros(2, dtype=torch.int64)},
    }
    assert c.mistake is not None
    arguments.update(changed[c.mistake])


def offset_of(c: Call) -> Any:
    """The `q_offset` argument of a call."""
    if c.q_offset is None:
        return None
    how, value = c.q_offset
    if how.startswith("numpy"):
        return getattr(np, how.split()[1])(value)
    if how.startswith("tensor"):
        return torch.tensor(value, dtype=getattr(torch, how.split()[1]), device=c.device)
    return value


def unbatched(x: Tensor, dims: int) -> Tensor:
    """x (B, heads, ...) without batch, or without batch and heads, of a call whose q has fewer than four dimensions."""
    for _ in range(4 - dims):
        x = x[0]
    return x
