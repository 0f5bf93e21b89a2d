"""Lists of blocks as arrays, made inside of `jit`, against the mask that they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from tests.jax.calls import ROUNDING, made
from tests.jax.oracle import Expected, compare

CALLS = 12


def kept(indices: np.ndarray, counts: np.ndarray | None, block: int, Q: int, K: int, H: int) -> np.ndarray:
    """The definition: (B, H, Q, K)."""
    Bl, heads, rows, n = indices.shape
    found = np.zeros((Bl, heads, Q, K), dtype=bool)
    for b, h, t in np.ndindex(Bl, heads, rows):
        for at in range(n if counts is None else int(np.clip(counts[b, h, t], 0, n))):
            c = int(indices[b, h, t, at])
            if c >= 0:
                found[b, h, t * block : (t + 1) * block, c * block : (c + 1) * block] = True
    return found if heads == 1 else np.repeat(found, H // heads, 1)


@pytest.mark.parametrize("part", range(2))
def test_random_lists(part: int) -> None:
    """Unsorted, repeated, missing and empty lists, of all heads or of each, with and without an interval of keys."""
    for call in range(CALLS):
        rng = np.random.default_rng((part, call))
        B, G = int(rng.integers(1, 3)), int(rng.integers(1, 3))
        H, block = G * int(rng.integers(1, 3)), int(rng.choice([32, 64]))
        Q, K = (int(rng.choice([1, 63, 64, 96, 150, 700])) for _ in range(2))
        rows, columns, n = -(-Q // block), -(-K // block), int(rng.integers(0, 6))
        shape = (int(rng.choice([1, B])), int(rng.choice([1, G, H])), rows, n)
        indices = rng.integers(-2, columns + 2, shape).astype(np.int32)
        counts = rng.integers(-1, n + 2, shape[:-1]) if rng.random() < 0.4 else None
        pattern, offset = None, K - Q
        if rng.random() < 0.6:
            windows = [gs.Causal(), gs.SlidingWindow(40), gs.SlidingWindow(20, 30), gs.Local(50), gs.Dense()]
            pattern = windows[int(rng.integers(len(windows)))]
            pattern = pattern & gs.SlidingWindow(300, 200) if rng.random() < 0.3 else pattern
            offset = int(rng.choice([K - Q, 0, 30]))
        keep = kept(indices, counts, block, Q, K, H)
        if pattern is not None:
            keep = keep & pattern.materialize(Q, K, offset)
        x = made(rng, (B, H, G, Q, K, 8, 8), "float32", keep, scale=0.4, q_offset=offset)

        @jax.jit
        def both(
            q: Any, k: Any, v: Any, indices: Any, counts: Any, dout: Any, dlse: Any, block: int = block,
            pattern: Any = pattern, offset: int = offset, scale: float = x.scale,
        ) -> Any:  # fmt: skip
            plan = gsj.prepare_blocks(
                indices, q, k, block_size=block, counts=counts, pattern=pattern, q_offset=offset
            )  # fmt: skip

            def f(q: Any, k: Any, v: Any) -> Any:
                return gsj.attention(q, k, v, plan, scale=scale, return_residual=True)

            (out, lse), back = jax.vjp(f, q, k, v)
            return out, lse, *back((dout, jnp.where(lse == -jnp.inf, 0.0, dlse)))

        compare(x, Expected(*both(x.q, x.k, x.v, indices, counts, x.dout, x.dlse), None), ROUNDING["float32"])


def test_made_once_and_given_to_layers() -> None:
    """One made inside of `jit` goes through scan, checkpoint and the gradient; vmap makes one for each element."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 256, 2, 8)), jnp.float32)
    lists = jnp.asarray(rng.integers(0, 4, (3, 4, 2)))

    @jax.jit
    def layers(q: Any, indices: Any) -> Any:
        plan = gsj.prepare_blocks(indices, q, q, pattern=gs.Causal())

        def layer(x: Any, _: Any) -> Any:
            return jax.checkpoint(lambda x: x + gsj.attention(x, x, x, plan))(x), None

        return (jax.lax.scan(layer, q, None, length=2)[0] ** 2).sum()

    each = jnp.stack([jax.grad(layers)(q, indices) for indices in lists])
    difference = jnp.abs(jax.vmap(jax.grad(layers), (None, 0))(q, lists) - each)
    assert difference.max() < 1e-6 * jnp.abs(each).max()
    same = gsj.prepare_blocks(lists[0], q, q)
    assert "blocks of 64" in repr(same) and (same.Q, same.K) == (256, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": jnp.zeros((3, 2), jnp.int32)}, r"indices must be integers \(B, N, rows, n\), rows = .* = 4, B 1"),
        ({"indices": jnp.zeros((4, 2))}, "indices must be integers"),
        ({"indices": jnp.zeros((3, 4, 2), jnp.int32)}, "N 1, 1 or 2"),
        ({"counts": jnp.zeros((3,), jnp.int32)}, "counts must be integers"),
        ({"pattern": gs.BigBird(64)}, "pattern must be one that lists of blocks are joined with: Dense, Causal"),
        ({"pattern": gs.SlidingWindow(3, sinks=2)}, "pattern must be one"),
        ({"pattern": 3}, "pattern must be one"),
        ({"q_offset": 2**31}, "q_offset must be an integer up to"),
        ({"block_size": 48}, "block must be a positive multiple of 32, got 48"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    q, k = jnp.ones((1, 256, 2, 8)), jnp.ones((1, 256, 1, 8))
    rows = -(-256 // 48) if "block_size" in change else 4
    given: dict[str, Any] = {"indices": jnp.zeros((rows, 2), jnp.int32)} | change
    with pytest.raises(ValueError, match=message):
        gsj.prepare_blocks(given.pop("indices"), q, k, **given)
