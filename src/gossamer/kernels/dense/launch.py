"""From tensors and words to kernel arguments, and the choice of the tile: small ones where there are few programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.dense.kernels import backward_kernel, forward_kernel
from gossamer.kernels.devices import elsewhere, empty_from, processors, template
from gossamer.kernels.relaunch import Known, bound, fresh, launch, padded, strides
from gossamer.kernels.rows import row_terms, sink_gradient
from gossamer.kernels.scores import scales
from gossamer.plan.problem import Problem

_known: Known = {}


class Tile(NamedTuple):
    """How a kernel is cut: R query rows, C keys, and the launch options."""

    R: int
    C: int
    warps: int
    stages: int


@lru_cache
def forward_tile(p: Problem, multiprocessors: int) -> Tile:
    """Few rows, many keys a step while there are few programs; measured on an H200 from 26 to 2048 positions."""
    wide = max(padded(p.D), padded(p.E)) * (2 if p.dtype == "float32" else 1)
    if wide > 128:
        R = 32 if multiprocessors <= -(-p.Q // 32) * p.B * p.H else 16
        return Tile(R, 32, 4, 2)
    if multiprocessors // 2 <= -(-p.Q // 64) * p.B * p.H:
        return Tile(64, 64, 4, 3)
    return Tile(16, 32 if p.K <= 32 else 128, 4, 2)


@lru_cache
def backward_tile(p: Problem) -> Tile:
    """Small tiles, whose loops are short."""
    wide = max(padded(p.D), padded(p.E)) * (2 if p.dtype == "float32" else 1)
    return Tile(32, 32, 4, 2 if wide <= 64 else 1)


def operand(x: Tensor) -> Tensor:
    """The tensor itself when the kernels can read it: last dimension contiguous, 32-bit offsets inside a head."""
    readable = (x.stride(3) == 1 or x.shape[3] == 1) and x.shape[2] * x.stride(2) < 2**31
    return x if readable else x.contiguous()


def shared_strides(words: Tensor | None) -> tuple[int, int]:
    """Distances of two batch elements' and two heads' words (Bl, Hl, Q, W); 0 where they share."""
    if words is None:
        return 0, 0
    return (words.stride(0) if words.shape[0] > 1 else 0), (words.stride(1) if words.shape[1] > 1 else 0)


def constants(p: Problem, tile: Tile, terms: Terms, shared: tuple[int, int]) -> dict[str, Any]:
    """Arguments of both kernels that follow from the sizes, and the launch options."""
    return {
        "words_b": shared[0], "words_h": shared[1], "H": p.H, "Q": p.Q, "K": p.K, "q_offset": terms.q_offset,
        "GROUP": p.H // p.G,
        "D": p.D, "E": p.E, "BLOCK_D": padded(p.D), "BLOCK_E": padded(p.E), "R": tile.R, "C": tile.C,
        "SOFTCAP": terms.softcap is not None, "PRECISION": precision(p), "ONE_ROW": one_row(p),
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True,
    }  # fmt: skip


def one_row(p: Problem) -> bool:
    """Whether the grid is one row of programs, whose numbers take a division: its other dimensions end at 65,535."""
    return max(p.B, p.H) >= 2**16


def grid(p: Problem, *programs: int) -> tuple[int, ...]:
    """Of all batch elements, each with its programs."""
    return (math.prod(programs) * p.B,) if one_row(p) else (*programs, p.B)


def forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, terms: Terms, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse). `tile` replaces the one chosen by size."""
    device = q.device
    if elsewhere(q):
        with torch.cuda.device(device):
            return forward(p, q, k, v, words, terms, tile)
    q, k, v = operand(q), operand(k), operand(v)
    out = q.new_empty((p.B, p.H, p.Q, p.E))
    lse = q.new_empty((p.B, p.H, p.Q), dtype=torch.float32)
    t, tile = terms, tile or forward_tile(p, processors(device))
    key, tensors, floats = forward_arguments(p, q, k, v, out, lse, words, t, tile)
    launch(
        _known, forward_kernel, grid(p, -(-p.Q // tile.R), p.H), key, tensors, floats,
        lambda: strides("q", q) | strides("k", k) | strides("v", v) | constants(p, tile, t, shared_strides(words)),
    )  # fmt: skip
    return out, lse


def forward_arguments(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, words: Tensor | None, t: Terms, tile: Tile
) -> tuple[Any, dict[str, Tensor | None], dict[str, float]]:
    """What `launch` tells forwards apart by, and what it gives each: tensors and numbers."""
    scale, cap = scales(t)
    tensors = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "words": words, "lengths": t.key_lengths,
        "sinks": t.sink_logits, "slopes": t.alibi_slopes,
    }  # fmt: skip
    key = p, tile, t.q_offset, t.softcap is None, shared_strides(words), q.device
    return key, tensors, {"scale": scale, "cap": cap}


def bound_forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, words: Tensor | None, terms: Terms, into: Any = None
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """See `kernels.contract.Binding`; not into results of any strides."""
    if into is not None or any(operand(x) is not x for x in (q, k, v)):
        return None
    device, plain = q.device, terms.having(None, None, None)
    out, lse = template(q, (p.B, p.H, p.Q, p.E)), template(q, (p.B, p.H, p.Q), torch.float32)
    kinds = fresh(q.dtype, (p.B, p.H, p.Q, p.E)), fresh(torch.float32, (p.B, p.H, p.Q))
    tile = forward_tile(p, processors(device))
    key, tensors, floats = forward_arguments(p, q, k, v, kinds[0], kinds[1], words, terms, tile)
    with_terms = terms is not plain
    # Words, which are bound, stand between the results and the tensors of the terms.
    found = bound(_known, forward_kernel, key, tensors, floats, len(tensors) if with_terms else 5)
    if found is None:
        return None
    run, rest = found
    masked = address(words)

    def call(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, sinks: Tensor | None = None,
        slopes: Tensor | None = None, into: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if elsewhere(q):
            return forward(p, q, k, v, words, plain.having(lengths, sinks, slopes))
        results = empty_from(out), empty_from(lse)
        given = q.data_ptr(), k.data_ptr(), v.data_ptr(), results[0].data_ptr(), results[1].data_ptr()
        if with_terms:
            run(*given, masked, address(lengths), address(sinks), address(slopes), *rest)
        else:
            run(*given, *rest)
        return results

    return call


def address(x: Tensor | None) -> int | None:
    """Of a tensor that may be absent."""
    return None if x is None else x.data_ptr()


def precision(p: Problem) -> str:
    """Of products: float32 as three of TF32, which rounds as float32 does."""
    return "tf32x3" if p.dtype == "float32" else "ieee"


def backward(
    p: Problem, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    words: Tensor | None, terms: Terms, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dsink_logits or None)."""
    device = q.device
    if elsewhere(q):
        with torch.cuda.device(device):
            return backward(p, dout, dlse, q, k, v, out, lse, words, terms, tile)
    q, k, v, dout, out, lse = operand(q), operand(k), operand(v), dout.contiguous(), out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    t, tile = terms, tile or backward_tile(p)
    key, tensors, floats = backward_arguments(p, (q, k, v, dout, out, lse, dlse, dq, dk, dv), words, t, tile)
    programs = -(-p.K // tile.C) * p.G + -(-p.Q // tile.R) * p.H
    launch(
        _known, backward_kernel, grid(p, programs), key, tensors, floats,
        lambda: strides("q", q) | strides("k", k) | strides("v", v) | constants(p, tile, t, shared_strides(words)),
    )  # fmt: skip
    dsink = None
    if terms.sink_logits is not None:
        dsink = sink_gradient(*row_terms(dout, dlse, out, lse, torch.float32), terms)
    return dq, dk, dv, dsink


def backward_arguments(
    p: Problem, x: tuple[Any, ...], words: Tensor | None, t: Terms, tile: Tile
) -> tuple[Any, dict[str, Tensor | None], dict[str, float]]:
    """As `forward_arguments`; `x` are q, k, v, dout, out, lse, dlse, dq, dk and dv."""
    names = ("q", "k", "v", "dout", "out", "lse", "dlse", "dq", "dk", "dv")
    more = {"words": words, "lengths": t.key_lengths, "slopes": t.alibi_slopes}
    scale, cap = scales(t)
    key = p, tile, t.q_offset, t.softcap is None, shared_strides(words), x[0].device
    return key, dict(zip(names, x, strict=True)) | more, {"scale": scale, "cap": cap, "plain_scale": float(t.scale)}


def bound_backward(
    p: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, words: Tensor | None,
    terms: Terms,
) -> Callable[..., tuple[Tensor, ...]] | None:  # fmt: skip
    """See `kernels.contract.Binding`."""
    if any(operand(x) is not x for x in (q, k, v)) or not all(x.is_contiguous() for x in (dout, out, lse)):
        return None
    grads, plain = [template(x, x.shape) for x in (q, k, v)], terms.having(None, None, None)
    given = (q, k, v, dout, out, lse, None, *(fresh(x.dtype, tuple(x.shape)) for x in (q, k, v)))
    with_terms = terms is not plain
    tile = backward_tile(p)
    key, tensors, floats = backward_arguments(p, given, words, terms, tile)
    found = bound(_known, backward_kernel, key, tensors, floats, len(tensors) if with_terms else len(given))
    if found is None:
        return None
    (run, rest), inputs = found, (q.stride(), k.stride(), v.stride())
    like_q, like_k, like_v = grads
    masked = address(words)

    def call(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        lengths: Tensor | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        first = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), out.data_ptr(), lse.data_ptr()
        alike = (
            dlse is None and dout.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
            # What was saved may have been elsewhere meanwhile, by hooks.
            and (q.stride(), k.stride(), v.stride()) == inputs
            and not (first[0] | first[1] | first[2] | first[3] | first[4] | first[5]) % 16
            and (not with_terms or (like_bound(lengths) and like_bound(slopes)))
        )  # fmt: skip
        if not alike or elsewhere(q):
            found = backward(p, dout, dlse, q, k, v, out, lse, words, plain.having(lengths, sinks, slopes))
            return found if sinks is not None else found[:3]  # type: ignore[return-value]
        dq, dk, dv = empty_from(like_q), empty_from(like_k), empty_from(like_v)
        more = (masked, address(lengths), address(slopes)) if with_terms else ()
        run(*first, None, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), *more, *rest)
        if sinks is None:
            return dq, dk, dv
        dsink = sink_gradient(*row_terms(dout, None, out, lse, torch.float32), plain.having(lengths, sinks, slopes))
        assert dsink is not None
        return dq, dk, dv, dsink

    return call


def like_bound(x: Tensor | None) -> bool:
    """Whether a saved tensor of one dimension is as it was when its call was bound, or absent as it was then."""
    return x is None or (x.is_contiguous() and not x.data_ptr() % 16)
