"""From a problem and its packed mask to kernel arguments, and the choice of the tile: small for few programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from gossamer.kernels import relaunch
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import EDGE, Builder, Kernel, Operand, Prepared
from gossamer.kernels.relaunch import Programs, padded, strides
from gossamer.kernels.scores import alibi, scales
from gossamer.kernels.small.kernels import backward_kernel, forward_kernel
from gossamer.kernels.small.parameters import Form
from gossamer.plan.problem import Problem

KERNELS = {"forward": forward_kernel, "backward": backward_kernel}


class Tile(NamedTuple):
    """The tile of a kernel: R query rows, C keys, and the launch options."""

    R: int
    C: int
    warps: int
    stages: int


@lru_cache
def forward_tile(p: Problem) -> Tile:
    """Few rows, many keys a step while there are few programs; measured on an H200 from 26 to 2048 positions."""
    wide = max(padded(p.D), padded(p.E)) * (2 if p.dtype == "float32" else 1)
    if wide > 128:
        R = 32 if p.processors <= -(-p.Q // 32) * p.B * p.H else 16
        return Tile(R, 32, 4, 2)
    if p.processors // 2 <= -(-p.Q // 64) * p.B * p.H:
        return Tile(64, 64, 4, 3)
    return Tile(16, 32 if p.K <= 32 else 128, 4, 2)


@lru_cache
def backward_tile(p: Problem) -> Tile:
    """Small tiles, whose loops are short."""
    wide = max(padded(p.D), padded(p.E)) * (2 if p.dtype == "float32" else 1)
    return Tile(32, 32, 4, 2 if wide <= 64 else 1)


def readable(x: Operand) -> bool:
    """Whether the kernels can read (B, heads, N, size) in place: contiguous rows, 32-bit offsets inside a head."""
    rows, size = x.shape[2:]
    return (x.strides[3] == 1 or size == 1) and rows * x.strides[2] < 2**31


def constants(b: Builder, p: Problem, tile: Tile, scoring: Scoring) -> dict[str, Any]:
    """Arguments of both kernels that follow from the sizes, and the scores'."""
    scale, cap = scales(scoring)
    mask_b = mask_h = 0  # distances of two batch elements' and two heads' masks; 0 where they share
    if "packed_mask" in b:
        (Bl, Hl, *_), (stride_b, stride_h, *_) = b["packed_mask"].shape, b["packed_mask"].strides
        mask_b, mask_h = stride_b if Bl > 1 else 0, stride_h if Hl > 1 else 0
    return {
        "packed_mask": "packed_mask" if "packed_mask" in b else None, "mask_b": mask_b, "mask_h": mask_h, "H": p.H,
        "Q": p.Q, "K": p.K, "q_offset": scoring.q_offset, "GROUP": p.H // p.G, "D": p.D, "E": p.E,
        "BLOCK_D": padded(p.D), "BLOCK_E": padded(p.E), "R": tile.R, "C": tile.C,
        # float32 as three of TF32, which rounds as float32 does.
        "PRECISION": "tf32x3" if p.dtype == "float32" else "ieee", "ONE_ROW": one_row(p), "scale": scale, "cap": cap,
        "SOFTCAP": scoring.softcap is not None, "ALIBI": alibi(b, scoring),
    }  # fmt: skip


def options(tile: Tile) -> dict[str, Any]:
    """The options of a launch."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def one_row(p: Problem) -> bool:
    """Whether the grid is one row of programs, whose numbers take a division: its other dimensions end at 65,535."""
    return max(p.B, p.H) >= 2**16


def grid(p: Problem, *programs: int) -> tuple[int, ...]:
    """The grid of all batch elements, each with its programs."""
    return (math.prod(programs) * p.B,) if one_row(p) else (*programs, p.B)


def builder(packed_mask: Any, operands: Mapping[str, Operand]) -> tuple[Builder, dict[str, str]]:
    """A launch that begins, and the arrays that the kernels read for q, k, v and dout: copies where they must be."""
    b = Builder(operands)
    if packed_mask is not None:
        b.layout(packed_mask=packed_mask)
    names = [name for name in ("q", "k", "v", "dout") if name in operands]
    return b, {name: name if readable(b[name]) else b.copied(name) for name in names}


def optional(b: Builder, name: str) -> str | None:
    """A tensor that a call may have, contiguous."""
    return b.contiguous(name) if name in b else None


def forward(
    p: Problem, packed_mask: Any, scoring: Scoring, operands: Mapping[str, Operand], tile: Tile | None = None
) -> Prepared:
    """out and lse. `tile` replaces the one chosen by size."""
    b, given = builder(packed_mask, operands)
    tile = tile or forward_tile(p)
    out = b.result("out", p.dtype, (p.B, p.H, p.Q, p.E), in_place=False)
    lse = b.result("lse", "float32", (p.B, p.H, p.Q), in_place=False)
    values = {
        **given, "out": out, "lse": lse, "lengths": optional(b, "key_lengths"), "sinks": optional(b, "sink_logits"),
        "slopes": optional(b, "alibi_slopes"), **constants(b, p, tile, scoring),
    }  # fmt: skip
    values |= {f"at_{name}": strides(b[given[name]]) for name in ("q", "k", "v")}
    programs = grid(p, -(-p.Q // tile.R), p.H)
    relaunch.step_of_form(b, "small", "forward", forward_kernel, programs, values, options(tile), Form)
    return b.done("out", "lse")


def backward(
    p: Problem, packed_mask: Any, scoring: Scoring, operands: Mapping[str, Operand], tile: Tile | None = None
) -> Prepared:
    """dq, dk and dv, and dsink_logits where there are sinks."""
    b, given = builder(packed_mask, operands)
    tile = tile or backward_tile(p)
    given |= {name: b.contiguous(given.get(name, name)) for name in ("dout", "out", "lse")}
    dq, dk, dv = (b.result(f"d{x}", p.dtype, b[x].shape, in_place=False) for x in ("q", "k", "v"))
    dlse = optional(b, "dlse")
    values = {
        **given, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv, "lengths": optional(b, "key_lengths"),
        "slopes": optional(b, "alibi_slopes"), "plain_scale": float(scoring.scale), **constants(b, p, tile, scoring),
    }  # fmt: skip
    values |= {f"at_{name}": strides(b[given[name]]) for name in ("q", "k", "v")}
    programs = -(-p.K // tile.C) * p.G + -(-p.Q // tile.R) * p.H
    relaunch.step_of_form(b, "small", "backward", backward_kernel, grid(p, programs), values, options(tile), Form)
    if "sink_logits" not in operands:
        return b.done("dq", "dk", "dv")
    b.function(
        Kernel(EDGE, "sink_gradient_of_results"), "dout", dlse, "out", "lse", "sink_logits",
        returns={"dsink_logits": None},
    )  # fmt: skip
    return b.done("dq", "dk", "dv", "dsink_logits")


def kernel(name: str, *key: Any) -> Callable[..., None]:
    """The function of a step."""
    return relaunch.launcher(KERNELS[name], Programs(*key))
