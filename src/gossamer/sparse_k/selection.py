"""The keys that a call keeps: thresholds of each step, and until when each key is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.sparse_k import operator

Keep = Literal["topk", "support"]
SUPPORT = 4  # lists of supports have room for so many times k; Gaussian scores take 1.1 to 2.5 times


class SelectedKeys(NamedTuple):
    """The thresholds of steps, and until when each key is kept: (B, U, N), U the heads of u."""

    tau: Tensor
    last: Tensor
    last_gated: Tensor
    m: Tensor | None = None  # the gates of all keys, where one threshold is that of every step


class Functions(NamedTuple):
    """How thresholds are computed: of (u, k)."""

    kept: Callable[[Tensor, int], Any]
    causal: Callable[[Tensor, int], Any]
    row: Callable[[Tensor, int], Any]
    largest: Callable[[Tensor, int], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]  # of (u, tau, dtau), by kernels


# Where modes, tracers and autograd look on; and where none does.
OPERATORS = Functions(
    torch.ops.gossamer.sparsek_kept.default, torch.ops.gossamer.sparsek_causal.default,
    torch.ops.gossamer.sparsek.default, torch.ops.gossamer.last_topk.default,
    torch.ops.gossamer.thresholds_backward.default,
)  # fmt: skip
DIRECT = Functions(
    operator.kept_of, operator.causal_of, operator.row_of, operator.largest_of, operator.gradient_by_kernels
)  # fmt: skip


class Selection:
    """Which keys a call keeps, by its options."""

    def __init__(self, k: int, keep: Keep, causal: bool, straight: bool, N: int) -> None:
        self.k, self.keep, self.causal, self.straight, self.N = min(k, N), keep, causal, straight, N
        # The keys that lists have room for at a step, and whether no more can be live.
        exact = keep == "topk" and not straight
        self.room = self.k if exact else min(SUPPORT * k, N)
        self.certain = exact or SUPPORT * k >= N

    def of(self, u: Tensor, functions: Functions) -> SelectedKeys:
        """The threshold of each step, and the last step that keeps each key."""
        N, u, m = self.N, u.contiguous(), None
        if self.causal and self.keep == "topk" and not self.straight:
            tau, last = functions.kept(u, self.k)
            return SelectedKeys(tau, last, last)
        if self.causal:
            tau, last_gated = functions.causal(u, self.k)
        else:
            m, tau_of_all = functions.row(u, self.k)
            tau = tau_of_all[..., None].expand(u.shape)
            last_gated = torch.where(u.detach() > tau.detach(), N - 1, -1).int()
        if self.keep == "support":
            return SelectedKeys(tau, last_gated, last_gated, m)
        last = functions.largest(u.detach(), self.k)
        if not self.causal:
            last = torch.where(last == N - 1, last, -1)
        return SelectedKeys(tau, last, torch.maximum(last, last_gated) if self.straight else last, m)

    def gradient(self, u: Tensor, kept: SelectedKeys, dtau: Tensor, functions: Functions) -> Tensor:
        """du of the gradient of thresholds, of `kept` by the functions without autograd."""
        if kept.m is not None:
            return operator.row_gradient(u, kept.m, kept.tau[..., 0], None, dtau.sum(-1))
        return operator.threshold_gradient(u, kept.tau, None, dtau, functions.gradient)
