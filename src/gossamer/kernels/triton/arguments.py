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
# What the strides of an array are called, where it is not by its own name.
STRIDES = {"dout": "g", "out": "o", "lse": "l", "dlse": "m", "part_out": "p", "part_lse": "m", "result": "r"}


def step(
    b: Builder, function: Any, grid: tuple[int, ...], values: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Add a launch of a kernel: `kernels.relaunch.step`, with values among which other kernels find theirs."""
    own = {
        name: values[name] if name in values or kind is None else filled(kind, values)
        for name, kind in relaunch.parameters(function).items()
    }
    # Scores become exponents by one multiply-add; Triton 3.10 stops fusing unless asked.
    relaunch.step(b, "triton", function.fn.__name__, function, grid, own, {**options, "enable_fp_fusion": True})


def filled(kind: Any, values: Mapping[str, Any]) -> Any:
    """A NamedTuple of the values of its fields' names."""
    return kind(*(values[field] for field in kind._fields))


def operand(b: Builder, name: str) -> str:
    """The array itself when the kernels can read it: last dimension contiguous, 32-bit offsets inside a tile."""
    x = b[name]
    readable = (x.strides[-1] == 1 or x.shape[-1] == 1) and x.strides[-2] <= LARGEST_ROW_STRIDE
    return name if readable else b.copied(name)


def arrays(b: Builder, **names: str) -> dict[str, Any]:
    """Arrays (B, heads, rows) or (B, heads, rows, size), and their strides."""
    values: dict[str, Any] = dict(names)
    for name, array in names.items():
        values[f"at_{name}"] = at = strides(b[array])
        values |= {f"stride_{STRIDES.get(name, name)}{axis}": stride for axis, stride in at._asdict().items()}
    return values


def listed(b: Builder, prefix: str, arrays: Mapping[str, Any]) -> dict[str, str]:
    """Arrays of the layout, known to the launch by a prefix: its walks have arrays of the same names."""
    b.layout(**{f"{prefix}_{name}": array for name, array in arrays.items()})
    return {name: f"{prefix}_{name}" for name in arrays}


def named(b: Builder, prefix: str, arrays: Any) -> Any:
    """Arrays of the layout in a NamedTuple, or NamedTuples in it, by names that begin with a prefix."""
    if not isinstance(arrays, tuple):
        return b.layout(**{prefix: arrays})[0]
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
