"""Arguments that launches of different kernels have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.scores import scales
from gossamer.plan.problem import Problem

# Offsets inside a tile are 32-bit: 256 rows (the largest tile) times this stride stay below 2**31.
LARGEST_ROW_STRIDE = 2**22


def operand(x: Tensor) -> Tensor:
    """The tensor itself when the kernels can read it: last dimension contiguous, 32-bit offsets inside a tile."""
    readable = (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) <= LARGEST_ROW_STRIDE
    return x if readable else x.contiguous()


def results(p: Problem, q: Tensor, into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """out (B, H, Q, E) and lse (B, H, Q) to write: those that the caller wants written, or new ones."""
    if into is not None:
        return into
    return q.new_empty((p.B, p.H, p.Q, p.E)), q.new_empty((p.B, p.H, p.Q), dtype=torch.float32)


def term_arguments(
    terms: Terms, like: Tensor
) -> tuple[dict[str, Tensor], dict[str, float], tuple[Any, ...], dict[str, bool]]:
    """The score terms of a launch: tensors, numbers, what else its key holds, and flags.

    A missing tensor is replaced by one that is never read.
    """
    softcap, alibi = terms.softcap is not None, terms.alibi_slopes is not None
    scale, cap = scales(terms)
    tensors = {
        "lengths": terms.key_lengths.contiguous() if terms.key_lengths is not None else like,
        "slopes": terms.alibi_slopes.contiguous() if alibi else like,
    }
    flags = {
        # One multiply-add takes the products to the exponent; the maximum commutes with a positive scale alone.
        "FOLD": terms.scale > 0 and not softcap and not alibi,
        "SOFTCAP": softcap,
        "ALIBI": alibi,
        "LENGTHS": terms.key_lengths is not None,
    }
    return tensors, {"scale": scale, "cap": cap}, (terms.q_offset, *flags.values()), flags
