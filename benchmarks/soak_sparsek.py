"""The family `sparsek`: random calls of `sparsek`, `sparsek_causal`, `last_topk`, and attention over what they keep.

Rows of which a gate is within rounding of an end of its clip have no gradient of their output here; nor are rows
compared of which a key of the support is within rounding of the threshold. Scores in steps are compared exactly.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import soak_oracle as oracle
import soak_sparsek_oracle as definition
import torch
from soak_arguments import laid_out, unbatched
from soak_calls import FLOATS, PLACES
from soak_outcomes import Outcome, begun, options_of, outcome_of
from soak_rounding import exact, moved, of_weights, stored_as
from torch import Tensor

import gossamer as gs

KINDS = (
    ("attention",) * 12 + ("attention_forward",) * 2 + ("sparsek",) * 4 + ("sparsek_causal",) * 4 + ("last_topk",) * 2
)
SCORES = ("plain", "plain", "slope", "fall", "ties", "equal", "far", "narrow", "tiny", "gone", "steps", "offset")
MODES = ("gradients",) * 8 + ("no_grad", "inference_mode", "autocast", "create_graph")
MISTAKES = (
    "k of 0",
    "k of 2.5",
    "u of another length",
    "u of bfloat16",
    "window of -1",
    "gate of text",
    "keep of text",
)


class Call(NamedTuple):
    """One call, but for the numbers in its tensors, which its seed makes as well."""

    seed: int
    device: str
    kind: str
    dtype: torch.dtype
    score_type: torch.dtype
    shape: tuple[int, int, int, int, int, int, int]  # B, H, G, U, N, D, E
    dims: int
    scores: str
    k: int
    window: int
    keep: str
    gate: str | None
    causal: bool
    scale: float | None
    straight: bool
    return_lse: bool
    cotangents: str
    places: tuple[str, str, str, str]  # how q, k, v and dout lie in memory
    dim: int  # of rows of `sparsek`
    mode: str
    compiled: bool
    mistake: str | None

    @property
    def implementation(self) -> str | None:
        return None

    def description(self) -> str:
        """The call as text."""
        B, H, G, U, N, D, E = self.shape
        return f"B={B} H={H} G={G} U={U} N={N} D={D} E={E} {options_of(self, 'seed', 'shape')}"


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    r = random.Random(f"sparsek {seed}")
    on_gpu = device == "cuda"
    kind = r.choice(KINDS)
    sizes = ((16, 16), (64, 64), (128, 128), (40, 64)) if on_gpu else ((1, 1), (4, 4), (8, 3), (5, 16), (16, 8))
    # On a GPU calls share what kernels are compiled for.
    form = random.Random(f"sparsek {r.randrange(30)} form") if on_gpu else r
    D, E = form.choice(sizes)
    dtype = form.choice(((torch.bfloat16, torch.float16) * 3 + FLOATS) if on_gpu else (torch.float64, *FLOATS))
    dims = r.choice([4, 4, 3, 2])
    B = r.choice([1, 1, 2]) if dims == 4 else 1
    G = r.choice([1, 1, 2]) if dims > 2 else 1
    H = G * r.choice([1, 1, 2, 3]) if dims > 2 else 1
    N = r.choice((1, 2, 40, 130, 200) if on_gpu else (1, 2, 3, 5, 9, 16, 17, 24, 33, 40))
    gate = form.choice(["v", "v", "kv", "logit", None])
    places = form.choice(PLACES), form.choice(PLACES), form.choice(PLACES), form.choice(PLACES)
    return Call(
        seed, device, kind, dtype, r.choice([torch.float32, torch.float32, torch.float64]),
        (B, H, G, r.choice([G, H]), N, D, E), dims, r.choice(SCORES),
        r.choice([1, 1, 2, 3, 5, max(1, N // 3), max(1, N - 1), N, N + 3, 2**31 - 1]),
        r.choice([0, 0, 0, 1, 4, N, 2**31 - 1]), r.choice(["topk", "topk", "support"]), gate, r.random() < 0.8,
        r.choice([None, None, 0.0, -0.7, 3.0, 1e-6, 30.0]), gate in ("v", None) and form.random() < 0.4,
        r.random() < 0.7, r.choice(["both", "both", "out", "lse"]), places, r.choice([0, 1, 2, -1, -2, -3]),
        r.choice(MODES), r.random() < 0.02,
        r.choice(MISTAKES) if r.random() < 0.03 else None,
    )  # fmt: skip


def refusals(c: Call) -> Iterator[tuple[str, str, bool]]:
    """The reasons to refuse a call: (reason, what the message must match, whether the call has to be refused)."""
    if c.mistake is not None:
        yield f"mistake: {c.mistake}", r"\bk\b|k_keep|\bu\b|scores|window|gate|keep", True
    if c.mode == "create_graph":
        yield "a second derivative", "second derivative", False


def refusal(c: Call, error: ValueError) -> str | None:
    """The reason for which a call may be refused with such an error; None where there is none."""
    return next((name for name, match, _ in refusals(c) if re.search(match, str(error))), None)


def sparsek_attention(*args: Any, **kwargs: Any) -> Any:
    """The function that is tested; tests of this script replace it by a wrong one."""
    return gs.sparsek_attention(*args, **kwargs)


def run(c: Call) -> Outcome:
    """Compute a call and compare it with the definition."""
    compute = _attention if c.kind.startswith("attention") else _threshold
    return outcome_of(begun("sparsek", c), lambda outcome: compute(c, outcome), lambda error: refusal(c, error))


def scores(c: Call, generator: torch.Generator) -> Tensor:
    """u (B, U, N) in the type of scores, on a CPU."""
    B, _, _, U, N, _, _ = c.shape
    u = torch.randn(B, U, N, generator=generator, dtype=torch.float64)
    chance = torch.rand(B, U, N, generator=generator)
    made = {
        "slope": u + 0.1 * torch.arange(N), "fall": u - 0.1 * torch.arange(N), "ties": (2 * u).round() / 2,
        "equal": torch.full_like(u, 0.5), "far": torch.where(chance < 0.2, 1e6 * u, u), "narrow": 1e-3 * u,
        "tiny": torch.where(chance < 0.7, 1e-17 * u, u.round()), "gone": torch.where(chance < 0.4, -math.inf, u),
        "steps": (4 * u).round() / 4, "offset": u + (2.0**20 if c.score_type == torch.float64 else 16.0),
    }  # fmt: skip
    return made.get(c.scores, u).to(c.score_type)


def _error(c: Call, of: torch.dtype) -> float:
    """Of u - tau, relative to tau and 1, computed in a type."""
    return 4 * torch.finfo(c.score_type).eps + torch.finfo(of).eps


def _compiled(c: Call, function: Any) -> Any:
    if not c.compiled or c.mistake is not None or c.mode == "create_graph":
        return function
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _threshold(c: Call, outcome: Outcome) -> Outcome:
    generator = torch.Generator().manual_seed(c.seed)
    u = scores(c, generator).to(c.device)
    if c.kind == "sparsek":  # rows along another dimension
        u = u.movedim(-1, c.dim)
    rows = u.movedim(c.dim, -1) if c.kind == "sparsek" else u
    k: Any = {"k of 0": 0, "k of 2.5": 2.5}.get(c.mistake or "", c.k)
    given = u.bfloat16() if c.mistake == "u of bfloat16" else u
    refused = c.mistake in ("k of 0", "k of 2.5", "u of bfloat16")
    leaf = given.detach().requires_grad_(
        not refused and c.kind != "last_topk" and "grad" in c.mode and c.mode != "no_grad"
    )
    flat = rows.double().reshape(-1, rows.shape[-1])
    N, eps = flat.shape[1], torch.finfo(c.score_type).eps
    function = {"sparsek": gs.sparsek, "sparsek_causal": gs.sparsek_causal, "last_topk": gs.last_topk}[c.kind]
    more = (c.dim,) if c.kind == "sparsek" else ()
    mode: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(c.mode, torch.enable_grad)
    with mode():
        found: Any = _compiled(c, lambda x: function(x, k, *more))(leaf)
    if refused:
        return outcome._replace(wrong=f"not refused: {c.mistake}")
    if c.kind == "last_topk":
        true_last = definition.last_topk(flat, c.k)
        same = torch.equal(found.reshape(flat.shape).long(), true_last)
        return outcome._replace(
            wrong=None if same and found.dtype == torch.int32 else f"last is {found}, not {true_last}"
        )
    exact_u = flat.clone().requires_grad_()
    first, tau = (found.m, found.tau) if c.kind == "sparsek" else (None, found.tau)
    if c.kind == "sparsek":
        true_tau = definition.threshold(exact_u, c.k)
        true_m = definition.gates(exact_u, true_tau[:, None])
        mine_m = first.movedim(c.dim, -1).reshape(flat.shape)
    else:
        true_tau = definition.causal_thresholds(exact_u, c.k)
    mine = tau.reshape(true_tau.shape)
    wanted = true_tau.detach()
    size = wanted.abs().nan_to_num(posinf=0.0, neginf=0.0)
    steps = 2.0 ** -(40 if c.score_type == torch.float32 else 48)
    allowed = 2 * eps * size + steps if c.score_type == torch.float32 else 8 * eps * (size + 1)
    wrongs = [oracle.wrong("tau", mine.detach()[..., None], wanted[..., None], wanted[..., None], allowed[..., None])]
    if tau.dtype != c.score_type:
        wrongs.append(f"tau is of {tau.dtype}")
    noise = 8 * eps * (size + 1)
    if c.kind == "sparsek":
        wrongs.append(
            oracle.wrong("m", mine_m.detach(), true_m.detach(), true_m.detach(), (2 * noise)[:, None].expand_as(flat))
        )
        over, pairs = flat - wanted[:, None], flat > -math.inf
    else:
        over = flat[:, None] - wanted[..., None]
        pairs = torch.ones(N, N, dtype=torch.bool, device=c.device).tril() & (flat > -math.inf)[:, None]
        j = torch.arange(N, device=c.device)
        mine_tau = mine.detach().double()
        alive = (flat[:, None] > mine_tau[..., None]) & (j <= j[:, None])
        true_last = torch.where(alive, j[:, None], j - 1).amax(1)
        if not torch.equal(found.last.reshape(true_last.shape).long(), true_last):
            wrongs.append(f"last is {found.last}, not {true_last}")
    edge = (((over.abs() <= noise[..., None]) | ((over - 1).abs() <= noise[..., None])) & pairs).any(-1)
    if leaf.requires_grad and tau.requires_grad:
        cotangent = torch.randn(wanted.shape, generator=generator, dtype=torch.float64).to(c.device)
        cotangent = torch.where(edge | (wanted == -math.inf), 0.0, cotangent)
        tensors, cotangents = [tau], [cotangent.reshape(tau.shape).to(c.score_type)]
        exact_tensors, exact_cotangents = [true_tau], [cotangents[0].double().reshape(wanted.shape)]
        if c.kind == "sparsek":
            dm = torch.randn(flat.shape, generator=generator, dtype=torch.float64).to(c.device)
            dm = torch.where(edge[:, None], 0.0, dm).to(c.score_type)
            tensors.append(first)
            cotangents.append(dm.reshape(rows.shape).movedim(-1, c.dim))
            exact_tensors.append(true_m)
            exact_cotangents.append(dm.double())
        (du,) = torch.autograd.grad(tensors, leaf, cotangents)
        # Thresholds of -inf are constants, of which autograd makes NaN.
        safe = [torch.where(x.detach() > -math.inf, x, 0.0) for x in exact_tensors]
        (true_du,) = torch.autograd.grad(safe, exact_u, exact_cotangents)
        mine_du = (du.movedim(c.dim, -1) if c.kind == "sparsek" else du).reshape(flat.shape)
        total = sum(x.abs().reshape(len(flat), -1).sum(-1) for x in exact_cotangents)
        limit = (16 * eps * total)[:, None].expand_as(flat)
        wrongs.append(oracle.wrong("du", mine_du, true_du, true_du, limit))
    return outcome._replace(wrong="; ".join(one for one in wrongs if one is not None) or None)


def _attention(c: Call, outcome: Outcome) -> Outcome:
    B, H, G, U, N, D, E = c.shape
    generator = torch.Generator().manual_seed(c.seed)
    low = c.dtype
    if c.mode == "autocast" and c.dtype != torch.float64:
        low = torch.bfloat16
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    whole = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(c.dtype).to(c.device)
        for shape in ((B, H, N, D), (B, G, N, D), (B, G, N, E))
    ]
    four = [laid_out(where, x) for where, x in zip(c.places, whole, strict=False)]
    u = scores(c, generator).to(c.device)
    wanted = c.mode in ("gradients", "autocast", "create_graph")
    leaves = [unbatched(x, c.dims).requires_grad_(wanted) for x in four]
    leaf_u = u[(0,) * (4 - c.dims)].clone().requires_grad_(wanted)
    g = definition.Given(c.k, c.window, c.keep, c.gate, c.causal, D**-0.5 if c.scale is None else c.scale, c.straight)
    options: dict[str, Any] = {
        "k_keep": c.k, "window": c.window, "keep": c.keep, "gate": c.gate, "causal": c.causal,
        "straight_through": c.straight, "return_lse": c.return_lse,
    }  # fmt: skip
    if c.scale is not None:
        options["scale"] = c.scale
    of_scores = leaf_u
    if c.mistake is not None:
        options |= {
            "k of 0": {"k_keep": 0}, "k of 2.5": {"k_keep": 2.5}, "window of -1": {"window": -1},
            "gate of text": {"gate": "values"}, "keep of text": {"keep": "most"},
        }.get(c.mistake, {})  # fmt: skip
        of_scores = torch.cat([of_scores, of_scores], -1) if c.mistake == "u of another length" else of_scores
        of_scores = of_scores.bfloat16() if c.mistake == "u of bfloat16" else of_scores
    if c.kind == "attention_forward" and c.mistake in (None, "k of 0", "k of 2.5"):
        g = definition.Given(c.k, 0, "topk", "v", c.causal, D**-0.5, False)
        k_keep = options["k_keep"]

        def function(*x: Tensor) -> Any:
            return gs.attention_forward(*x[:3], causal=c.causal, k_keep=k_keep, scores=x[3])

        told = False
    else:

        def function(*x: Tensor) -> Any:
            return sparsek_attention(*x, **options)

        told = c.return_lse
    mode: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(c.mode, torch.enable_grad)
    if c.mode == "autocast":
        mode = lambda: torch.autocast(c.device, torch.bfloat16)  # noqa: E731
    with mode():
        found = _compiled(c, function)(*leaves, of_scores)
    if c.mistake is not None:
        return outcome._replace(wrong=f"not refused: {c.mistake}")
    out, lse = found if told else (found, None)
    if out.dtype != low or (told and lse.dtype != wide):
        return outcome._replace(wrong=f"out is of {out.dtype}")
    error = _error(c, wide)
    exact_u = u.double()
    chosen = definition.select(exact_u, g.k_keep, g.keep, g.causal, 2 * error)
    each = H // U
    unsure, edge = (x.repeat_interleave(each, 1) for x in (chosen.unsure, chosen.at_edge))
    skip = unsure | (edge & (c.scores not in ("equal",)))
    dout = torch.randn((B, H, N, E), generator=generator, dtype=torch.float64).to(low).to(c.device)
    dlse = torch.randn((B, H, N), generator=generator, dtype=torch.float64).to(wide).to(c.device)
    use_out = c.cotangents != "lse" or not told
    use_lse = told and c.cotangents != "out"
    dout = torch.where(skip[..., None], 0.0, dout).to(low) * use_out
    dlse = torch.where(skip, 0.0, dlse).to(wide) * use_lse
    if c.places[3] not in ("one head", "one batch"):
        dout = laid_out(c.places[3], dout)
    inputs = [x.detach().to(low).double() for x in four]

    def of(x: list[Tensor], low_type: torch.dtype | None, rounding: Any) -> dict[str, Tensor]:
        kind = x[0].dtype
        return definition.attend(
            [*x, exact_u], g, chosen, dout.to(kind), dlse.to(kind), low_type, rounding, error
        )  # fmt: skip

    true = of(inputs, None, exact())
    plain = of([x.to(wide) for x in inputs], low if torch.finfo(low).bits == 16 else None, exact())
    units = moved(true, lambda rounding: of(inputs, None, rounding), low, c.seed + 1)
    of_sizes = of([*inputs[:2], inputs[2].abs()], None, exact())["out"]
    units["out"] = units["out"] + of_weights(of_sizes, low)
    stored_as(units, true, c.dtype)
    units["out"] = torch.where(unsure[..., None], math.inf, units["out"])
    units["lse"] = torch.where(unsure, math.inf, units["lse"] + 8 * torch.finfo(wide).eps)
    units["du"] = units["du"] + 4 * torch.finfo(c.score_type).eps * true["size of du"]
    units["du"] = units["du"] + 2 * torch.finfo(c.score_type).smallest_normal
    # A sum over steps that the type of u does not hold is none for any key.
    over = true["size of du"].amax(-1, keepdim=True) > torch.finfo(c.score_type).max / N
    units["du"] = torch.where(over, math.inf, units["du"])
    actual = {"out": out.detach().reshape(B, H, N, E)}
    if told:
        actual["lse"] = lse.detach().reshape(B, H, N)
    if wanted:
        outputs = [out] * use_out + [lse] * use_lse
        cotangents = [unbatched(dout, c.dims)] * use_out + [unbatched(dlse, c.dims)] * use_lse
        graph = c.mode == "create_graph"
        gradients = torch.autograd.grad(outputs, [*leaves, leaf_u], cotangents, create_graph=graph, allow_unused=True)
        for name, x, leaf in zip(("dq", "dk", "dv", "du"), gradients, [*leaves, leaf_u], strict=True):
            x = torch.zeros_like(leaf) if x is None else x
            if x.dtype != leaf.dtype or x.shape != leaf.shape:
                return outcome._replace(wrong=f"{name} is of {x.dtype}, {tuple(x.shape)}")
            actual[name] = x.detach()
        if graph:
            return outcome._replace(wrong="a second derivative is not refused")
    differences = [
        oracle.wrong(name, x.reshape(true[name].shape), true[name], plain[name], units[name])
        for name, x in actual.items()
    ]
    return outcome._replace(wrong="; ".join(one for one in differences if one is not None) or None)
