"""How far rounding moves results that have no formula for it: an oracle is computed again with errors of a few units.

An oracle that takes a `Rounding` disturbs its inputs and what it makes of them, forward and backward. What the results
of some such computations differ by, times a factor, is what rounding may do; `soak_oracle.wrong` adds twice the error
of plain attention in the type of the call. Imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TIMES = 3  # an oracle is computed with errors
FACTOR = 4.0

Results = dict[str, Tensor]


class Rounding(NamedTuple):
    """Errors of `eps` times a normal number; none where eps is 0."""

    eps: float
    generator: torch.Generator
    stored: float = 0.0  # relative error of a result that is stored in 16 bits, and read by the backward

    def of_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Errors of delta = rowsum(dout * out) by those of out as it is stored: (B, H, Q)."""
        size = (dout * out).abs().sum(-1).detach()
        return self.stored * size * self._normal(size)

    def relative(self, x: Tensor, units: float = 2.0) -> Tensor:
        """x with each number off by some units in its last place, and its gradient, too."""
        if not self.eps:
            return x
        return x * (1 + units * self.eps * self._normal(x))

    def absolute(self, x: Tensor, size: Tensor) -> Tensor:
        """x off by units of numbers of this size."""
        return x + self.eps * size.detach() * self._normal(x) if self.eps else x

    def of_scores(
        self, u: Tensor, dout: Tensor, v: Tensor, q: Tensor, k: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Errors of dq (B, H, Q, D) and dk (B, H, K, D) by those of dS = u (dP - delta), two sums that cancel.

        Args:
            u: (B, H, Q, K), what dP is multiplied by.
            v, k: of as many heads as q.
        """
        size = u.abs() * (dout.abs() @ v.abs().mT)
        size = size + u.abs() * (u.abs() * (dout.abs() @ v.abs().mT)).sum(-1, keepdim=True)
        errors = 4 * self.eps * abs(scale) * size * self._normal(size)
        return errors @ k, errors.mT @ q

    def _normal(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.generator, dtype=torch.float64).to(x.device, x.dtype)


def multiplied(weights: Tensor, scores: Tensor, low: torch.dtype | None) -> Tensor:
    """Weights as tensor cores multiply values by them: rounded once. So is the gradient of `scores`.

    Args:
        low: the type of 16 bits that operands of products have; None: nothing is rounded.
    """
    if low is None:
        return weights
    scores.register_hook(lambda x: x.to(low).to(x.dtype))
    return weights + (weights.to(low).to(weights.dtype) - weights).detach()


def of_weights(out: Tensor, low: torch.dtype) -> Tensor:
    """How far `out` of the magnitudes of values moves where each weight is off by half a unit in its last place.

    What a kernel measures exponents from decides how a weight is rounded: of few keys plain attention may be exact.
    """
    return torch.finfo(low).eps / 2 * out if torch.finfo(low).bits == 16 else torch.zeros_like(out)


def exact() -> Rounding:
    """No errors."""
    return Rounding(0.0, torch.Generator())


def moved(true: Results, again: Callable[[Rounding], Results], low: torch.dtype, seed: int) -> Results:
    """Of every number of `true`, how far rounding may move it: by rows, of a part of them also by the whole.

    Args:
        true: in float64.
        again: the same results with errors.
        low: the type of the call.
    """
    wide = torch.float64 if low == torch.float64 else torch.float32
    eps, stored = torch.finfo(wide).eps, torch.finfo(low).eps / 2
    generator = torch.Generator().manual_seed(seed)
    most = {name: torch.zeros_like(x) for name, x in true.items()}
    for _ in range(TIMES):
        for name, x in again(Rounding(eps, generator, 0.0 if low == wide else stored)).items():
            off = torch.where(x == true[name], 0.0, (x - true[name]).abs()).nan_to_num(nan=torch.inf)
            most[name] = torch.maximum(most[name], off)
    least = 2 * torch.finfo(low).smallest_normal * (1.0 if low == wide else torch.finfo(low).eps)
    found = {}
    for name, x in most.items():
        size = true[name].abs().nan_to_num(posinf=0.0)
        if x.ndim > 1:
            of_rows, large = x.amax(-1, keepdim=True), size.amax(-1, keepdim=True)
        else:
            of_rows, large = x, size
        whole = x.flatten().amax() if x.numel() else 0.0
        found[name] = FACTOR * of_rows + 0.5 * whole + 8 * eps * large + stored * size + least
    return found


def stored_as(units: Results, true: Results, dtype: torch.dtype) -> None:
    """Add to what rounding may do to dq, dk and dv that they are stored in the type of q, as under autocast."""
    info = torch.finfo(dtype)
    for name in ("dq", "dk", "dv"):
        units[name] = units[name] + info.eps / 2 * true[name].abs() + info.smallest_normal * info.eps
