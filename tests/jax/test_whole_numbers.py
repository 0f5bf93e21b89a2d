"""Every int of the public interface of JAX and of particles may be a whole number of numpy or JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.cosmos as gc
import gossamer.jax as gsj
import gossamer.particles as gp

KINDS: dict[str, Callable[[int], Any]] = {
    "np.int64": np.int64, "np.int32": np.int32, "numpy array": np.array, "jax array": jnp.array,
}  # fmt: skip
q = jax.random.normal(jax.random.key(0), (1, 64, 2, 8))
x = jax.random.uniform(jax.random.key(1), (50, 3))
window = gs.SlidingWindow(5, 0)
listed = jnp.array([[0, -1], [1, 0]])
box = gc.Box(size_mpc_h=100, particles=8)
noise = jax.random.normal(jax.random.key(2), (8, 8, 8))


def chosen(**options: Any) -> Any:
    """The blocks that are chosen of some keys."""
    long = jnp.tile(q, (1, 5, 1, 1))
    return gsj.topk_blocks(long, long, causal=True, **options).indices


# By (callable, parameter): the call as a function of the number, and the number.
ROWS: dict[tuple[str, str], tuple[Callable[[Any], Any], int]] = {
    ("attention", "q_offset"): (lambda n: gsj.attention(q, q, q, window, q_offset=n), 3),
    ("explain", "q_offset"): (lambda n: str(gsj.explain(q, q, q, window, q_offset=n)), 3),
    ("prepare", "q_offset"): (lambda n: gsj.prepare(window, q, q, q_offset=n), 3),
    ("prepare_blocks", "q_offset"): (lambda n: gsj.prepare_blocks(listed, q, q, block_size=32, q_offset=n), 3),
    ("prepare_blocks", "block_size"): (lambda n: gsj.prepare_blocks(listed, q, q, block_size=n), 32),
    ("entmax_attention", "top_k"): (lambda n: gsj.entmax_attention(q, q, q, top_k=n), 5),
    ("topk_blocks", "topk"): (lambda n: chosen(topk=n), 3),
    ("topk_blocks", "block_size"): (lambda n: chosen(topk=3, block_size=n), 64),
    ("topk_blocks", "local"): (lambda n: chosen(topk=3, local=n), 2),
    ("topk_blocks", "first"): (lambda n: chosen(topk=3, first=n), 2),
    ("create_sparsity_mask", "capacity"): (lambda n: gsj.create_sparsity_mask(x, 0.3, capacity=n).indices, 30),
    ("Neighbors.allocate", "capacity"): (lambda n: gp.Neighbors.allocate(x, 0.3, capacity=n).indices, 30),
    ("initial_conditions", "order"): (lambda n: gc.initial_conditions(noise, gc.Cosmology(), box, 0.1, order=n), 2),
}
# By `prepare` and `topk_blocks`.
MADE = {("Prepared", "q_offset"), ("SelectedBlocks", "q_offset"), ("SelectedBlocks", "dims")}


def asked() -> Iterator[tuple[str, str]]:
    """(callable, parameter) of every int that the public interface takes."""
    for room in (gsj, gp, gc):
        for name in room.__all__:
            what = getattr(room, name)
            held = [(name, what)]
            if inspect.isclass(what):
                held += [(f"{name}.{at}", getattr(what, at)) for at in dir(what) if at[0] != "_"]
            for label, one in held:
                try:
                    parameters = inspect.signature(one).parameters.values()
                except (TypeError, ValueError):
                    continue
                yield from ((label, p.name) for p in parameters if "int" in str(p.annotation))


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, down to the numbers that they hold."""
    leaves = [jax.tree.flatten(each) for each in (one, other)]
    (a, form), (b, other_form) = leaves
    return form == other_form and all(np.array_equal(*pair) for pair in zip(a, b, strict=True))


def test_every_int_has_a_row() -> None:
    assert set(asked()) - MADE == set(ROWS)


@pytest.mark.parametrize("at", ROWS, ids=".".join)
def test_whole_numbers_of_any_library(at: tuple[str, str]) -> None:
    call, n = ROWS[at]
    wanted = call(n)
    for name, kind in KINDS.items():
        assert same(call(kind(n)), wanted), name


@pytest.mark.parametrize("at", ROWS, ids=".".join)
def test_what_is_no_whole_number_is_refused(at: tuple[str, str]) -> None:
    for wrong in (True, np.True_, jnp.array(True), 2.0, np.float64(2), "2", np.array([2, 3])):
        with pytest.raises(ValueError, match="must"):
            ROWS[at][0](wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_a_box_and_lengths(kind: str) -> None:
    n = KINDS[kind]
    assert gc.Box(size_mpc_h=n(100), particles=n(8)) == box
    lengths = [n(9)]
    assert np.array_equal(gsj.attention(q, q, q, key_lengths=lengths), gsj.attention(q, q, q, key_lengths=[9]))
