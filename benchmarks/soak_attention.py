"""The family `attention`: random calls of `gossamer.attention`, each compared with `soak_oracle`.

A call is computed up to three times, with other numbers each time: a repeated call goes by other paths than the first.
A call is right when its results and gradients are those of the oracle, or when it is refused by a ValueError that
`refusals` lists for it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import soak_oracle as oracle
import torch
from soak_arguments import laid_out, make_mistake, offset_of, pattern_argument, scale_of, unbatched, vector
from soak_calls import Call, draw, refusal, refusals
from soak_oracle import Terms
from soak_outcomes import Outcome, begun, outcome_of
from soak_run import IN_PARTS
from torch import Tensor

import gossamer as gs
from gossamer.memo import forget_all

__all__ = ["attention", "draw", "run"]

ROUGH = 1024.0  # a soft cap up to which the kernels for Hopper, whose tanh is rough near 0, may be taken


def attention(*args: Any, **kwargs: Any) -> Any:
    """The function that is tested; tests of this script replace it by a wrong one."""
    return gs.attention(*args, **kwargs)


def run(c: Call) -> Outcome:
    """Compute a call up to three times, and compare each with the oracle."""
    IN_PARTS[0] = c.parts
    if c.parts:
        forget_all()
    try:
        return outcome_of(begun("attention", c), lambda outcome: _run(c, outcome), lambda error: refusal(c, error))
    finally:
        if c.parts:
            IN_PARTS[0] = False
            forget_all()


def _run(c: Call, outcome: Outcome) -> Outcome:
    B, H, G, Q, K, D, E = c.shape
    generator = torch.Generator().manual_seed(c.seed)
    given = pattern_argument(c)
    lengths = None if c.lengths is None else vector(c.lengths, c.device)
    sinks, slopes = (None if x is None else vector(x, c.device) for x in (c.sinks, c.slopes))
    if sinks is not None:
        sinks.requires_grad_("s" in c.wanted)
    counts, r = given.counts, random.Random(c.seed + 2)
    turns = 1 if c.mistake is not None else r.choice([1, 2, 2, 3])
    for turn in range(turns):
        if turn == 2 and lengths is not None and c.lengths is not None and c.lengths.place != "expanded":
            values = (*c.lengths.values[1:], min(K // 2 + 1, torch.iinfo(lengths.dtype).max))
            lengths.copy_(torch.tensor(values, dtype=lengths.dtype))
        if turn == 2 and given.mask is not None:
            given.mask.logical_not_()
            counts = 1 - counts
        shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
        whole = [torch.randn(s, generator=generator, dtype=torch.float64).to(c.dtype).to(c.device) for s in shapes]
        four = [laid_out(where, x) for where, x in zip(c.places, whole, strict=True)]
        leaves = [unbatched(x, c.dims).requires_grad_(name in c.wanted) for x, name in zip(four, "qkv", strict=True)]
        scale = scale_of(c)
        options: dict[str, Any] = {
            "q_offset": offset_of(c), "scale": scale, "softcap": c.softcap, "key_lengths": lengths,
            "alibi_distance": c.distance,
            "sink_logits": sinks, "alibi_slopes": slopes, "implementation": c.implementation,
            "deterministic": c.deterministic, "layout": "bshd" if c.bshd else "bhnd",
        }  # fmt: skip
        if lengths is not None and c.listed:
            options["key_lengths"] = lengths.tolist()
        inputs = [in_layout(c, x) for x in leaves]
        arguments = dict(zip("qkv", inputs, strict=True)) | {"pattern": given.pattern, **options}
        arguments |= {"return_lse": c.return_lse, "merge": "lse" if c.merge else None}
        if c.mistake is not None:
            make_mistake(c, arguments)
        if turn == 0 and c.mistake is None and not c.merge:
            explained = gs.explain(*inputs, given.pattern, **options)
            outcome = outcome._replace(implementation=explained.implementation + " in parts" * bool(explained.parts))
            density = float((counts > 0).double().mean())
            if not math.isclose(explained.density, density, abs_tol=1e-12):
                return outcome._replace(wrong=f"a density of {density} is explained as {explained.density}")
        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "plain": torch.enable_grad}
        with torch.enable_grad() if c.wanted else modes[c.mode]():
            found = attention(**arguments)
        must = [name for name, _, has_to in refusals(c) if has_to]
        if must:
            return outcome._replace(wrong=f"not refused: {must[0]}")
        out, *more = found if c.return_lse else (found,)
        if c.bshd and not out.is_contiguous():
            return outcome._replace(wrong="out is not contiguous in its layout")
        results = in_layout(c, out), *more
        value = float(D**-0.5 if scale is None else scale.detach().item() if isinstance(scale, Tensor) else scale)
        terms = Terms(
            value, c.offset, None if c.softcap is None else float(c.softcap),
            None if lengths is None else lengths.tolist(), sinks, slopes, c.distance or "signed",
        )  # fmt: skip
        learned = scale if isinstance(scale, Tensor) and scale.requires_grad else None
        difference = compared(c, four, leaves, sinks, counts, terms, results, learned)
        if difference is not None:
            return outcome._replace(wrong=f"call {turn + 1}: {difference}")
    return outcome


def in_layout(c: Call, x: Tensor) -> Tensor:
    """One of q, k, v and out in the layout of the call, or from it."""
    return x.transpose(-3, -2) if c.bshd and c.dims > 2 else x


def compared(
    c: Call, four: list[Tensor], leaves: list[Tensor], sinks: Tensor | None, counts: Tensor, terms: Terms,
    results: tuple[Tensor, ...], learned: Tensor | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with the results and gradients of a call; None where nothing is.

    Args:
        learned: a scale with a gradient.
    """
    B, H, _, Q, _, _, E = c.shape
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(c.seed + 3)
    with torch.no_grad():
        dout, dlse = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((B, H, Q, E), (B, H, Q)))
        dout, dlse = dout.to(c.device, c.dtype), dlse.to(c.device, wide)
        use_lse = c.return_lse and c.cotangents != "out"
        use_out = c.cotangents != "lse" or not c.return_lse
        dout, dlse = dout * use_out, dlse * use_lse
        counts = oracle.within(counts, terms)
    exact = [x.detach().double().requires_grad_() for x in four]
    of_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    slopes = None if terms.slopes is None else terms.slopes.detach().double()
    of_scale = None if learned is None else learned.detach().double().requires_grad_()
    wide_terms = terms._replace(sinks=of_sinks, slopes=slopes)
    if of_scale is not None:
        wide_terms = wide_terms._replace(scale=of_scale)
    with torch.enable_grad():
        out, lse = oracle.exact(*exact, counts, wide_terms)
    true = {"out": out.detach(), "lse": lse.detach()}
    actual = dict(zip(("out", "lse"), results, strict=False))
    for name, x in actual.items():
        if x.dtype != (c.dtype if name == "out" else wide):
            return f"{name} is of {x.dtype}"
    if c.wanted and any(x is not None and x.requires_grad for x in [*leaves, sinks, learned]):
        some = torch.isfinite(lse)
        loss = (out * dout.double()).sum() + (torch.where(some, lse, 0.0) * torch.where(some, dlse, 0.0)).sum()
        every = dict(zip(oracle.NAMES[2:], [*exact, of_sinks, of_scale], strict=True))
        every = {name: x for name, x in every.items() if x is not None}
        gradients = torch.autograd.grad(loss, list(every.values()), allow_unused=True)
        true |= {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(every.items(), gradients, strict=True)}
        mine = dict(zip(oracle.NAMES[2:], [*leaves, sinks, learned], strict=True))
        mine = {name: x for name, x in mine.items() if x is not None and x.requires_grad}
        outputs = [(actual["out"], unbatched(dout, c.dims))] if use_out else []
        outputs += [(actual["lse"], unbatched(dlse, c.dims))] if use_lse else []
        found = torch.autograd.grad([x for x, _ in outputs], list(mine.values()), [g for _, g in outputs])
        for (name, x), g in zip(mine.items(), found, strict=True):
            if g.dtype != x.dtype:
                return f"{name} is of {g.dtype}"
        actual |= dict(zip(mine, found, strict=True))
    with torch.no_grad():
        terms = terms._replace(sinks=None if sinks is None else sinks.detach())
        low = oracle.plain(*four, counts, terms, dout, dlse)
        inputs, wide_terms = [x.detach() for x in exact], terms._replace(slopes=slopes)
        scaled = c.scale_tensor in ("learned", "constant")
        rough = c.device == "cuda" and c.dtype != torch.float64 and (terms.softcap or 0.0) <= ROUGH
        moved = oracle.rounding(
            *inputs, counts, wide_terms, dout.double(), dlse.double(), c.dtype, c.merge, scaled, rough
        )
        differences = []
        for name, x in actual.items():
            if name == "dscale" and name not in moved:  # of a scale of 0: finite is all that is asked
                differences += [] if bool(x.isfinite()) else [f"dscale is {float(x)}"]
                continue
            if name not in ("dsink_logits", "dscale"):
                x = x.reshape((1,) * (4 - c.dims) + tuple(x.shape))
            differences.append(oracle.wrong(name, x.detach(), true[name], low[name], moved[name]))
    return "; ".join(one for one in differences if one is not None) or None
