"""Random calls of `gossamer.attention`, everything that a user can pass, and the comparison of one with the oracle.

`draw` makes a call of a seed and a device, `run` computes it up to three times, with other numbers each time (a
repeated call goes by other paths than the first), and says what came of it. A call is right when its results are those
of `soak_oracle`, or when it is refused by a ValueError that `accepted` lists for it; anything else is wrong.
"""

from __future__ import annotations

import math
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import soak_oracle as oracle
import torch
from soak_oracle import Spec, Terms
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import gossamer as gs
from gossamer.torch import calls, plan, split

Draw = random.Random
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
LARGEST = 2**31 - 1
FARTHEST = 2**31 - 2**16  # positions reach it nowhere: documented


class Profile(NamedTuple):
    """What the calls on a kind of device have in common. A GPU compiles kernels for each type and head size: few."""

    sizes: tuple[tuple[torch.dtype, int, int] | None, ...]  # (dtype, D, E); None: any
    lengths: tuple[int, ...]
    longest: int
    pairs: int  # B * H * Q * K at the most
    names: tuple[str | None, ...]


PROFILES = {
    "cpu": Profile(
        (None,), (1, 2, 3, 7, 17, 31, 32, 33, 40, 63, 64, 65, 96, 100, 127, 128, 129, 150), 500, 400_000,
        (None,) * 12 + ("blocked",) * 4 + ("reference",) * 2 + ("triton", "hopper", "dense"),
    ),
    "cuda": Profile(
        (
            (torch.bfloat16, 128, 128), (torch.bfloat16, 64, 64), (torch.float16, 128, 128), (torch.float16, 96, 40),
            (torch.float32, 64, 64), (torch.bfloat16, 17, 23), (torch.float64, 20, 3),
        ),
        (1, 17, 40, 64, 100, 128, 129, 256, 300, 517, 900, 1024, 1400), 1500, 12_000_000,
        (None,) * 10 + ("hopper",) * 5 + ("triton",) * 5 + ("dense",) * 3 + ("blocked", "reference"),
    ),
}  # fmt: skip


class Vector(NamedTuple):
    """key_lengths, sink_logits or alibi_slopes."""

    values: tuple[Any, ...]
    dtype: torch.dtype
    place: str


class Call(NamedTuple):
    """One call, but for the numbers in q, k and v."""

    seed: int
    device: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int, int]  # B, H, G, Q, K, D, E
    dims: int
    spec: Spec
    form: str  # of the `pattern` argument
    blocks: tuple[int, int]
    merge: bool
    q_offset: tuple[str, int] | None  # how it is given, and its value
    scale: Any
    softcap: Any
    lengths: Vector | None
    sinks: Vector | None
    slopes: Vector | None
    places: tuple[str, str, str]
    wanted: str  # gradients of which of q, k, v, and s for the sinks; "": none
    mode: str  # where no gradient is wanted: no_grad, inference_mode or nothing
    cotangents: str  # of out, of lse or of both
    return_lse: bool
    implementation: str | None
    deterministic: bool | None
    parts: bool  # computed in parts whatever that costs, where there is something dilated in it
    mistake: str | None

    @property
    def offset(self) -> int:
        """Position of query row 0."""
        return self.shape[4] - self.shape[3] if self.q_offset is None else self.q_offset[1]

    def said(self) -> str:
        """The call in some lines."""
        B, H, G, Q, K, D, E = self.shape
        skip = ("seed", "shape", "spec")
        rest = {n: x for n, x in self._asdict().items() if n not in skip and x not in (None, False, "")}
        text = ", ".join(f"{name}={x}" for name, x in rest.items())
        return f"B={B} H={H} G={G} Q={Q} K={K} D={D} E={E} {shortened(self.spec)}\n    {text}"


class Outcome(NamedTuple):
    """What came of a call."""

    seed: int
    kind: str  # of pattern
    implementation: str
    refused: str | None
    wrong: str | None
    said: str


def shortened(spec: Spec) -> str:
    """A pattern in one line."""
    text = " ".join(repr(spec).split())
    return text if len(text) <= 300 else text[:297] + "..."


# -- what is attended ------------------------------------------------------------------------------------------------


def sometimes(r: Draw, usual: Any, extreme: Any) -> Any:
    """An extreme one now and then."""
    return extreme if r.random() < 0.08 else usual


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _segment(r: Draw, K: int) -> Spec:
    dilation = sometimes(r, 1 + r.randrange(6), LARGEST)
    return ("DilatedSegment", sometimes(r, 1 + r.randrange(K), LARGEST), dilation, r.randrange(min(dilation, 9)))


def _neighborhood(r: Draw, K: int) -> Spec:
    first = r.choice(_divisors(K))
    second = r.choice(_divisors(K // first))
    shape = r.choice([(K,), (first, K // first), (first, second, K // first // second)])
    return ("Neighborhood", shape, tuple((r.randrange(6), sometimes(r, r.randrange(6), LARGEST)) for _ in shape))


def _rows(r: Draw, Q: int, K: int) -> Spec:
    each = r.choice([0, 1, 3, 20])
    rows = [sorted(r.sample(range(K), min(K, r.randrange(each + 1)))) for _ in range(Q)]
    for _ in range(r.choice([0, 0, 1, 2])):
        rows[r.randrange(Q)] = list(range(K))
    return ("CSR", rows)


def _ids(r: Draw, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(r.randrange(2**32))
    ids = rng.integers(0, r.choice([1, 3, 9]), shape) * sometimes(r, 1, -(2**62) // 9)
    return np.sort(ids, axis=-1) if r.random() < 0.7 else ids


def _blocks(r: Draw, lead: tuple[int, ...], Q: int, K: int) -> Spec:
    block = r.choice([1, 5, 16, 32, 33, 64, 1000]) if Q * K < 40_000 else r.choice([16, 32, 64, 100])
    shape = (*lead, -(-Q // block), -(-K // block))
    return ("BlockMask", np.random.default_rng(r.randrange(2**32)).random(shape) < r.choice([0.05, 0.4, 0.9]), block)


def _big_bird(r: Draw, N: int) -> Spec:
    block = r.choice([1, 4, 16, 64] if N < 200 else [16, 50, 64])
    numbers = block, r.choice([1, 3, 5]), r.randrange(3), r.randrange(4), r.randrange(9), r.random() < 0.4
    return ("BigBird", *numbers, _drawn(numbers, N))


def _drawn(numbers: tuple[Any, ...], N: int) -> np.ndarray:
    """The random blocks of a BigBird, which its definition leaves free, as far as they are where they may be."""
    block, window, ends, count, _, causal = numbers
    dense, n = gs.BigBird(*numbers).materialize(N, N), -(-N // block)
    edges = np.arange(0, N, block)
    some = np.logical_or.reduceat(np.logical_or.reduceat(dense, edges, axis=0), edges, axis=1)
    must, may, number = oracle.big_bird_rule(n, window, ends, count, causal)
    drawn = some & ~must
    free = np.arange(n)
    free = (free >= ends) & (free < n - ends)
    assert not (drawn & ~may).any(), "BigBird draws a block where none may be"
    assert (drawn.sum(1)[free] == number[free]).all(), "BigBird draws too many blocks, or too few"
    return drawn


SHARED: dict[str, Any] = {
    "Dense": lambda r, Q, K: ("Dense",),
    "Causal": lambda r, Q, K: ("Causal",),
    "SlidingWindow": lambda r, Q, K: (
        "SlidingWindow", r.choice([None, 0, r.randrange(60), sometimes(r, 9, LARGEST)]),
        r.choice([0, 0, None, r.randrange(20), sometimes(r, 4, LARGEST)]),
        r.choice([0, 0, 3, sometimes(r, 70, LARGEST)]),
    ),
    "Local": lambda r, Q, K: ("Local", sometimes(r, 1 + r.randrange(70), LARGEST)),
    "DilatedSegment": lambda r, Q, K: _segment(r, K),
    "Dilated": lambda r, Q, K: (
        "Dilated", sometimes(r, r.randrange(20), LARGEST), sometimes(r, r.randrange(9), LARGEST),
        sometimes(r, 1 + r.randrange(12), r.choice([K, 100 * K, LARGEST])),
    ),
    "Strided": lambda r, Q, K: (
        "Strided", sometimes(r, 1 + r.randrange(40), LARGEST), sometimes(r, r.randrange(40), LARGEST),
    ),
    "PowerStrided": lambda r, Q, K: ("PowerStrided", sometimes(r, 2 + r.randrange(3), LARGEST), r.randrange(20)),
    "Longformer": lambda r, Q, K: (
        "Longformer", sometimes(r, r.randrange(40), LARGEST),
        tuple(sorted({r.randrange(K) for _ in range(r.randrange(4))})),
        sometimes(r, 1 + r.randrange(8), LARGEST),
    ),
    "BlockMask": lambda r, Q, K: _blocks(r, (), Q, K),
    "Document": lambda r, Q, K: ("Document", _ids(r, (K,))),
    "Neighborhood": lambda r, Q, K: _neighborhood(r, K),
    "CSR": _rows,
    "Predicate": lambda r, Q, K: (
        "Predicate", r.randrange(1, 7), r.randrange(1, 7), r.choice([1, 2, 7, 40]), r.randrange(1, 4),
    ),
    "BigBird": lambda r, Q, K: _big_bird(r, K) if Q == K else ("Causal",),
    "Tree": lambda r, Q, K: ("Tree", [r.randrange(-1, t) for t in range(Q)]) if Q <= K else ("Dense",),
}  # fmt: skip


def spec_of(r: Draw, B: int, H: int, Q: int, K: int, deep: int = 0) -> Spec:
    """Shared, by head or by batch element, and compositions of these."""
    how = r.random()
    if deep > 1 or how < 0.5:
        return SHARED[r.choice(list(SHARED))](r, Q, K)
    if how < 0.62:
        kinds = r.choice([("SlidingWindow", "Dilated"), tuple(SHARED)])
        return ("PerHead", [SHARED[r.choice(kinds)](r, Q, K) for _ in range(H)])
    if how < 0.70:
        return _long_net(r, H)
    if how < 0.75:
        return _blocks(r, r.choice([(H,), (1, H), (B, H), (B, 1)]), Q, K)
    if how < 0.79:
        return ("Document", _ids(r, (B, K)))
    if how < 0.83:
        return ("PerBatch", [SHARED[r.choice(list(SHARED))](r, Q, K) for _ in range(B)])
    one = spec_of(r, B, H, Q, K, deep + 1)
    if how < 0.87:
        return ("Not", one)
    return (r.choice(["And", "Or", "Or"]), one, spec_of(r, B, H, Q, K, deep + 1))


def _long_net(r: Draw, H: int) -> Spec:
    segments, dilations = r.choice(
        [((8, 24), (1, 3)), ((16, 32, 64), (1, 2, 4)), ((32, 64), (2, 4)), ((10, 7), (3, 2)), ((LARGEST, 5), (2, 1))]
    )
    return ("LongNet", segments, dilations, H, r.random() < 0.5)


def dilated(r: Draw, H: int, Q: int, K: int) -> Spec:
    """A pattern of which some heads or terms are plain inside residue classes: what is computed in parts."""
    how = r.random()
    kinds = "Dilated", "Dilated", "Strided", "Longformer"
    if how < 0.5:
        return SHARED[r.choice(kinds)](r, Q, K)
    if how < 0.65:
        return _long_net(r, H)
    if how < 0.85:
        return ("PerHead", [SHARED[r.choice((*kinds, "SlidingWindow"))](r, Q, K) for _ in range(H)])
    return ("Or", SHARED[r.choice(kinds)](r, Q, K), SHARED[r.choice((*kinds, "SlidingWindow", "Local"))](r, Q, K))


def pattern_of(spec: Spec, Q: int, K: int, r: Draw) -> gs.Pattern:
    """The package's pattern, by one of the ways in which it is made."""
    name, *rest = spec
    if name == "And":
        return pattern_of(rest[0], Q, K, r) & pattern_of(rest[1], Q, K, r)
    if name == "Or":
        return pattern_of(rest[0], Q, K, r) | pattern_of(rest[1], Q, K, r)
    if name == "Not":
        return ~pattern_of(rest[0], Q, K, r)
    if name in ("PerHead", "PerBatch"):
        return getattr(gs, name)([pattern_of(one, Q, K, r) for one in rest[0]])
    if name == "Predicate":
        a, b, m, c = rest
        return gs.Predicate(lambda i, j: (a * i + b * j) % m < c)
    if name == "BigBird":
        return gs.BigBird(*rest[:-1])
    if name == "LongNet":
        return gs.LongNet(*rest[:2], heads=rest[2], causal=rest[3])
    if name == "CSR":
        return _csr(rest[0], K, r)
    if (
        name == "Document"
        and rest[0].ndim == 1
        and rest[0].min() >= 0
        and (np.diff(rest[0]) >= 0).all()
        and r.random() < 0.5
    ):
        return gs.Document.from_cu_seqlens(np.cumsum([0, *np.bincount(rest[0])]))
    return getattr(gs, name)(*rest)


def _csr(rows: list[list[int]], K: int, r: Draw) -> gs.Pattern:
    how, Q = r.choice(["plain", "scipy", "torch", "edges"]), len(rows)
    indptr, indices = np.cumsum([0, *map(len, rows)]), np.array([key for row in rows for key in row], dtype=np.int64)
    of_rows = np.repeat(np.arange(Q), np.diff(indptr))
    if how == "scipy":
        from scipy.sparse import coo_matrix

        return gs.CSR.from_scipy(coo_matrix((np.ones(len(indices)), (of_rows, indices)), shape=(Q, K)))
    if how == "torch":
        pairs = torch.from_numpy(np.stack([of_rows, indices]))
        with warnings.catch_warnings():  # of torch 2.11, whatever is asked for
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
            return gs.CSR.from_torch(torch.sparse_coo_tensor(pairs, torch.ones(len(indices)), (Q, K)))
    if how == "edges":
        return gs.CSR.from_edge_index(np.stack([indices, of_rows]), (K, Q))
    return gs.CSR(indptr, indices, K)


# -- the other arguments ---------------------------------------------------------------------------------------------


def _vector_place(r: Draw) -> str:
    return r.choice(["plain", "plain", "plain", "strided", "unaligned", "expanded"])


def _lengths(r: Draw, B: int, K: int) -> Vector:
    dtype = r.choice(INTEGERS)
    limits = torch.iinfo(dtype)
    wide = (limits.max, limits.min, LARGEST, 2**31, 2**32 + 10, -1, -(2**31) - 1, -(2**32) + 5)
    plain = (0, 1, K // 2, K - 1, K, K + 1, r.randrange(K + 2))
    values = tuple(r.choice(wide if r.random() < 0.3 else plain) for _ in range(B))
    return Vector(tuple(min(max(n, limits.min), limits.max) for n in values), dtype, _vector_place(r))


def _slopes(r: Draw, H: int) -> Vector:
    sign, size = r.choice([1, -1]), r.choice([1.0, 1.0, 1.0, 0.01, 30.0, 1e4])
    powers = [sign * 2.0 ** (-8 * (h + 1) / H) for h in range(H)]
    values = r.choice([powers, [r.uniform(-1, 1) * size for _ in range(H)], [0.0] * H, [sign * size] * H])
    return Vector(tuple(values), r.choice(FLOATS), _vector_place(r))


def _sinks(r: Draw, H: int) -> Vector:
    choices = (0.0, 50.0, -50.0, -math.inf, r.gauss(0, 1), r.gauss(0, 1), r.gauss(0, 1))
    return Vector(tuple(r.choice(choices) for _ in range(H)), r.choice(FLOATS), _vector_place(r))


def _number(r: Draw, values: tuple[Any, ...]) -> Any:
    value = r.choice(values)
    if r.random() < 0.1 and isinstance(value, float) and 1e-30 < abs(value) < 1e30:
        return r.choice([np.float64, np.float32, np.float16])(value)
    return value


def _q_offset(r: Draw, Q: int, K: int) -> tuple[str, int] | None:
    if r.random() < 0.55:
        return None
    near = (0, 5, -9, K + 3, K - Q, r.randrange(-K, 2 * K))
    far = (10 * K, -10 * K, LARGEST, -LARGEST, 2**24 + 1, FARTHEST - max(Q, K), max(Q, K) - FARTHEST)
    how = r.choice(["int", "int", "numpy", "tensor"])
    value = r.choice(far if r.random() < 0.3 else near)
    if how == "numpy":
        return r.choice(["numpy int64", "numpy int32"]), value
    if how == "tensor":
        fits = [t for t in INTEGERS if torch.iinfo(t).min <= value <= torch.iinfo(t).max]
        return f"tensor {str(r.choice(fits))[6:]}", value
    return how, value


PLACES = (
    "plain", "plain", "plain", "positions first", "within NaN", "unaligned", "columns", "one head", "one batch",
    "every other row", "part of a row", "features first",
)  # fmt: skip


def placed(where: str, x: Tensor) -> Tensor:
    """The values of x (B, heads, N, size), or of a part of it that is repeated, somewhere else, with NaN around."""
    B, heads, N, size = x.shape
    if where == "one head":
        return x[:, :1].expand(x.shape)
    if where == "one batch":
        return x[:1].expand(x.shape)
    if where == "positions first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if where == "columns":
        return x.mT.contiguous().mT
    if where == "features first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    shapes = {
        "within NaN": ((heads + 1, N + 1, 2, B, size + 8), lambda y: y[1:, :N, 1, :, :size].permute(2, 0, 1, 3)),
        "unaligned": ((x.numel() + 1,), lambda y: y[1:].view(x.shape)),
        "every other row": ((B, heads, 2 * N, size), lambda y: y[:, :, 1::2]),
        "part of a row": ((B, heads, N, 2 * size + 1), lambda y: y[..., size : 2 * size]),
    }
    if where not in shapes:
        return x
    shape, view = shapes[where]
    return view(torch.full(shape, math.nan, dtype=x.dtype, device=x.device)).copy_(x)


def vector(given: Vector, device: str) -> Tensor:
    """The tensor of some values, in its place; an expanded one has the first value alone."""
    values = torch.tensor(given.values, dtype=given.dtype)
    n = len(values)
    if given.place == "expanded":
        return values[:1].to(device).expand(n)
    if given.place == "strided":
        room = torch.zeros(2 * n, dtype=given.dtype)
        room[::2] = values
        return room.to(device)[::2]
    if given.place == "unaligned":
        return torch.cat([values.new_zeros(1), values]).to(device)[1:]
    return values.to(device)


FORMS = ("pattern",) * 12 + (
    "handle", "handle", "mask", "mask", "layout", "device layout", "block mask", "mask function", "sparse", "reordered",
)  # fmt: skip
# Forms in which rows are counted from 0, so that a q_offset says nothing; of a pattern it is refused, or not read.
WITHOUT_POSITIONS = ("mask", "block mask", "mask function", "sparse")
MISTAKES = (
    "q of integers", "k of another head size", "v with a key more", "heads that G does not divide", "no keys",
    "softcap of 0", "softcap of nan", "scale of inf", "lengths of floats", "lengths for another batch",
    "slopes for another head", "slopes that require grad", "sinks on integers", "q_offset of 2**31", "q_offset of 0.5",
    "a list of patterns", "a mask of floats", "a mask of another size", "an unknown implementation",
    "merge of a window",
    "k of another type", "q of one dimension", "numpy q", "return_lse of 1", "deterministic of 1", "softcap of text",
    "q_offset of two numbers",
)  # fmt: skip


def draw(seed: int, device: str) -> Call:
    """The call of a seed; the same on every machine."""
    r, p = random.Random(seed), PROFILES[device]
    size = r.choice(p.sizes)
    if size is None:
        edges = (1, 2, 3, 5, 8, 16, 17, 20, 32, 33, 64)
        D = r.choice(edges)
        E = D if r.random() < 0.5 else r.choice(edges)
        size = r.choice((torch.float32,) * 4 + (torch.float64,) * 3 + (torch.float16, torch.bfloat16)), D, E
    dtype, D, E = size
    dims = r.choice([4, 4, 4, 4, 3, 2])
    B = r.choice([1, 1, 2, 3]) if dims == 4 else 1
    G = r.choice([1, 1, 2, 3]) if dims > 2 else 1
    H = G * r.choice([1, 1, 2, 3, 4]) if dims > 2 else 1
    K = r.choice(p.lengths) if r.random() < 0.96 else r.randrange(1, p.longest)
    Q = r.choice([K, K, K, 1, 1 + r.randrange(K), K + 1 + r.randrange(40), r.choice(p.lengths)])
    while p.pairs < B * H * Q * K:
        Q, K = max(1, Q // 2), max(1, K // 2)
    parts = r.random() < 0.3
    spec = dilated(r, H, Q, K) if parts and r.random() < 0.8 else spec_of(r, B, H, Q, K)
    form = r.choice(FORMS)
    if r.random() < 0.03:
        spec, form = ("Dense",), "none"
    if form in ("sparse", "reordered") and (any(oracle.lead(spec)) or (form == "reordered" and Q != K)):
        form = "pattern"
    q_offset = _q_offset(r, Q, K)
    if form not in ("pattern", "handle", "none") and r.random() < 0.8:
        q_offset = None
    if q_offset and form in WITHOUT_POSITIONS and q_offset[1] == K - Q:
        q_offset = None
    merge = form in ("pattern", "handle") and spec[0] in ("Or", "LongNet") and r.random() < 0.3
    lengths, sinks, slopes = (
        make(r, *sizes) if r.random() < 0.22 else None
        for make, sizes in ((_lengths, (B, K)), (_sinks, (H,)), (_slopes, (H,)))
    )
    mistake = r.choice(MISTAKES) if r.random() < 0.03 else None
    wanted = "" if r.random() < 0.12 else r.choice(["qkvs", "qkvs", "qkvs", "q", "kv", "s" if sinks else "qkv"])
    blocks = r.choice([(64, 64), (128, 128), (32, 64), (96, 32)])
    scales = 0.0, -0.3, 1.0, 3, 1e-5, 30.0, 1e4, 0.25, 0.25, sometimes(r, 0.5, r.choice([1e39, 1e-39, 1e12, -1e30]))
    caps = 2.0, 0.01, 0.5, 30.0, 1e4, 5, 50.0, sometimes(r, 3.0, r.choice([1e39, 1e-39]))
    scale = _number(r, scales) if r.random() < 0.25 else None
    softcap = _number(r, caps) if r.random() < 0.22 else None
    places, mode = (
        (r.choice(PLACES), r.choice(PLACES), r.choice(PLACES)),
        r.choice(["no_grad", "inference_mode", "plain"]),
    )
    return Call(
        seed, device, dtype, (B, H, G, Q, K, D, E), dims, spec, form, blocks, merge, q_offset, scale, softcap,
        lengths, sinks, slopes, places, wanted, mode,
        r.choice(["both", "both", "out", "lse"]), r.random() < 0.7, r.choice(p.names),
        r.choice([None, None, False, True]), parts, mistake,
    )  # fmt: skip


# -- the call --------------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """The `pattern` argument, what must live as long, how often pairs are kept, and the mask that may be written to."""

    pattern: Any
    alive: Any
    counts: Tensor
    mask: Tensor | None = None


def given_of(c: Call) -> Given:
    """The `pattern` argument in its form."""
    B, H, _, Q, K, _, _ = c.shape
    r = random.Random(c.seed + 1)
    # What has no positions of its own is made from the pattern at the default ones.
    offset = K - Q if c.form in WITHOUT_POSITIONS or c.form == "reordered" else c.offset
    counts = oracle.kept(c.spec, B, H, Q, K, offset, c.device, c.merge)
    if c.form == "none":
        return Given(None, None, counts)
    if c.form == "mask":
        mask = counts > 0
        if r.random() < 0.3:  # broadcast over queries
            mask = mask[:, :, :1].clone()
        while mask.ndim > 2 and mask.shape[0] == 1 and r.random() < 0.5:
            mask = mask[0]
        shown = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(-1, -1, Q, -1).long()
        return Given(mask, None, shown, mask)
    if c.form == "mask function":
        kept = (counts > 0).expand(B, H, Q, K)
        function = lambda b, h, i, j: kept[b, h, i, j]  # noqa: E731
        return Given(create_block_mask(function, B, H, Q, K, c.device, c.blocks), kept, counts)
    if c.form == "sparse":
        kept = (counts[0, 0] > 0).float().cpu()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            sparse = kept.to_sparse_csr()
        return Given(sparse.to(c.device), None, counts)
    if c.form == "reordered":
        return Given(gs.CSR.from_torch((counts[0, 0] > 0).float().to_sparse_coo()).reordered(), None, counts)
    pattern = pattern_of(c.spec, Q, K, r)
    if c.form == "handle":
        return Given(pattern.handle, pattern, counts)
    if c.form == "block mask":
        return Given(gs.to_flex(pattern, Q, K, block_size=c.blocks, device=c.device), None, counts)
    if c.form in ("layout", "device layout"):
        layout = pattern.layout(Q, K, block_q=c.blocks[0], block_kv=c.blocks[1], q_offset=offset)
        return Given(layout.to(c.device) if c.form == "device layout" else layout, None, counts)
    return Given(pattern, None, counts)


def accepted(c: Call) -> Iterator[tuple[str, str, bool]]:
    """What may refuse a call: (reason for the counts, what the message must match, whether it has to be refused)."""
    if c.mistake is not None:
        yield f"mistake: {c.mistake}", ".", True
    if c.q_offset is not None and c.form in WITHOUT_POSITIONS:
        yield f"q_offset with a {c.form}", "q_offset", c.slopes is None
    if abs(c.offset) > FARTHEST - max(c.shape[3:5]):
        yield "q_offset too far", "q_offset", False
    names = repr(c.spec)
    if c.q_offset is not None and (c.form not in ("pattern", "handle") or "'CSR'" in names or "'BlockMask'" in names):
        yield "q_offset with what counts rows from 0", "q_offset", False
    if c.form == "reordered" and c.lengths is not None:
        yield "key_lengths of a reordered matrix", "key_lengths", True
    if c.form == "reordered" and c.slopes is not None:
        yield "alibi_slopes of a reordered matrix", "alibi_slopes", True
    for name, x in (("scale", c.scale), ("softcap", c.softcap)):
        if x is not None and x != 0 and not 1.2e-38 < abs(float(x)) < 3.4e38:
            yield f"{name} that float32 does not hold", name, False
    if c.implementation not in (None, "blocked", "reference"):
        yield f"{c.implementation} does not support it", f"implementation|{c.implementation}", False


def refusal(c: Call, error: ValueError) -> str | None:
    """The reason for which a call may be refused so; None: it may not."""
    return next((name for name, match, _ in accepted(c) if re.search(match, str(error))), None)


def _mistaken(c: Call, arguments: dict[str, Any]) -> None:
    """Put a mistake into the arguments."""
    q, k, v = (arguments[name] for name in "qkv")
    B, H, _, Q, K, _, _ = c.shape
    one = q.detach()
    changed: dict[str, Any] = {
        "q of integers": {"q": torch.ones(q.shape, dtype=torch.int32, device=c.device)},
        "k of another head size": {"k": torch.cat([k, k], -1)},
        "v with a key more": {"v": torch.cat([v, v[..., :1, :]], -2)},
        "heads that G does not divide": {"k": torch.stack([one] * (H + 1)), "q": one, "v": one},
        "no keys": {"k": k[..., :0, :], "v": v[..., :0, :]},
        "softcap of 0": {"softcap": 0.0},
        "softcap of nan": {"softcap": math.nan},
        "scale of inf": {"scale": math.inf},
        "lengths of floats": {"key_lengths": torch.ones(B, device=c.device)},
        "lengths for another batch": {"key_lengths": torch.ones(B + 1, dtype=torch.int32, device=c.device)},
        "slopes for another head": {"alibi_slopes": torch.ones(H + 1, device=c.device)},
        "slopes that require grad": {"alibi_slopes": torch.ones(H, device=c.device).requires_grad_()},
        "sinks on integers": {"sink_logits": torch.ones(H, dtype=torch.int64, device=c.device)},
        "q_offset of 2**31": {"q_offset": 2**31},
        "q_offset of 0.5": {"q_offset": 0.5},
        "a list of patterns": {"pattern": [gs.Causal()] * H},
        "a mask of floats": {"pattern": torch.zeros(Q, K, device=c.device)},
        "a mask of another size": {"pattern": torch.ones(Q + 1, K + 1, dtype=torch.bool, device=c.device)},
        "an unknown implementation": {"implementation": "fast"},
        "merge of a window": {"pattern": gs.Causal(), "merge": "lse"},
        "k of another type": {"k": k.to(torch.float32 if c.dtype != torch.float32 else torch.float64)},
        "q of one dimension": {"q": q.reshape(-1)},
        "numpy q": {"q": np.zeros(tuple(q.shape))},
        "return_lse of 1": {"return_lse": 1},
        "deterministic of 1": {"deterministic": 1},
        "softcap of text": {"softcap": "2"},
        "q_offset of two numbers": {"q_offset": torch.zeros(2, dtype=torch.int64)},
    }
    assert c.mistake is not None
    arguments.update(changed[c.mistake])


def _offset_argument(c: Call) -> Any:
    if c.q_offset is None:
        return None
    how, value = c.q_offset
    if how.startswith("numpy"):
        return getattr(np, how.split()[1])(value)
    if how.startswith("tensor"):
        return torch.tensor(value, dtype=getattr(torch, how.split()[1]), device=c.device)
    return value


def _fewer(x: Tensor, dims: int) -> Tensor:
    for _ in range(4 - dims):
        x = x[0]
    return x


def attention(*args: Any, **kwargs: Any) -> Any:
    """What is tested; a test of this tool puts something wrong in its place."""
    return gs.attention(*args, **kwargs)


def run(c: Call) -> Outcome:
    """Compute a call, several times, and compare."""
    outcome = Outcome(c.seed, c.spec[0], c.implementation or "None", None, None, c.said())
    _in_parts[0] = c.parts
    if c.parts:
        _forget()
    try:
        return _run(c, outcome)
    except ValueError as error:
        name = refusal(c, error)
        if name is not None:
            return outcome._replace(refused=name)
        return outcome._replace(wrong=f"refused: {type(error).__name__}: {_place(error)}")
    except Exception as error:
        return outcome._replace(wrong=f"{type(error).__name__}: {_place(error)}")
    finally:
        if c.parts:
            _in_parts[0] = False
            _forget()


def _place(error: Exception) -> str:
    """The message of an error, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{message[:400]} ({last.filename.rsplit('/', 2)[-2]}/{last.filename.rsplit('/', 1)[-1]}:{last.lineno})"


def _run(c: Call, outcome: Outcome) -> Outcome:
    B, H, G, Q, K, D, E = c.shape
    generator = torch.Generator().manual_seed(c.seed)
    given = given_of(c)
    lengths = None if c.lengths is None else vector(c.lengths, c.device)
    sinks, slopes = (None if x is None else vector(x, c.device) for x in (c.sinks, c.slopes))
    if sinks is not None:
        sinks.requires_grad_("s" in c.wanted)
    counts, r = given.counts, random.Random(c.seed + 2)
    turns = 1 if c.mistake is not None else r.choice([1, 2, 2, 3])
    names: set[str] = set()
    for turn in range(turns):
        if turn == 2 and lengths is not None and c.lengths is not None and c.lengths.place != "expanded":
            values = (*c.lengths.values[1:], min(K // 2 + 1, torch.iinfo(lengths.dtype).max))
            lengths.copy_(torch.tensor(values, dtype=lengths.dtype))
        if turn == 2 and given.mask is not None:
            given.mask.logical_not_()
            counts = 1 - counts
        shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
        whole = [torch.randn(s, generator=generator, dtype=torch.float64).to(c.dtype).to(c.device) for s in shapes]
        four = [placed(where, x) for where, x in zip(c.places, whole, strict=True)]
        leaves = [_fewer(x, c.dims).requires_grad_(name in c.wanted) for x, name in zip(four, "qkv", strict=True)]
        options: dict[str, Any] = {
            "q_offset": _offset_argument(c), "scale": c.scale, "softcap": c.softcap, "key_lengths": lengths,
            "sink_logits": sinks, "alibi_slopes": slopes, "implementation": c.implementation,
            "deterministic": c.deterministic,
        }  # fmt: skip
        arguments = dict(zip("qkv", leaves, strict=True)) | {"pattern": given.pattern, **options}
        arguments |= {"return_lse": c.return_lse, "merge": "lse" if c.merge else None}
        if c.mistake is not None:
            _mistaken(c, arguments)
        if turn == 0 and c.mistake is None and not c.merge:
            told = gs.explain(*leaves, given.pattern, **options)
            outcome = outcome._replace(implementation=told.implementation + " in parts" * bool(told.parts))
        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "plain": torch.enable_grad}
        with torch.enable_grad() if c.wanted else modes[c.mode]():
            found = attention(**arguments)
        must = [name for name, _, has_to in accepted(c) if has_to]
        if must:
            return outcome._replace(wrong=f"not refused: {must[0]}")
        results = found if c.return_lse else (found,)
        terms = Terms(
            float(D**-0.5 if c.scale is None else c.scale), c.offset, None if c.softcap is None else float(c.softcap),
            None if lengths is None else lengths.tolist(), sinks, slopes,
        )  # fmt: skip
        said = compared(c, four, leaves, sinks, counts, terms, results, names)
        if said is not None:
            return outcome._replace(wrong=f"call {turn + 1}: {said}")
    return outcome


def compared(
    c: Call, four: list[Tensor], leaves: list[Tensor], sinks: Tensor | None, counts: Tensor, terms: Terms,
    results: tuple[Tensor, ...], names: set[str],
) -> str | None:  # fmt: skip
    """What is wrong with results and gradients; None where nothing is."""
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
    wide_terms = terms._replace(sinks=of_sinks, slopes=slopes)
    with torch.enable_grad():
        out, lse = oracle.exact(*exact, counts, wide_terms)
    true = {"out": out.detach(), "lse": lse.detach()}
    actual = dict(zip(("out", "lse"), results, strict=False))
    for name, x in actual.items():
        if x.dtype != (c.dtype if name == "out" else wide):
            return f"{name} is of {x.dtype}"
    if c.wanted and any(x.requires_grad for x in [*leaves, *([] if sinks is None else [sinks])]):
        some = torch.isfinite(lse)
        loss = (out * dout.double()).sum() + (torch.where(some, lse, 0.0) * torch.where(some, dlse, 0.0)).sum()
        every = dict(zip(oracle.NAMES[2:], [*exact, of_sinks], strict=True))
        every = {name: x for name, x in every.items() if x is not None}
        gradients = torch.autograd.grad(loss, list(every.values()), allow_unused=True)
        true |= {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(every.items(), gradients, strict=True)}
        mine = dict(zip(oracle.NAMES[2:], [*leaves, sinks], strict=True))
        mine = {name: x for name, x in mine.items() if x is not None and x.requires_grad}
        outputs = [(actual["out"], _fewer(dout, c.dims))] if use_out else []
        outputs += [(actual["lse"], _fewer(dlse, c.dims))] if use_lse else []
        found = torch.autograd.grad([x for x, _ in outputs], list(mine.values()), [g for _, g in outputs])
        for (name, x), g in zip(mine.items(), found, strict=True):
            if g.dtype != x.dtype:
                return f"{name} is of {g.dtype}"
        actual |= dict(zip(mine, found, strict=True))
    with torch.no_grad():
        low = oracle.plain(*four, counts, terms._replace(sinks=None if sinks is None else sinks.detach()), dout, dlse)
        inputs = [x.detach() for x in exact]
        sunk = terms._replace(sinks=None if sinks is None else sinks.detach(), slopes=slopes)
        moved = oracle.rounding(*inputs, counts, sunk, dout.double(), dlse.double(), c.dtype, c.merge)
        said = []
        for name, x in actual.items():
            if name not in ("dsink_logits",):
                x = x.reshape((1,) * (4 - c.dims) + tuple(x.shape))
            said.append(oracle.wrong(name, x.detach(), true[name], low[name], moved[name]))
    said = [one for one in said if one is not None]
    return "; ".join(said) if said else None


# -- what every process sets up --------------------------------------------------------------------------------------

_in_parts = [False]


def _forget() -> None:
    """Plans and calls remember how they were computed."""
    split._known.clear()
    plan._plans.clear()
    calls.forget()


@contextmanager
def prepared() -> Iterator[None]:
    """Memory that is not written holds NaN; calls are computed in parts, whatever that costs, where `run` says so."""
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, make: Any) -> None:
        original = getattr(owner, name)
        kept.append((owner, name, original))
        setattr(owner, name, make(original))

    def fill(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.fill_(math.nan)
        return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

    def poisoned(original: Any) -> Any:
        return lambda *a, **k: fill(original(*a, **k))

    def cheap(original: Any) -> Any:
        return lambda *a: 0.0 if _in_parts[0] else original(*a)

    def parted(original: Any) -> Any:
        def cheaper(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
            if _in_parts[0]:
                cost.call = lambda *a, **k: math.inf
            return original(found, pattern, p, sizes, cost)

        return cheaper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        put(owner, name, poisoned)
    put(split, "_classes_cost", cheap)
    put(split, "_cheaper", parted)
    try:
        yield
    finally:
        for owner, name, original in reversed(kept):
            setattr(owner, name, original)


class Counts:
    """What came of the calls so far."""

    def __init__(self) -> None:
        self.calls, self.refused, self.wrong = 0, Counter[str](), 0
        self.by: dict[str, dict[str, Counter[str]]] = {"implementation": {}, "pattern": {}}

    def add(self, one: Outcome) -> None:
        """Count an outcome."""
        self.calls += 1
        what = "wrong" if one.wrong else "refused" if one.refused else "right"
        self.wrong += one.wrong is not None
        if one.refused:
            self.refused[one.refused] += 1
        for group, name in (("implementation", one.implementation), ("pattern", one.kind)):
            self.by[group].setdefault(name, Counter())[what] += 1

    def said(self) -> str:
        """The counts as text."""
        lines = [f"{self.calls} calls, {sum(self.refused.values())} refused by name, {self.wrong} wrong"]
        for group, found in self.by.items():
            lines.append(f"by {group}:")
            for name, n in sorted(found.items()):
                lines.append(f"  {name:24} {n['right']:7} right {n['refused']:6} refused {n['wrong']:6} wrong")
        if self.refused:
            lines.append("refused:")
            lines += [f"  {n:7} {name}" for name, n in self.refused.most_common()]
        return "\n".join(lines)
