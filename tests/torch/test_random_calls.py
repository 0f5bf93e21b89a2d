"""Random calls against float64: any composition, sizes, grouped heads, score terms and strides, in every form."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.contract import Terms
from gossamer.kernels.reference import oracle
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.plan.problem import Unsupported
from gossamer.testing import tolerance
from gossamer.torch.mask_layouts import layout_of
from tests.support import terms_cases
from tests.support.exact import no_gpu, within_nan
from tests.support.parts_cases import at_any_price, forget

Draw = random.Random
CALLS = 120  # of a test on a CPU
TERMS = ("softcap", "scale", "key_lengths", "alibi_slopes", "sink_logits")


class Kind(NamedTuple):
    """What the calls of a test have in common, so that a GPU compiles few kernels for them."""

    device: str
    dtype: torch.dtype
    sizes: tuple[tuple[int, int], ...]  # (D, E)
    lengths: tuple[int, ...]
    names: tuple[str | None, ...] = (None,)
    terms: tuple[str, ...] = TERMS
    calls: int = CALLS


LONG = (1, 40, 129, 517, 900, 1400)
CPU = Kind("cpu", torch.float64, ((8, 8), (1, 5), (20, 3)), (1, 3, 40, 100, 129))
GPU = {
    "bfloat16": Kind("cuda", torch.bfloat16, ((128, 128),), LONG, (None, "hopper"), ("key_lengths", "sink_logits"), 25),
    "bfloat16_64": Kind("cuda", torch.bfloat16, ((64, 64),), LONG, (None, "hopper", "triton"), ("softcap",), 25),
    "float32": Kind("cuda", torch.float32, ((64, 64),), LONG, (None, "triton"), ("key_lengths", "sink_logits"), 25),
    "float16_terms": Kind("cuda", torch.float16, ((96, 40),), LONG[:4], (None,), TERMS, 25),
    "odd_sizes": Kind("cuda", torch.bfloat16, ((17, 23),), LONG[:4], (None,), (), 25),
    "wide": Kind("cuda", torch.float32, ((300, 520),), LONG[:4], (None,), (), 20),
    "small": Kind("cuda", torch.bfloat16, ((128, 64),), (1, 26, 100, 129), (None, "small"), TERMS, 40),
}


def graph(r: Draw, Q: int, K: int) -> gs.Pattern:
    """A few keys a row, and now and then a row of many."""
    rng, each = np.random.default_rng(r.randrange(99)), r.choice([1, 3, 20])
    rows = [np.sort(rng.choice(K, min(K, int(n)), replace=False)) for n in rng.integers(0, each + 1, Q)]
    if r.random() < 0.3:
        rows[r.randrange(Q)] = np.arange(K)
    return gs.CSR(np.cumsum([0, *map(len, rows)]), np.concatenate(rows).astype(np.int64), K)


SHARED: list[Callable[[Draw, int, int], gs.Pattern]] = [
    lambda r, Q, K: gs.Causal(),
    lambda r, Q, K: gs.SlidingWindow(r.randrange(60), r.randrange(20), r.choice([0, 0, 3])),
    lambda r, Q, K: gs.SlidingWindow(r.choice([None, 9]), r.choice([None, 4])),
    lambda r, Q, K: gs.Local(1 + r.randrange(70)),
    lambda r, Q, K: gs.Dilated(r.randrange(20), r.randrange(9), 1 + r.randrange(12)),
    lambda r, Q, K: gs.Strided(2 + r.randrange(40), r.randrange(40)),
    lambda r, Q, K: gs.Longformer(r.randrange(40), {r.randrange(K), r.randrange(K)}, 1 + r.randrange(8)),
    lambda r, Q, K: gs.PowerStrided(2 + r.randrange(3), r.randrange(20)),
    lambda r, Q, K: gs.Predicate(lambda i, j: (5 * i + j) % 7 == 0),
    graph,
    lambda r, Q, K: gs.Document(np.sort(np.random.default_rng(r.randrange(99)).integers(0, 4, (1, K)))),
    lambda r, Q, K: gs.PerHead([gs.Dilated(r.randrange(9), 0, 1 + r.randrange(9))]),
    lambda r, Q, K: gs.Neighborhood((-(-K // 8), 8) if K % 8 == 0 else (K,), [r.randrange(4)] * (1 + (K % 8 == 0))),
    lambda r, Q, K: gs.BigBird(16, random_blocks=1) if Q == K else gs.Dense(),
    lambda r, Q, K: gs.Tree([r.randrange(-1, t) for t in range(Q)]) if Q <= K else gs.Causal(),
]


def pattern_of(r: Draw, Q: int, K: int, B: int, H: int, deep: int = 0) -> gs.Pattern:
    """Shared, by head or by batch element, and compositions of these."""
    how = r.random()
    if deep > 1 or how < 0.45:
        return r.choice(SHARED)(r, Q, K)
    if how < 0.6:
        return gs.PerHead([r.choice(SHARED[:6])(r, Q, K) for _ in range(H)])
    if how < 0.65:
        return gs.LongNet((8, 24), (1, 3), heads=H, causal=r.random() < 0.5)
    if how < 0.7:
        return gs.BlockMask(np.random.default_rng(r.randrange(99)).random((H, -(-Q // 16), -(-K // 16))) < 0.4, 16)
    if how < 0.73:
        return gs.PerBatch([r.choice(SHARED)(r, Q, K) for _ in range(B)])
    if how < 0.76:
        return gs.Document(np.sort(np.random.default_rng(r.randrange(99)).integers(0, 4, (B, K)), axis=1))
    one = pattern_of(r, Q, K, B, H, deep + 1)
    if how < 0.8:
        return ~one
    other = pattern_of(r, Q, K, B, H, deep + 1)
    return one & other if how < 0.88 else one | other


def form_of(r: Draw, pattern: gs.Pattern, kept: Tensor, Q: int, K: int, device: str, plain: bool, rows: bool) -> Any:
    """The pattern as one of the things that `attention` takes; `rows`: a mask may have those of the call."""
    form = r.choice(["pattern"] * 6 + ["mask", "layout", "device layout", "block mask", "reordered"])
    blocks = r.choice([(64, 64), (128, 128), (32, 64)])
    if form == "mask" and rows:
        return kept
    if not plain or form == "pattern":  # what follows has positions of its own
        return pattern
    if form == "block mask":
        return gs.to_flex(pattern, Q, K, block_size=blocks, device=device)
    if form == "reordered":
        square = Q == K and kept.ndim == 2
        return gs.CSR.from_torch(kept.float().to_sparse_coo()).reordered() if square else pattern
    layout = pattern.layout(Q, K, block_q=blocks[0], block_kv=blocks[1])
    return layout.to(device) if form == "device layout" else layout


def laid_out(where: str, x: Tensor) -> Tensor:
    """The values of x (B, heads, N, size), or of its first head, somewhere else."""
    if where == "positions first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if where == "within NaN":
        return within_nan(x)[1].copy_(x)
    if where == "unaligned":
        room = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype, device=x.device)
        return room[1:].view(x.shape).copy_(x)
    if where == "columns":
        return x.mT.contiguous().mT
    return x[:, :1].expand(x.shape) if where == "one head" else x


PLACES = ("plain", "plain", "positions first", "within NaN", "unaligned", "columns", "one head")


def rounded_delta(exact: tuple[Tensor, Tensor], dout: Tensor, sinks: Tensor, dtype: torch.dtype) -> float:
    """What the rounding of out to `dtype` does to a sink's gradient, the sum of share * dout * out: five deviations."""
    out, lse = (x.detach() for x in exact)
    share = torch.exp(sinks.detach().double()[:, None] - lse).nan_to_num(0.0, 0.0, 0.0)
    each = torch.finfo(dtype).eps / 12**0.5 * share[..., None] * dout.double() * out
    return 5 * float(each.square().sum((0, 2, 3)).sqrt().max())


def one_call(seed: int, kind: Kind = CPU) -> None:
    """A call, and the same with other numbers, which is known then."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    B, G, K = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice(kind.lengths)
    Q = r.choice([K, K, 1, 17, 150])
    H, (D, E) = G * r.choice([1, 2]), r.choice(kind.sizes)
    pattern = pattern_of(r, Q, K, B, H)
    terms = terms_cases.terms(r, kind.terms, B, H, K, kind.dtype, kind.device)
    wide = compute_dtype(kind.dtype)
    # Slopes times distances that float32 rounds by more than 1 are no scores that could be compared.
    q_offset = terms_cases.offset(r, Q, K, far=wide == torch.float64 or "alibi_slopes" not in terms)
    if not pattern.reads_positions and "alibi_slopes" not in terms:
        q_offset = None
    first = K - Q if q_offset is None else int(q_offset)
    kept = torch.from_numpy(pattern.materialize(Q, K, first)).to(kind.device)
    values: dict[str, Any] = {"scale": D**-0.5, "q_offset": first} | terms
    farthest = max(abs(K - first), abs(Q + first))
    steepest = float(terms["alibi_slopes"].double().abs().max()) if "alibi_slopes" in terms else 0.0
    plain = first == K - Q and not {"alibi_slopes", "key_lengths"}.intersection(terms)
    options = {"q_offset": q_offset, "implementation": r.choice(kind.names), **terms}
    given = form_of(r, pattern, kept, Q, K, kind.device, plain, first == K - Q or "alibi_slopes" in terms)
    places, wanted = [r.choice(PLACES) for _ in range(3)], r.choice(["qkv", "qkv", "q", "kv"])
    bshd = seed % 3 == 0
    options["layout"] = "bshd" if bshd else "bhnd"
    if "key_lengths" in terms and seed % 2:
        options["key_lengths"] = terms["key_lengths"].tolist()
    shown = f"{seed}: {given if given is pattern else type(given)} of {pattern!r} {values} {places} {wanted} {options}"
    for _ in range(2):
        shapes = (B, H, Q, D), (B, G, K, D), (B, G, K, E)
        inputs = [torch.randn(s, dtype=torch.float64).to(kind.device, kind.dtype) for s in shapes]
        q, k, v = (laid_out(where, x).requires_grad_(name in wanted)
                   for where, x, name in zip(places, inputs, "qkv", strict=True))  # fmt: skip
        turned = [x.transpose(1, 2) if bshd else x for x in (q, k, v)]
        explained = gs.explain(*turned, given, **options)
        assert explained.density == pytest.approx(float(kept.double().mean()), abs=1e-12), shown
        out, lse = gs.attention(*turned, given, return_lse=True, **options)
        assert out.is_contiguous(), shown
        found = out.transpose(1, 2) if bshd else out, lse
        exact, low = oracle(q, k, v, kept, Terms(**values)), tolerance.plain(q, k, v, kept, Terms(**values))
        dout, dlse = torch.randn_like(found[0]), torch.randn_like(found[1])
        leaves = [x for x in (q, k, v, terms.get("sink_logits")) if x is not None and x.requires_grad]
        results = []
        for out, lse in (found, exact, low):
            loss = (out * dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()
            results.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)])
        sinks = terms.get("sink_logits")
        of_sinks = 0.0 if sinks is None else rounded_delta(exact, dout, sinks, kind.dtype)
        for at, (a, b, c) in enumerate(zip(*results, strict=True)):
            # The largest of many draws; and where rows keep one key, dP - delta is the rounding of E products in each.
            most = 2 * tolerance.bound(b, c, a.dtype) + 4 * torch.finfo(wide).eps * (E * Q) ** 0.5
            most += of_sinks * (sinks is not None and at == len(results[0]) - 1)
            if wide == torch.float64:  # a score is as exact as its largest term, and a gradient of 16 bits is rounded
                largest = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max())
                score = steepest * farthest * max(1.0, largest)
                most = 1e-9 + 8 * torch.finfo(wide).eps * score + torch.finfo(a.dtype).eps * largest
            assert tolerance.error(a, b) <= most, f"{tolerance.error(a, b):.2e} over {most:.2e} by {explained}\n{shown}"


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("first", [0, CALLS])
def test_any_call_is_exact(first: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = at_any_price(monkeypatch) if in_parts else []
    forget()
    for seed in range(first, first + CALLS):
        one_call(seed)
    forget()
    assert len(taken) >= 8 or not in_parts


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("name", GPU)
def test_any_call_on_a_gpu(name: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, done = GPU[name], 0
    if in_parts:
        at_any_price(monkeypatch)
    forget()
    for seed in range(kind.calls):
        try:
            one_call(seed + 1000 * in_parts, kind)
        except Unsupported:  # a kernel asked for by name
            continue
        done += 1
    forget()
    assert done >= kind.calls // 2


def test_a_masks_layout_is_one_that_a_user_might_give() -> None:
    """Row bounds that are not there are not read: no entry, not even padding, is in the interval list."""
    x = torch.zeros(2, 3, 100, 8)
    for shape in ((100, 90), (2, 1, 100, 90), (1, 3, 1, 90)):
        made = layout_of(torch.rand(shape) < 0.5, 100, 90, block_q=32, block_kv=64, transpose=True)
        gs.attention(x, x[:, :, :90], x[:, :, :90], made)
        for walk in (made.rows, made.columns):
            assert walk.lo.numel() or not walk.interval.indices.numel()
