"""The forward of SparseK attention by the kernel for compute capability 9.0, over the lists of the Triton kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.kernels.gpu import processors
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.launch import Launched
from gossamer.sparse_k.hopper.configurations import SIZES, TILE, SparseKConfig
from gossamer.sparse_k.launch import triton as triton_calls
from gossamer.sparse_k.launch.problem import Operands, Options

LOG2E = math.log2(math.e)
STEP = 8  # numbers of 16 bits that are copied at once
LARGEST_ROW_STRIDE = 1 << 30  # of gathered rows, so that bytes fit 32 bits


def reasons(x: Operands, o: Options) -> list[str]:
    """The reasons for which the kernel does not compute a call."""
    D, E = x.q.shape[3], x.v.shape[3]
    refusals = [*missing_packages()]
    if x.q.device.type != "cuda":
        refusals.append(f"needs a GPU, not {x.q.device.type}")
    elif torch.cuda.get_device_capability(x.q.device) != (9, 0):
        refusals.append("needs a GPU of compute capability 9.0")
    if x.q.dtype not in (torch.float16, torch.bfloat16):
        refusals.append(f"has no kernels for {x.q.dtype}")
    if x.u.dtype != torch.float32:
        refusals.append(f"has no kernels for scores of {x.u.dtype}")
    if max(D, E) > max(SIZES) or D % STEP or E % STEP:
        refusals.append(f"head sizes are multiples of {STEP} up to {max(SIZES)}")
    if not o.causal:
        refusals.append("is causal")
    if x.q.shape[2] != x.u.shape[2]:
        refusals.append("has a query of every key: no prefix")
    if x.hidden is not None:
        refusals.append("takes no key_lengths")
    if o.gate not in ("v", None):
        refusals.append(f"has no gate {o.gate!r}")
    if o.scale <= 0:
        refusals.append("the scale is positive")
    return refusals


def config(x: Operands, o: Options) -> SparseKConfig:
    """The configuration of the kernel of a call."""
    size = next(size for size in SIZES if size >= max(x.q.shape[3], x.v.shape[3]))
    return SparseKConfig(str(x.q.dtype).removeprefix("torch."), size, o.gate == "v")


def forward(x: Operands, o: Options) -> tuple[Tensor, Tensor]:
    """out (B, H, N, E), in q's type, and lse (B, H, N)."""
    from gossamer.sparse_k.hopper import compiled

    (B, H, N, _), E = x.q.shape, x.v.shape[3]
    q, k, v = (_readable(t) for t in (x.q, x.k, x.v))
    u, tau, last = (_aligned(t.contiguous()) for t in (x.u, x.tau, x.last))
    every = triton_calls.live_keys(last, o)
    tile_lists = triton_calls.lists(last, o, TILE, every)
    out, lse = x.q.new_empty(B, H, N, E), x.u.new_empty(B, H, N)
    items = B * H * tile_lists.keys.shape[1]
    given = (
        q, k, v, out, lse, *(t.flatten(0, 1) for t in (u, tau, last)), tile_lists.keys, tile_lists.counts,
        every.keys, every.counts,
        last.new_zeros(1), o.scale * LOG2E, o.window, items, min(items, processors(x.q.device)),
    )  # fmt: skip
    Launched(compiled.forward(config(x, o)), given, by_address=False).start()
    return out, lse


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _readable(x: Tensor) -> Tensor:
    """x if TMA reads it and its rows can be gathered, else a copy."""
    *lead, last = x.stride()
    able = last == 1 and all(s > 0 and s % STEP == 0 for s in lead) and x.stride(2) < LARGEST_ROW_STRIDE
    return _aligned(x if able else x.contiguous())
