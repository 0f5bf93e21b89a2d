"""What tests compare numbers with: a case in float64 and by plain attention, and memory that NaN surrounds."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.testing import inputs, tolerance
from gossamer.testing.cases import Case

CUDA = torch.cuda.is_available()
no_gpu = pytest.mark.skipif(not CUDA, reason="torch finds no CUDA device")

# What `Exact` has of a case, in its order.
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink_logits")


class Exact:
    """A case in float64 and by plain attention in its own dtype: outputs, and gradients for one random cotangent."""

    def __init__(self, case: Case, dtype: str, device: str) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        given = inputs.make(case, dtype, device).batched()
        self.pattern, self.terms = given.pattern, given.terms
        self.leaves = [x.requires_grad_() for x in (*given.qkv, given.terms.sink_logits) if x is not None]
        self.problem = inputs.problem_of(case, dtype, device)
        self.mask = torch.from_numpy(self.pattern.materialize(case.Q, case.K, self.terms.q_offset)).to(device)
        generator = torch.Generator().manual_seed(11)
        shape = (case.B, case.H, case.Q)
        self.dout = torch.randn((*shape, case.E), generator=generator, dtype=torch.float64).to(device, given.q.dtype)
        dlse = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.dlse = dlse.to(device, compute_dtype(given.q.dtype))  # that of lse, as autograd gives it
        whole = *given.qkv, self.mask, given.terms, self.dout, self.dlse
        self.exact, self.low = tolerance.exact_results(*whole), tolerance.plain_results(*whole)


@cache
def exact_of(case: Case, dtype: str, device: str) -> Exact:
    return Exact(case, dtype, device)


def within_nan(x: Tensor) -> tuple[Tensor, Tensor]:
    """(a larger tensor of NaN, a view of it in the shape of x (B, heads, N[, size]) with every stride another)."""
    rows = x if x.ndim == 4 else x[..., None]
    B, heads, N, size = rows.shape
    room = torch.full((heads + 1, N + 1, 2, B, size + 8), torch.nan, dtype=x.dtype, device=x.device)
    view = room[1:, :N, 1, :, :size].permute(2, 0, 1, 3)
    return room, view if x.ndim == 4 else view[..., 0]
