"""Arguments of the kernels of this package by their names, each written once: a kernel takes those that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.kernels import relaunch
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Builder
from gossamer.kernels.relaunch import padded, strides
from gossamer.kernels.scores import alibi, scales
from gossamer.plan.problem import Problem

# Offsets inside a tile are 32-bit: 256 rows (the largest tile) times this stride stay below 2**31.
LARGEST_ROW_STRIDE = 2**22


def step(
    b: Builder, function: Any, grid: tuple[int, ...], values: Mapping[str, Any], options: Mapping[str, Any],
    form: Any = None,
) -> None:  # fmt: skip
    """Add a launch of a kernel by `kernels.relaunch.step_of_form`."""
    # Scores become exponents by one multiply-add; Triton 3.10 stops fusing unless asked.
    options = {**options, "enable_fp_fusion": True}
    relaunch.step_of_form(b, "triton", function.fn.__name__, function, grid, values, options, form)


def operand(b: Builder, name: str) -> str:
    """The array itself when the kernels can read it: last dimension contiguous, 32-bit offsets inside a tile."""
    x = b[name]
    readable = (x.strides[-1] == 1 or x.shape[-1] == 1) and x.strides[-2] <= LARGEST_ROW_STRIDE
    return name if readable else b.copied(name)


def readable(b: Builder, name: str) -> str:
    """The array itself where its rows are contiguous."""
    x = b[name]
    return name if x.strides[-1] == 1 or x.shape[-1] == 1 else b.copied(name)


def arrays(b: Builder, **names: str) -> dict[str, Any]:
    """Arrays (B, heads, rows) or (B, heads, rows, size), and their strides."""
    return {**names, **{f"at_{name}": strides(b[array]) for name, array in names.items()}}


def listed(b: Builder, prefix: str, arrays: Mapping[str, Any]) -> dict[str, str]:
    """Arrays of the layout, known to the launch by a prefix: its walks have arrays of the same names."""
    b.layout(**{f"{prefix}_{name}": array for name, array in arrays.items()})
    return {name: f"{prefix}_{name}" for name in arrays}


def named(b: Builder, prefix: str, arrays: Any) -> Any:
    """Arrays of the layout in a NamedTuple, or NamedTuples in it, by names that begin with a prefix."""
    if not isinstance(arrays, tuple):
        (name,) = b.layout(**{prefix: arrays})
        return name
    fields = getattr(arrays, "_fields", range(len(arrays)))
    members = (named(b, f"{prefix}_{field}", x) for field, x in zip(fields, arrays, strict=True))
    return type(arrays)(*members) if hasattr(arrays, "_fields") else tuple(members)


def vector(b: Builder, name: str, unread: str | None) -> str | None:
    """One of the score terms, contiguous; `unread` without it."""
    return b.contiguous(name) if name in b else unread


def terms(b: Builder, p: Problem, scoring: Scoring, unread: str | None) -> dict[str, Any]:
    """Sizes and score terms; `unread` stands for arrays that a call has not."""
    scale, cap = scales(scoring)
    softcap, slopes = scoring.softcap is not None, alibi(b, scoring)
    return {
        "H": p.H, "G": p.G, "Q": p.Q, "K": p.K, "D": p.D, "E": p.E, "GROUP": p.H // p.G, "BLOCK_D": padded(p.D),
        "BLOCK_E": padded(p.E), "unread": unread, "lengths": vector(b, "key_lengths", unread),
        "slopes": vector(b, "alibi_slopes", unread), "q_offset": scoring.q_offset, "scale": scale, "cap": cap,
        "plain_scale": float(scoring.scale),
        # One multiply-add takes the products to the exponent; the maximum commutes with a positive scale alone.
        "FOLD": scoring.scale > 0 and not softcap and not slopes,
        "SOFTCAP": softcap, "ALIBI": slopes, "LENGTHS": "key_lengths" in b, "SINK": "sink_logits" in b,
    }  # fmt: skip


def row_results(b: Builder, p: Problem) -> dict[str, Any]:
    """out (B, H, Q, E) and lse (B, H, Q), to write."""
    out = b.result("out", p.dtype, (p.B, p.H, p.Q, p.E))
    return arrays(b, out=out, lse=b.result("lse", "float32", (p.B, p.H, p.Q)))
