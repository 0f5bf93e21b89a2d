"""Random calls of attention over structure that tensors tell: what the families `blocks`, `lists` and `packed` share.

Each makes its own pattern argument and says, by the definitions, which pairs it keeps; then attention over these pairs
is compared as in the family `attention`.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import soak_oracle as oracle
import torch
from soak_arguments import laid_out, unbatched, vector
from soak_attention import compared, in_layout
from soak_calls import FLOATS, INTEGERS, PLACES, Vector
from soak_oracle import Spec, Terms
from soak_outcomes import Outcome, begun, options_of, outcome_of
from soak_patterns import pattern_of
from torch import Tensor

import gossamer as gs


class Profile(NamedTuple):
    """What the calls of a family are drawn from."""

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    pairs: int
    mistakes: tuple[str, ...]


class Call(NamedTuple):
    """One call, but for what its seed makes: tensors, and the options of its family."""

    seed: int
    device: str
    family: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int, int]  # B, H, G, Q, K, D, E
    dims: int
    scale: float | None
    softcap: float | None
    sinks: Vector | None
    places: tuple[str, str, str]
    wanted: str
    mode: str  # where no gradient is wanted
    cotangents: str
    return_lse: bool
    bshd: bool
    turns: int
    shared: bool  # whether the layout is made once
    poisoned: bool  # whether what no pair has is NaN
    compiled: bool
    mistake: str | None
    merge: bool = False  # read by `compared`, and so is the next
    scale_tensor: str | None = None

    @property
    def implementation(self) -> str | None:
        return None

    def description(self) -> str:
        """The call as text."""
        B, H, G, Q, K, D, E = self.shape
        return f"B={B} H={H} G={G} Q={Q} K={K} D={D} E={E} {options_of(self, 'seed', 'shape')}"


class Told(NamedTuple):
    """What a family makes of a call."""

    pattern: Any
    options: dict[str, Any]  # of `attention`, which say what is attended
    counts: Tensor  # (B, H, Q, K): 1 of kept pairs
    text: str  # what it is
    alive: Any = None


def draw(family: str, profile: Profile, seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    r = random.Random(f"{family} {seed}")
    on_gpu = device == "cuda"
    # On a GPU calls share what kernels are compiled for.
    form = random.Random(f"{family} {r.randrange(40)} form") if on_gpu else r
    D, E = form.choice(
        ((64, 64), (128, 128), (96, 40), (17, 23)) if on_gpu else ((1, 1), (4, 4), (8, 3), (16, 16), (33, 20))
    )
    dtype = form.choice(((torch.bfloat16,) * 3 + FLOATS) if on_gpu else (torch.float64, torch.float32, *FLOATS))
    kind = r.choice(profile.kinds)
    dims = r.choice([4, 4, 4, 3, 2])
    B = r.choice([1, 2, 3]) if dims == 4 else 1
    if kind in ("sequences", "varlen"):
        B, dims = 1, 4
    G = form.choice([1, 1, 2, 3]) if dims > 2 else 1
    H = G * form.choice([1, 1, 2, 4]) if dims > 2 else 1
    lengths = [*profile.lengths, *(5 * n for n in profile.lengths)] if on_gpu else profile.lengths
    K = r.choice(lengths)
    Q = r.choice([K, K, K, 1, 1 + r.randrange(K), r.choice(lengths)])
    most = profile.pairs * (12 if on_gpu else 1)
    while most < B * H * Q * K:
        Q, K = max(1, Q // 2), max(1, K // 2)
    sinks = None
    if form.random() < 0.15:
        values = tuple(r.choice([0.0, 5.0, -50.0, r.gauss(0, 1)]) for _ in range(H))
        sinks = Vector(values, r.choice(FLOATS), r.choice(["plain", "strided", "expanded"]))
    wanted = "" if r.random() < 0.15 else r.choice(["qkvs", "qkvs", "q", "kv"])
    compiled = r.random() < 0.02
    return Call(
        seed, device, family, kind, dtype, (B, H, G, Q, K, D, E), dims,
        r.choice([None, None, None, 0.25, -0.3, 0.0, 1e-5, 30.0]), form.choice([None] * 5 + [2.0, 50.0]), sinks,
        (form.choice(PLACES), form.choice(PLACES), form.choice(PLACES)), wanted,
        r.choice(["no_grad", "inference_mode", "plain"]), r.choice(["both", "both", "out", "lse"]), r.random() < 0.7,
        r.random() < 0.3, 1 if compiled else r.choice([1, 2, 2, 3]), r.random() < 0.25, r.random() < 0.3, compiled,
        r.choice(profile.mistakes) if r.random() < 0.03 else None,
    )  # fmt: skip


def refusals(c: Call) -> Iterator[tuple[str, str, bool]]:
    """The reasons to refuse a call: (reason, what the message must match, whether the call has to be refused)."""
    if c.mistake is not None:
        yield f"mistake: {c.mistake}", ".", True
    if c.device == "cuda" and c.dtype == torch.float64:
        yield "lists of keys in float64", "float64", False
    yield "lists joined with what is no interval", "joined by & with patterns of one interval", False
    yield "a pattern without positions", "go by positions|a step", False


def refusal(c: Call, error: ValueError) -> str | None:
    """The reason for which a call may be refused with such an error; None where there is none."""
    return next((name for name, match, _ in refusals(c) if re.search(match, str(error))), None)


def attention(*args: Any, **kwargs: Any) -> Any:
    """The function that is tested; tests of this script replace it by a wrong one."""
    return gs.attention(*args, **kwargs)


def run(c: Call, tell: Callable[[Call, random.Random, list[Tensor], list[Tensor]], Told]) -> Outcome:
    """Compute a call and compare it with the definition.

    Args:
        tell: gives what a call attends, of its q, k and v, with four dimensions and as they are given.
    """
    outcome = begun(c.family, c)
    return outcome_of(outcome, lambda found: _run(c, found, tell), lambda error: refusal(c, error))


def _run(c: Call, outcome: Outcome, tell: Any) -> Outcome:
    B, H, G, Q, K, D, E = c.shape
    generator = torch.Generator().manual_seed(c.seed)
    sinks = None if c.sinks is None else vector(c.sinks, c.device)
    if sinks is not None:
        sinks.requires_grad_("s" in c.wanted)
    r = random.Random(f"{c.family} {c.seed} told")
    told: Told | None = None
    layout: Any = None
    for turn in range(c.turns):
        shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
        whole = [torch.randn(s, generator=generator, dtype=torch.float64).to(c.dtype).to(c.device) for s in shapes]
        four = [laid_out(where, x) for where, x in zip(c.places, whole, strict=True)]
        if told is None or c.family == "blocks":
            told = tell(c, r, four, [in_layout(c, unbatched(x, c.dims)) for x in four])
            outcome = outcome._replace(description=f"{c.description()}\n    {told.text}")
        counts = told.counts
        given = poisoned(c, four, counts) if c.poisoned else four
        leaves = [unbatched(x, c.dims).requires_grad_(name in c.wanted) for x, name in zip(given, "qkv", strict=True)]
        options: dict[str, Any] = {"scale": c.scale, "softcap": c.softcap, "sink_logits": sinks}
        inputs = [in_layout(c, x) for x in leaves]
        mode: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(c.mode, torch.enable_grad)
        with torch.enable_grad() if c.wanted else mode():
            options["return_lse"] = c.return_lse
            if c.kind == "varlen":  # (1, heads, N, size) as (N, heads, size)
                packed = [x[0].transpose(0, 1) for x in leaves]
                found = _called(c, partial(gs.varlen, **told.options, **options))(*packed)
                out, *more = found if c.return_lse else (found,)
                results = (out.transpose(0, 1)[None], *(x[None] for x in more))
            else:
                pattern, where = told.pattern, told.options
                options["layout"] = "bshd" if c.bshd and c.dims > 2 else "bhnd"
                if c.shared and c.family != "blocks" and not c.compiled:
                    if layout is None:
                        rest = {name: options[name] for name in ("softcap", "sink_logits", "layout")}
                        layout = gs.device_layout(*inputs, pattern, **where, **rest)
                    pattern, where = layout, {}
                found = _called(c, partial(attention, pattern=pattern, **where, **options))(*inputs)
                out, *more = found if c.return_lse else (found,)
                results = (in_layout(c, out), *more)
        if c.mistake is not None:
            return outcome._replace(wrong=f"not refused: {c.mistake}")
        terms = Terms(float(D**-0.5 if c.scale is None else c.scale), K - Q, c.softcap, None, sinks, None)
        difference = compared(c, four, leaves, sinks, counts, terms, results)  # type: ignore[arg-type]
        if difference is not None:
            return outcome._replace(wrong=f"call {turn + 1}: {difference}")
    return outcome


def _called(c: Call, function: Any) -> Any:
    if not c.compiled or c.mistake is not None:
        return function
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    def quiet(*args: Tensor) -> Any:
        with warnings.catch_warnings():  # of torch itself, which looks at the .grad of inputs that are views
            warnings.filterwarnings("ignore", "The .grad attribute")
            return compiled(*args)

    return quiet


def poisoned(c: Call, four: list[Tensor], counts: Tensor) -> list[Tensor]:
    """q, k and v with NaN in rows that keep nothing, and on a CPU in keys that nothing keeps."""
    B, H, G, Q, K, _, _ = c.shape
    kept = counts.expand(B, H, Q, K) > 0
    rows = kept.any(-1)
    keys = kept.any(2).unflatten(1, (G, H // G)).any(2)
    q, k, v = four
    q = torch.where(rows[..., None], q, torch.nan)
    if c.device == "cpu":
        k, v = (torch.where(keys[..., None], x, torch.nan) for x in (k, v))
    return [q, k, v]


# -- patterns of positions, joined with what tensors tell ------------------------------------------------------------


def rule(r: random.Random, intervals: bool) -> Spec:
    """A pattern that goes by positions; of one interval a row where `intervals`."""
    one: list[Spec] = [
        ("Dense",), ("Causal",), ("Local", 1 + r.randrange(40)),
        ("SlidingWindow", r.choice([None, 0, r.randrange(60)]), r.choice([0, 0, None, r.randrange(9)]), 0),
    ]  # fmt: skip
    if r.random() < 0.15:
        return ("And", r.choice(one), r.choice(one))
    if intervals or r.random() < 0.6:
        return r.choice(one)
    more: list[Spec] = [
        ("SlidingWindow", r.randrange(20), 0, r.choice([1, 3])),
        ("Dilated", r.randrange(9), r.randrange(4), 1 + r.randrange(5)),
        ("Strided", 1 + r.randrange(9), r.randrange(9)), ("Or", r.choice(one), r.choice(one)),
    ]  # fmt: skip
    return r.choice(more)


def made(spec: Spec, Q: int, K: int) -> gs.Pattern:
    """The package's pattern."""
    return pattern_of(spec, Q, K, random.Random(0))


def joined(r: random.Random, structure: Any, spec: Spec, Q: int, K: int) -> Any:
    """`structure & pattern`, in either order."""
    if spec == ("Dense",) and r.random() < 0.7:
        return structure
    return structure & made(spec, Q, K) if r.random() < 0.7 else made(spec, Q, K) & structure


def kept_by(spec: Spec, Q: int, K: int, offsets: list[int], device: str) -> Tensor:
    """(B, 1, Q, K) of a pattern at the offset of each batch element."""
    return torch.cat([oracle.kept(spec, 1, 1, Q, K, offset, device) for offset in offsets])


def integers(r: random.Random, values: list[int], device: str) -> Tensor:
    """A tensor of some integers, of any type that holds them, as it lies in memory."""
    fits = [t for t in INTEGERS if torch.iinfo(t).min <= min(values) and max(values) <= torch.iinfo(t).max]
    return vector(Vector(tuple(values), r.choice(fits), r.choice(["plain", "plain", "strided", "unaligned"])), device)
