"""Random calls of `gossamer.attention`: what a call is, how one is drawn, and for which reasons it may be refused.

`draw` makes the call of a seed on a kind of device, from everything that a user can pass. A `Call` names its arguments;
`soak_arguments` makes them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import soak_oracle as oracle
import torch
from soak_oracle import Spec
from soak_outcomes import options_of
from soak_patterns import LARGEST, Draw, dilated, shortened, sometimes, spec_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
BLOCK = 3000  # calls
FARTHEST = 2**31 - 2**16  # |q_offset| is accepted up to this less max(Q, K)


class Profile(NamedTuple):
    """What the calls on a kind of device are drawn from.

    On a GPU, where kernels are compiled for types, head sizes, terms and alignments, calls share `builds` draws of
    these, and each `BLOCK` of calls has others; what is attended, lengths and values are drawn for every call.
    """

    sizes: tuple[tuple[torch.dtype, int, int] | None, ...]  # (dtype, D, E); None: any
    lengths: tuple[int, ...]
    longest: int
    pairs: int  # B * H * Q * K at the most
    implementations: tuple[str | None, ...]
    builds: int  # 0: every call has its own


PROFILES = {
    "cpu": Profile(
        (None,), (1, 2, 3, 7, 17, 31, 32, 33, 40, 63, 64, 65, 96, 100, 127, 128, 129, 150), 500, 400_000,
        (None,) * 12 + ("blocked",) * 4 + ("reference",) * 2 + ("triton", "hopper", "small"), 0,
    ),
    "cuda": Profile(
        (
            (torch.bfloat16, 128, 128), (torch.bfloat16, 64, 64), (torch.float16, 128, 128), (torch.float16, 96, 40),
            (torch.float32, 64, 64), (torch.bfloat16, 17, 23), (torch.float64, 20, 3), (torch.bfloat16, 128, 64),
            (torch.float32, 300, 520),
        ),
        (1, 17, 40, 64, 100, 128, 129, 256, 300, 517, 900, 1024, 1400), 1500, 12_000_000,
        (None,) * 10 + ("hopper",) * 5 + ("triton",) * 5 + ("small",) * 3 + ("blocked", "reference"), 45,
    ),
}  # fmt: skip


class Vector(NamedTuple):
    """key_lengths, sink_logits or alibi_slopes: the values, their type, and how they lie in memory."""

    values: tuple[Any, ...]
    dtype: torch.dtype
    place: str


class Call(NamedTuple):
    """One call, but for the numbers in q, k and v, which its seed makes as well."""

    seed: int
    device: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int, int]  # B, H, G, Q, K, D, E
    dims: int
    spec: Spec
    form: str  # of the `pattern` argument
    blocks: tuple[int, int]  # queries and keys of a block, where the form has blocks
    merge: bool  # whether it is called with merge="lse"
    q_offset: tuple[str, int] | None  # how it is given, and its value
    scale: Any
    softcap: Any
    lengths: Vector | None
    sinks: Vector | None
    slopes: Vector | None
    distance: str | None  # alibi_distance; None: not given
    scale_tensor: str  # "": scale is a number; else where it is a tensor: "read" on the CPU, "learned", or "constant"
    places: tuple[str, str, str]  # how q, k and v lie in memory
    wanted: str  # gradients of which of q, k, v, and s for the sinks; "": none
    mode: str  # where no gradient is wanted: no_grad, inference_mode or nothing
    cotangents: str  # of out, of lse or of both
    return_lse: bool
    implementation: str | None
    deterministic: bool | None
    parts: bool  # whether what is dilated in it is computed in parts, whatever that costs
    mistake: str | None  # of MISTAKES
    bshd: bool  # whether q, k, v and out are (B, positions, heads, size)
    listed: bool  # whether lengths are given in a list

    @property
    def kind(self) -> str:
        """The kind of the pattern."""
        return str(self.spec[0])

    @property
    def offset(self) -> int:
        """Position of query row 0."""
        return self.shape[4] - self.shape[3] if self.q_offset is None else self.q_offset[1]

    def description(self) -> str:
        """The call in two lines of text."""
        B, H, G, Q, K, D, E = self.shape
        text = options_of(self, "seed", "shape", "spec")
        return f"B={B} H={H} G={G} Q={Q} K={K} D={D} E={E} {shortened(self.spec)}\n    {text}"


def _vector_place(r: Draw) -> str:
    return r.choice(["plain", "plain", "plain", "strided", "unaligned", "expanded"])


def _lengths(r: Draw, b: Draw, B: int, K: int) -> Vector:
    dtype = b.choice(INTEGERS)
    limits = torch.iinfo(dtype)
    wide = (limits.max, limits.min, LARGEST, 2**31, 2**32 + 10, -1, -(2**31) - 1, -(2**32) + 5)
    plain = (0, 1, K // 2, K - 1, K, K + 1, r.randrange(K + 2))
    values = tuple(r.choice(wide if r.random() < 0.3 else plain) for _ in range(B))
    return Vector(tuple(min(max(n, limits.min), limits.max) for n in values), dtype, _vector_place(b))


def _slopes(r: Draw, b: Draw, B: int, H: int) -> Vector:
    if b.random() < 0.4:
        each = [_slopes_of_heads(r, b, H).values for _ in range(B)]
        return Vector(tuple(each), r.choice(FLOATS), _vector_place(b))
    return _slopes_of_heads(r, b, H)


def _slopes_of_heads(r: Draw, b: Draw, H: int) -> Vector:
    sign, size = r.choice([1, -1]), r.choice([1.0, 1.0, 1.0, 0.01, 30.0, 1e4])
    powers = [sign * 2.0 ** (-8 * (h + 1) / H) for h in range(H)]
    values = r.choice([powers, [r.uniform(-1, 1) * size for _ in range(H)], [0.0] * H, [sign * size] * H])
    return Vector(tuple(values), b.choice(FLOATS), _vector_place(b))


def _sinks(r: Draw, b: Draw, H: int) -> Vector:
    choices = (0.0, 50.0, -50.0, -math.inf, r.gauss(0, 1), r.gauss(0, 1), r.gauss(0, 1))
    return Vector(tuple(r.choice(choices) for _ in range(H)), b.choice(FLOATS), _vector_place(b))


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
FORMS = ("pattern",) * 12 + (
    "handle", "handle", "mask", "mask", "layout", "device layout", "block mask", "mask function", "sparse", "reordered",
)  # fmt: skip
# Forms of pairs without positions: a q_offset moves none of them, and is refused, unless slopes read it.
WITHOUT_POSITIONS = ("mask", "block mask", "mask function", "sparse")
MISTAKES = (
    "q of integers", "k of another head size", "v with a key more", "heads that G does not divide", "no values",
    "softcap of 0", "softcap of nan", "scale of inf", "lengths of floats", "lengths for another batch",
    "slopes for another head", "slopes that require grad", "a distance without slopes", "a distance of text",
    "scale of a vector", "sinks on integers", "q_offset of 2**31", "q_offset of 0.5",
    "a list of patterns", "a mask of floats", "a mask of another size", "an unknown implementation",
    "merge of a window",
    "k of another type", "q of one dimension", "numpy q", "return_lse of 1", "deterministic of 1", "softcap of text",
    "q_offset of two numbers",
)  # fmt: skip


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    r, p = random.Random(seed), PROFILES[device]
    b = random.Random(f"{seed // BLOCK} {seed % p.builds}") if p.builds else r
    size = p.sizes[seed % p.builds % len(p.sizes)] if p.builds else b.choice(p.sizes)
    if size is None:
        edges = (1, 2, 3, 5, 8, 16, 17, 20, 32, 33, 64)
        D = r.choice(edges)
        E = D if r.random() < 0.5 else r.choice(edges)
        size = r.choice((torch.float32,) * 4 + (torch.float64,) * 3 + (torch.float16, torch.bfloat16)), D, E
    dtype, D, E = size
    dims = b.choice([4, 4, 4, 4, 3, 2])
    B = b.choice([1, 1, 2, 3]) if dims == 4 else 1
    G = b.choice([1, 1, 2, 3]) if dims > 2 else 1
    H = G * b.choice([1, 1, 2, 3, 4]) if dims > 2 else 1
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
        make(r, b, *sizes) if b.random() < 0.22 else None
        for make, sizes in ((_lengths, (B, K)), (_sinks, (H,)), (_slopes, (B, H)))
    )
    mistake = r.choice(MISTAKES) if r.random() < 0.03 else None
    wanted = "" if b.random() < 0.12 else b.choice(["qkvs", "qkvs", "qkvs", "q", "kv", "s" if sinks else "qkv"])
    blocks = r.choice([(64, 64), (128, 128), (32, 64), (96, 32)])
    scales = (
        0.0,
        -0.3,
        1.0,
        3,
        sometimes(r, 1e-5, 1e-35),
        30.0,
        1e4,
        0.25,
        0.25,
        sometimes(r, 0.5, r.choice([1e39, 1e-39, 1e12, -1e30])),
    )
    caps = (
        2.0,
        0.01,
        0.5,
        sometimes(r, 30.0, r.choice([1e-18, 1e18])),
        1e4,
        5,
        50.0,
        sometimes(r, 3.0, r.choice([1e39, 1e-39])),
    )
    scale = _number(b, scales) if b.random() < 0.25 else None
    softcap = _number(r, caps) if b.random() < 0.22 else None
    places, mode = (
        (b.choice(PLACES), b.choice(PLACES), b.choice(PLACES)),
        r.choice(["no_grad", "inference_mode", "plain"]),
    )
    distance = b.choice(["signed", "absolute", "absolute", None]) if slopes else None
    tensor = ""
    if isinstance(scale, float) and 1e-30 < abs(scale) < 1e30 and r.random() < 0.6:
        tensor = r.choice(["read", "learned", "learned", "constant"])
    elif scale == 0.0 and r.random() < 0.5:
        tensor = "learned"
    if dtype == torch.float16 and tensor and not 1e-3 < abs(scale) < 100:
        tensor = "read"  # else products of q leave the type, which is told as a limit
    return Call(
        seed, device, dtype, (B, H, G, Q, K, D, E), dims, spec, form, blocks, merge, q_offset, scale, softcap,
        lengths, sinks, slopes, distance, tensor, places, wanted, mode,
        r.choice(["both", "both", "out", "lse"]), r.random() < 0.7, b.choice(p.implementations),
        b.choice([None, None, False, True]), parts, mistake, mistake is None and r.random() < 0.3, r.random() < 0.3,
    )  # fmt: skip


def refusals(c: Call) -> Iterator[tuple[str, str, bool]]:
    """The reasons to refuse a call: (reason, what the message must match, whether the call has to be refused)."""
    if c.mistake is not None:
        yield f"mistake: {c.mistake}", ".", True
    if c.q_offset is not None and c.form in WITHOUT_POSITIONS:
        yield f"q_offset with a {c.form}", "q_offset", c.slopes is None
    if abs(c.offset) > FARTHEST - max(c.shape[3:5]):
        yield "q_offset too far", "q_offset", False
    names = repr(c.spec)
    if c.q_offset is not None and (
        c.form not in ("pattern", "handle") or any(f"'{name}'" in names for name in ("CSR", "BlockMask", "BigBird"))
    ):
        yield "q_offset with what counts rows from 0", "q_offset", False
    if c.slopes is not None and c.distance is None:
        yield "no alibi_distance", "alibi_distance", False
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
    """The reason for which a call may be refused with such an error; None where there is none."""
    return next((name for name, match, _ in refusals(c) if re.search(match, str(error))), None)
