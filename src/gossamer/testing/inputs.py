"""Fresh random inputs of a case."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.plan.problem import Problem
from gossamer.testing.cases import Case
from gossamer.torch.planning import chip_of

STRIDES = ("plain", "positions_first", "sliced")


class Inputs(NamedTuple):
    """q, k, v and the keyword arguments of `attention`, tensors on one device."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    def leaves(self) -> list[Tensor]:
        """The tensors a gradient goes to: q, k, v, and the sinks where there are any."""
        sink = self.options.get("sink_logits")
        return [self.q, self.k, self.v] + ([] if sink is None else [sink])


def make(
    case: Case,
    dtype: str,
    device: str = "cpu",
    *,
    seed: int = 0,
    strides: str = "plain",
    requires_grad: bool = False,
) -> Inputs:
    """Inputs from a standard normal distribution, the same on every device.

    Args:
        strides: "plain" is contiguous; "positions_first" is a view of (B, N, heads, size); "sliced" is a part of
            a larger tensor.
    """
    if strides not in STRIDES:
        raise ValueError(f"strides={strides!r} is not one of {', '.join(STRIDES)}")
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)

    def draw(heads: int, positions: int, size: int) -> Tensor:
        shape = (case.B, heads, positions, size)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(kind).to(device)
        if strides == "positions_first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif strides == "sliced":
            x = torch.nn.functional.pad(x, (3, 5, 1, 2))[:, :, 1:-2, 3:-5]
        for _ in range(4 - case.dims):
            x = x[0]
        return x.requires_grad_(requires_grad)

    q = draw(case.H, case.Q, case.D)
    k, v = draw(case.G, case.K, case.D), draw(case.G, case.K, case.E)
    options: dict[str, Any] = {}
    if case.q_offset is not None:
        options["q_offset"] = case.q_offset
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.key_lengths is not None:
        options["key_lengths"] = torch.tensor(case.key_lengths, dtype=torch.int32, device=device)
    if case.sink_logits:
        sink = torch.randn(case.H, generator=generator).to(device)
        options["sink_logits"] = sink.requires_grad_(requires_grad)
    if case.alibi_slopes:
        options["alibi_slopes"] = (2.0 ** -torch.arange(1, case.H + 1)).to(device)
    return Inputs(q, k, v, options)


def problem_of(case: Case, dtype: str, device: str = "cpu", *, backward: bool = True) -> Problem:
    """The problem an implementation is asked about."""
    named = ("key_lengths", "softcap")
    terms = {name for name in named if getattr(case, name) is not None}
    terms |= {name for name in ("sink_logits", "alibi_slopes") if getattr(case, name)}
    terms |= {"q_offset"} if case.q_offset not in (None, case.K - case.Q) else set()
    chip = chip_of(torch.device("cuda", torch.cuda.current_device()))._asdict() if device == "cuda" else {}
    c = case
    return Problem(
        c.B, c.H, c.G, c.Q, c.K, c.D, c.E, dtype, device, **chip, score_terms=frozenset(terms), backward=backward
    )


def terms_of(case: Case, inputs: Inputs) -> Terms:
    """The score terms as an implementation gets them."""
    options = dict(inputs.options)
    offset = options.pop("q_offset", case.K - case.Q)
    return Terms(scale=case.D**-0.5, q_offset=offset, **options)
