"""Steps of kernels in Triton as calls of XLA, by functions of numpy that stand for the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj
from gossamer.jax.kernels import bind, recipes, targets
from gossamer.kernels.launch import Builder, Group, Kernel, Operand, Step, compact, names_of
from gossamer.plan.problem import Problem
from tests.jax import stand_in

SIZE = 2, 3, 4
OPERANDS = dict.fromkeys("qk", Operand("float32", SIZE, compact(SIZE)))


def twice(x: Any, out: Any) -> None:
    out[:] = 2 * x


def add(x: Any, out: Any) -> None:
    out += x


FUNCTIONS = {"twice": twice, "add": add}


def call(step: Step, places: Mapping[str, int], pointers: int) -> targets.TritonCall:
    """What `targets.triton` gives: the kernel finds its arrays among the pointers."""
    first, last = (places[name] for name in (next(names_of(step.arguments)), tuple(names_of(step.arguments))[-1]))

    def make() -> Any:
        import tvm_ffi

        def run(*given: Any) -> None:
            assert len(given) == pointers
            FUNCTIONS[step.kernel.name](stand_in._memory(given[first]), stand_in._memory(given[last]))

        return tvm_ffi.convert(run)

    name = f"stand_in_triton_{step.kernel.name}_{first}_{last}_{pointers}"
    return targets.TritonCall(targets.registered(name, make, 0), {})


def test_arrays_are_passed_once_and_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array may stand for several arguments; what a kernel is given of the launch's own it may write."""
    stand_in.use(monkeypatch)
    monkeypatch.setattr(targets, "triton", call)
    b = Builder(OPERANDS)
    b.array("out", "float32", SIZE)
    b.step(Kernel("triton", "twice"), "q", Group(("out", "out")))
    b.step(Kernel("triton", "add"), "k", "k", "out")
    b.step(Kernel("triton", "add"), "q", "out")
    launch = b.done("out").launch
    q, k = (jax.random.normal(jax.random.key(n), SIZE) for n in range(2))
    found = jax.jit(lambda **x: bind.run(launch, OPERANDS, {}, x)["out"])(q=q, k=k)
    np.testing.assert_allclose(found.reshape(SIZE), 3 * q + k, rtol=1e-6)


def test_what_is_read_has_been_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.use(monkeypatch)
    monkeypatch.setattr(targets, "triton", call)
    b = Builder(OPERANDS)
    b.step(Kernel("triton", "twice"), "q", "k")
    launch = b.done().launch
    with pytest.raises(AssertionError, match="before they are written"):
        bind.run(launch, OPERANDS, {}, {"q": jnp.ones(SIZE)})


def test_float32_is_for_triton_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is not installed, as here, `lax` computes it."""
    stand_in.use(monkeypatch)
    assert recipes.implementation_of("float32") == "triton"
    q = jnp.ones((1, 100, 2, 16))
    text = str(gsj.explain(q, q, q, gs.Causal()))
    assert "blocked, in lax" in text and "needs the package triton" in text
    for name in ("triton", "hopper"):
        reason = "needs the package triton" if name == "triton" else "dtype float32 not in"
        with pytest.raises(gs.Unsupported, match=reason):
            gsj.attention(q, q, q, implementation=name)
    p = Problem(1, 2, 2, 100, 100, 16, 16, "bfloat16", "cuda", 90, 132)
    assert recipes.refusals(p, gs.Causal()) == []
    assert recipes.refusals(p, gs.Causal(), "triton")
