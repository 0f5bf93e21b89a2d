"""Random calls from JAX: each is drawn, run under a drawn stack of transformations, and compared with an oracle.

A program is a call of `attention`, of sums or forces, or of neighbours, with all that is known before it is compiled;
several calls share one, each with other numbers. It runs for several lanes (independent problems, of which some arrays
may be shared) under a stack: jit, vmap, scan, remat, shard_map, and the gradient at any place among them. What a
gradient gives for an array that lanes share is the sum of theirs. `soak_jax_oracle.py` says what is right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import soak_jax_oracle as oracle
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from soak_jax_oracle import Law, Terms
from soak_outcomes import Outcome, outcome_of

import gossamer as gs
import gossamer.jax as gsj
from gossamer import particles as gp

SHARED = 4  # consecutive seeds have one program
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-51}
MAPS = ("vmap", "scan", "shard_map")
Arrays = dict[str, Any]


class Program(NamedTuple):
    """What calls share."""

    family: str
    kind: str
    description: str
    gradient: tuple[str, ...]  # of which arrays there is one; none: the call has no gradient
    shapes: Callable[[np.random.Generator], Arrays]  # the arrays of one lane
    call: Callable[..., Arrays]  # of the arrays of one lane
    expected: Callable[[Arrays, Arrays], Arrays]  # results and gradients (by names of arrays, in "d") with `off`
    dtype: str = "float32"


class Layer(NamedTuple):
    """One transformation of a stack."""

    name: str
    lanes: int = 1
    shared: frozenset[str] = frozenset()  # arrays that all lanes of it have


class Near(NamedTuple):
    """A number for each place, and how far it may be off."""

    value: np.ndarray
    off: Any


# -- transformations ---------------------------------------------------------------------------------------------------


def stack(r: random.Random, names: tuple[str, ...], gradient: bool, devices: int) -> list[Layer]:
    """Layers from the innermost out."""
    found: list[Layer] = []
    for name in r.sample(MAPS, r.choice([0, 0, 1, 1, 1, 2])):
        lanes = devices if name == "shard_map" else r.choice([1, 2, 3])
        some = frozenset(one for one in names if r.random() < 0.3)
        found.append(Layer(name, lanes, some if len(some) < len(names) else frozenset()))
    if gradient and r.random() < 0.85:
        found.insert(r.randint(0, len(found)), Layer("gradient"))
        if r.random() < 0.3:
            at = next(n for n, one in enumerate(found) if one.name == "gradient")
            found.insert(r.randint(0, at), Layer("remat"))
    if r.random() < 0.9 or any(one.name == "shard_map" for one in found):
        found.append(Layer("jit"))
    if r.random() < 0.2:
        found.insert(r.randint(0, len(found)), Layer("jit"))
    return found


def transformed(call: Callable[..., Arrays], layers: list[Layer], wanted: tuple[str, ...]) -> Callable[..., Any]:
    """The function under the stack, of (arrays, cotangents): results, and gradients where they are asked for."""

    def bottom(arrays: Arrays, cotangents: Arrays) -> Any:
        return call(**arrays), {}

    run, inside = bottom, False
    for layer in layers:
        run = _layer(run, layer, wanted, inside)
        inside = inside or layer.name == "gradient"
    return run


def _layer(run: Callable[..., Any], layer: Layer, wanted: tuple[str, ...], inside: bool) -> Callable[..., Any]:
    name, shared = layer.name, layer.shared
    if name == "jit":
        return jax.jit(run)
    if name == "remat":
        return jax.checkpoint(run)
    if name == "gradient":

        def with_gradient(arrays: Arrays, cotangents: Arrays) -> Any:
            of = {one: arrays[one] for one in wanted if one in arrays}
            results, back = jax.vjp(lambda of: run(arrays | of, cotangents)[0], of)
            given = {one: _cotangent(results[one], cotangents[one]) for one in results}
            return results, back(given)[0]

        return with_gradient

    def split(arrays: Arrays) -> tuple[Arrays, Arrays]:
        return {n: x for n, x in arrays.items() if n not in shared}, {n: x for n, x in arrays.items() if n in shared}

    def mapped(arrays: Arrays, cotangents: Arrays) -> Any:
        own, same = split(arrays)
        if name == "vmap":
            return jax.vmap(lambda own, cotangents: run(own | same, cotangents))(own, cotangents)
        if name == "scan":
            _, found = lax.scan(lambda carry, given: (carry, run(given[0] | same, given[1])), 0, (own, cotangents))
            return found

        def slab(own: Arrays, same: Arrays, cotangents: Arrays) -> Any:
            first = jax.tree.map(lambda x: x.reshape(x.shape[1:]), (own, cotangents))
            results, grads = run(first[0] | same, first[1])
            grads = {n: x if n in shared else x[None] for n, x in grads.items()}
            return jax.tree.map(lambda x: x[None], results), grads

        mesh = jax.make_mesh((layer.lanes,), ("lanes",), axis_types=(AxisType.Auto,))
        of_grads = {n: P() if n in shared else P("lanes") for n in wanted if n in arrays} if inside else {}
        specs = (P("lanes"), P(), P("lanes")), (P("lanes"), of_grads)
        return jax.shard_map(slab, mesh=mesh, in_specs=specs[0], out_specs=specs[1])(own, same, cotangents)

    return mapped


def _cotangent(result: Any, given: Any) -> Any:
    """Of an lse of -inf there is none; integers have none either."""
    if not jnp.issubdtype(result.dtype, jnp.floating):
        return np.zeros(result.shape, jax.dtypes.float0)
    return jnp.where(result == -jnp.inf, 0.0, given).astype(result.dtype) if result.size else given


class Laned(NamedTuple):
    """The numbers of a call: of each lane, and as the stack takes them."""

    lanes: dict[
        tuple[int, ...], tuple[Arrays, Arrays]
    ]  # arrays and cotangents, by indices of the maps, outermost first
    arrays: Arrays
    cotangents: Arrays


def numbers(program: Program, maps: list[Layer], rng: np.random.Generator) -> Laned:
    """Args: maps: outermost first."""
    lanes: dict[tuple[int, ...], tuple[Arrays, Arrays]] = {}
    kept: dict[tuple[str, tuple[int, ...]], Any] = {}
    for at in product(*(range(layer.lanes) for layer in maps)):
        drawn, mine = program.shapes(rng), {}
        for name, x in drawn.items():
            key = tuple(n for n, layer in zip(at, maps, strict=True) if name not in layer.shared)
            mine[name] = kept.setdefault((name, key), x)
        lanes[at] = mine, {}
    results = jax.eval_shape(lambda given: program.call(**given), next(iter(lanes.values()))[0])
    for at, (mine, _) in lanes.items():
        cotangents = {}
        for name, x in results.items():
            of = jnp.float32 if not jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
            cotangents[name] = rng.standard_normal(x.shape).astype(jnp.dtype(of))
        lanes[at] = mine, cotangents

    def stacked(name: str, which: int) -> Any:
        axes = [layer.lanes for layer in maps if which or name not in layer.shared]
        parts: dict[tuple[int, ...], Any] = {}
        for at, both in lanes.items():
            own = (n for n, layer in zip(at, maps, strict=True) if which or name not in layer.shared)
            parts[tuple(own)] = both[which][name]
        first = next(iter(parts.values()))
        return np.stack([parts[at] for at in sorted(parts)]).reshape((*axes, *first.shape))

    one = next(iter(lanes.values()))
    return Laned(lanes, {n: stacked(n, 0) for n in one[0]}, {n: stacked(n, 1) for n in one[1]})


# -- one call ----------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """A program and its stack."""

    program: Program
    layers: list[Layer]

    @property
    def stack(self) -> str:
        return " of ".join(layer.name for layer in reversed(self.layers)) or "eager"

    @property
    def maps(self) -> list[Layer]:
        """Outermost first."""
        return [layer for layer in reversed(self.layers) if layer.name in MAPS]


def calls(first: int, last: int) -> Iterator[Outcome]:
    """The outcomes of seeds, which have to be in order for a program to be compiled once."""
    drawn, compiled = None, None
    for seed in range(first, last):
        if drawn is None or seed % SHARED == 0:
            jax.clear_caches()
            drawn = draw(seed)
            compiled = transformed(drawn.program.call, drawn.layers, drawn.program.gradient)
        yield run(seed, drawn, compiled)


def draw(seed: int) -> Drawn:
    """The program of a seed, which is that of its neighbours."""
    r = random.Random(seed // SHARED)
    program = r.choice(PROGRAMS)(r)
    names = tuple(program.shapes(np.random.default_rng(0)))
    return Drawn(program, stack(r, names, bool(program.gradient), jax.device_count()))


def run(seed: int, drawn: Drawn, compiled: Callable[..., Any]) -> Outcome:
    """Compute a call of a program, of which `compiled` is the function under its stack, and compare it."""
    program = drawn.program
    shared = [f"{layer.name} of {layer.lanes} sharing {sorted(layer.shared)}" for layer in drawn.maps]
    text = f"{drawn.stack}: {program.description}{''.join(f'; {one}' for one in shared)}"
    outcome = Outcome(seed, program.kind, drawn.stack, None, None, text, program.family)

    def compute(outcome: Outcome) -> Outcome:
        with jax.enable_x64(True) if program.dtype == "float64" else nullcontext():
            given = numbers(program, drawn.maps, np.random.default_rng(seed))
            found = compiled(given.arrays, given.cotangents)
            wrong = list(differences(drawn, given, *jax.tree.map(np.asarray, found)))
        return outcome._replace(wrong="; ".join(wrong[:3]) or None)

    return outcome_of(outcome, compute, lambda error: None)  # nothing is drawn that is refused


def differences(drawn: Drawn, given: Laned, results: Arrays, grads: Arrays) -> Iterator[str]:
    """What is wrong."""
    program, maps = drawn.program, drawn.maps
    names = [layer.name for layer in drawn.layers]
    asked = "gradient" in names
    at_gradient = names.index("gradient") if asked else 0
    # Maps outside of the gradient give one for each lane, but shard_map, which sums those of what its devices share.
    outside = [layer for n, layer in enumerate(drawn.layers) if n > at_gradient and layer.name in ("vmap", "scan")]
    totals: dict[tuple[str, tuple[int, ...]], list[Near]] = {}
    for at, (arrays, cotangents) in given.lanes.items():
        want = program.expected(arrays, cotangents)
        for name, near in want.items():
            if name in results:
                yield from _different(f"{name}{list(at)}", results[name][at], near, program.dtype)
        if not asked:
            continue
        for name in program.gradient:
            if name in arrays:
                key = tuple(
                    n for n, layer in zip(at, maps, strict=True) if name not in layer.shared or layer in outside
                )  # fmt: skip
                totals.setdefault((name, key), []).append(want[f"d{name}"])
    for (name, key), parts in totals.items():
        eps = ROUNDING[str(given.arrays[name].dtype)] * (len(parts) > 1)
        value = sum(part.value for part in parts)
        off = sum(part.off + eps * np.abs(part.value).max(initial=0.0) for part in parts)
        yield from _different(f"d{name}{list(key)}", grads[name][key], Near(value, off), program.dtype)


def _different(name: str, found: np.ndarray, near: Near, dtype: str) -> Iterator[str]:
    want, off = np.broadcast_arrays(near.value, near.off)
    if found.shape != want.shape:
        yield f"{name} has shape {found.shape}, not {want.shape}"
        return
    found = found.astype(np.float64)
    finite = np.isfinite(want)
    if not (found[~finite] == want[~finite]).all():
        yield f"{name} is not {want[~finite][:1]} where it must be"
    error = np.abs(found[finite] - want[finite])
    bad = ~(error <= off[finite])
    if bad.any():
        worst = np.nanargmax(np.where(bad, error / np.maximum(off[finite], 1e-300), 0))
        yield f"{name}: {bad.sum()} of {bad.size} off, one by {error[worst]:.2e}, over {off[finite][worst]:.1e}"


# -- attention ---------------------------------------------------------------------------------------------------------


def spec_of(r: random.Random, B: int, H: int, Q: int, K: int, depth: int = 0) -> tuple[Any, ...]:
    """A pattern, alone or composed."""
    seed, kind = r.randrange(2**31), r.random()
    if depth == 0 and kind < 0.1:
        return "PerHead", *(spec_of(r, B, H, Q, K, 2) for _ in range(H))
    if depth == 0 and kind < 0.2:
        return "PerBatch", *(spec_of(r, B, H, Q, K, 2) for _ in range(B))
    if depth < 2 and kind < 0.45:
        name = r.choice(["And", "Or", "Not"])
        return name, *(spec_of(r, B, H, Q, K, depth + 1) for _ in range(1 if name == "Not" else 2))
    rng = np.random.default_rng(seed)
    made = [
        ("Dense",), ("Causal",), ("SlidingWindow", r.choice([0, 3, 40]), r.choice([0, 0, 5]), r.choice([0, 0, 2])),
        ("Local", r.choice([5, 64])), ("Dilated", r.choice([1, 4]), r.choice([0, 2]), r.choice([2, 7])),
        ("Document", np.sort(rng.integers(0, 4, K)).tolist()),
        ("BlockMask", rng.random((-(-Q // 32), -(-K // 32))) < 0.5, 32), ("Pairs", rng.random((Q, K)) < 0.1),
    ]  # fmt: skip
    if not (Q and K):
        made = made[:5]
    if depth:  # `Pairs` and blocks are of rows, not of positions
        made = made[:6]
    return r.choice(made)


def pattern_of(spec: tuple[Any, ...]) -> gs.Pattern:
    name, *rest = spec
    if name in ("And", "Or", "Not"):
        parts = [pattern_of(one) for one in rest]
        return ~parts[0] if name == "Not" else parts[0] & parts[1] if name == "And" else parts[0] | parts[1]
    if name in ("PerHead", "PerBatch"):
        made: gs.Pattern = getattr(gs, name)([pattern_of(one) for one in rest])
        return made
    if name == "Pairs":
        rows, columns = np.nonzero(rest[0])
        Q, K = rest[0].shape
        counts = np.bincount(rows, minlength=Q)
        return gs.CSR(np.concatenate([[0], np.cumsum(counts)]), columns, K)
    if name == "SlidingWindow":
        left, right, sinks = rest
        return gs.SlidingWindow(left, right, sinks=sinks)
    found: gs.Pattern = getattr(gs, name)(*rest)
    return found


def attention(*args: Any, **options: Any) -> Any:
    """The function that is tested; tests of this script replace it by a wrong one."""
    return gsj.attention(*args, **options)


def of_attention(r: random.Random) -> Program:
    B, G, share = r.choice([1, 2]), r.choice([1, 2]), r.choice([1, 2])
    H, Q, K = G * share, r.choice([1, 40, 64, 70]), r.choice([1, 64, 70, 130])
    if r.random() < 0.04:
        Q, K = r.choice([(0, K), (Q, 0)])
    D, E, dtype = (
        r.choice([8, 16]),
        r.choice([8, 16, 5]),
        r.choice(["float32"] * 4 + ["bfloat16", "float16", "float64"]),
    )
    wide = "float64" if dtype == "float64" else "float32"
    spec = spec_of(r, B, H, Q, K)
    offset, by_rows = K - Q, spec[0] in ("Pairs", "BlockMask")
    options: dict[str, Any] = {}
    if not by_rows and r.random() < 0.2:
        offset = options["q_offset"] = r.choice([0, -9, 40])
    form = r.choice(["pattern", "pattern", "plan", "mask", "blocks", "none"])
    keep = np.ones((1, 1, Q, K), bool)
    pattern: Any = None
    sizes = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in ((B, Q, H, D), (B, K, G, D))]
    moved = options.pop("q_offset", None) if form == "blocks" else None
    if form == "blocks" and Q and K:
        listed = np.random.default_rng(r.randrange(2**31)).integers(-1, -(-K // 32), (H, -(-Q // 32), 2))
        chosen = (listed[..., None] == np.arange(-(-K // 32))).any(-2)
        keep = chosen.repeat(32, 1).repeat(32, 2)[None, :, :Q, :K]
    elif form != "none":
        keep = oracle.mask(spec, B, H, Q, K, offset)
        pattern = pattern_of(spec)
        if form == "mask" and Q and K:
            pattern, offset = keep, K - Q
            options.pop("q_offset", None)
        elif form == "plan":
            pattern = gsj.prepare(pattern, *sizes, q_offset=options.pop("q_offset", None))
    softcap = options["softcap"] = r.choice([None, None, None, 2.0, 30.0])
    scale = r.choice([None, None, 0.3, -1.0, "traced"])
    fixed = D**-0.5 if scale is None else scale
    if scale != "traced":
        options["scale"] = scale
    options["implementation"] = r.choice([None, None, None, "blocked"])
    one_batch, has = r.random() < 0.15, {name: r.random() < 0.25 for name in ("lengths", "sinks", "slopes")}
    size, each_its_own, distance = r.choice([1.0, 1.0, 6.0, 1e-3]), r.random() < 0.3, r.choice(["signed", "absolute"])
    options["alibi_distance"] = distance if has["slopes"] else None

    def shapes(rng: np.random.Generator) -> Arrays:
        shared = 1 if one_batch else B
        made: Arrays = {"q": size * rng.standard_normal((B, Q, H, D)), "k": rng.standard_normal((shared, K, G, D))}
        made["v"] = rng.standard_normal((shared, K, G, E))
        made = {name: x.astype(jnp.dtype(dtype)) for name, x in made.items()}
        if has["lengths"]:
            made["lengths"] = rng.choice([-3, 0, 1, K // 2, K, K + 9], B).astype(np.int32)
        if has["sinks"]:
            made["sinks"] = rng.choice([-30.0, 0.0, 1.0, 20.0], H).astype(wide)
        if has["slopes"]:
            made["slopes"] = rng.choice([0.0, 0.01, 0.5, -0.05], (B, H) if each_its_own else H).astype(wide)
        if scale == "traced":
            made["scale"] = np.asarray(rng.choice([0.3, -1.0, 0.05]), wide)
        return made

    def call(q: Any, k: Any, v: Any, lengths: Any = None, sinks: Any = None, slopes: Any = None, scale: Any = None
             ) -> Arrays:  # fmt: skip
        given = (
            gsj.prepare_blocks(jnp.asarray(listed), q, k, block_size=32, q_offset=moved)
            if form == "blocks" and Q and K
            else pattern
        )
        more = options if scale is None else options | {"scale": scale}
        out, lse = attention(
            q, k, v, given, key_lengths=lengths, sink_logits=sinks, alibi_slopes=slopes, return_residual=True, **more
        )  # fmt: skip
        return {"out": out, "lse": lse}

    def expected(arrays: Arrays, cotangents: Arrays) -> Arrays:
        traced = arrays.get("scale")
        number = float(fixed if traced is None else traced)
        terms = Terms(
            keep, number, offset, softcap, arrays.get("lengths"), arrays.get("sinks"), arrays.get("slopes"),
            folded=traced is not None, absolute=distance == "absolute",
        )  # fmt: skip
        given = arrays["q"], arrays["k"], arrays["v"], cotangents["out"], cotangents["lse"]
        return attended(given, terms, dtype)

    description = f"{form} {spec if form not in ('none', 'blocks') else ''} B={B} H={H} G={G} Q={Q} K={K} D={D} E={E} "
    description += f"{dtype} {options} scale={scale} size={size} terms {[n for n, there in has.items() if there]}"
    gradient = "q", "k", "v", "sinks", "scale"
    kind = spec[0] if form in ("pattern", "plan") else form
    return Program("attention", kind, description, gradient, shapes, call, expected, dtype)


def attended(given: tuple[Any, ...], terms: Terms, dtype: str, known: float = 0.0) -> Arrays:
    """Results and gradients of attention, each with twice the error of plain code of its type and its rounding.

    Args:
        known: how far a bias is known.
    """
    q, k, v, *_ = given
    short = jnp.dtype(dtype).itemsize == 2
    truth = oracle.attention(*given, terms)
    wide = np.float64 if dtype == "float64" else np.float32
    plain = truth if dtype == "float64" else oracle.attention(*given, terms, wide, jnp.dtype(dtype) if short else None)
    most = [float(np.abs(np.asarray(x).astype(np.float64)).max(initial=0.0)) for x in given]
    E, D, size = v.shape[-1], q.shape[-1], abs(terms.scale)
    # The truth of float64 is rounded as well.
    products = min(size * most[0] * most[1] * D, terms.softcap or math.inf)  # whose terms may cancel
    unit = (2.0**-51 if dtype == "float64" else 2.0**-24) * (8 + truth.largest + products) + known
    ds = most[3] * most[2] * E + most[4]
    sizes = {
        "out": most[2], "lse": 1.0, "q": size * ds * most[1], "k": size * ds * most[0] * q.shape[2] / k.shape[2],
        "v": most[3] * q.shape[2] / k.shape[2], "sinks": ds * q.shape[0], "scale": ds * most[0] * most[1] * D,
    }  # fmt: skip
    rows = q.shape[0] * q.shape[1]
    made: Arrays = {}
    fields = {"out": "out", "lse": "lse", "q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "scale": "dscale"}
    for name, field in fields.items():
        want, low = getattr(truth, field), getattr(plain, field)
        if want is None:
            continue
        if name in ("k", "v") and k.shape[0] != q.shape[0]:
            want, low = want.sum(0, keepdims=True), low.sum(0, keepdims=True)
        finite = np.isfinite(want)
        gap = float(np.abs(np.where(finite, low, 0) - np.where(finite, want, 0)).max(initial=0.0))
        biggest = float(np.abs(np.where(finite, want, 0)).max(initial=0.0))
        off = 2 * gap + unit * sizes[name]
        if name in ("sinks", "scale"):
            off += (unit + ROUNDING[dtype] * short) * sizes[name] * math.sqrt(rows)
        parts = 2 if name in ("k", "v") and len(k) != len(q) else 1  # that are rounded before they are added
        off += 0.0 if name == "lse" else parts * ROUNDING[dtype] * biggest
        made[name if name in ("out", "lse") else f"d{name}"] = Near(want, off)
    return made


# -- particles ---------------------------------------------------------------------------------------------------------


def spline(s: Any, xp: Any, h: float) -> Any:
    u = xp.sqrt(s) / h
    return xp.where(u < 1, 1 - 1.5 * u**2 + 0.75 * u**3, xp.where(u < 2, 0.25 * (2 - u) ** 3, 0.0))


def plummer(s: Any, xp: Any, h: float) -> Any:
    return xp.rsqrt(s + h**2) ** 3


def waves(s: Any, xp: Any, h: float) -> Any:
    return xp.cos(s / h**2) * xp.exp(-s / h**2)


OWN = {"spline": spline, "plummer": plummer, "waves": waves}


class Cloud(NamedTuple):
    """Where particles are, but for the numbers."""

    N: int
    box: tuple[float | None, ...]
    unit: float  # of length: the size of a box that is periodic
    radius: float
    kind: str

    def places(self, rng: np.random.Generator) -> np.ndarray:
        """float32, of which no two are at the radius, or half of the box apart, but for rounding."""
        for _ in range(200):
            x = self._places(rng).astype(np.float32)
            if not oracle.pairs(x, self.box, self.radius).unsure:
                return x
        raise RuntimeError(f"no positions of {self} are sure")

    def _places(self, rng: np.random.Generator) -> np.ndarray:
        N, d = self.N, len(self.box)
        sizes = np.full(d, self.unit)
        x: np.ndarray = rng.random((N, d)) * sizes
        if self.kind == "clustered":
            x = sizes * (0.5 + 0.1 * rng.standard_normal((N, d)))
        elif self.kind == "coincident" and N:
            x = x[rng.integers(0, max(1, N // 4), N)]
        elif self.kind == "one place":
            x[:] = 0.3 * sizes
        elif self.kind == "seam":
            x = np.mod(x * 0.1 - 0.05 * sizes, sizes)
        elif self.kind == "outside":
            x = x + rng.integers(-2, 3, (N, d)) * sizes
        return x


def cloud_of(r: random.Random) -> Cloud:
    d, unit = r.choice([1, 2, 3]), 2.0 ** r.choice([0, 0, 0, -12, 12])
    form = r.choice(["open", "periodic", "periodic", "mixed"])
    box = tuple(None if form == "open" or (form == "mixed" and r.random() < 0.5) else unit for _ in range(d))
    kind = r.choice(["uniform", "clustered", "coincident", "one place", "seam", "outside"])
    return Cloud(r.choice([0, 1, 33, 33, 80, 80]), box, unit, unit * r.choice([0.05, 0.2, 0.4]), kind)


def radial_sum(*args: Any) -> Any:
    """The functions that are tested; tests of this script replace them by wrong ones."""
    return gp.radial_sum(*args)


def of_particles(r: random.Random) -> Program:
    """Sums, or forces."""
    force, cloud = r.random() < 0.5, cloud_of(r)
    radius, N = cloud.radius, cloud.N
    unit = 2.0 ** round(math.log2(radius))
    name = r.choice(["gravity", "gravity", *OWN] if force else ["gaussian", "gaussian", *OWN])
    h = unit * r.choice([0.2, 0.5])
    law = Law(name, (h,))
    if name == "gravity":
        law = Law(name, (radius / 5.5, r.choice([0.0, radius / 50])))
    made: Any = gp.RadialKernel(OWN[name], h) if name in OWN else gp.Gaussian(h)
    made = gp.ShortRangeGravity(*law.numbers) if name == "gravity" else made
    channels = () if force else r.choice([(), (1,), (3,), (6,)])

    def shapes(rng: np.random.Generator) -> Arrays:
        values = rng.random(N) if force else rng.standard_normal((N, *channels))
        return {"x": cloud.places(rng), "v": values.astype(np.float32)}

    def call(x: Any, v: Any) -> Arrays:
        cells = gp.Cells.build(x, radius, cloud.box)
        return {"out": gp.radial_force(cells, v, made) if force else radial_sum(cells, v, made)}

    def expected(arrays: Arrays, cotangents: Arrays) -> Arrays:
        found = oracle.pairs(arrays["x"], cloud.box, radius)
        v, g = arrays["v"], cotangents["out"]
        if force:
            want = oracle.radial_force(law, found, v, g)
        else:
            want = oracle.radial_sum(law, found, *(one.reshape(N, channels[0] if channels else 1) for one in (v, g)))
            want = {n: oracle.Sums(*(x.reshape(v.shape) if n != "x" else x for x in one)) for n, one in want.items()}
        return {"out": Near(*want["out"]), "dx": Near(*want["x"]), "dv": Near(*want["v"])}

    description = f"{name} {law.numbers} channels {channels} over {cloud}"
    return Program("forces" if force else "sums", name, description, ("x", "v"), shapes, call, expected)


def of_neighbors(r: random.Random) -> Program:
    """Attention between neighbours, and their lists."""
    cloud = cloud_of(r)
    N, radius, heads = cloud.N, cloud.radius, r.choice([None, 1, 3])
    kernel, dtype = (
        r.choice(["dot", "gaussian", "dot+gaussian"]),
        r.choice(["float32", "float32", "bfloat16", "float16"]),
    )
    width = None if kernel == "dot" else radius * r.choice([0.3, 2.0])
    scale, D, E = r.choice([None, 0.2, "traced"]) if kernel != "gaussian" else None, 8, r.choice([5, 8])
    moved = r.random() < 0.3

    def shapes(rng: np.random.Generator) -> Arrays:
        made: Arrays = {"x": cloud.places(rng)}
        head = () if heads is None else (heads,)
        for name, size in (("q", D), ("k", D), ("v", E)):
            if name == "v" or kernel != "gaussian":
                made[name] = rng.standard_normal((N, *head, size)).astype(jnp.dtype(dtype))
        if scale == "traced":
            made["scale"] = np.float32(rng.choice([0.3, 0.7]))
        return made

    def call(x: Any, v: Any, q: Any = None, k: Any = None, scale: Any = scale) -> Arrays:
        lists = gp.Neighbors.allocate(x[::-1] if moved else x, radius, cloud.box, capacity=N)
        lists = lists.update(x) if moved else lists
        out, lse = gp.neighbor_attention(
            q, k, v, lists, kernel=kernel, bandwidth=width, scale=scale, return_residual=True
        )  # fmt: skip
        return {"out": out, "lse": lse, "counts": lists.counts, "listed": jnp.sort(lists.indices, -1)}

    def expected(arrays: Arrays, cotangents: Arrays) -> Arrays:
        found = oracle.pairs(arrays["x"], cloud.box, radius)
        bias = None if width is None else -found.s / (2 * width**2)
        known = 0.0 if width is None else (found.off * found.keep).max(initial=0.0) / (2 * width**2)
        traced = arrays.get("scale")
        number = (
            0.0
            if kernel == "gaussian"
            else float(D**-0.5 if scale is None else traced if traced is not None else scale)
        )
        terms = Terms(found.keep[None, None], number, bias=bias, folded=traced is not None)
        v, dout, dlse = arrays["v"], cotangents["out"], cotangents["lse"]
        if heads is None:
            v, dout, dlse = (x[:, None] for x in (v, dout, dlse))
        none = np.zeros((*v.shape[:2], D), v.dtype)
        q, k = (arrays.get(name, none).reshape(none.shape) for name in "qk")
        given = tuple(x[None] for x in (q, k, v, dout, dlse))
        want = attended(given, terms, dtype, known)
        want = {n: Near(one.value[0] if one.value.ndim > 1 else one.value, one.off) for n, one in want.items()}
        if heads is None:
            want = {n: Near(one.value[:, 0] if one.value.ndim > 1 else one.value, one.off) for n, one in want.items()}
        short = ROUNDING[dtype] if dtype != "float32" else 2.0**-20
        dx, off = np.zeros(arrays["x"].shape), np.zeros(())
        if width is not None:
            dbias = oracle.attention(*given, terms).dbias
            both = (dbias + dbias.T) / width**2
            dx = (both[..., None] * found.steps).sum(1)
            most = [float(np.abs(one.astype(np.float64)).max(initial=0.0)) for one in given]
            ds = most[3] * most[2] * E + most[4]
            length = np.abs(np.where(found.keep[..., None], found.steps, 0.0))
            off = short * 4 * (v.shape[1] * ds * length.sum(1).max(initial=0.0) / width**2) + 2.0**-22
        listed = np.where(found.keep, np.arange(N), -1)
        counts = found.keep.sum(1)
        return want | {"dx": Near(dx, off), "counts": Near(counts, 0), "listed": Near(np.sort(listed, -1), 0)}

    description = f"{kernel} width={width} scale={scale} heads={heads} E={E} {dtype} moved={moved} over {cloud}"
    gradient = ("x", "v") if kernel == "gaussian" else ("x", "q", "k", "v", "scale")
    return Program("neighbors", kernel, description, gradient, shapes, call, expected, dtype)


PROGRAMS = (of_attention, of_attention, of_particles, of_particles, of_neighbors)
