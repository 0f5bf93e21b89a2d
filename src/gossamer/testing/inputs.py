"""The inputs of a call: fresh random ones of a case, for tests and benchmarks alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.reference import kept
from gossamer.plan.problem import Problem
from gossamer.testing.cases import Case
from gossamer.torch.planning import chip_of

if TYPE_CHECKING:
    from gossamer.patterns import Pattern

STRIDES = ("plain", "positions_first", "sliced")
POISONS = (math.nan, math.inf, -math.inf)  # what may be in memory that no kept pair reads


class Unkept(NamedTuple):
    """The rows that no pair of a call reads: queries that keep nothing, and keys that no query of their group keeps."""

    rows: Tensor  # (B, H, Q) bool
    keys: Tensor  # (B, G, K) bool

    def with_rows(self, x: Tensor, value: float) -> Tensor:
        """q, dout (B, H, Q, size) or dlse (B, H, Q) with a value in all rows that keep nothing."""
        return x.masked_fill(self.rows if x.ndim == 3 else self.rows[..., None], value)

    def with_keys(self, x: Tensor, value: float) -> Tensor:
        """k or v (B, G, K, size) with a value in all keys that no query keeps."""
        return x.masked_fill(self.keys[..., None], value)


class Inputs(NamedTuple):
    """One attention problem: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E), and dout (B, H, Q, E) or None.

    As `attention` takes them, q, k, v and dout may lack B, or B and the heads.
    """

    pattern: Pattern
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    dout: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `attention`."""
        terms = self.terms._asdict()
        distance = "absolute" if terms.pop("absolute") else "signed"
        return terms if self.terms.alibi_slopes is None else terms | {"alibi_distance": distance}

    def batched(self) -> Inputs:
        """x in four dimensions."""
        missing = (None,) * (4 - self.q.ndim)
        dout = None if self.dout is None else self.dout[missing]
        return self._replace(q=self.q[missing], k=self.k[missing], v=self.v[missing], dout=dout)


def make(
    case: Case,
    dtype: str,
    device: str | torch.device = "cpu",
    *,
    seed: int = 0,
    strides: str = "plain",
    requires_grad: bool = False,
    pattern: Pattern | None = None,
    on_device: bool = False,
) -> Inputs:
    """Inputs from a standard normal distribution.

    Args:
        strides: "plain" is contiguous; "positions_first" is a view of (B, N, heads, size); "sliced" is a part of
            a larger tensor.
        requires_grad: of q, k, v and the sinks.
        pattern: that of the case, where it was made before.
        on_device: drawn there, where gigabytes of them take no time; or else the same numbers on every device.
    """
    if strides not in STRIDES:
        raise ValueError(f"strides={strides!r} is not one of {', '.join(STRIDES)}")
    where = torch.device(device if on_device else "cpu")
    generator = torch.Generator(where).manual_seed(seed)
    kind = getattr(torch, dtype)
    drawn = kind if on_device else torch.float64

    def draw(heads: int, positions: int, size: int) -> Tensor:
        shape = (case.B, heads, positions, size)
        x = torch.randn(shape, generator=generator, dtype=drawn, device=where).to(device, kind)
        if strides == "positions_first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif strides == "sliced":
            x = torch.nn.functional.pad(x, (3, 5, 1, 2))[:, :, 1:-2, 3:-5]
        for _ in range(4 - case.dims):
            x = x[0]
        return x

    q = draw(case.H, case.Q, case.D).requires_grad_(requires_grad)
    k, v = (draw(case.G, case.K, size).requires_grad_(requires_grad) for size in (case.D, case.E))
    lengths = sinks = slopes = None
    if case.key_lengths is not None:
        lengths = torch.tensor(case.key_lengths, dtype=torch.int32, device=device)
    if case.sink_logits:
        sinks = torch.randn(case.H, generator=generator, device=where).to(device).requires_grad_(requires_grad)
    if case.alibi_slopes:
        slopes = (2.0 ** -torch.arange(1, case.H + 1, device="cpu")).to(device)
        if case.alibi_slopes == "each":
            slopes = torch.stack([slopes / (b + 1) for b in range(case.B)])
    offset = case.K - case.Q if case.q_offset is None else case.q_offset
    absolute = case.alibi_distance == "absolute"
    terms = Terms(case.D**-0.5, offset, case.softcap, absolute, lengths, sinks, slopes)
    return Inputs(case.pattern() if pattern is None else pattern, q, k, v, terms, draw(case.H, case.Q, case.E))


def unkept(mask: Tensor, terms: Terms, shape: tuple[int, int, int], G: int) -> Unkept:
    """The rows that no pair of a call reads.

    Args:
        mask: broadcasts to (B, H, Q, K).
        shape: (B, H, Q).
        G: heads of k and v.
    """
    keep = kept(mask, terms, mask.shape[-1]).expand(*shape, -1)
    return Unkept(~keep.any(-1), ~keep.unflatten(1, (G, -1)).any(3).any(2))


def problem_of(case: Case, dtype: str, device: str = "cpu", *, backward: bool = True) -> Problem:
    """The problem an implementation is asked about."""
    named = ("key_lengths", "softcap")
    terms = {name for name in named if getattr(case, name) is not None}
    terms |= {name for name in ("sink_logits", "alibi_slopes") if getattr(case, name)}
    terms |= {"alibi_distance"} if case.alibi_distance == "absolute" else set()
    terms |= {"q_offset"} if case.q_offset not in (None, case.K - case.Q) else set()
    chip = chip_of(torch.device("cuda", torch.cuda.current_device()))._asdict() if device == "cuda" else {}
    c = case
    return Problem(
        c.B, c.H, c.G, c.Q, c.K, c.D, c.E, dtype, device, **chip, score_terms=frozenset(terms), backward=backward
    )
