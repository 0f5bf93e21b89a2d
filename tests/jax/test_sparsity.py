"""`create_sparsity_mask` against all distances, `sparse_attention` as the mission calls it, splash masks."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer.jax as gsj

CALLS = 150


def near(x: Any, threshold: float, box: Any) -> np.ndarray:
    """The definition, over all pairs."""
    x = np.asarray(x, np.float64)
    step = x[:, None] - x
    sizes = [box] * x.shape[1] if box is None or np.isscalar(box) else box
    for axis, size in enumerate(sizes):
        if size is not None:
            step[..., axis] -= size * np.round(step[..., axis] / size)
    found: np.ndarray = np.sqrt((step * step).sum(-1)) <= threshold
    return found


@pytest.mark.parametrize("part", range(2))
def test_random_points(part: int) -> None:
    """1 to 3 dimensions by cells, wider ones by blocks; points on a grid, coincident ones, boxes of any axes."""
    for call in range(CALLS):
        rng = np.random.default_rng((part, call))
        N, d = int(rng.integers(1, 160)), int(rng.choice([1, 2, 3, 4, 64]))
        x = rng.uniform(-1, 2, (N, d)).astype(rng.choice([np.float32, np.float64]))
        if rng.random() < 0.3:
            x = np.round(x * 4) / 4  # distances that are the threshold
        if rng.random() < 0.1:
            x[:] = x[0]
        threshold = float(rng.choice([0, 1e-9, 0.05, 0.25, 0.3, 1.0, 3.0]))
        box: Any = None
        if rng.random() < 0.5:
            box = [None if rng.random() < 0.4 else float(rng.uniform(0.2, 4)) for _ in range(d)]
            box = 1.0 if rng.random() < 0.5 else box
        mask = gsj.create_sparsity_mask(x, threshold, box)
        assert (mask.materialize(N, N) == near(x, threshold, box)).all(), (call, N, d, threshold, box)
        assert mask.materialize(N, N).diagonal().all()


def nearest(x: Any, share: float, box: Any) -> np.ndarray:
    """The definition of a share: the pairs within the distance of that rank among all."""
    every = np.sqrt(squared(x, box))
    wanted = math.ceil(Fraction(str(share)) * every.size)
    found: np.ndarray = every <= np.sort(every, axis=None)[wanted - 1]
    return found


@pytest.mark.parametrize("part", range(2))
def test_random_shares(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any dimension, ties, points at one place, numbers too large or too small to be squared, samples of a few."""
    from gossamer.jax import sparsity

    for call in range(CALLS):
        rng = np.random.default_rng((2, part, call))
        N, d = int(rng.integers(1, 160)), int(rng.choice([1, 2, 3, 4, 64]))
        x = rng.uniform(-1, 2, (N, d)).astype(rng.choice([np.float32, np.float64]))
        kind = rng.random()
        if kind < 0.3:
            x = np.round(x * 4) / 4
        elif kind < 0.5:
            x[rng.random(N) < rng.random()] = x[0]
        elif kind < 0.6:
            x = x.astype(np.float64) * 10.0 ** rng.choice([-300, -158, -20, 20, 160])
        elif kind < 0.7:  # one cluster far from the others
            x[: N // 2] *= 1e-6
        share = rng.choice([1e-9, 1 / N, 0.01, 0.07, 0.22, rng.random() or 1.0, 1 - 1e-9, 1.0])
        box: Any = None
        if rng.random() < 0.4:
            box = [None if rng.random() < 0.4 else float(rng.uniform(0.2, 4)) for _ in range(d)]
        monkeypatch.setattr(sparsity, "PAIRS", int(rng.choice([600, 5000, 2**22])))
        monkeypatch.setattr(sparsity, "DEVIATIONS", int(rng.choice([0, 6])))
        with np.errstate(over="ignore"):
            mask, want = gsj.create_sparsity_mask(x, box=box, share=share), nearest(x, share, box)
        assert (mask.materialize(N, N) == want).all(), (call, N, d, share, box)
        assert want.diagonal().all() and want.sum() >= share * N * N * (1 - 1e-12)


def test_a_share_as_it_is_written() -> None:
    x = np.random.default_rng(0).random((1000, 64))
    for share in (0.01, np.float32(0.5), jnp.float32(0.25), 1):
        assert len(gsj.create_sparsity_mask(x, share=share).indices) == float(share) * 1000**2


def test_blocks_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.jax import sparsity

    monkeypatch.setattr(sparsity, "PAIRS", 1000)
    rng = np.random.default_rng(0)
    for d, threshold in ((2, 0.1), (3, 0.2), (20, 1.6)):
        x = rng.random((200, d))
        assert (gsj.create_sparsity_mask(x, threshold).materialize(200, 200) == near(x, threshold, None)).all()
        assert (gsj.create_sparsity_mask(x, threshold, 1.0).materialize(200, 200) == near(x, threshold, 1.0)).all()


@pytest.mark.parametrize("share", [0.25, 0.01, None])
def test_the_example_of_the_mission(share: float | None) -> None:
    """4096 rows of 64 features: at shares of the pairs, and at a threshold that keeps rows alone."""
    q, k, v = (jax.random.normal(jax.random.key(i), (4096, 64)) for i in range(3))
    if share is None:
        mask = gsj.create_sparsity_mask(q, threshold=0.01)
        out = gsj.sparse_attention(q, k, v, mask)
        assert len(mask.indices) == 4096 and (out == v).all()
        return
    mask = gsj.create_sparsity_mask(q, share=share)
    out = gsj.sparse_attention(q, k, v, mask)
    assert 0 <= len(mask.indices) - share * 4096**2 < 3  # pairs come in twos
    keep = mask.materialize(4096, 4096)[None, None]
    want = jax.nn.dot_product_attention(*(x[None, :, None] for x in (q, k, v)), mask=keep)
    assert jnp.abs(out - want[0, :, 0]).max() < 2e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.ones(3)}, r"x must be an array \(N, d\) of real numbers"),
        ({"x": np.ones((3, 2), complex)}, "x must be an array"),
        ({"x": np.full((3, 2), np.nan)}, "x must hold finite numbers"),
        ({"threshold": -0.1}, "threshold must be a finite number of at least 0"),
        ({"threshold": float("inf")}, "threshold must be a finite number"),
        ({"threshold": True}, "threshold must be a finite number"),
        ({"threshold": None}, "exactly one of threshold and share must be given; got neither"),
        ({"share": 0.1}, "exactly one of threshold and share must be given; got threshold=1.0 .float. and share=0.1"),
        ({"threshold": None, "share": 0.0}, "share must be a number over 0 and at most 1; got 0.0"),
        ({"threshold": None, "share": 1.01}, "share must be a number over 0 and at most 1"),
        ({"threshold": None, "share": float("nan")}, "share must be a number over 0 and at most 1"),
        ({"threshold": None, "share": True}, "share must be a number over 0 and at most 1"),
        ({"threshold": None, "share": 0.1, "capacity": 3}, "share must be left out under jit and with a capacity"),
        ({"box": 0.0}, "box must be a positive number, 2 of them or None"),
        ({"box": [1.0]}, "box must be a positive number, 2 of them or None"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"x": np.ones((3, 2)), "threshold": 1.0} | arguments
    with pytest.raises(ValueError, match=message):
        gsj.create_sparsity_mask(**given)


@pytest.mark.parametrize("call", range(8))
def test_lists_under_jit(call: int) -> None:
    """The pairs are those of the pattern that is made on the host, and so is attention over them, with gradients."""
    rng = np.random.default_rng(call)
    N, d = int(rng.integers(1, 200)), int(rng.integers(1, 4))
    x = jnp.asarray(rng.random((N, d)), jnp.float32)
    if call % 3 == 0:
        x = jnp.round(x * 4) / 4 + 2.0**-9  # coincident points, and distances that the threshold is between
    box = [None, 1.25, tuple(rng.choice([None, 1.25]) for _ in range(d))][call % 3]
    threshold = float(rng.choice([0.05, 0.27, 0.6]))
    pattern = gsj.create_sparsity_mask(x, threshold, box)
    capacity = int(np.diff(pattern.indptr).max())
    heads, scale = ((2, 2, 2), (6, 2, 2), (3, 1, 1))[call % 3], (0.3, -0.3, 0, np.float32(-1.0))[call % 4]
    q, k, v = (jnp.asarray(rng.standard_normal((2, N, H, 8)), jnp.float32) for H in heads)

    @jax.jit
    def lists(x: jax.Array, q: jax.Array) -> Any:
        mask = gsj.create_sparsity_mask(x, threshold, box, capacity=capacity)
        out, lse = gsj.sparse_attention(q, k, v, mask, scale=scale, return_residual=True)
        return mask.indices, mask.overflow, out, lse

    indices, overflow, out, lse = lists(x, q)
    keep = np.zeros((N, N + 1), bool)
    keep[np.arange(N)[:, None], np.asarray(indices)] = True
    near = np.abs(np.sqrt(squared(x, box)) / threshold - 1) < 1e-6  # where float32 may decide otherwise
    assert not overflow and ((keep[:, :N] == pattern.materialize(N, N)) | near).all()
    wanted = gsj.sparse_attention(q, k, v, pattern, scale=scale, return_residual=True)
    if not (near & (keep[:, :N] != pattern.materialize(N, N))).any():
        for a, b in zip((out, lse), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)
        got, want = (
            jax.grad(lambda q, of=of: gsj.sparse_attention(q, k, v, of, scale=scale).sum())(q)
            for of in (gsj.create_sparsity_mask(x, threshold, box, capacity=capacity), pattern)
        )
        np.testing.assert_allclose(got, want, atol=2e-5)


def squared(x: Any, box: Any) -> np.ndarray:
    """The squared distances of all pairs."""
    x = np.asarray(x, np.float64)
    step = x[:, None] - x
    for axis, size in enumerate([box] * x.shape[1] if box is None or np.isscalar(box) else box):
        if size is not None:
            step[..., axis] -= size * np.round(step[..., axis] / size)
    found: np.ndarray = (step * step).sum(-1)
    return found


def test_lists_that_are_too_short() -> None:
    """Are told of, and what depends on them is NaN."""
    x = jnp.concatenate([jnp.zeros((6, 2)), jnp.ones((3, 2))])
    mask = jax.jit(lambda x: gsj.create_sparsity_mask(x, 0.5, capacity=4))(x)
    v = jnp.arange(18.0).reshape(9, 2)
    out = gsj.sparse_attention(v, v, v, mask)
    assert mask.overflow and jnp.isnan(out[:6]).all() and jnp.isfinite(out[6:]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "make the mask outside of jit, or give the capacity"),
        ({"capacity": -1}, "capacity must be an integer in \\[0, "),
        ({"capacity": 8, "x": np.ones((3, 4))}, "positions .N, d., d from 1 to 3, where lists are made"),
        ({"capacity": 8, "x": np.ones((3, 2), int)}, "positions .N, d., d from 1 to 3"),
        ({"capacity": 8, "threshold": 0}, "over 0 where lists are made"),
        ({"capacity": 8, "box": 1.5}, "threshold must be at most half the box, 0.75; got 1.0"),
    ],
)
def test_lists_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"threshold": 1.0, **arguments}
    x = jnp.asarray(given.pop("x", np.ones((3, 2))))
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: gsj.create_sparsity_mask(x, **given).indices)(x)


def test_room_for_more_than_all_points() -> None:
    x = jnp.ones((3, 2))
    mask = gsj.create_sparsity_mask(x, 1.0, capacity=10**9)
    assert mask.indices.shape == (3, 3) and not mask.overflow


def test_options_of_lists() -> None:
    x = jnp.ones((3, 2))
    with pytest.raises(ValueError, match="return_residual must be True or False; got 1"):
        gsj.sparse_attention(x, x, x, gsj.create_sparsity_mask(x, 1.0, capacity=3), return_residual=1)
    with pytest.raises(ValueError, match="scale and return_residual; got key_lengths, softcap"):
        gsj.sparse_attention(x, x, x, gsj.create_sparsity_mask(x, 1.0, capacity=8), softcap=1.0, key_lengths=None)


def test_splash_masks() -> None:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash

    N, rng = 96, np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, N, 2, 8)), jnp.float32)
    shape = (N, N)
    for mask in (
        splash.FullMask(shape), splash.CausalMask(shape), splash.CausalMask(shape, 3), splash.CausalMask(shape, -5),
        splash.LocalMask(shape, (5, None), 0), splash.LocalMask(shape, (5, 3), 2) & splash.CausalMask(shape),
        splash.ChunkedCausalMask(shape, 17) | splash.LocalMask(shape, (2, 2), 0),
        splash.NumpyMask(rng.random(shape) < 0.3),
        splash.MultiHeadMask([splash.CausalMask(shape), splash.LocalMask(shape, (5, 3), 0)]),
    ):  # fmt: skip
        dense = np.asarray(mask[tuple(slice(None) for _ in mask.shape)])
        dense = dense if dense.ndim == 3 else dense[None]
        out, lse = gsj.attention(x, x, x, gsj.from_splash(mask), return_residual=True)
        want = jax.nn.dot_product_attention(x, x, x, mask=jnp.asarray(dense)[None])
        some = jnp.broadcast_to(jnp.asarray(dense.any(-1)).T, (N, 2))[None]
        assert (jnp.isfinite(lse) == some).all()
        assert jnp.abs(jnp.where(some[..., None], out - want, out)).max() < 1e-5
    with pytest.raises(ValueError, match="joins a ChunkedCausalMask with masks of other offsets"):
        gsj.from_splash(splash.ChunkedCausalMask(shape, 17) & splash.CausalMask(shape, -3))
    with pytest.raises(ValueError, match="mask must be a splash attention mask"):
        gsj.from_splash(3)
