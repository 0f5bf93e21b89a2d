"""From tensors and words to kernel arguments, and the choice of the tile: small ones where there are few programs."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.dense.kernels import backward_kernel, forward_kernel
from gossamer.kernels.rows import row_terms, sink_gradient

LOG2E = 1.0 / math.log(2.0)


class Tile(NamedTuple):
    """How a kernel is cut: R query rows, C keys, and the launch options."""

    R: int
    C: int
    warps: int
    stages: int


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a head size."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 elsewhere (the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def forward_tile(p: Problem, multiprocessors: int) -> Tile:
    """The most rows that still give every multiprocessor a program."""
    wide = max(padded(p.D), padded(p.E)) * (2 if p.dtype == "float32" else 1)
    C = 64 if wide <= 128 else 32
    for R in (64, 32):
        if multiprocessors <= -(-p.Q // R) * p.B * p.H and R * wide <= 64 * 256:
            return Tile(R, C, 4, 2)
    return Tile(16, C, 4, 2)


def backward_tile(p: Problem, multiprocessors: int) -> Tile:
    """Smaller tiles for large heads, whose gradients are held in registers."""
    wide = max(padded(p.D), padded(p.E)) * (2 if p.dtype == "float32" else 1)
    programs = -(-p.Q // 64) * p.B * p.H
    if wide > 256:
        return Tile(16, 32, 4, 1)
    size = 64 if wide <= 128 and programs >= multiprocessors else 32
    return Tile(size, size, 4, 2 if wide <= 128 else 1)


def operand(x: Tensor) -> Tensor:
    """The tensor itself when its last dimension is contiguous."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def scales(terms: Terms) -> tuple[float, float]:
    """(factor of the products, factor of the tanh), so that scores are in base 2."""
    if terms.softcap is None:
        return terms.scale * LOG2E, 0.0
    return terms.scale / terms.softcap, terms.softcap * LOG2E


def shared_strides(words: Tensor | None) -> tuple[int, int]:
    """Distances of two batch elements' and two heads' words (Bl, Hl, Q, W); 0 where they share."""
    if words is None:
        return 0, 0
    return (words.stride(0) if words.shape[0] > 1 else 0), (words.stride(1) if words.shape[1] > 1 else 0)


def forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, terms: Terms, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse). `tile` replaces the one chosen by size."""
    q, k, v = operand(q), operand(k), operand(v)
    out = torch.empty((p.B, p.H, p.Q, p.E), dtype=q.dtype, device=q.device)
    lse = torch.empty((p.B, p.H, p.Q), dtype=torch.float32, device=q.device)
    R, C, warps, stages = tile or forward_tile(p, processors(q.device))
    forward_kernel[-(-p.Q // R), p.H, p.B](
        q, k, v, out, lse, words, terms.key_lengths, terms.sink_logits, terms.alibi_slopes,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shared_strides(words), p.Q, p.K, terms.q_offset,
        *scales(terms), GROUP=p.H // p.G, D=p.D, E=p.E, BLOCK_D=padded(p.D), BLOCK_E=padded(p.E), R=R, C=C,
        SOFTCAP=terms.softcap is not None, PRECISION="tf32x3" if p.dtype == "float32" else "ieee",
        num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def backward(
    p: Problem, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    words: Tensor | None, terms: Terms, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink_logits or None)."""
    q, k, v, dout, out, lse = operand(q), operand(k), operand(v), dout.contiguous(), out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    R, C, warps, stages = tile or backward_tile(p, processors(q.device))
    programs = -(-p.K // C) * p.G + -(-p.Q // R) * p.H
    backward_kernel[programs, p.B](
        q, k, v, dout, out, lse, dlse, dq, dk, dv, words, terms.key_lengths, terms.alibi_slopes,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *shared_strides(words), p.Q, p.K, terms.q_offset,
        *scales(terms), terms.scale, p.H, GROUP=p.H // p.G, D=p.D, E=p.E, BLOCK_D=padded(p.D), BLOCK_E=padded(p.E),
        R=R, C=C, SOFTCAP=terms.softcap is not None, PRECISION="tf32x3" if p.dtype == "float32" else "ieee",
        num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    dsink = None
    if terms.sink_logits is not None:
        dsink = sink_gradient(*row_terms(dout, dlse, out, lse, torch.float32), terms)
    return dq, dk, dv, dsink
