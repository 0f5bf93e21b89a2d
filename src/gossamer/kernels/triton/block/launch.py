"""From tensors and a layout to kernel arguments: forward and backward of one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gossamer.kernels.contract import Terms
from gossamer.kernels.relaunch import launch, padded, strides
from gossamer.kernels.rows import sink_gradient_of
from gossamer.kernels.triton.arguments import operand, results, term_arguments
from gossamer.kernels.triton.block.config import TileConfig, config
from gossamer.kernels.triton.block.forward import forward_kernel
from gossamer.kernels.triton.block.key_gradients import dkdv_kernel
from gossamer.kernels.triton.block.query_gradient import dq_kernel
from gossamer.kernels.triton.block.schedule import Schedule, schedule_of
from gossamer.kernels.triton.config import Direction
from gossamer.kernels.triton.row_terms import row_terms
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.walk import Walk
from gossamer.plan.problem import Problem


def describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can be made: 16-byte alignment of the base and of every stride."""
    unit = 16 // x.element_size()
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in x.stride()[:3])


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (B, heads, N, size) for blocks of `rows` rows of one head."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded(x.shape[-1])])


def sizes(
    problem: Problem, walk: Walk, direction: Direction, chosen: TileConfig | None, streamed: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A kernel's streamed operands, as it wants them; its block sizes and launch options; its programs for a row."""
    bits = 32 if problem.dtype == "float32" else 16
    if chosen is None:
        tile = (walk.block_rows, walk.block_columns)
        chosen = config(direction, bits, problem.D, problem.E, problem.sm or 80, tile)
    fitted = chosen.fit(walk.block_rows, walk.block_columns)
    tma = fitted.tma and all(describable(x) for x in streamed.values())
    operands = {name: described(x, fitted.columns) if tma else x for name, x in streamed.items()}
    options = {
        "TMA": tma,
        "D": problem.D,
        "E": problem.E,
        "BLOCK_D": padded(problem.D),
        "BLOCK_E": padded(problem.E),
        "R": fitted.rows,
        "C": fitted.columns,
        "PRECISION": fitted.precision,
        "num_warps": fitted.warps,
        "num_stages": fitted.stages,
        # Scores become exponents by one multiply-add; Triton 3.10 stops fusing unless asked.
        "enable_fp_fusion": True,
    }
    return operands, options, walk.block_rows // fitted.rows


def start(
    plan: Schedule,
    kernel: Any,
    programs: int,
    key: Hashable,
    tensors: dict[str, Any],
    floats: dict[str, float],
    options: dict[str, Any],
    rest: Callable[[], dict[str, Any]],
) -> None:
    """Run a kernel over a walk: see `kernels.relaunch.launch`, past which a descriptor goes, made for one call."""
    if not programs:
        return
    grid = (programs * plan.cut.copies,)
    if options["TMA"]:
        kernel[grid](**tensors, **floats, **options, **rest())
    else:
        launch(plan.known, kernel, grid, (key, *options.values()), tensors, floats, lambda: options | rest())


def fixed(plan: Schedule, p: Problem, walk: Walk, terms: Terms, flags: dict[str, bool]) -> dict[str, Any]:
    """Arguments of the three kernels that follow from the sizes."""
    return {
        "n_items": plan.size, "n_slots": plan.cut.slots, "n_tiles": walk.tiles, "H": p.H, "G": p.G, "Q": p.Q, "K": p.K,
        "list_b": plan.list_b, "list_h": plan.list_h, "lead_heads": plan.cut.lead_heads, "q_offset": terms.q_offset,
        **plan.pointers, **plan.constants, **flags,
    }  # fmt: skip


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). `tiles` and `split` replace the shipped configuration and the automatic split of long rows."""
    p, walk = problem, layout.rows
    q, k, v = operand(q), operand(k), operand(v)
    out, lse = results(p, q, into)
    plan = schedule_of(layout, False, p.B, p.H, p.H // p.G, split)
    parts = plan.cut.part(p.E, lse), plan.cut.part(2, lse)
    run, programs = forward_launch(p, q, k, v, out, lse, parts, layout, terms, plan, tiles)
    start(
        plan, forward_kernel, programs, *run,
        lambda: {
            "SINK": terms.sink_logits is not None, **fixed(plan, p, walk, terms, term_arguments(terms, lse)[-1]),
            **strides("q", q), **strides("k", k), **strides("v", v), **strides("o", out), **strides("l", lse),
        },
    )  # fmt: skip
    plan.cut.join(out, lse, parts)
    return out, lse


def forward_launch(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: tuple[Tensor, Tensor],
    layout: BlockLayout, terms: Terms, plan: Schedule, tiles: TileConfig | None,
) -> tuple[tuple[Any, dict[str, Any], dict[str, float], dict[str, Any]], int]:  # fmt: skip
    """(key, tensors, numbers, options) of a launch of the forward kernel, and its programs for one copy."""
    more, floats, key, _ = term_arguments(terms, lse)
    operands, options, cuts = sizes(p, layout.rows, "forward", tiles, {"k": k, "v": v})
    tensors = {
        "q": q, **operands, "out": out, "lse": lse, "lengths": more["lengths"],
        "sinks": lse if terms.sink_logits is None else terms.sink_logits.contiguous(), "slopes": more["slopes"],
        "part_acc": parts[0], "part_ml": parts[1],
    }  # fmt: skip
    return ((*key, terms.sink_logits is None), tensors, floats, options), cuts * plan.size


def query_gradient(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """dq (B, H, Q, D)."""
    p, walk = problem, layout.rows
    dq = q.new_empty((p.B, p.H, p.Q, p.D)) if into is None else into
    plan = schedule_of(layout, False, p.B, p.H, p.H // p.G, split)
    more, floats, key, flags = term_arguments(terms, rows)
    operands, options, parts = sizes(p, walk, "dq", tiles, {"k": k, "v": v})
    part = plan.cut.part(p.D, rows)
    start(
        plan, dq_kernel, parts * plan.size, key,
        {"q": q, **operands, "dout": dout, "row_terms": rows, "dq": dq, **more, "part": part},
        {"plain_scale": terms.scale, **floats}, options,
        lambda: {
            "padded_Q": rows.shape[-1], "delta_offset": rows.stride(0), **fixed(plan, p, walk, terms, flags),
            **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout), **strides("dq", dq),
        },
    )  # fmt: skip
    plan.cut.add(part, dq)
    return dq


def key_gradients(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """dk (B, G, K, D) and dv (B, G, K, E)."""
    p, walk = problem, layout.columns
    if into is None:
        dk, dv = k.new_empty((p.B, p.G, p.K, p.D)), v.new_empty((p.B, p.G, p.K, p.E))
    else:
        dk, dv = into
    plan = schedule_of(layout, True, p.B, p.G, p.H // p.G, split)
    more, floats, key, flags = term_arguments(terms, rows)
    operands, options, parts = sizes(p, walk, "dkdv", tiles, {"q": q, "dout": dout})
    part_dk, part_dv = plan.cut.part(p.D, rows), plan.cut.part(p.E, rows)
    tensors = {
        "k": k, "v": v, **operands, "row_terms": rows, "dk": dk, "dv": dv, **more, "part_dk": part_dk,
        "part_dv": part_dv,
    }  # fmt: skip
    start(
        plan, dkdv_kernel, parts * plan.size, key, tensors, {"plain_scale": terms.scale, **floats}, options,
        lambda: {
            "padded_Q": rows.shape[-1], "delta_offset": rows.stride(0), **fixed(plan, p, walk, terms, flags),
            **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout), **strides("dk", dk),
            **strides("dv", dv),
        },
    )  # fmt: skip
    plan.cut.add(part_dk, dk)
    plan.cut.add(part_dv, dv)
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
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None)."""
    q, k, v, dout = operand(q), operand(k), operand(v), operand(dout)
    rows = row_terms(problem, dout, dlse, out, lse, layout.rows.tiles * layout.block_q)
    into_q, into_kv = (None, None) if into is None else (into[0], into[1:])
    dq = query_gradient(problem, q, k, v, dout, rows, layout, terms, tiles=tiles, split=split, into=into_q)
    dk, dv = key_gradients(problem, q, k, v, dout, rows, layout, terms, tiles=tiles, split=split, into=into_kv)
    return dq, dk, dv, sink_gradient_of(rows, lse, terms)
