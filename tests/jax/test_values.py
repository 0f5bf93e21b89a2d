"""Results and gradients against the definition in float64: the cases of all tests, and random calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.jax import tiling
from gossamer.jax.choice import PlacedCSR
from gossamer.testing.cases import SMALL, Case
from tests.jax.calls import ROUNDING, inputs_of, kept, made, run, runner
from tests.jax.oracle import Expected, compare, expected

Together = Callable[[int | None], None]

WORKERS = 8  # parts of the random calls
CALLS = 18  # of each, with three draws of numbers


@pytest.mark.parametrize("rows", [None, 1, 64])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cases(case: Case, rows: int | None, together: Together) -> None:
    together(rows)
    x = inputs_of(case, "float32")
    compare(x, run(x, case.pattern()), ROUNDING["float32"])


@pytest.mark.parametrize("name", ["window", "all_terms", "documents_by_batch", "per_head", "all_empty", "more_queries"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cases_in_16_bits(name: str, dtype: str) -> None:
    (case,) = (c for c in SMALL if c.name == name)
    x = inputs_of(case, dtype)
    compare(x, run(x, case.pattern()), ROUNDING[dtype])


@pytest.mark.parametrize("rows", [0, 1, 64])
@pytest.mark.parametrize("name", ["window", "all_terms", "per_head", "dense"])
def test_plain_lax(name: str, rows: int, together: Together) -> None:
    """`implementation="blocked"`, which JAX differentiates itself."""
    together(rows)
    (case,) = (c for c in SMALL if c.name == name)
    x = inputs_of(case, "float32")
    compare(x, run(x, case.pattern(), "blocked"), ROUNDING["float32"])


@pytest.mark.parametrize("rows", [0, 1, 64])
@pytest.mark.parametrize("implementation", [None, "blocked"])
@pytest.mark.parametrize("case", [case for case in SMALL if "unkept" in case.tags], ids=str)
def test_nothing_unkept_reaches_a_result(case: Case, implementation: str | None, rows: int, together: Together) -> None:
    """NaN and infinities in what no kept pair has: the bits that zeros give, in gradients of JAX's own as well."""
    together(rows)
    x = inputs_of(case, "float32")
    (B, Q, H, _), (_, K, G, _) = x.q.shape, x.k.shape
    keep = np.broadcast_to(x.keep, (B, H, Q, K))
    if x.key_lengths is not None:
        keep = keep & (np.arange(K) < x.key_lengths[:, None, None, None])
    rows = ~keep.any(-1).swapaxes(1, 2)[..., None]
    keys = ~keep.reshape(B, G, -1, K).any(2).swapaxes(1, 2)[..., None]
    call = runner(x, case.pattern(), implementation)

    def results(value: float) -> list[np.ndarray]:
        q, dout = (np.where(rows, value, y).astype(y.dtype) for y in (x.q, x.dout))
        k, v = (np.where(keys, value, y).astype(y.dtype) for y in (x.k, x.v))
        return [np.asarray(y) for y in call(x._replace(q=q, k=k, v=v, dout=dout)) if y is not None]

    zeros = results(0.0)
    assert np.isfinite(zeros[0]).all()
    for value in (np.nan, np.inf, -np.inf):
        for name, clean, found in zip(Expected._fields, zeros, results(value), strict=False):
            assert np.array_equal(clean, found), f"{value} reaches {name}"


def test_float64() -> None:
    (case,) = (c for c in SMALL if c.name == "all_terms")
    with jax.enable_x64(True):
        x = inputs_of(case, "float64")
        found = run(x, case.pattern())
        assert found.lse.dtype == np.float64
        for got, want in zip(found, expected(x), strict=True):
            assert np.abs(np.asarray(got) - want).max() < 1e-12


@pytest.mark.parametrize("implementation", [None, "blocked"])
@pytest.mark.parametrize("rows", [1, 64])
def test_results_of_pieces_are_joined_now_and_then(
    rows: int, implementation: str | None, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows have so many pieces that their results would take more than those of rows."""
    together(rows)
    monkeypatch.setattr(tiling, "HELD", 0)
    monkeypatch.setattr(tiling, "SCORES", 2**16)
    rng = np.random.default_rng(2)
    pattern = gs.CSR.from_edge_index(rng.integers(0, 120, (2, 3000)), 120)
    x = made(rng, (2, 4, 2, 120, 120, 8, 16), "float32", kept(pattern, 120, 120, 0), scale=0.4, q_offset=0)
    compare(x, run(x, pattern, implementation), ROUNDING["float32"])


@pytest.mark.parametrize("rows", [0, 1, 64])
@pytest.mark.parametrize("implementation", [None, "blocked"])
def test_rows_longer_than_a_piece(implementation: str | None, rows: int, together: Together) -> None:
    """Of more tiles than one step computes, beside short ones, and of groups of heads."""
    together(rows)
    pattern = gs.SlidingWindow(300) | gs.Longformer(4, (0, 2500))
    keep = kept(pattern, 200, 2600, 2400)
    x = made(
        np.random.default_rng(1), (1, 4, 2, 200, 2600, 16, 8), "float32", keep, scale=0.3, q_offset=2400
    )  # fmt: skip
    compare(x, run(x, pattern, implementation), ROUNDING["float32"])


def random_pattern(rng: np.random.Generator, B: int, H: int, Q: int, K: int) -> gs.Pattern:
    """Any class of pattern, alone or composed."""

    def n(low: int, high: int) -> int:
        return int(rng.integers(low, high))

    def one() -> gs.Pattern:
        pattern = any_one()
        try:
            pattern.check(Q, K)
        except ValueError:  # square ones
            return one()
        return pattern

    def any_one() -> gs.Pattern:
        rows = [np.flatnonzero(rng.random(K) < rng.random() ** 3) for _ in range(Q)]
        made: list[Any] = [
            gs.Dense, gs.Causal, lambda: gs.SlidingWindow(n(0, 90), n(0, 40), n(0, 6)), lambda: gs.Local(n(1, 80)),
            lambda: gs.BigBird(n(1, 5) * 8), lambda: gs.Dilated(n(0, 9), n(0, 9), n(1, 9)),
            lambda: gs.Strided(n(1, 30), n(1, 12)), lambda: gs.PowerStrided(2, n(1, 9)),
            lambda: gs.Longformer(n(1, 9) * 2, (0,)),
            lambda: gs.CSR(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), K),
            lambda: PlacedCSR(np.cumsum([0, *map(len, rows)]), np.concatenate(rows), rng.permutation(K)),
            lambda: gs.BlockMask(rng.random((-(-Q // 16), -(-K // 16))) < 0.4, 16),
        ]  # fmt: skip
        return made[n(0, len(made))]()

    pattern = one()
    if rng.random() < 0.4:
        other = one()
        pattern = pattern & other if rng.random() < 0.5 else pattern | other
    if rng.random() < 0.15:
        pattern = ~pattern
    if rng.random() < 0.2:
        pattern = gs.PerHead([pattern, *(one() for _ in range(H - 1))])
    elif rng.random() < 0.2:
        pattern = gs.PerBatch([pattern, *(one() for _ in range(B - 1))])
    return pattern


@pytest.mark.parametrize("part", range(WORKERS))
def test_random_calls(part: int, together: Together) -> None:
    """About 2,300 comparisons in all: every term at its extremes, sizes under and over tiles, empty rows."""
    count = 0
    for call in range(CALLS):
        rng = np.random.default_rng((part, call))
        B, G = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        H = G * int(rng.integers(1, 4))
        Q, K = (int(rng.choice([1, 5, 63, 64, 65, 100, 150])) for _ in range(2))
        D, E = (int(rng.choice([1, 8, 17, 33])) for _ in range(2))
        pattern = random_pattern(rng, B, H, Q, K)
        together((None, 0, 1, 64)[call % 4])
        offset = K - Q
        if pattern.reads_positions and rng.random() < 0.3:
            offset = int(rng.choice([0, -70, 40, K]))
        softcap = float(rng.choice([0.1, 2.0, 40.0])) if rng.random() < 0.3 else None
        dtype = str(rng.choice(["float32", "float32", "bfloat16", "float16"]))
        scale = float(rng.choice([D**-0.5, 1.0, 0.0, -0.7, 3.0]))
        has = rng.random(3) < 0.3
        keep = kept(pattern, Q, K, offset)
        of_slopes = (B, H) if rng.random() < 0.5 else H
        distance = str(rng.choice(["signed", "absolute"])) if has[2] else None
        call_of = None
        for _ in range(3):
            lengths = rng.choice([-3, 0, 1, K // 2, K, K + 9], B)
            x = made(
                rng, (B, H, G, Q, K, D, E), dtype, keep, scale=scale, q_offset=offset, softcap=softcap,
                key_lengths=lengths if has[0] else None,
                sink_logits=rng.choice([-30.0, 0.0, 1.0, 20.0], H).astype(np.float32) if has[1] else None,
                alibi_slopes=rng.choice([-0.5, 0.0, 0.01, 0.5], of_slopes).astype(np.float32) if has[2] else None,
                alibi_distance=distance,
            )  # fmt: skip
            call_of = call_of or runner(x, pattern)
            count += compare(x, call_of(x), ROUNDING[dtype])
    assert count >= CALLS * 3 * 5


def test_dense_masks_and_sparse_matrices() -> None:
    from jax.experimental.sparse import BCSR

    rng = np.random.default_rng(0)
    mask = rng.random((2, 1, 90, 100)) < 0.2
    x = made(rng, (2, 2, 1, 90, 100, 8, 8), "float32", mask, scale=0.5, q_offset=10)
    compare(x, run(x, mask), ROUNDING["float32"])
    compare(x, run(x, gsj.prepare(mask, x.q, x.k)), ROUNDING["float32"])
    one = mask[0, 0]
    x = x._replace(keep=one)
    compare(x, run(x, jax.numpy.asarray(one)), ROUNDING["float32"])
    compare(x, run(x, BCSR.fromdense(one.astype(np.float32))), ROUNDING["float32"])


def test_scores_that_are_no_numbers_are_not_an_empty_row() -> None:
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 6, 1, 4)) for n in range(3))
    for at, rows in ((q.at[0, 2].set(jnp.nan), [2]), (q, [])):
        out, lse = gsj.attention(at, k, v, gs.Causal(), return_residual=True)
        assert [i for i in range(6) if jnp.isnan(out[0, i]).all()] == rows
        assert [i for i in range(6) if jnp.isnan(lse[0, i]).all()] == rows
    assert jnp.isnan(gsj.attention(1e20 * q, 1e20 * k, v)).any()
