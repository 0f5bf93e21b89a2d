"""`topk_blocks` of JAX, against loops over rows and blocks, and the mass that is kept, against a softmax in float64."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.blocks import lists_jax
from gossamer.plan.problem import Unsupported
from tests.support.blocks_definition import oracle, softmax


def arrays(rng: np.random.Generator, sizes: tuple[int, ...], whole: bool = False) -> list[np.ndarray]:
    """q (B, Q, H, D) and k (B, K, G, D); whole: of numbers whose scores are exact, with ties."""
    B, H, G, Q, K, D = sizes
    draw = (lambda shape: rng.integers(-2, 3, shape)) if whole else rng.standard_normal
    return [draw(shape).astype(np.float32) for shape in ((B, Q, H, D), (B, K, G, D))]


def check(q: np.ndarray, k: np.ndarray, **options: Any) -> None:
    """All lists, and what they cover."""
    (B, Q, H, D), (_, K, G, _) = q.shape, k.shape
    block, group = options.get("block_size", 64), H // G
    found = jax.jit(lambda q, k: gsj.topk_blocks(q, k, **options))(q, k)
    shared = options.get("per", "head") == "group"
    indices, covered = np.asarray(found.indices), np.asarray(found.covered)
    C, T = -(-K // block), -(-Q // block)
    topk, top_p = options.get("topk") or C, options.get("top_p") or 1.0
    assert indices.shape == (B, G if shared else H, T, min(topk, C)) and covered.shape == indices.shape[:3]
    of_options = {
        "causal": options["causal"], "block": block, "score": options.get("score", "mean"),
        "local": options.get("local", 1), "first": options.get("first", 1), "scale": options.get("scale", D**-0.5),
    }  # fmt: skip
    for b, h, t in np.ndindex(indices.shape[:3]):
        heads = slice(h * group, (h + 1) * group) if shared else slice(h, h + 1)
        of_q = q[b].astype(float).swapaxes(0, 1)[heads]
        of_k = k[b, :, h if shared else h // group].astype(float)
        want = oracle(of_q, of_k, range(t * block, min(t * block + block, Q)), Q=Q, **of_options)
        share, taken, total = softmax(want.score), [], 0.0
        for place, c in enumerate(want.order[:topk]):
            if place >= want.always and total >= top_p - 1e-6:
                break
            taken.append(c)
            total += share[c]
        mine = [c for c in indices[b, h, t] if c >= 0]
        scores = [want.score[c] for c in mine[want.always :]], [want.score[c] for c in taken[want.always :]]
        assert sorted(mine[: want.always]) == sorted(taken[: want.always])
        np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-5)  # near ties may be the other way
        assert abs(covered[b, h, t] - total) < 1e-4


@pytest.mark.parametrize("seed", range(12))
def test_lists(seed: int) -> None:
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    G = draw.choice([1, 2])
    Q = draw.choice([64, 130, 300])
    q, k = arrays(rng, (draw.choice([1, 2]), G * draw.choice([1, 2]), G, Q, max(Q, draw.choice([200, 333])), 8))
    options = {
        "causal": draw.random() < 0.5, "per": draw.choice(["head", "group"]), "score": draw.choice(["mean", "bound"]),
        "local": draw.choice([0, 1, 2]), "first": draw.choice([0, 1, 2]), "block_size": draw.choice([64, 64, 128]),
        "topk": draw.choice([None, 6, 100]), "top_p": draw.choice([None, 0.3, 0.8]),
    }  # fmt: skip
    if options["topk"] is None and options["top_p"] is None:
        options["top_p"] = 1.0
    if seed % 4 == 0:
        options["scale"] = -0.7
    check(q, k, **options)


def test_ties_go_to_the_first() -> None:
    rng = np.random.default_rng(0)
    q, k = arrays(rng, (1, 2, 1, 128, 640, 4), whole=True)
    k[:] = k[:, :1]
    found = gsj.topk_blocks(q, k, causal=False, topk=5, first=0, local=1)
    assert found.indices[0, 0].tolist() == [[8, 0, 1, 2, 3], [9, 0, 1, 2, 3]]


def test_bounds_of_many_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are held for some blocks at a time."""
    q, k = arrays(np.random.default_rng(1), (1, 2, 1, 500, 500, 8))
    want = gsj.topk_blocks(q, k, causal=True, topk=4, score="bound")
    monkeypatch.setattr(lists_jax, "MOST", 3 * 2 * 64 * 8)
    jax.clear_caches()
    found = gsj.topk_blocks(q, k, causal=True, topk=4, score="bound")
    np.testing.assert_array_equal(found.indices, want.indices)
    lse = gsj.attention(q, k, k, found, return_residual=True)[1]
    assert ((found.kept_mass(lse) > 0) & (found.kept_mass(lse) <= 1)).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("per", ["head", "group"])
def test_attention_over_them(causal: bool, per: str) -> None:
    """As over the mask of the lists, with a gradient, under jit, and of lists that are given again."""
    q, k = (jnp.asarray(x) for x in arrays(np.random.default_rng(2), (2, 4, 2, 200, 300, 16)))

    @jax.jit
    def step(q: Any, k: Any) -> Any:
        chosen = gsj.topk_blocks(q, k, causal=causal, topk=4, per=per)
        return (gsj.attention(q, k, k, chosen) ** 2).sum(), chosen

    (total, chosen), slopes = jax.value_and_grad(step, (0, 1), has_aux=True)(q, k)
    keep = np.zeros((2, 4, 256, 320), bool)
    heads = chosen.indices.shape[1]
    for b, h, t in np.ndindex(2, 4, 4):
        for c in np.asarray(chosen.indices[b, h * heads // 4, t]):
            if c >= 0:
                keep[b, h, t * 64 : t * 64 + 64, c * 64 : c * 64 + 64] = True
    keep = keep[:, :, :200, :300] & (gs.Causal() if causal else gs.Dense()).materialize(200, 300)
    masked = lambda q, k: (gsj.attention(q, k, k, keep) ** 2).sum()  # noqa: E731
    want, right = jax.value_and_grad(masked, (0, 1))(q, k)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    for one, other in zip(slopes, right, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    plan = gsj.prepare_blocks(chosen.indices, q, k, pattern=gs.Causal() if causal else None)
    np.testing.assert_allclose((gsj.attention(q, k, k, plan) ** 2).sum(), want, rtol=1e-5)
    out = gsj.entmax_attention(q, k, k, chosen)
    np.testing.assert_allclose(out, gsj.entmax_attention(q, k, k, keep), atol=1e-5)


@pytest.mark.parametrize("per", ["head", "group"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_mass(per: str, dtype: str) -> None:
    """Never over what a softmax in float64 keeps, and not far from it where keys of a block are alike."""
    rng = np.random.default_rng(3)
    q, k = arrays(rng, (1, 4, 2, 256, 384, 16))
    k = np.repeat(k[:, ::64], 64, 1) + 0.02 * k
    q, k = (jnp.asarray(3 * x).astype(dtype) for x in (q, k))
    chosen = gsj.topk_blocks(q, k, causal=True, topk=4, score="bound", per=per)
    lse = gsj.attention(q, k, k, chosen, return_residual=True)[1]
    mass = np.asarray(jax.jit(lambda chosen, lse: chosen.kept_mass(lse))(chosen, lse), float)
    of_q, of_k = (np.asarray(x, float) for x in (q, np.repeat(np.asarray(k), 2, 2)))
    scores = np.einsum("bihd,bjhd->bhij", of_q, of_k) / 4
    scores[..., ~gs.Causal().materialize(256, 384)] = -np.inf
    every = scores.max(-1, keepdims=True)
    p = np.exp(scores - every)
    p /= p.sum(-1, keepdims=True)
    blocks = p.reshape(1, 4, 256, 6, 64).sum(-1)
    lists = np.repeat(np.asarray(chosen.indices), 4 // chosen.indices.shape[1], 1)
    kept = np.zeros((1, 4, 256))
    for h, i in np.ndindex(4, 256):
        kept[0, h, i] = blocks[0, h, i, [c for c in lists[0, h, i // 64] if c >= 0]].sum()
    kept = kept.swapaxes(1, 2)
    assert mass.dtype == float and (mass <= kept + 1e-12).all() and (kept - mass).mean() < 0.05


def test_forms_and_nothing() -> None:
    q, k = arrays(np.random.default_rng(4), (1, 1, 1, 100, 164, 8))
    want = gsj.topk_blocks(q, k, causal=True, topk=2, score="bound")
    for at in ((0,), (0, slice(None), 0)):
        found = gsj.topk_blocks(q[at], k[at], causal=True, topk=2, score="bound")
        np.testing.assert_array_equal(found.indices, want.indices)
        _, lse = gsj.attention(q[at], k[at], k[at], found, return_residual=True)
        assert found.kept_mass(lse).shape == lse.shape
    for some, others in ((q[:, :0], k), (q, k[:, :0]), (q[:0], k[:0])):
        found = gsj.topk_blocks(some, others, causal=True, topk=3, score="bound")
        assert (found.indices == -1).all() and not found.covered.any()
        out, lse = gsj.attention(some, others, others, found, return_residual=True)
        assert not out.any() and (found.kept_mass(lse) == 1).all()


def test_vmap() -> None:
    q, k = (jnp.asarray(x) for x in arrays(np.random.default_rng(5), (3, 2, 2, 128, 192, 8)))
    attend = lambda q, k: gsj.attention(q, k, k, gsj.topk_blocks(q, k, causal=True, topk=3))  # noqa: E731
    found = jax.vmap(lambda q, k: attend(q[None], k[None])[0])(q, k)
    np.testing.assert_allclose(found, attend(q, k), atol=1e-5)


def test_what_is_wrong() -> None:
    q, k = arrays(np.random.default_rng(6), (1, 2, 1, 128, 192, 8))
    for options, text in (
        ({"topk": None}, "topk or top_p must be given"),
        ({"topk": 1}, r"topk must be at least the 2 blocks that are always kept \(first=1, local=1\); got 1"),
        ({"topk": 2.5}, "topk must be an integer of at least 1, or None"),
        ({"top_p": 1.5}, r"top_p must be a number in \(0, 1\], or None"),
        ({"block_size": 32}, "block_size must be 64 or 128"),
        ({"score": "max"}, 'score must be "mean" or "bound"'),
        ({"per": "batch"}, 'per must be "head" or "group"'),
        ({"local": -1}, "local must be an integer of at least 0"),
        ({"causal": 1}, "causal must be True or False"),
        ({"scale": "1"}, "scale must be a number"),
    ):
        with pytest.raises(ValueError, match=text):
            gsj.topk_blocks(q, k, **{"causal": False, "topk": 4, **options})
    chosen = gsj.topk_blocks(q, k, causal=False, topk=3)
    with pytest.raises(Unsupported, match="kept_mass needs blocks"):
        chosen.kept_mass(jnp.zeros((1, 128, 2)))
    chosen = gsj.topk_blocks(q, k, causal=False, topk=3, score="bound")
    with pytest.raises(ValueError, match=r"lse must be an array of shape \(1, 128, 2\), float32"):
        chosen.kept_mass(jnp.zeros((1, 2, 128)))
    assert repr(chosen) == "SelectedBlocks((1, 2, 2, 3), 64, causal=False)"
