"""The families `entmax` and `topk`: random calls of `entmax_attention` and of `topk_keys`.

Half of the calls have inputs in small steps, whose scores are exact in every type, ties among them. In the others a row
whose kept keys are within rounding of others is not compared, and has no gradient of its output; nor has one with a key
at the edge of the support.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import soak_entmax_oracle as definition
import soak_oracle as oracle
import torch
from soak_arguments import laid_out, pattern_argument, unbatched
from soak_calls import FLOATS, INTEGERS, PLACES
from soak_oracle import Spec
from soak_outcomes import Outcome, begun, options_of, outcome_of
from soak_patterns import shortened, spec_of
from soak_rounding import exact, moved, of_weights, stored_as
from torch import Tensor

import gossamer as gs

MODES = ("gradients",) * 10 + ("no_grad", "no_grad", "inference_mode", "autocast", "create_graph")
HOST_FORMS = ("layout", "device layout", "block mask")  # which are not drawn inside of compiled functions
MISTAKES = (
    "top_k of 0", "top_k of 2.0", "alpha of 2.5", "alpha of nan", "an alpha out of range", "save of text",
    "positions of floats", "positions of another length", "another head size", "implementation of text", "causal of 1",
)  # fmt: skip


class Call(NamedTuple):
    """One call, but for the numbers in its tensors, which its seed makes as well."""

    seed: int
    device: str
    family: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int, int]  # B, H, G, Q, K, D, E
    dims: int
    spec: Spec
    form: str  # of the `pattern` argument
    blocks: tuple[int, int]
    steps: bool  # whether inputs are in small steps, so that scores are exact
    size: float  # of q
    alpha: Any  # a number, or one for each head
    alpha_type: torch.dtype | None  # of a tensor
    top_k: int | None
    causal: bool
    q_positions: tuple[torch.dtype, tuple[int, ...]] | None  # type and shape
    k_positions: tuple[torch.dtype, tuple[int, ...]] | None
    scale: float | None
    save: str
    implementation: str | None
    told: bool
    places: tuple[str, str, str, str]  # how q, k, v and dout lie in memory
    mode: str
    compiled: bool
    mistake: str | None
    merge: bool = False  # read by `pattern_argument`

    @property
    def kind(self) -> str:
        """The kind of the pattern."""
        return str(self.spec[0])

    @property
    def offset(self) -> int:
        """Position of query row 0."""
        return self.shape[4] - self.shape[3]

    def description(self) -> str:
        """The call in two lines of text."""
        B, H, G, Q, K, D, E = self.shape
        text = options_of(self, "seed", "shape", "spec", "merge")
        return f"B={B} H={H} G={G} Q={Q} K={K} D={D} E={E} {shortened(self.spec)}\n    {text}"


def draw(seed: int, device: str, family: str = "entmax") -> Call:
    """The call of a seed, which is the same on every machine."""
    r = random.Random(f"{family} {seed}")
    on_gpu = device == "cuda"
    sizes = ((8, 8), (20, 40), (64, 64), (128, 64)) if on_gpu else ((1, 1), (4, 4), (8, 3), (16, 16), (5, 20), (64, 8))
    # On a GPU calls share what kernels are compiled for.
    form_of = random.Random(f"{family} {r.randrange(30)} form") if on_gpu else r
    D, E = form_of.choice(sizes)
    dtype = form_of.choice((torch.float32,) * 3 + FLOATS)
    if on_gpu:
        dtype = form_of.choice((torch.bfloat16,) * 3 + (torch.float16,) * 2 + (torch.float32, torch.float64))
    dims = form_of.choice([4, 4, 4, 3, 2])
    B = r.choice([1, 2, 3]) if dims == 4 else 1
    G = form_of.choice([1, 1, 2, 3]) if dims > 2 else 1
    H = G * form_of.choice([1, 1, 2, 3]) if dims > 2 else 1
    lengths = (1, 33, 64, 130, 300, 700) if on_gpu else (1, 2, 3, 7, 16, 17, 31, 33, 40, 64, 65, 70, 129)
    K = r.choice(lengths)
    Q = r.choice([K, K, K, 1, 1 + r.randrange(K), r.choice(lengths)])
    while (1_000_000 if on_gpu else 15_000) < B * H * Q * K:
        Q, K = max(1, Q // 2), max(1, K // 2)
    form = r.choice(
        ["none"] * 6 + ["pattern"] * 8 + ["handle", "mask", "mask", "layout", "device layout", "block mask"]
    )
    spec: Spec = ("Dense",) if form == "none" else spec_of(r, B, H, Q, K)
    alpha: Any = form_of.choice([1.0, 1.5, 1.5, 1.5, 2.0, 2.0, 1.001, 1.05, 1.25, 1.333, 1.75, 1.9, 1, 2])
    alpha_type = None
    if family == "entmax" and form_of.random() < 0.35:
        alpha_type = r.choice((torch.float32, torch.float64, torch.float64, torch.bfloat16))
        ends = (1.0, 1.25, 1.5, 1.75, 2.0)
        alpha = tuple(r.choice([r.choice(ends), r.uniform(1, 2)]) for _ in range(H))
        alpha = r.choice([alpha, alpha, (alpha[0],)])
    top_k = (
        form_of.choice([None, None, 1, 2, 5, 16, K, K + 3, 300, 2**31 - 1])
        if family == "entmax"
        else 1 + r.randrange(K + 4)
    )
    positions = [None, None]
    if r.random() < 0.25:
        shapes = [(Q,), (1, Q), (H, Q), (B, H, Q), (B, 1, Q), (1, 1, 1)], [(K,), (G, K), (H, K), (B, G, K), (B, 1, K)]
        given = [(r.choice(INTEGERS), r.choice(one)) for one in shapes]
        positions = r.choice([[given[0], None], [None, given[1]], given, given])

    scale = r.choice([None, None, None, 0.25, 1.0, -0.5, 0.0, sometimes_far(r)])
    mistakes = MISTAKES if family == "entmax" else [one for one in MISTAKES if "alpha" not in one and "save" not in one]
    blocks = r.choice([(64, 64), (128, 128), (32, 64)])
    return Call(
        seed, device, family, dtype, (B, H, G, Q, K, D, E), dims, spec, form, blocks,
        r.random() < 0.5, r.choice([0.0, 0.1, 1.0, 1.0, 3.0, 3.0, 10.0]), alpha, alpha_type, top_k, r.random() < 0.4,
        positions[0], positions[1], scale, r.choice(["lists", "lists", "tau"]),
        form_of.choice([None] * 14 + ["torch"] * 5 + ["kernels"] * (12 if on_gpu else 1)), r.random() < 0.7,
        (form_of.choice(PLACES), form_of.choice(PLACES), form_of.choice(PLACES), form_of.choice(PLACES)),
        r.choice(MODES),
        r.random() < 0.02, r.choice(mistakes) if r.random() < 0.03 else None,
    )  # fmt: skip


def sometimes_far(r: random.Random) -> float:
    """A scale that makes scores huge or tiny."""
    return r.choice([1e-30, 1e-6, 100.0, 1e4, -1e3])


def refusals(c: Call) -> Iterator[tuple[str, str, bool]]:
    """The reasons to refuse a call: (reason, what the message must match, whether the call has to be refused)."""
    if c.mistake is not None:
        yield f"mistake: {c.mistake}", r"top_k|k_keep|alpha|save|positions|implementation|causal|head size", True
    if c.implementation == "kernels":
        yield "kernels do not take it", "implementation|kernels", False
    if c.mode == "create_graph":
        yield "a second derivative", "differentiated once|double backward", False


def refusal(c: Call, error: ValueError) -> str | None:
    """The reason for which a call may be refused with such an error; None where there is none."""
    return next((name for name, match, _ in refusals(c) if re.search(match, str(error))), None)


def entmax_attention(*args: Any, **kwargs: Any) -> Any:
    """The function that is tested; tests of this script replace it by a wrong one."""
    return gs.entmax_attention(*args, **kwargs)


def topk_keys(*args: Any, **kwargs: Any) -> Any:
    """As `entmax_attention`."""
    return gs.topk_keys(*args, **kwargs)


def run(c: Call) -> Outcome:
    """Compute a call and compare it with the definition."""
    compute = _entmax if c.family == "entmax" else _topk
    return outcome_of(begun(c.family, c), lambda outcome: compute(c, outcome), lambda error: refusal(c, error))


class Made(NamedTuple):
    """The arguments of a call."""

    four: list[Tensor]  # q, k and v as they lie in memory, with four dimensions
    pattern: Any
    alive: Any
    options: dict[str, Any]
    seen: Tensor  # (B, H, Q, K) bool
    generator: torch.Generator


def made(c: Call) -> Made:
    """The arguments of a call, and what its rows see."""
    B, H, G, Q, K, D, E = c.shape
    generator = torch.Generator().manual_seed(c.seed)
    argument = pattern_argument(c)  # type: ignore[arg-type]
    whole = []
    for shape, size in zip(((B, H, Q, D), (B, G, K, D), (B, G, K, E)), (c.size, 1.0, 1.0), strict=True):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = ((2 * x).round() / 2).clamp(-3, 3) * (round(size) if size >= 1 else size > 0) if c.steps else size * x
        whole.append(x.to(c.dtype).to(c.device))
    four = [laid_out(where, x) for where, x in zip(c.places, whole, strict=False)]
    seen = (argument.counts > 0).expand(B, H, Q, K)
    options: dict[str, Any] = {"causal": c.causal}
    if c.scale is not None:
        options["scale"] = c.scale
    if c.implementation is not None:
        options["implementation"] = c.implementation
    given: list[Tensor | None] = []
    for name, one in (("q_positions", c.q_positions), ("k_positions", c.k_positions)):
        if one is None:
            given.append(None)
            continue
        dtype, shape = one
        low = 0 if dtype == torch.uint8 else -3
        x = torch.randint(low, min(K + 2, 120), shape, generator=generator).to(dtype).to(c.device)
        options[name] = x
        given.append(x.long())
    if given != [None, None]:
        of_q, of_k = given
        of_q = torch.arange(K - Q, K, device=c.device) if of_q is None else of_q
        of_k = torch.arange(K, device=c.device) if of_k is None else of_k
        of_q = of_q.expand(B, H, Q) if of_q.ndim else of_q
        if of_k.ndim > 1 and of_k.shape[-2] == G:
            of_k = of_k.repeat_interleave(H // G, -2)
        seen = seen & (of_k.expand(B, H, K)[:, :, None] <= of_q[..., None])
    elif c.causal:
        i = torch.arange(Q, device=c.device)[:, None] + (K - Q)
        seen = seen & (torch.arange(K, device=c.device) <= i)
    return Made(four, argument.pattern, argument.alive, options, seen, generator)


def _scale(c: Call) -> float:
    return c.shape[5] ** -0.5 if c.scale is None else c.scale


def _sure(c: Call) -> bool:
    """Whether scores are computed without rounding: sums of products in steps of 1/4, times a power of 2."""
    return c.steps and c.shape[5] in (1, 4, 16, 64) and (c.scale is None or c.scale in (0.25, 1.0, -0.5, 0.0))


def _mistaken(c: Call, options: dict[str, Any], inputs: list[Tensor], name: str) -> None:
    _, H, _, Q, *_ = c.shape
    changes: dict[str, dict[str, Any]] = {
        "top_k of 0": {name: 0}, "top_k of 2.0": {name: 2.0}, "alpha of 2.5": {"alpha": 2.5},
        "alpha of nan": {"alpha": float("nan")}, "save of text": {"save": "everything"}, "causal of 1": {"causal": 1},
        "an alpha out of range": {"alpha": torch.full((H,), 0.5, device=c.device)},
        "positions of floats": {"q_positions": torch.zeros(Q, device=c.device)},
        "positions of another length": {"q_positions": torch.zeros(Q + 2, dtype=torch.int64, device=c.device)},
        "implementation of text": {"implementation": "fast"},
    }  # fmt: skip
    assert c.mistake is not None
    if c.mistake == "another head size":
        inputs[1] = torch.cat([inputs[1], inputs[1]], -1)
        return
    options.update(changes[c.mistake])


def _called(c: Call, function: Any, *args: Any, **options: Any) -> Any:
    """A call, in a compiled function where it is drawn so."""
    if not c.compiled or c.mistake is not None or c.mode == "create_graph" or c.form in HOST_FORMS:
        return function(*args, **options)
    torch._dynamo.reset()
    return torch.compile(lambda *x: function(*x, **options), fullgraph=True, backend="aot_eager")(*args)


def _entmax(c: Call, outcome: Outcome) -> Outcome:
    (B, H, _, Q, *_), E = c.shape, c.shape[6]
    m = made(c)
    options = m.options | {"top_k": c.top_k, "save": c.save, "return_aux": c.told, "alpha": c.alpha}
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    low = c.dtype
    with torch.no_grad():
        if c.alpha_type is not None:
            of_heads = torch.tensor(c.alpha, dtype=c.alpha_type, device=c.device)
            options["alpha"] = of_heads[0].clone() if len(c.alpha) == 1 and c.seed % 2 else of_heads.expand(H).clone()
    learned = isinstance(options["alpha"], Tensor)
    wanted = c.mode in ("gradients", "create_graph", "autocast")
    leaves = [unbatched(x, c.dims).requires_grad_(wanted) for x in m.four]
    if learned:
        options["alpha"].requires_grad_(wanted)
    given = list(leaves)
    if c.mistake is not None:
        _mistaken(c, options, given, "top_k")
    mode: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(c.mode, torch.enable_grad)
    if c.mode == "autocast":
        low = torch.float64 if c.dtype == torch.float64 else torch.bfloat16
        wide = torch.float64 if c.dtype == torch.float64 else torch.float32
        mode = lambda: torch.autocast(c.device, torch.bfloat16)  # noqa: E731
    with mode():
        found = _called(c, entmax_attention, *given, m.pattern, **options)
    if c.mistake is not None:
        return outcome._replace(wrong=f"not refused: {c.mistake}")
    out, aux = found if c.told else (found, None)
    if out.dtype != low:
        return outcome._replace(wrong=f"out is of {out.dtype}")
    exact_inputs = [x.detach().to(low).double() for x in m.four]
    of_alpha = torch.as_tensor(options["alpha"], dtype=torch.float64, device=c.device).detach().expand(H)
    a, scale = (of_alpha - 1)[:, None, None], _scale(c)
    sure = _sure(c)
    r = definition.rows(*exact_inputs[:2], a, m.seen, scale, c.top_k, torch.finfo(wide).eps, sure)
    skipped = r.unsure | r.at_edge
    dout = torch.randn((B, H, Q, E), generator=m.generator, dtype=torch.float64).to(low).to(c.device)
    dout = laid_out(c.places[3], torch.where(skipped[..., None], 0.0, dout).to(low))
    if c.places[3] in ("one head", "one batch"):  # which expand one row to others
        dout = torch.where(skipped.flatten(0, 1).any(0)[:, None], 0.0, dout).to(low)
    inputs = [*exact_inputs, of_alpha]
    exact_dout = dout.double()
    true = definition.attend(inputs, r.kept, scale, exact_dout, None, exact())
    plain_inputs = [x.to(wide) for x in inputs]
    low_or_none = low if torch.finfo(low).bits == 16 else None
    plain = definition.attend(plain_inputs, r.kept, scale, dout.to(wide), low_or_none, exact())
    units = moved(
        true, lambda rounding: definition.attend(inputs, r.kept, scale, exact_dout, None, rounding), low, c.seed + 1
    )
    stored_as(units, true, c.dtype)
    actual = {"out": out.detach().reshape(B, H, Q, E)}
    sizes = [*inputs[:2], inputs[2].abs(), of_alpha]
    of_sizes = definition.attend(sizes, r.kept, scale, exact_dout, None, exact())["out"]
    units["out"] = units["out"] + of_weights(of_sizes, low)
    for name, x in definition.of_operands(inputs, r.kept, scale, exact_dout, low).items():
        units[name] = units[name] + x
    units["out"] = torch.where(r.unsure[..., None], torch.inf, units["out"])
    units["out"] = torch.where(r.kept.any(-1)[..., None], units["out"], 0.0)
    if wanted and out.requires_grad:
        outputs = [*leaves, options["alpha"]] if learned else leaves
        graph = c.mode == "create_graph"
        gradients = torch.autograd.grad(out, outputs, unbatched(dout, c.dims), create_graph=graph)
        names = ("dq", "dk", "dv", "dalpha")
        for name, x, leaf in zip(names, gradients, outputs, strict=False):
            if x.dtype != leaf.dtype or x.shape != leaf.shape:
                return outcome._replace(wrong=f"{name} is of {x.dtype}, {tuple(x.shape)}")
            actual[name] = x.detach()
        if learned and actual["dalpha"].ndim == 0:
            stored = true["dalpha"].abs().sum()
            for results in (true, plain, units):
                results["dalpha"] = results["dalpha"].sum().reshape(())
        elif learned:
            stored = true["dalpha"].abs()
        if c.alpha_type is not None:  # rounded for each head before a sum
            units["dalpha"] = units["dalpha"] + torch.finfo(c.alpha_type).eps * stored
        if graph:
            torch.autograd.grad(sum(x.double().square().sum() for x in gradients), leaves)
            return outcome._replace(wrong="a second derivative is not refused")
    differences = [
        oracle.wrong(name, x.reshape(true[name].shape), true[name], plain[name], units[name])
        for name, x in actual.items()
    ]
    if aux is not None:
        differences += _told(aux, r, wide, (B, H, Q), scale, exact_inputs)
    return outcome._replace(wrong="; ".join(one for one in differences if one is not None) or None)


def _told(
    aux: Any, r: definition.Rows, wide: torch.dtype, shape: tuple[int, ...], scale: float, inputs: list[Tensor]
) -> list[str | None]:
    """What is wrong with the aux of a call."""
    size = definition.size_of_scores(*inputs[:2], scale).amax(-1)
    allowed = 8 * torch.finfo(wide).eps * (size + r.tau.nan_to_num(posinf=0.0).abs() + 8)
    allowed = torch.where(r.unsure, torch.inf, allowed)
    found: list[str | None] = []
    if aux.tau.dtype != wide or aux.support.dtype != torch.int32 or aux.certified.dtype != torch.bool:
        found.append(f"aux is of {aux.tau.dtype}, {aux.support.dtype}, {aux.certified.dtype}")
    tau = aux.tau.reshape(shape)
    found.append(oracle.wrong("tau", tau[..., None], r.tau[..., None], r.tau[..., None], allowed[..., None]))
    for name, mine, true, skip in (
        ("support", aux.support.reshape(shape), r.support, r.unsure | r.at_edge),
        ("certified", aux.certified.reshape(shape), r.certified, r.unsure | r.close),
    ):
        bad = (mine != true) & ~skip
        if bad.any():
            at = tuple(int(n) for n in bad.nonzero()[0])
            found.append(f"{name}{list(at)} is {mine[at].item()}, not {true[at].item()} ({int(bad.sum())} rows)")
    return found


def _topk(c: Call, outcome: Outcome) -> Outcome:
    B, H, _, Q, K, _, _ = c.shape
    m = made(c)
    options = m.options | {"k_keep": c.top_k}
    q, k = (unbatched(x, c.dims) for x in m.four[:2])
    given = [q, k]
    if c.mistake is not None:
        _mistaken(c, options, given, "k_keep")
    keys = _called(c, topk_keys, *given, m.pattern, **options)
    if c.mistake is not None:
        return outcome._replace(wrong=f"not refused: {c.mistake}")
    assert c.top_k is not None
    if keys.dtype != torch.int32 or keys.requires_grad or keys.shape != (*q.shape[:-1], c.top_k):
        return outcome._replace(wrong=f"keys are of {keys.dtype}, {tuple(keys.shape)}")
    exact_inputs = [x.detach().double() for x in m.four[:2]]
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    zeros = torch.zeros((H, 1, 1), dtype=torch.float64, device=c.device)
    r = definition.rows(*exact_inputs, zeros, m.seen, _scale(c), c.top_k, torch.finfo(wide).eps, _sure(c))
    place = torch.where(r.kept, torch.arange(K, device=c.device), K).sort(-1).values[..., : c.top_k]
    true = torch.full((B, H, Q, c.top_k), -1, device=c.device)
    true[..., : place.shape[-1]] = torch.where(place < K, place, -1)
    bad = (keys.reshape(true.shape) != true).any(-1) & ~r.unsure
    if bad.any():
        at = tuple(int(n) for n in bad.nonzero()[0])
        mine = keys.reshape(true.shape)[at].tolist()
        return outcome._replace(wrong=f"keys{list(at)} are {mine}, not {true[at].tolist()} ({int(bad.sum())} rows)")
    return outcome
