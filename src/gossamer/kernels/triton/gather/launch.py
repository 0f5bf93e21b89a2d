"""From tensors and a gather layout to kernel arguments: forward and backward of one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.relaunch import launch, strides
from gossamer.kernels.rows import sink_gradient_of
from gossamer.kernels.triton.arguments import operand, results, term_arguments
from gossamer.kernels.triton.gather import rows as row_kernels
from gossamer.kernels.triton.gather import tiles as tile_kernels
from gossamer.kernels.triton.gather.config import GroupConfig, RowConfig
from gossamer.kernels.triton.gather.schedule import launch_of
from gossamer.kernels.triton.row_terms import row_terms
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.problem import Problem

# Query rows of the row terms are padded to this: the largest group of rows.
PADDED_ROWS = 64


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). `config` and `split` (units of an item) replace the shipped configuration."""
    p = problem
    q, k, v = operand(q), operand(k), operand(v)
    out, lse = results(p, q, into)
    run = launch_of(p, layout, "forward", config, split)
    parts = run.cut.part(p.E, lse), run.cut.part(2, lse)
    if run.grid[0]:
        launch(
            run.known, forward_kernel_of(layout), run.grid,
            *forward_arguments(q, k, v, out, lse, parts, terms),
            lambda: {
                "SINK": terms.sink_logits is not None, "H": p.H, "Q": p.Q, "q_offset": terms.q_offset,
                **strides("q", q), **strides("k", k), **strides("v", v), **strides("o", out), **strides("l", lse),
                **_terms(terms, lse)[-1], **run.rest,
            },
        )  # fmt: skip
    run.cut.join(out, lse, parts)
    return out, lse


def forward_kernel_of(layout: GatherLayout) -> Any:
    """Rows alone need no tiles."""
    return row_kernels.rows_forward_kernel if layout.block_q == 1 else tile_kernels.tiles_forward_kernel


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: tuple[Tensor, Tensor], terms: Terms
) -> tuple[Any, dict[str, Tensor | None], dict[str, float]]:
    """(key, tensors, numbers) of a launch of the forward."""
    more, floats, key, _ = _terms(terms, lse)
    sinks = lse if terms.sink_logits is None else terms.sink_logits.contiguous()
    tensors = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "lengths": more["lengths"], "sinks": sinks,
        "slopes": more["slopes"], "part_acc": parts[0], "part_ml": parts[1],
    }  # fmt: skip
    return (key, terms.sink_logits is None), tensors, floats


def _terms(terms: Terms, like: Tensor) -> tuple[dict[str, Tensor], dict[str, float], tuple[Any, ...], dict[str, bool]]:
    """As `term_arguments`, without the flag that these kernels do not have."""
    tensors, floats, key, flags = term_arguments(terms, like)
    del flags["FOLD"]
    return tensors, floats, key, flags


def padded_rows(Q: int) -> int:
    """Queries padded to whole groups, of any size that a layout has."""
    return -(-Q // PADDED_ROWS) * PADDED_ROWS


def query_gradient(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """dq (B, H, Q, D)."""
    p = problem
    dq = q.new_empty((p.B, p.H, p.Q, p.D)) if into is None else into
    run = launch_of(p, layout, "dq", config, split)
    more, floats, key, flags = _terms(terms, rows)
    part = run.cut.part(p.D, rows)
    kernel = row_kernels.rows_dq_kernel if layout.block_q == 1 else tile_kernels.tiles_dq_kernel
    if run.grid[0]:
        tensors = {"q": q, "k": k, "v": v, "dout": dout, "row_terms": rows, "dq": dq, "part": part, **more}
        launch(
            run.known, kernel, run.grid, key, tensors, {"plain_scale": terms.scale, **floats},
            lambda: {
                "H": p.H, "padded_Q": rows.shape[-1], "delta_offset": rows.stride(0), "q_offset": terms.q_offset,
                **({} if layout.block_q == 1 else {"Q": p.Q}),
                **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout), **strides("dq", dq),
                **flags, **run.rest,
            },
        )  # fmt: skip
    run.cut.add(part, dq)
    return dq


def key_gradients(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """dk (B, G, K, D) and dv (B, G, K, E)."""
    p = problem
    run = launch_of(p, layout, "dkdv", config, split)
    if into is None:
        dk, dv = k.new_empty((p.B, p.G, p.K, p.D)), v.new_empty((p.B, p.G, p.K, p.E))
    else:
        dk, dv = into
    own_k, own_v = dk, dv
    if run.heads != p.G:
        own_k, own_v = (
            x.new_empty((p.B, run.heads, p.K, size), dtype=torch.float32) for x, size in ((k, p.D), (v, p.E))
        )
    more, floats, key, flags = _terms(terms, rows)
    part_dk, part_dv = run.cut.part(p.D, rows), run.cut.part(p.E, rows)
    kernel = row_kernels.rows_dkdv_kernel if layout.block_q == 1 else tile_kernels.tiles_dkdv_kernel
    if run.grid[0]:
        tensors = {
            "q": q, "k": k, "v": v, "dout": dout, "row_terms": rows, "dk": own_k, "dv": own_v, "part_dk": part_dk,
            "part_dv": part_dv, **more,
        }  # fmt: skip
        launch(
            run.known, kernel, run.grid, key, tensors, {"plain_scale": terms.scale, **floats},
            lambda: {
                "heads": run.heads, "padded_Q": rows.shape[-1], "delta_offset": rows.stride(0),
                "q_offset": terms.q_offset,
                **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout),
                **strides("dk", own_k), **strides("dv", own_v), **flags, **run.rest,
            },
        )  # fmt: skip
    run.cut.add(part_dk, own_k)
    run.cut.add(part_dv, own_v)
    if run.heads != p.G:
        dk.copy_(own_k.unflatten(1, (p.G, -1)).sum(2))
        dv.copy_(own_v.unflatten(1, (p.G, -1)).sum(2))
    return dk, dv


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None)."""
    q, k, v, dout = operand(q), operand(k), operand(v), operand(dout)
    rows = row_terms(problem, dout, dlse, out, lse, padded_rows(problem.Q))
    into_q, into_kv = (None, None) if into is None else (into[0], into[1:])
    dq = query_gradient(problem, q, k, v, dout, rows, layout, terms, config=config, split=split, into=into_q)
    dk, dv = key_gradients(problem, q, k, v, dout, rows, layout, terms, config=config, split=split, into=into_kv)
    return dq, dk, dv, sink_gradient_of(rows, lse, terms)
