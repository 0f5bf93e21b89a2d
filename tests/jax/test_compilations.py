"""What is compiled again: nothing for a mask, lists or positions of the same capacity, computed at once or in `jit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring

import gossamer as gs
import gossamer.jax as gsj
from gossamer import particles as gp
from gossamer.jax.tiles import capacity_of

N = 300
COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled() -> Iterator[Callable[[Callable[[], Any]], int]]:
    """How many programs a function compiles."""
    seen: list[str] = []

    def listen(name: str, _: float, **facts: Any) -> None:
        seen.append(name)

    def count(function: Callable[[], Any]) -> int:
        seen.clear()
        jax.block_until_ready(function())
        return seen.count(COMPILED)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    monitoring.unregister_event_duration_listener(listen)


def arrays(count: int, *shape: int) -> list[jax.Array]:
    return [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), count)]


def gradient(mask: Any, q: jax.Array) -> Any:
    return jax.grad(lambda q: gsj.sparse_attention(q, q, q, mask).sum())(q)


@pytest.mark.parametrize(("d", "rows"), [(3, 1), (64, 1), (3, 64)])
def test_another_mask(d: int, rows: int, together: Any, compiled: Any) -> None:
    """Of as many pairs: at once, its gradient, and as an argument of a jitted function."""
    together(rows)
    q, *points = arrays(4, N, d)
    first, *others = (gsj.create_sparsity_mask(x, share=0.06) for x in points)
    shapes = [[x.shape for x in jax.tree.leaves(gsj.prepare(mask, q, q))] for mask in (first, *others)]
    assert shapes[0] == shapes[1] == shapes[2]
    step = jax.jit(lambda plan, q: gsj.sparse_attention(q, q, q, plan))
    for call in (
        lambda mask: gsj.sparse_attention(q, q, q, mask),
        lambda mask: gradient(mask, q),
        lambda mask: step(gsj.prepare(mask, q, q), q),
    ):
        assert compiled(lambda call=call: call(first))  # type: ignore[misc]
        for mask in (first, *others):
            assert not compiled(lambda call=call, mask=mask: call(mask))  # type: ignore[misc]


def test_other_numbers(compiled: Any) -> None:
    """`scale` and `softcap` are arguments of programs, of a call at once, of its gradient, and with a mask."""
    q, *_ = arrays(1, 2, 70, 4, 16)
    (x,) = arrays(1, N, 3)
    mask = gsj.create_sparsity_mask(x, share=0.06)

    def both(scale: float, softcap: float | None) -> Any:
        loss = lambda q: gsj.attention(q, q, q, gs.SlidingWindow(20), scale=scale, softcap=softcap).sum()  # noqa: E731
        return jax.grad(loss)(q), gsj.attention(q, q, q, gs.SlidingWindow(20), scale=scale, softcap=softcap)

    def plain(scale: float, softcap: float) -> Any:
        return gsj.attention(q, q, q, gs.Causal(), scale=scale, softcap=softcap, implementation="blocked")

    def sparse(scale: float, softcap: float) -> Any:
        return gsj.sparse_attention(x, x, x, mask, scale=scale, softcap=softcap)

    def entmax(scale: float, alpha: float) -> Any:
        return gsj.entmax_attention(q, q, q, gs.Causal(), scale=scale, alpha=1 + alpha / 100)

    for call in (both, plain, sparse, entmax):
        one = call(0.3, 20.0)
        assert not compiled(lambda call=call: call(0.7, 31.0))  # type: ignore[misc]
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (one, call(0.7, 31.0))), strict=True))
    both(0.3, None)
    assert not compiled(lambda: both(-0.1, None))


def spline(s: Any, xp: Any, h: Any, height: Any) -> Any:
    u = xp.sqrt(s) / h
    return xp.where(u < 1, height * (1 - u) ** 2, 0.0)


def test_other_numbers_of_particles(compiled: Any) -> None:
    """Radius, box, bandwidth and the numbers of laws are arguments of programs, of gradients too."""
    x = jax.random.uniform(jax.random.key(0), (333, 3))
    v = jax.random.normal(jax.random.key(1), (333, 2, 8))

    def of_sums(law: Any, radius: float, box: Any) -> Any:
        total = lambda x: gp.radial_sum(gp.Cells.build(x, radius, box), 1.0, law).sum()  # noqa: E731
        return total(x), jax.grad(total)(x)

    def of_forces(law: Any, radius: float, box: Any) -> Any:
        pull = lambda x: gp.radial_force(gp.Cells.build(x, radius, box), 1.0, law).std()  # noqa: E731
        return pull(x), jax.grad(pull)(x)

    def of_rows(bandwidth: float, radius: float, box: Any) -> Any:
        def mean(x: jax.Array) -> jax.Array:
            neighbors = gp.Neighbors.allocate(x, radius, box, capacity=333)
            return gp.neighbor_attention(None, None, v, neighbors, kernel="gaussian", bandwidth=bandwidth).std()

        return mean(x), jax.grad(mean)(x)

    for call, one, other in (
        (of_sums, gp.Gaussian(0.05), gp.Gaussian(0.011)),
        (of_sums, gp.RadialKernel(spline, 0.1, 1.0), gp.RadialKernel(spline, 0.07, 3.0)),
        (of_forces, gp.ShortRangeGravity(0.02), gp.ShortRangeGravity(0.011, 0.003)),
        (of_forces, gp.RadialKernel(spline, 0.1, 1.0), gp.RadialKernel(spline, 0.07, 3.0)),
        (of_rows, 0.07, 0.5),
    ):
        first, _ = call(one, 0.15, (1.0, None, 1.5))
        for numbers in ((other, 0.15, (1.0, None, 1.5)), (one, 0.4, (0.9, None, 1.1)), (one, 1e3, (1e4, None, 1e4))):
            assert not compiled(lambda call=call, numbers=numbers: call(*numbers))  # type: ignore[misc]
            value, _ = call(*numbers)
            assert value != first


def test_lists_of_any_capacity(compiled: Any) -> None:
    """Of few particles a program makes lists of all capacities: another cloud, radius or capacity cuts them alone."""
    x = jax.random.uniform(jax.random.key(0), (222, 3))
    moved = jax.block_until_ready(x**2)
    assert compiled(lambda: gp.Neighbors.allocate(x, 0.3, 1.0).places) <= 3  # runs, lists, the cut
    one = gp.Neighbors.allocate(x, 0.3, 1.0)
    assert not compiled(lambda: [gp.Neighbors.allocate(x, 0.2, 0.9, one.capacity).places, one.update(moved).places])
    made: list[gp.Neighbors] = []
    for capacity in (None, 48):
        assert compiled(lambda capacity=capacity: made.append(gp.Neighbors.allocate(moved, 0.4, 1.0, capacity))) <= 1  # type: ignore[misc]
    wide, short = made
    assert wide.capacity > one.capacity and not wide.overflow and short.overflow
    np.testing.assert_array_equal(short.places, wide.places[:, :48])


def test_a_second_derivative_takes_no_memory(compiled: Any) -> None:
    """It is refused before anything of it is compiled or computed."""
    (q,) = arrays(1, 1, 77, 2, 16)
    for function in (gsj.attention, gsj.entmax_attention):
        slope = jax.grad(lambda q, function=function: function(q, q, q, gs.SlidingWindow(33)).sum())
        for second in (jax.jacrev(slope), jax.hessian(slope), jax.jit(jax.jacrev(slope))):

            def attempt(second: Any = second) -> None:
                with pytest.raises(TypeError, match="no forward mode and no second derivative"):
                    second(q)

            before = {id(x) for x in jax.live_arrays()}
            attempt()
            made = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
            assert made < q.nbytes, "no more than lists"


def test_lists_of_neighbours(compiled: Any) -> None:
    q, x, moved = arrays(3, N, 3)
    one, other = (gsj.create_sparsity_mask(at, 0.8, capacity=64) for at in (x, moved))
    heads = jnp.ones((2, N, 4, 8))
    for call in (
        lambda near: gsj.sparse_attention(q, q, q, near),
        lambda near: gp.neighbor_attention(q, q, q, near, kernel="dot+gaussian", bandwidth=0.3),
        lambda near: gsj.sparse_attention(heads, heads, heads, near),
        lambda near: gradient(near, q),
    ):
        assert compiled(lambda call=call: call(one))  # type: ignore[misc]
        assert not compiled(lambda call=call: [call(near) for near in (one, other)])  # type: ignore[misc]


def test_positions_of_one_query(compiled: Any) -> None:
    """Steps of decoding: programs for numbers of tiles that lie further and further apart, not one a step."""
    k, v = arrays(2, 1, 1024, 2, 16)
    q = k[:, :1]
    step = lambda at: gsj.attention(q, k, v, gs.Causal(), q_offset=at)  # noqa: E731
    for at in (70, 127, 128, 300, 600):
        step(at)
    assert not compiled(lambda: [step(at) for at in (71, 99, 126, 128, 310, 350, 610, 760)])


def test_capacities() -> None:
    for n in range(1, 5000):
        assert n <= capacity_of(n) <= max(1.5 * n, 1)
    assert len({capacity_of(n) for n in range(2**20, 2**22)}) == 5
    assert np.diff([capacity_of(n) for n in range(5000)]).min() >= 0
