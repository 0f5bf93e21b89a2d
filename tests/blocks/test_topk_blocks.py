"""Chosen key blocks, against loops over rows and blocks, and the mass they keep, against a softmax in float64."""

from __future__ import annotations

import gc
import math
import random
import weakref
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gossamer as gs
from gossamer.blocks import api
from gossamer.blocks import scores as block_scores
from gossamer.memo import forget_all
from tests.support.blocks_definition import oracle, ranges, softmax
from tests.support.modes import Largest, NothingIsRead
from tests.torch.test_host_cost import entered


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def case(draw: random.Random, dtype: torch.dtype, whole: bool, amplitude: float = 1.0) -> Case:
    """Whole: of numbers whose scores are exact in float32, with ties."""
    g = torch.Generator().manual_seed(draw.randrange(2**31))
    B, G, times, D = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([2, 4])
    block = draw.choice([64, 64, 128])
    sizes = [64, 128, 256, 512] if whole else [1, 63, 65, 100, 200, 256, 500]
    Q, K = (block // 64 * draw.choice(sizes) for _ in range(2))
    shapes = (B, G * times, Q, D), (B, G, K, D), (B, G, K, 8)
    q, k, v = (torch.randn(shape, generator=g) * amplitude for shape in shapes)
    if draw.random() < 0.5:  # what blocks have in common is most of their keys
        k = 0.3 * k + torch.randn(B, G, -(-K // 64), D, generator=g).repeat_interleave(64, 2)[:, :, :K] * amplitude
    if whole:
        q, k = q.round().clamp(-2, 2), k.round().clamp(-2, 2)
    local, first = draw.choice([0, 1, 1, 2]), draw.choice([0, 1, 1, 2])
    options = {
        "causal": draw.random() < 0.6, "block_size": block, "score": draw.choice(["mean", "bound"]), "local": local,
        "first": first, "per": draw.choice(["head", "group"]), "scale": draw.choice([None, 0.5, -1.0]),
        "topk": draw.choice([None, first + 2 * local + 1, first + 2 * local + 2]),
        "top_p": draw.choice([None, 0.31, 0.83, 1.0]),  # no sum of equal shares
    }  # fmt: skip
    if options["topk"] is options["top_p"] is None:
        options["topk"] = 8
    if whole:
        options["scale"] = 0.25
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), options)


@pytest.mark.parametrize("seed", range(30))
def test_choice(seed: int) -> None:
    draw = random.Random(seed)
    whole = seed % 2 == 0
    q, k, _, options = case(draw, torch.float32 if whole else draw.choice([torch.float32, torch.float64]), whole)
    (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
    chosen = gs.topk_blocks(q, k, **options)
    block, topk, top_p = options["block_size"], options["topk"], options["top_p"]
    C, heads = -(-K // block), G if options["per"] == "group" else H
    n = C if topk is None else min(topk, C)
    assert chosen.indices.shape == (B, heads, -(-Q // block), n) and chosen.indices.dtype == torch.int32
    how = {x: options[x] for x in ("causal", "score", "local", "first")}
    how |= {"block": block, "scale": D**-0.5 if options["scale"] is None else options["scale"], "Q": Q}
    for b, h, (t, rows) in ((b, h, r) for b in range(B) for h in range(heads) for r in enumerate(ranges(Q, block))):
        at = slice(h * H // heads, (h + 1) * H // heads)
        wanted = oracle(q[b, at].double().numpy(), k[b, h * G // heads].double().numpy(), rows, **how)
        share = softmax(wanted.score)
        found = [c for c in chosen.indices[b, h, t].tolist() if c >= 0]
        assert chosen.indices[b, h, t, len(found) :].tolist() == [-1] * (n - len(found))
        taken, mass = [], 0.0
        for c in wanted.order[:n]:
            if top_p is not None and len(taken) >= wanted.always and mass >= top_p - (0 if top_p < 1 else -1):
                break
            taken.append(c)
            mass += share[c]
        if whole:
            assert found == taken
            assert float(chosen.covered[b, h, t]) == pytest.approx(mass, abs=1e-6)
        else:  # scores are rounded: they are in order but for that
            assert found[: wanted.always] == taken[: wanted.always] and len(found) == len(taken)
            values = [wanted.score[c] for c in found[wanted.always :]]
            assert all(x >= y - 1e-5 * (1 + abs(y)) for x, y in pairwise(values))
            left = max((wanted.score[c] for c in wanted.order if c not in found), default=-math.inf)
            assert not values or values[-1] >= left - 1e-5 * (1 + abs(left))


@pytest.mark.parametrize("seed", range(10))
def test_no_score_is_over_its_bound(seed: int) -> None:
    q, k, _, options = case(random.Random(seed), torch.float64, False)
    scale = options["scale"] or 0.7
    for rows in block_scores.row_bounds(q, k, 64, scale, torch.float64):
        part = q[:, :, rows.first : rows.end].unflatten(1, (k.shape[1], -1))
        s = scale * part @ k.unsqueeze(2).mT
        over = rows.bounds.repeat_interleave(64, -1)[..., : k.shape[2]]
        assert (s <= over + 1e-12).all()
        assert (over - s).amin() < 10  # not merely large


def mask_of(chosen: gs.BlockIndices, q: Tensor, k: Tensor, block: int, causal: bool) -> Tensor:
    """The kept pairs, (B, H, Q, K), by loops over the lists."""
    (B, H, Q, _), K = q.shape, k.shape[2]
    mask = np.zeros((B, H, Q, K), dtype=bool)
    heads = chosen.indices.shape[1]
    for b, h, t in np.ndindex(B, H, chosen.indices.shape[2]):
        for c in chosen.indices[b, h * heads // H, t].tolist():
            if c >= 0:
                mask[b, h, t * block : (t + 1) * block, c * block : (c + 1) * block] = True
    return torch.from_numpy(mask & np.tri(Q, K, K - Q, dtype=bool) if causal else mask)


@pytest.mark.parametrize("seed", range(12))
def test_attention_over_the_chosen_blocks(seed: int) -> None:
    draw = random.Random(seed)
    q, k, v, options = case(draw, torch.float64, False)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    chosen = gs.topk_blocks(q, k, **options)
    mask = mask_of(chosen, q, k, options["block_size"], options["causal"])
    given: Any = chosen
    if seed % 3 == 1:
        given, mask = chosen & gs.Causal(), mask & torch.ones_like(mask).tril(k.shape[2] - q.shape[2])
    elif seed % 3 == 2:
        ids = torch.arange(k.shape[2]) // 70
        given = gs.DocumentIds(ids) & chosen
        place = torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
        mask = mask & ((place.clamp(min=0) // 70)[:, None] == ids) & (place >= 0)[:, None]
    results = []
    for pattern in (given, mask):
        out, lse = gs.attention(q, k, v, pattern, return_lse=True)
        loss = (out * torch.linspace(-1, 1, 8, dtype=out.dtype)).sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)
    assert "SelectedBlocks(" in str(gs.explain(q, k, v, chosen))


class Masses(NamedTuple):
    found: Tensor
    true: Tensor


def masses(draw: random.Random, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Masses:
    options = options | {"score": "bound"}
    chosen = gs.topk_blocks(q, k, **options)
    _, lse = gs.attention(q, k, v, chosen, scale=options["scale"], return_lse=True)
    found = chosen.kept_mass(lse)
    assert found.dtype == lse.dtype and found.shape == lse.shape and not found.requires_grad
    (_, H, Q, D), (_, G, K, _) = q.shape, k.shape
    scale = D**-0.5 if options["scale"] is None else options["scale"]
    s = scale * q.double() @ k.double().repeat_interleave(H // G, 1).mT
    if options["causal"]:
        s = s.masked_fill(~torch.ones(Q, K, dtype=torch.bool).tril(K - Q), -math.inf)
    mask = mask_of(chosen, q, k, options["block_size"], options["causal"])
    every, kept = s.logsumexp(-1), s.masked_fill(~mask, -math.inf).logsumexp(-1)
    return Masses(found, torch.where(every == -math.inf, 1, (kept - every).exp()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_kept_mass_is_never_over_the_true_one(dtype: torch.dtype) -> None:
    draw, rows, between = random.Random(f"{dtype}"), 0, 0
    while rows < 10_000:
        inputs = case(draw, dtype, False, draw.choice([0.3, 1.0, 3.0, 30.0]))
        if inputs.k.shape[2] <= 3 * inputs.options["block_size"]:
            continue
        found, true = masses(draw, dtype, *inputs)
        assert (found >= 0).all() and (found.double() <= true).all()
        rows += found.numel()
        between += int(((found > 0.01) & (true < 0.99)).sum())
    assert between > 500  # it says something of rows that drop something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kept_mass_is_close_where_bounds_are(dtype: torch.dtype) -> None:
    """Equal keys in a block: each bound is the score, and what is taken off for rounding is all that differs."""
    draw, g, rows = random.Random(7), torch.Generator().manual_seed(7), 0
    for amplitude in (0.1, 1.0, 3.0, 20.0) * 3:
        q, v = (torch.randn(2, 2, 600, 16, generator=g).mul(amplitude).to(dtype) for _ in range(2))
        k = torch.randn(2, 1, 10, 16, generator=g).mul(amplitude).repeat_interleave(64, 2)[:, :, :600].to(dtype)
        v = v[:, :1]
        options = {"causal": draw.random() < 0.5, "block_size": 64, "topk": 5, "scale": None, "per": "head"}
        found, true = masses(draw, dtype, q, k, v, options)
        assert (found.double() <= true).all()
        off = 1e-9 if dtype == torch.float64 else 1e-3 if amplitude < 20 else 0.2
        assert ((true - found.double()) <= off).all()
        rows += found.numel()
    assert rows > 10_000


def test_forms_and_layouts() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 8, generator=g) for _ in range(3))
    options: dict[str, Any] = {"topk": 3, "causal": True, "score": "bound"}
    whole = gs.topk_blocks(q, k, **options)
    _, lse = gs.attention(q, k, v, whole, return_lse=True)
    mass = whole.kept_mass(lse)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    other = gs.topk_blocks(*turned[:2], layout="bshd", **options)
    assert torch.equal(other.indices, whole.indices) and torch.equal(other.kept_mass(lse), mass)
    heads = gs.topk_blocks(q[0], k[0], **options)
    assert torch.equal(heads.kept_mass(gs.attention(q[0], k[0], v[0], heads, return_lse=True)[1]), mass[0])
    one = gs.topk_blocks(q[0, 0], k[0, 0], **options)
    assert torch.equal(one.indices[0, 0], whole.indices[0, 0])
    torch.testing.assert_close(one.kept_mass(lse[0, 0]), mass[0, 0])


def test_the_limit_of_blocks_is_said() -> None:
    q, k = (torch.randn(1, 1, 1024, 16, generator=torch.Generator().manual_seed(x)) for x in (0, 1))
    short, enough = (gs.topk_blocks(q, k, causal=False, topk=n, top_p=0.9) for n in (4, None))
    assert short.indices.shape[-1] == 4 and enough.indices.shape[-1] == 16
    assert (short.covered < 0.9).all() and (short.indices >= 0).all()
    assert (enough.covered >= 0.9).all() and (enough.indices < 0).any(-1).all()


@pytest.mark.parametrize("score", ["mean", "bound"])
def test_autocast_rounds_what_attention_rounds_and_no_score(score: Any) -> None:
    q, k, v = (torch.randn(1, 2, 640, 32, generator=torch.Generator().manual_seed(x)) for x in (0, 1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gs.topk_blocks(q, k, causal=True, topk=5, score=score)
        _, lse = gs.attention(q, k, v, cast, return_lse=True)
    rounded = [x.bfloat16() for x in (q, k, v)]
    plain = gs.topk_blocks(*rounded[:2], causal=True, topk=5, score=score)
    assert torch.equal(plain.indices, cast.indices) and torch.equal(plain.covered, cast.covered)
    if score == "bound":
        assert torch.equal(cast.kept_mass(lse), plain.kept_mass(gs.attention(*rounded, plain, return_lse=True)[1]))


def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and no array of all rows and blocks."""
    q, k = (torch.randn(2, 2, 1500, 4, generator=torch.Generator().manual_seed(x)) for x in (0, 1))
    lse = torch.zeros(2, 2, 1500)
    results = []
    for most in (2**24, 1):
        monkeypatch.setattr(block_scores, "MOST", most)
        with Largest() as seen:
            chosen = gs.topk_blocks(q, k, causal=True, topk=6, score="bound")
            results.append((chosen.indices, chosen.covered, chosen.kept_mass(lse)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert seen.elements <= 2 * 2 * 1500 * 4 < 2 * 2 * 1500 * 24


def everything(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    mean = gs.topk_blocks(q, k, causal=True, topk=3, per="group")
    out = gs.attention(q, k, v, mean)
    bound = gs.topk_blocks(q, k, causal=True, top_p=0.7, topk=4, score="bound")
    more, lse = gs.attention(q, k, v, bound & gs.SlidingWindow(300), return_lse=True)
    return out + more, bound.kept_mass(lse), bound.covered, mean.indices


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled() -> None:
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        g = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, H, 300, 8, generator=g).requires_grad_() for H in (4, 2, 2))
        found, wanted = compiled(q, k, v), everything(q, k, v)
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)
        results = (torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (found, wanted))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y)


def test_nothing_is_read_back() -> None:
    def choose() -> None:
        q, k = torch.randn(1, 4, 300, 8), torch.randn(1, 2, 400, 8)
        for score, top_p in (("mean", None), ("bound", 0.5)):
            chosen = gs.topk_blocks(q, k, causal=True, topk=4, top_p=top_p, score=score)
        chosen.kept_mass(torch.zeros(1, 4, 300))

    with NothingIsRead():
        choose()
    with FakeTensorMode():  # which has no values to read
        choose()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": 1}, "causal must be True or False; got 1"),
        ({"block_size": 32}, "block_size must be 64 or 128"),
        ({"topk": None}, "topk or top_p must be given"),
        ({"topk": 0}, "topk must be an integer of at least 1"),
        ({"topk": 2}, r"topk must be at least the 3 blocks .*first=1, local=1, whose positions lie in two"),
        ({"topk": 2, "local": 2, "first": 0}, "topk must be at least the 3 blocks"),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\]"),
        ({"top_p": math.nan}, "top_p must be a number"),
        ({"top_p": "0.5"}, "top_p must be a number"),
        ({"score": "max"}, 'score must be "mean" or "bound"; got .max.'),
        ({"per": None}, 'per must be "head" or "group"'),
        ({"local": -1}, "local must be an integer of at least 0"),
        ({"first": 1.0}, "first must be an integer of at least 0"),
        ({"scale": "1"}, "scale must be a number"),
        ({"layout": "bnhd"}, "layout must be"),
        ({"k": torch.zeros(1, 3, 500, 8)}, "have a number of heads G that divides"),
        ({"k": torch.zeros(1, 2, 500, 4)}, "have the head size of q"),
        ({"q": torch.zeros(500, 8)}, "q and k must both have 2, 3 or 4 dimensions"),
        ({"q": torch.zeros(1, 2, 500, 8, dtype=torch.int32)}, "q must be a tensor of float16"),
        ({"q": [1.0]}, "q must be a torch tensor"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    given = {"q": torch.zeros(1, 2, 470, 8), "k": torch.zeros(1, 2, 500, 8), "causal": True, "topk": 4} | options
    with pytest.raises(ValueError, match=message):
        gs.topk_blocks(given.pop("q"), given.pop("k"), **given)


def test_errors_of_kept_mass() -> None:
    x = torch.zeros(1, 2, 300, 8)
    with pytest.raises(gs.Unsupported, match='kept_mass needs blocks that were chosen with score="bound"'):
        gs.topk_blocks(x, x, causal=True, topk=3).kept_mass(torch.zeros(1, 2, 300))
    chosen = gs.topk_blocks(x, x, causal=True, topk=3, score="bound")
    for lse in (torch.zeros(2, 300), torch.zeros(1, 2, 300, dtype=torch.float64), None):
        with pytest.raises(ValueError, match=r"lse must be a tensor of shape \(1, 2, 300\), torch.float32"):
            chosen.kept_mass(lse)


def test_repeated_calls_are_known() -> None:
    """The first and a later call of one key are the same, of the numbers that tensors hold then; errors stay."""
    forget_all()
    q, k = (torch.randn(1, heads, 320, 16) for heads in (4, 2))
    kinds: list[dict[str, Any]] = [
        {"topk": 3}, {"topk": 4}, {"top_p": 0.5}, {"topk": 3, "score": "bound"}, {"topk": 3, "per": "group"},
        {"topk": 3, "scale": 2.0}, {"topk": 3, "first": 0}, {"topk": 3, "local": 2}, {"topk": 3, "block_size": 128},
    ]  # fmt: skip
    found = [[gs.topk_blocks(q, k, causal=True, **kind) for kind in kinds] for _ in range(2)]
    assert len(api.known) == len(kinds)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.indices, b.indices) and torch.equal(a.covered, b.covered) and repr(a) == repr(b)
        assert a.rule == b.rule and b._choice.q.data_ptr() == q.data_ptr()
    chosen = found[1][0]
    k.copy_(k.flip(2))
    again = gs.topk_blocks(q, k, causal=True, topk=3)
    forget_all()
    assert torch.equal(again.indices, gs.topk_blocks(q, k, causal=True, topk=3).indices)
    assert not torch.equal(again.indices, chosen.indices)
    for wrong in ({"topk": 0}, {"topk": 1, "local": 2}, {"topk": True}, {"topk": 3, "per": "all"}):
        for _ in range(2):
            with pytest.raises(ValueError):
                gs.topk_blocks(q, k, causal=True, **wrong)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        cast = gs.topk_blocks(q, k, causal=True, topk=3)
    assert cast._choice.q.dtype == torch.bfloat16 and len(api.known) == 1
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    assert torch.equal(gs.topk_blocks(*leaves, causal=True, topk=3).indices, again.indices)
    with torch.inference_mode():
        assert torch.equal(gs.topk_blocks(q, k, causal=True, topk=3).indices, again.indices)
    few = gs.topk_blocks(q[0], k[0], causal=True, topk=3)
    turned = gs.topk_blocks(q.transpose(1, 2), k.transpose(1, 2), causal=True, topk=3, layout="bshd")
    assert torch.equal(few.indices, again.indices) and torch.equal(turned.indices, again.indices)
    x = weakref.ref(q)
    del q, found, chosen, again, few, turned
    gc.collect()
    assert x() is None


def test_how_much_of_the_package_a_repeated_call_enters() -> None:
    q, k = (torch.randn(1, 4, 320, 16) for _ in range(2))
    for _ in range(2):
        repeat = entered(lambda: gs.topk_blocks(q, k, topk=3, causal=True))
    assert len(repeat.files) <= 10 and len(repeat.functions) <= 22, sorted(repeat.functions)
