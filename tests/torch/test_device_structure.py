"""Structure made on the device, against its definition by loops over pairs and a dense softmax in float64."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from tests.support.definition import dense, tensors

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
Keep = Callable[[int, int], bool]  # of positions i and j

RULES: dict[str, tuple[gs.Pattern | None, Keep]] = {
    "none": (None, lambda i, j: True),
    "dense": (gs.Dense(), lambda i, j: True),
    "causal": (gs.Causal(), lambda i, j: j <= i),
    "window": (gs.SlidingWindow(5), lambda i, j: i - 5 <= j <= i),
    "both sides": (gs.SlidingWindow(3, 4), lambda i, j: i - 3 <= j <= i + 4),
    "behind": (gs.SlidingWindow(None, 2), lambda i, j: j <= i + 2),
    "ahead": (gs.SlidingWindow(2, None), lambda i, j: i - 2 <= j),
    "farthest": (gs.SlidingWindow(2**31 - 1, 2**31 - 2), lambda i, j: j <= i + 2**31 - 2),
    "strictly before": (gs.SlidingWindow(9, -3), lambda i, j: i - 9 <= j <= i - 3),
    "strictly behind": (gs.SlidingWindow(-2, 7), lambda i, j: i + 2 <= j <= i + 7),
    "past": (gs.SlidingWindow(None, -1), lambda i, j: j < i),
    "no key": (gs.SlidingWindow(2, -3), lambda i, j: False),
    "farthest behind": (gs.SlidingWindow(1 - 2**31, None), lambda i, j: i + 2**31 - 1 <= j),
    "past sinks": (gs.SlidingWindow(5, -2, 3), lambda i, j: i - 5 <= j <= i - 2 or (j < 3 and j <= i)),
    "local": (gs.Local(7), lambda i, j: i // 7 == j // 7),
    "widest local": (gs.Local(2**31 - 1), lambda i, j: i // (2**31 - 1) == j // (2**31 - 1)),
    "joined": (
        gs.SlidingWindow(9, 3) & gs.Local(12) & gs.Causal() & gs.Local(8),
        lambda i, j: i - 9 <= j <= i and i // 12 == j // 12 and i // 8 == j // 8,
    ),
    "sinks": (gs.SlidingWindow(4, sinks=3), lambda i, j: i - 4 <= j <= i or (j < 3 and j <= i)),
    "sinks ahead": (gs.SlidingWindow(4, 2, sinks=2), lambda i, j: i - 4 <= j <= i + 2 or j < 2),
    "dilated": (gs.Dilated(3, 2, 4), lambda i, j: (i - j) % 4 == 0 and -8 <= i - j <= 12),
    "far dilated": (gs.Dilated(2**31 - 1, 0, 40), lambda i, j: (i - j) % 40 == 0 and j <= i),
    "lone keys": (gs.Dilated(3, 0, 2**31 - 1), lambda i, j: i == j),
    "far strided": (gs.Strided(10**8, 1), lambda i, j: j <= i and (i - j <= 1 or (i - j) % 10**8 == 0)),
    "apart": (gs.Dilated(9, 9, 70001) & gs.Dilated(9, 9, 70003), lambda i, j: i == j),
    "nested": (
        reduce(operator.or_, [gs.SlidingWindow(n, 0) for n in range(30)]) & gs.SlidingWindow(40),
        lambda i, j: i - 29 <= j <= i,
    ),
    "strided": (gs.Strided(5, 2), lambda i, j: j <= i and (i - j <= 2 or (i - j) % 5 == 0)),
    "longformer": (gs.Longformer(6, dilation=2), lambda i, j: (i - j) % 2 == 0 and abs(i - j) <= 6),
    "union": (
        (gs.Causal() | gs.Local(4)) & gs.SlidingWindow(8, 8),
        lambda i, j: (j <= i or i // 4 == j // 4) and abs(i - j) <= 8,
    ),
}  # fmt: skip
INTERVALS = [name for name, (pattern, _) in RULES.items() if pattern is None or pattern.device_rule().interval]
STEPS = ["dilated", "far dilated", "lone keys", "far strided", "apart", "strided", "longformer"]


def check(run: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], mask: np.ndarray, **terms: Any) -> None:
    """out, lse and every gradient of `run`, which gives (B, H, Q, E), against `dense`."""
    found, wanted = run(*inputs), dense(*inputs[:3], mask, *inputs[3:], **terms)
    g = torch.Generator().manual_seed(1)
    seeds = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in wanted]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)
    seen = wanted[1] > -math.inf
    results = []
    for out, lse in (found, wanted):
        total = (out * seeds[0]).sum() + (lse[seen] * seeds[1][seen]).sum()
        results.append(torch.autograd.grad(total, inputs, allow_unused=True))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, atol=1e-9, rtol=1e-9)


def integers(values: list[int], draw: random.Random) -> Tensor:
    """Values in the narrowest or any wider type that holds them."""
    able = [t for t in INTEGERS if all(torch.iinfo(t).min <= x <= torch.iinfo(t).max for x in values)]
    return torch.tensor(values, dtype=draw.choice(able))


def extremes(draw: random.Random, K: int, low: int = -(2**63), high: int = 2**63 - 1) -> int:
    near = [0, 1, -1, K - 1, K, K + 1, draw.randint(-K, 2 * K), draw.randint(0, K)]
    return draw.choice([*near, *near, 127, -128, 2**31 - 1, -(2**31), 2**31, 2**32 + 3, low, high])


def positions(offset: int, Q: int, K: int) -> range:
    """Of query rows; offsets past the documented limit count as the limit."""
    most = 2**31 - 2**16 - max(Q, K)
    first = max(-most, min(most, offset))
    return range(first, first + Q)


@pytest.mark.parametrize("name", RULES)
def test_bounds_of_a_rule(name: str) -> None:
    pattern, keep = RULES[name]
    rule = (gs.Dense() if pattern is None else pattern).device_rule()
    assert rule is not None
    draw = random.Random(name)
    for _ in range(120):
        Q, K = draw.choice([1, 3, 20]), draw.choice([1, 2, 13, 40])
        most = 2**31 - 2**16 - max(Q, K)
        near = [draw.randint(-2 * K, 2 * K), most - draw.randint(0, 3), -most + draw.randint(0, 3)]
        i = np.arange(Q) + draw.choice([*near, 2**30, -(2**30), K - Q])
        found: list[set[int]] = [set() for _ in range(Q)]
        for reach in rule.reaches:
            with np.errstate(all="raise"):
                lo, hi = reach.bounds(i.astype(np.int32), K)
            assert lo.dtype == hi.dtype == np.int32 and lo.min() >= 0 and hi.max() <= K
            assert (np.diff(lo) >= 0).all() and (np.diff(hi) >= 0).all()
            assert reach.longest is None or (hi - lo).max() <= reach.longest
            for r, at in enumerate(i.tolist()):
                found[r] |= {j for j in range(lo[r], hi[r]) if (at - j) % reach.step == 0}
        for r, at in enumerate(i.tolist()):
            assert {j for j in range(K) if keep(at, j)} == found[r]


@pytest.mark.parametrize("seed", range(24))
def test_offsets_starts_and_lengths_of_each_sequence(seed: int) -> None:
    draw = random.Random(seed)
    pattern, keep = RULES[draw.choice(list(RULES))]
    B, G, times = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 3])
    Q, K, D, E = draw.choice([1, 2, 33, 70]), draw.choice([1, 31, 64, 130]), 4, 5
    offsets = [draw.choice([extremes(draw, K), K - Q, draw.randint(0, K)]) for _ in range(B)]
    starts = [draw.choice([0, draw.randint(0, K), extremes(draw, K)]) for _ in range(B)]
    ends = [draw.choice([K, draw.randint(0, K), extremes(draw, K)]) for _ in range(B)]
    given: dict[str, Any] = {"q_offset": integers(offsets, draw), "key_starts": integers(starts, draw)}
    given["key_lengths"] = draw.choice([ends, integers(ends, draw)])
    given["key_starts"] = draw.choice([starts, given["key_starts"]])
    if draw.random() < 0.3:
        offsets, _ = [K - Q] * B, given.pop("q_offset")
    elif draw.random() < 0.3:
        starts, _ = [0] * B, given.pop("key_starts")
    if draw.random() < 0.3:
        ends, _ = [K] * B, given.pop("key_lengths")
    mask = np.array(
        [[[keep(i, j) and starts[b] <= j < ends[b] for j in range(K)] for i in positions(offsets[b], Q, K)]
         for b in range(B)]
    )[:, None]  # fmt: skip
    inputs = tensors((B, G * times, Q, D), (B, G, K, D), (B, G, K, E), seed=seed)
    terms: dict[str, Any] = {"softcap": draw.choice([None, 2.0]), "scale": draw.choice([None, 0.7])}
    if draw.random() < 0.5:
        inputs += tensors((G * times,), seed=seed + 1)
    form = draw.choice(["bhnd", "bshd"] + ["unbatched"] * (B == 1))

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        options = given | terms | {"sink_logits": sinks, "return_lse": True}
        if form == "bhnd":
            return gs.attention(q, k, v, pattern, **options)
        if form == "unbatched":
            out, lse = gs.attention(q[0], k[0], v[0], pattern, **options)
            return out[None], lse[None]
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = gs.attention(*turned, pattern, layout="bshd", **options)
        return out.transpose(1, 2), lse

    check(run, inputs, mask, **terms)
    # One query without gradients is another path for other calls.
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs)[0], dense(*inputs[:3], mask, *inputs[3:], **terms)[0])


def runs(ids: list[int]) -> list[int]:
    """The number of the run that each position is in."""
    found, n = [], 0
    for at, x in enumerate(ids):
        n += at > 0 and x != ids[at - 1]
        found.append(n)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_documents(seed: int) -> None:
    draw = random.Random(seed)
    pattern, keep = RULES[draw.choice(list(RULES))]
    B, K, H = draw.choice([1, 2]), draw.choice([1, 5, 64, 100]), 2
    Q = draw.choice([K, K, 1, 2 * K])
    every = [[draw.choice([0, -128, 127, 3, 3, 3]) for _ in range(K)] for _ in range(B)]
    if draw.random() < 0.7:
        every = [sorted(ids, key=lambda x: (x * 7) % 5) for ids in every]  # few runs
    every = every[:1] * B if draw.random() < 0.3 else every
    dtype = draw.choice([torch.int8, torch.int16, torch.int32, torch.int64])
    ids = torch.tensor(every[0] if every[0] == every[-1] and draw.random() < 0.5 else every, dtype=dtype)
    offset = draw.choice([None, 0, -3, K, torch.tensor(K - 1), torch.tensor([extremes(draw, K) for _ in range(B)])])
    first = [K - Q] * B if offset is None else [int(x) for x in torch.as_tensor(offset).expand(B)]
    mask = np.zeros((B, 1, Q, K), dtype=bool)
    for b in range(B):
        run = runs(every[b])
        for r, i in enumerate(positions(first[b], Q, K)):
            for j in range(K):
                mask[b, 0, r, j] = 0 <= i < K and run[i] == run[j] and keep(i, j)
    given = gs.DocumentIds(ids)
    if pattern is not None:
        given = draw.choice([lambda: given & pattern, lambda: pattern & given])()
    inputs = tensors((B, H, Q, 4), (B, 1, K, 4), (B, 1, K, 6), seed=seed)
    check(lambda q, k, v: gs.attention(q, k, v, given, q_offset=offset, return_lse=True), inputs, mask)


@pytest.mark.parametrize("seed", range(12))
def test_documents_by_their_edges(seed: int) -> None:
    draw = random.Random(seed)
    K = draw.choice([1, 40, 130])
    edges = sorted(draw.choice([0, draw.randint(0, K), K]) for _ in range(draw.choice([1, 2, 6])))
    mask = np.zeros((K, K), dtype=bool)
    for first, end in pairwise(edges):
        for i in range(first, end):
            mask[i, first : i + 1] = True
    given = gs.Causal() & gs.DocumentIds.from_cu_seqlens(integers(edges, draw), K)
    inputs = tensors((2, 2, K, 4), (2, 2, K, 4), (2, 2, K, 4), seed=seed)
    check(lambda q, k, v: gs.attention(q, k, v, given, return_lse=True), inputs, mask)


def test_edges_that_decrease_count_as_those_before_them() -> None:
    """Where nobody reads them: on a GPU, and in compiled functions."""
    (q,) = tensors((1, 1, 6, 4))

    def run(edges: torch.Tensor) -> torch.Tensor:
        return gs.attention(q, q, q, gs.DocumentIds.from_cu_seqlens(edges, 6))

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for wrong, right in (([0, 4, 2, 6], [0, 4, 4, 6]), ([-9, 3, 2**40], [0, 3, 6]), ([2, 5, -1], [2, 5, 5])):
        assert torch.equal(compiled(torch.tensor(wrong)), run(torch.tensor(right)))


def test_an_id_that_returns_is_another_document() -> None:
    (q,) = tensors((1, 1, 5, 4))
    ids = torch.tensor([1, 1, 0, 1, 1])
    found = gs.attention(q, q, q, gs.DocumentIds(ids))
    assert torch.allclose(found, gs.attention(q, q, q, gs.Document([0, 0, 1, 2, 2])))
    assert not torch.allclose(found, gs.attention(q, q, q, gs.Document(ids)))


@pytest.mark.parametrize("kind", ["blocks", "keys"])
@pytest.mark.parametrize("seed", range(20))
def test_lists(seed: int, kind: str) -> None:
    """Of key blocks of each query block, and of keys of each query, which are blocks of one."""
    draw = random.Random(seed)
    B, G, times, block = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([64, 128])
    Q, K, n = draw.choice([1, 64, 150, 256]), draw.choice([1, 100, 128, 300]), draw.choice([0, 1, 2, 5])
    if kind == "keys":
        block, Q, K, n = 1, draw.choice([1, 7, 40]), draw.choice([1, 33, 60]), draw.choice([0, 1, 9, 70])
    T, C, H = -(-Q // block), -(-K // block), G * times
    lead = draw.choice([1, B]), draw.choice([1, G, H])
    wide = draw.random() < 0.5
    strange = [2**40, -(2**63), 2**63 - 1] if wide else [2**31 - 1, -(2**31)]
    values = np.array([draw.choice([*range(-1, C + 1), *range(C), *strange]) for _ in range(lead[0] * lead[1] * T * n)])
    indices = values.reshape(*lead, T, n).astype(np.int64 if wide else np.int32)
    counts = None
    if draw.random() < 0.5:
        counts = np.array([draw.randint(-1, n + 2) for _ in range(lead[0] * lead[1] * T)]).reshape(*lead, T)
    joined = draw.choice(["nothing", "rule", "documents", "lengths"])
    pattern, keep = RULES[draw.choice(INTERVALS)] if joined in ("rule", "documents") else (None, lambda i, j: True)
    ids = [j // (50 if kind == "blocks" else 11) for j in range(K)]
    ends = [draw.choice([K, 0, draw.randint(0, K)]) for _ in range(B)] if joined == "lengths" else [K] * B
    mask = np.zeros((B, H, Q, K), dtype=bool)
    for b in range(B):
        for h in range(H):
            own = h if lead[1] == H else h // times if lead[1] == G else 0
            for r in range(Q):
                where = min(b, lead[0] - 1), own, r // block
                listed = indices[where][: None if counts is None else max(0, counts[where])].tolist()
                for c in {c for c in listed if 0 <= c < C}:
                    for j in range(c * block, min(K, (c + 1) * block)):
                        i = r + K - Q
                        together = joined != "documents" or (i >= 0 and ids[i] == ids[j])
                        mask[b, h, r, j] = keep(i, j) and together and j < ends[b]
    lists, numbers = torch.from_numpy(indices), None if counts is None else torch.from_numpy(counts)
    given: Any = gs.BlockIndices(lists, block, numbers) if kind == "blocks" else gs.Indices(lists, numbers)
    if pattern is not None:
        given = given & pattern
    if joined == "documents":
        given = gs.DocumentIds(torch.tensor(ids)) & given
    options = {"key_lengths": ends} if joined == "lengths" else {}
    inputs = tensors((B, H, Q, 4), (B, G, K, 4), (B, G, K, 4), seed=seed)
    check(lambda q, k, v: gs.attention(q, k, v, given, return_lse=True, **options), inputs, mask)


def test_a_score_term_that_reads_positions() -> None:
    Q, K, H = 5, 9, 2
    inputs, slopes = tensors((1, H, Q, 4), (1, H, K, 4), (1, H, K, 4)), torch.tensor([0.5, -0.25]).double()
    for offset in (None, 2, torch.tensor(3)):
        first = K - Q if offset is None else int(offset)
        position = np.arange(first, first + Q)
        mask = np.array([[2 <= j <= i for j in range(K)] for i in position])
        options: dict[str, Any] = {"q_offset": offset, "alibi_slopes": slopes, "key_starts": [2], "return_lse": True}
        options["alibi_distance"] = "signed"
        check(
            lambda q, k, v, options=options: gs.attention(q, k, v, gs.Causal(), **options), inputs, mask,
            slopes=slopes, position=position,
        )  # fmt: skip


def test_inference_mode_and_training_share_tensors() -> None:
    q, k, v = tensors((2, 2, 4, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    offset = torch.tensor([5, 2])
    with torch.inference_mode():
        first = gs.attention(q, k, v, gs.Causal(), q_offset=offset)
    second = gs.attention(q, k, v, gs.Causal(), q_offset=offset)
    second.sum().backward()
    assert torch.equal(first, second.detach()) and q.grad is not None


def contract(lo: Tensor, hi: Tensor, K: int) -> None:
    """What layouts made on a device ask of intervals."""
    assert lo.dtype == hi.dtype == torch.int32 and lo.shape == hi.shape and lo.is_contiguous() and hi.is_contiguous()
    assert (lo >= 0).all() and (lo <= hi).all() and (hi <= K).all()
    assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()


@pytest.mark.parametrize("seed", range(40))
def test_intervals_keep_what_layouts_ask_of_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the data are: kernels would see tiles that are not there. Edges are not read, as those of a GPU."""
    from gossamer.torch.structure import base
    from gossamer.torch.structure import inputs as of_inputs

    monkeypatch.setattr(base, "is_read", lambda *_: False)
    seen = []

    def checked(lo: Tensor, hi: Tensor, K: int, **options: Any) -> Any:
        contract(lo, hi, K)
        seen.append(1)
        return build(lo, hi, K, **options)

    build = of_inputs.interval_layout
    monkeypatch.setattr(of_inputs, "interval_layout", checked)
    draw = random.Random(seed)
    pattern, _ = RULES[draw.choice(INTERVALS)]
    B, Q, K = draw.choice([1, 2]), draw.choice([1, 50]), draw.choice([1, 70])
    q, k = (x.detach() for x in tensors((B, 2, Q, 4), (B, 1, K, 4)))

    def numbers(n: int) -> Tensor:
        return torch.tensor([extremes(draw, K) for _ in range(n)])

    def edges(most: int) -> Tensor:
        return torch.tensor([draw.choice([draw.randint(0, most), extremes(draw, most)]) for _ in range(5)])

    given: dict[str, Any] = {"q_offset": numbers(B), "key_starts": numbers(B), "key_lengths": numbers(B)}
    for structure in (pattern, gs.DocumentIds(torch.randint(3, (K,))), gs.DocumentIds.from_cu_seqlens(edges(K), K)):
        joined = structure if structure is pattern or pattern is None else structure & pattern
        gs.attention(q, k, k, joined, **given)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, k)]
    wild, sorted_edges = [edges(B * Q), edges(B * K)], [edges(B * Q).sort().values, edges(B * K).sort().values]
    for pair in (wild, sorted_edges):
        gs.varlen(*flat, *pair, pattern=pattern, seqused_k=draw.choice([None, numbers(4)]))
    assert len(seen) == 5


@pytest.mark.parametrize("seed", range(20))
def test_bounds_end_with_the_keys_that_are_kept(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that keep nothing, at either end: kernels clear what is before the first and past the last."""
    from gossamer.torch.structure import inputs as of_inputs

    seen: list[tuple[Tensor, Tensor]] = []

    def kept(lo: Tensor, hi: Tensor, K: int, **options: Any) -> Any:
        contract(lo, hi, K)
        seen.append((lo, hi))
        return build(lo, hi, K, **options)

    build = of_inputs.interval_layout
    monkeypatch.setattr(of_inputs, "interval_layout", kept)
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    q, k = (x.detach() for x in tensors((60, 2, 4), (90, 1, 4)))
    # Sequences of 1 to 8 rows and of 2 to 15 keys, of which some are there; rows and keys of none on both sides.
    cu_q, cu_k = (np.cumsum([rng.integers(1, 9), *rng.integers(low, high, 5)]) for low, high in ((1, 9), (2, 16)))
    used = [draw.choice([n, draw.randint(1, n)]) for n in np.diff(cu_k).tolist()]
    pattern = draw.choice([None, gs.Causal(), gs.SlidingWindow(3), gs.SlidingWindow(2, 1)])
    gs.varlen(q, k, k, cu_q, cu_k, pattern=pattern, seqused_k=draw.choice([None, used]))
    q = tensors((2, 2, 60, 4))[0].detach()
    ids = torch.from_numpy(rng.integers(0, 9, 60)).sort().values
    given = {"key_starts": rng.integers(0, 20, 2).tolist(), "key_lengths": rng.integers(21, 60, 2).tolist()}
    gs.attention(q, q, q, gs.DocumentIds(ids) & gs.Causal(), **given)
    gs.attention(q, q, q, gs.SlidingWindow(4, 4), **given)
    for lo, hi in seen:
        there = lo < hi
        assert torch.equal(lo[..., 0], lo.masked_fill(~there, 10**6).amin(-1))
        assert torch.equal(hi[..., -1], hi.masked_fill(~there, 0).amax(-1))
    lo, hi = seen[0]
    assert len(seen) == 3 and not (lo < hi)[..., [0, -1]].any()


@pytest.mark.parametrize("lead", [1, 2])
def test_shared_blocks_of_sequences_with_lengths_of_their_own(lead: int) -> None:
    inputs = tensors((2, 2, 70, 4), (2, 2, 130, 4), (2, 2, 130, 4))
    mask = np.zeros((2, 1, 70, 130), dtype=bool)
    mask[0, 0, :64, 64:90] = mask[1, 0, :64, 64:128] = mask[0, 0, 64:, :64] = mask[1, 0, 64:, :64] = True
    given = gs.BlockIndices(torch.tensor([[1, 1], [0, -1]]).expand(lead, 1, 2, 2))
    options = {"key_lengths": [90, 200], "return_lse": True}
    check(lambda q, k, v: gs.attention(q, k, v, given, **options), inputs, mask)
