"""The family `neighbors`: random attention between neighbours and its lists, each compared with `soak_pairs`.

Clouds are those of `soak_clouds.py`. Lists are made and sometimes made again of particles that have moved; capacities
are drawn too small as well. Lists are right when they have exactly the particles within the radius, and say where they
have no room. What is computed of a list that is cut is NaN, all else is attention over all pairs in float64.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import soak_oracle
import soak_pairs
import torch
from soak_arguments import laid_out
from soak_clouds import PLACES, Cloud, cloud, make, precision
from soak_outcomes import Outcome, options_of, outcome_of_mistakes
from torch import Tensor

from gossamer import particles as gp
from gossamer.particles import listed_torch
from gossamer.particles.attend import Attending

__all__ = ["draw", "neighbor_attention", "run"]

SIZES = {
    "cpu": (0, 1, 2, 3, 7, 31, 33, 63, 64, 65, 100, 129, 200, 256, 257, 300),
    "cuda": (0, 1, 2, 7, 33, 63, 64, 65, 100, 129, 257, 300, 500, 900, 1300),
}
FEATURES: dict[str, tuple[tuple[torch.dtype, int, int] | None, ...]] = {  # (type, D, E); None: any
    "cpu": (None,),
    "cuda": (
        (torch.bfloat16, 64, 64), (torch.bfloat16, 64, 64), (torch.float16, 128, 128), (torch.float16, 20, 48),
        (torch.bfloat16, 128, 64), (torch.bfloat16, 17, 23), (torch.float32, 64, 64), (torch.float32, 20, 48),
        (torch.float64, 8, 4), (torch.bfloat16, 160, 32),
    ),
}  # fmt: skip
TYPES = (torch.float32,) * 4 + (torch.float64,) * 2 + (torch.float16, torch.bfloat16)
UNITS = 55  # the largest power of two of a unit of length
MISTAKES: dict[str, tuple[type[Exception], str]] = {
    "a capacity of -1": (ValueError, "capacity"),
    "a capacity of 2.5": (ValueError, "capacity"),
    "an unknown kernel": (ValueError, "kernel must be one of"),
    "a bandwidth for products": (ValueError, "bandwidth"),
    "no bandwidth for a Gaussian": (ValueError, "bandwidth"),
    "a bandwidth of 0": (ValueError, "bandwidth"),
    "a scale for a Gaussian": (ValueError, "must be None"),
    "v of one more": (ValueError, "v must be"),
    "q of other heads": (ValueError, "q and k must be"),
    "q of another type": (ValueError, "of one type"),
    "features of integers": (ValueError, "v must be of real|of one type"),
    "no q": (ValueError, "q and k are needed"),
    "q of no features": (ValueError, "must have features"),
    "a pattern for neighbors": (TypeError, "must be Neighbors"),
    "moved particles of one more": (ValueError, "x must be"),
    "a gradient of a gradient": (ValueError, "differentiated again"),
}


def neighbor_attention(*args: Any, **kwargs: Any) -> Any:
    """What is tested; tests of this script replace it by a wrong one."""
    return gp.neighbor_attention(*args, **kwargs)


class Call(NamedTuple):
    """One call, but for its numbers, which its seed makes as well."""

    seed: int
    device: str
    cloud: Cloud
    capacity: str  # none is given, one with room, or one without
    moved: bool  # lists are made of other places, and made again
    form: str  # dot, gaussian or dot+gaussian
    bandwidth: float  # in radii
    scale: float | None
    heads: int | None  # None: features (N, D)
    dtype: torch.dtype
    D: int
    E: int
    places: tuple[str, str, str]  # how q, k and v lie in memory
    residual: bool
    wanted: str  # gradients of which of x, q, k and v
    mode: str
    cotangents: str  # of out, of lse or of both
    mistake: str | None

    implementation = None

    @property
    def kind(self) -> str:
        return self.form

    def description(self) -> str:
        """The call in two lines of text."""
        return f"{self.cloud}\n    {options_of(self, 'seed', 'cloud')}"


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    r = random.Random(seed)
    of = cloud(r, SIZES[device], UNITS)
    form = r.choice(["dot", "gaussian", "dot+gaussian", "dot+gaussian"])
    size = r.choice(FEATURES[device])
    if size is None:
        size = r.choice(TYPES), r.choice([1, 2, 3, 4, 8, 16, 20]), r.choice([1, 2, 3, 8, 16, 17])
    dtype, D, E = size
    mistake = r.choice(list(MISTAKES)) if r.random() < 0.04 else None
    if mistake is not None:
        of = of._replace(N=max(of.N, 9), bad=None)
        form = {"a scale for a Gaussian": "gaussian", "a bandwidth for products": "dot"}.get(mistake, form)
        if mistake in ("no bandwidth for a Gaussian", "a bandwidth of 0"):
            form = "gaussian"
        elif mistake.startswith(("q of", "no q", "features")):
            form = "dot"
    return Call(
        seed, device, of, r.choice(["none", "none", "given", "given", "small"]), r.random() < 0.3, form,
        r.choice([0.1, 0.3, 1.0, 5.0]), r.choice([None, None, 0.3, 1.0, 2]), r.choice([None, 1, 2, 3]), dtype, D, E,
        (r.choice(PLACES), r.choice(PLACES), r.choice(PLACES)), r.random() < 0.6,
        r.choice(["", "xqkv", "xqkv", "xqkv", "qkv", "x", "q", "kv", "v"]),
        r.choice(["no_grad", "inference_mode", "plain"]), r.choice(["both", "both", "out", "lse"]), mistake,
    )  # fmt: skip


def run(c: Call) -> Outcome:
    """Compute a call twice, and compare it with attention over all pairs."""
    return outcome_of_mistakes("neighbors", c, _run, MISTAKES, _refused)


def _refused(c: Call, error: Exception) -> str | None:
    finite = c.cloud.bad is None or c.capacity != "none" or "x must be finite" not in str(error)
    return None if finite else "lists of positions that are not finite"


def _run(c: Call, outcome: Outcome) -> Outcome:
    rng = np.random.default_rng(c.seed)
    of = c.cloud
    made = make(of, rng, c.device)
    N, x = of.N, made.x
    q, k, v = _features(c, rng)
    leaves = {"dx": x, "dq": q, "dk": k, "dv": v}
    for name, one in leaves.items():
        if one is not None and name[1] in c.wanted:
            one.requires_grad_()
    p = precision(of, c.device == "cuda")
    exact = x.detach().double().clone().requires_grad_()
    with torch.enable_grad():
        reach = float(made.radius)
        found = soak_pairs.pairs(exact, made.sizes, reach, p, p.tiny * reach**2)
    most = int(found.keep.sum(1).max()) if N else 1
    capacity: Any = {"none": None, "given": most + int(rng.integers(0, 20)), "small": most // 2}[c.capacity]
    start = x.detach()[torch.as_tensor(rng.permutation(N), device=c.device)] if c.moved else x
    options: dict[str, Any] = {"kernel": c.form, "scale": None if c.form == "gaussian" else c.scale}
    options["bandwidth"] = None if c.form == "dot" else c.bandwidth * reach
    if c.mistake is not None:
        q, k, v, capacity, options = _mistaken(c, q, k, v, capacity, options)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "plain": torch.enable_grad}
    twice = c.mistake == "a gradient of a gradient"
    with torch.enable_grad() if c.wanted or twice else modes[c.mode]():
        neighbors = gp.Neighbors.allocate(start, made.radius, made.box, capacity)
        if c.mistake == "moved particles of one more":
            neighbors.update(torch.cat([start, start[:1]]))
        neighbors = neighbors.update(x) if c.moved else neighbors
        given: Any = neighbors.indices if c.mistake == "a pattern for neighbors" else neighbors
        out, lse = neighbor_attention(q, k, v, given, return_residual=True, **options)
        again = neighbor_attention(q, k, v, neighbors, return_residual=c.residual, **options)
    if twice:
        (dv,) = torch.autograd.grad(out.float().square().sum(), v, create_graph=True)
        dv.float().sum().backward()
    if c.mistake is not None:
        return outcome._replace(wrong=f"not refused: {c.mistake}")
    spread = None if c.form == "dot" else 2 * options["bandwidth"] ** 2
    call = Attending(options["scale"] or 1.0, spread, neighbors.cells.box)
    kernels = bool(N) and listed_torch.attends(neighbors.groups, call, v if q is None else q, v)
    outcome = outcome._replace(implementation="kernels" if kernels else "operations")
    wide = torch.float64 if of.dtype == torch.float64 else torch.float32
    if out.dtype != v.dtype or lse.dtype != wide:
        return outcome._replace(wrong=f"out is of {out.dtype}, lse of {lse.dtype}")
    if not _equal(out, again[0] if c.residual else again) or (c.residual and not _equal(lse, again[1])):
        return outcome._replace(wrong="a second call gives other bits")
    wrong = _lists(c, neighbors, found)
    if wrong is not None:
        return outcome._replace(wrong=wrong)
    actual = {"out": out, "lse": lse}
    dout, dlse = (torch.as_tensor(rng.standard_normal(one.shape), device=c.device).to(one.dtype) for one in (out, lse))
    dout, dlse = dout * (c.cotangents != "lse"), dlse * (c.cotangents != "out")
    asked = {n: one for n, one in leaves.items() if one is not None and one.requires_grad}
    if asked:
        outputs = [(out, dout)] * (c.cotangents != "lse") + [(lse, dlse)] * (c.cotangents != "out")
        gradients = torch.autograd.grad(
            [one for one, _ in outputs], list(asked.values()), [g for _, g in outputs], allow_unused=True
        )  # fmt: skip  # lse does not depend on v
        for (name, one), d in zip(asked.items(), gradients, strict=True):
            actual[name] = torch.zeros_like(one) if d is None else d
            if actual[name].dtype != one.dtype:
                return outcome._replace(wrong=f"{name} is of {actual[name].dtype}")
    if of.bad is not None and N:
        unread = {"dx"} if c.form == "dot" else {"dv"} if c.cotangents == "lse" else set()
        known = [name for name, one in actual.items() if name not in unread and not one.isnan().all()]
        return outcome._replace(
            wrong=f"{', '.join(known)}: numbers, of positions that are not finite" if known else None
        )
    scale = options["scale"] if options["scale"] is not None else c.D**-0.5
    of_pairs, of_features = (exact, found, p), (q, k, v, float(scale), options["bandwidth"])
    return outcome._replace(wrong=_compared(c, neighbors, of_pairs, of_features, (dout, dlse), actual, kernels))


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=1.5), b.nan_to_num(nan=1.5))


def _features(c: Call, rng: np.random.Generator) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """q, k and v, as they lie in memory."""
    H, made = c.heads or 1, []
    for size, place in zip((c.D, c.D, c.E), c.places, strict=True):
        x = torch.as_tensor(rng.standard_normal((1, H, c.cloud.N, size))).to(c.dtype).to(c.device)
        one = laid_out(place, x)[0].transpose(0, 1)
        made.append(one[:, 0] if c.heads is None else one)
    q, k, v = made
    return (None, None, v) if c.form == "gaussian" else (q, k, v)


def _mistaken(
    c: Call, q: Tensor | None, k: Tensor | None, v: Tensor, capacity: Any, options: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a call with its mistake."""
    if c.mistake == "a capacity of -1":
        capacity = -1
    elif c.mistake == "a capacity of 2.5":
        capacity = 2.5
    elif c.mistake == "an unknown kernel":
        options["kernel"] = "cosine"
    elif c.mistake == "a bandwidth for products":
        options["bandwidth"] = 0.1
    elif c.mistake == "no bandwidth for a Gaussian":
        options["bandwidth"] = None
    elif c.mistake == "a bandwidth of 0":
        options["bandwidth"] = 0.0
    elif c.mistake == "a scale for a Gaussian":
        options["scale"] = 1.0
    elif c.mistake == "v of one more":
        v = torch.cat([v, v[:1]])
    elif c.mistake == "no q":
        q = None
    elif c.mistake == "a gradient of a gradient":
        v = v.detach().clone().requires_grad_()
    elif c.mistake == "features of integers":
        q, k, v = (one.detach().int() for one in (q, k, v) if one is not None)
    elif q is not None and k is not None and c.mistake == "q of other heads":
        q = torch.stack([q, q], 1).flatten(1, 2) if c.heads else q[None]
    elif q is not None and c.mistake == "q of another type":
        q = q.detach().to(torch.float64 if c.dtype != torch.float64 else torch.float32)
    elif q is not None and k is not None and c.mistake == "q of no features":
        q, k = q[..., :0], k[..., :0]
    return q, k, v, capacity, options


def _lists(c: Call, neighbors: gp.Neighbors, found: soak_pairs.Pairs) -> str | None:
    """What is wrong with lists; None where nothing is."""
    N, bad = c.cloud.N, c.cloud.bad is not None and c.cloud.N
    if bad or not N:
        return None if bool(neighbors.overflow) == bool(bad) else "overflow of lists of no particle, or of no number"
    indices, counts = neighbors.indices.long(), neighbors.counts.long()
    wanted, sure = found.keep.sum(1), ~_loose(found)
    if ((counts - wanted).abs() > (~sure).sum(1)).any():
        return f"counts are {counts.tolist()[:20]}, not {wanted.tolist()[:20]}"
    listed = torch.zeros(N, N + 1, dtype=torch.int64, device=indices.device)
    listed.scatter_add_(1, torch.where(indices < 0, N, indices), torch.ones_like(indices))
    listed = listed[:, :N]
    cut = counts > neighbors.capacity
    if (listed > 1).any() or ((listed == 1) & ~found.keep & sure).any():
        return "a list has a particle twice, or one that is not near"
    if ((listed == 0) & found.keep & sure & ~cut[:, None]).any():
        return "a list that has room lacks a neighbour"
    if (listed.sum(1) != counts.clamp(max=neighbors.capacity)).any():
        return "a list is not filled"
    over = bool(neighbors.overflow)
    if over != bool(cut.any()) and (neighbors.groups is None or not over):
        return f"overflow is {over}, of counts up to {int(counts.max())} and a capacity of {neighbors.capacity}"
    if over and c.capacity == "none" and not c.moved:
        return "overflow of lists that were made for these particles"
    return None


def _loose(found: soak_pairs.Pairs) -> Tensor:
    """Pairs of which rounding says whether they are within the radius."""
    return found.unsure & (found.s.detach() > found.ds)


def _compared(
    c: Call, neighbors: gp.Neighbors, of_pairs: tuple[Tensor, soak_pairs.Pairs, soak_pairs.Precision],
    of_features: tuple[Any, ...], cotangents: tuple[Tensor, Tensor], actual: dict[str, Tensor], kernels: bool,
) -> str | None:  # fmt: skip
    """What is wrong with results and gradients; None where nothing is."""
    (x, found, p), (*features, scale, bandwidth), (dout, dlse) = of_pairs, of_features, cotangents
    N, wide = c.cloud.N, torch.float64 if c.cloud.dtype == torch.float64 else torch.float32
    if not N:
        return next((f"{n} has shape {tuple(one.shape)}" for n, one in actual.items() if one.numel()), None)
    low, kept = torch.finfo(c.dtype), torch.finfo(wide)
    narrow = low.bits < kept.bits
    stored = soak_pairs.Stored(
        low.eps / 2 if narrow else 0.0, low.eps / 2 if narrow and kernels else 0.0,
        2 * low.smallest_normal * (low.eps if low.bits == 16 else 1.0),
    )  # fmt: skip

    def moved(one: Tensor | None) -> Any:
        """By heads first."""
        if one is None:
            return None
        one = one.detach().double()
        return one[None] if c.heads is None else one.transpose(0, 1)

    q, k, v = (moved(one) for one in features)
    of_lse = dlse.double()[None] if c.heads is None else dlse.double().T
    a = soak_pairs.Attention(q, k, v, scale, bandwidth)
    true, allowed = soak_pairs.attention(x, found, a, moved(dout), of_lse, p, stored)
    cut = torch.zeros(N, dtype=torch.bool, device=x.device)
    cut[neighbors.cells.order.long()] = neighbors.cut
    # Gradients to a particle are sums over its list, and over the lists that it is in.
    near = (found.keep & cut).any(1) | cut
    differences = []
    for name, one in actual.items():
        result, limit = one.detach(), allowed[name]
        if name == "lse":
            result = (result[None] if c.heads is None else result.T)[..., None]
        elif name != "dx":
            result = result[None] if c.heads is None else result.transpose(0, 1)
        rows = result if name == "dx" else result.movedim(1, 0).flatten(1)
        whole = rows.isnan().all(1)
        # Of lists that are cut nothing is a number, but where 0 is the gradient whatever a list has.
        unread = (name == "dv" and c.cotangents == "lse") or (name == "dx" and c.form == "dot")
        if (cut & ~whole).any() and not unread:
            return f"{name} has numbers of lists that are cut"
        may = cut if name in ("out", "lse") else near & (name != "dx" or c.form != "dot")
        if c.device == "cuda":  # lists of groups of 64 are cut there as well
            may = may | bool(neighbors.overflow)
        if (rows.isnan().any(1) & ~may).any():
            return f"{name} has no numbers of lists that are whole"
        result, true[name] = (
            part[..., 0] if name == "lse" and part.ndim == 3 else part for part in (result, true[name])
        )
        result = torch.where(result.isnan(), true[name].to(result.dtype), result)
        store = torch.finfo(one.dtype)
        limit = limit + store.eps * true[name].abs() + store.smallest_normal * (store.eps if store.bits == 16 else 1)
        differences.append(soak_oracle.wrong(name, result, true[name], true[name], limit))
    return "; ".join(one for one in differences if one is not None) or None
