"""The soak of calls from JAX: calls run clean, all is drawn, and what is wrong is found and said."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import gossamer.jax as gsj
from gossamer import particles as gp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALLS = 16


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The folder of the scripts, which import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_what_is_imported() -> None:
    allowed = {"soak_jax_oracle": {"numpy", "scipy"}, "soak_outcomes": set()}
    for name, more in allowed.items():
        tree = ast.parse((BENCHMARKS / f"{name}.py").read_text())
        names = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert {one.split(".")[0] for one in names} <= set(sys.stdlib_module_names) | more


@pytest.mark.parametrize(("B", "H", "Q", "K"), [(2, 3, 24, 24), (1, 2, 7, 40), (3, 1, 50, 30)])
def test_the_oracles_masks_are_those_of_the_patterns(B: int, H: int, Q: int, K: int) -> None:
    import random

    calls, oracle = (importlib.import_module(name) for name in ("soak_jax_calls", "soak_jax_oracle"))
    r = random.Random(Q)
    for _ in range(150):
        spec = calls.spec_of(r, B, H, Q, K)
        for offset in (K - Q,) if spec[0] in ("Pairs", "BlockMask") else (K - Q, 0, -9):
            want = calls.pattern_of(spec).materialize(Q, K, offset)
            found = oracle.mask(spec, B, H, Q, K, offset)
            assert (np.broadcast_to(found, (B, H, Q, K)) == want).all(), (spec, offset)


def test_everything_is_drawn() -> None:
    calls = importlib.import_module("soak_jax_calls")
    drawn = [calls.draw(seed) for seed in range(0, 1600, calls.SHARED)]
    assert {one.program.family for one in drawn} == {"attention", "sums", "forces", "neighbors"}
    names = {layer.name for one in drawn for layer in one.layers}
    assert names == {"jit", "vmap", "scan", "remat", "shard_map", "gradient"}
    under = {(one.program.family, layer.name) for one in drawn for layer in one.layers}
    assert len(under) == 4 * len(names)


def test_calls_run_clean(capsys: pytest.CaptureFixture[str]) -> None:
    soak = importlib.import_module("soak_jax")
    assert soak.main(["--calls", str(CALLS)]) == 0, capsys.readouterr().out
    assert f"{CALLS} calls, 0 refused by name, 0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["attention", "sums", "neighbors"])
@pytest.mark.parametrize("fault", ["result", "gradient", "error"])
def test_a_fault_is_found(
    family: str, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of a thousandth in results, or in gradients alone, or one that is raised: with the call's command."""
    soak, calls = (importlib.import_module(name) for name in ("soak_jax", "soak_jax_calls"))
    seed = next(4 * n for n in range(500) if plain(calls.draw(4 * n), family))
    own = {"attention": (calls, "attention"), "sums": (calls, "radial_sum"), "neighbors": (gp, "neighbor_attention")}
    owner, name = own[family]
    right = {"attention": gsj.attention, "sums": gp.radial_sum, "neighbors": gp.neighbor_attention}[family]

    def off(x: Any) -> Any:
        if fault == "result":
            return x * (1 + 1e-3)
        return x + 1e-3 * (x - jax.lax.stop_gradient(x))  # the same number

    def wrong(*args: Any, **options: Any) -> Any:
        if fault == "error":
            raise RuntimeError("broken")
        found = right(*args, **options)
        return (off(found[0]), *found[1:]) if isinstance(found, tuple) else off(found)

    monkeypatch.setattr(owner, name, wrong)
    assert soak.main(["--one", str(seed)]) == 1
    message = capsys.readouterr().out
    assert f"WRONG python benchmarks/soak_jax.py --one {seed} --device cpu" in message
    assert {"result": "out[", "gradient": " off, one by", "error": "RuntimeError: broken"}[fault] in message
    assert "1 wrong" in message


def plain(drawn: Any, family: str) -> bool:
    """A call in float32 with a gradient, whose rounding is small and whose results are not nothing."""
    program, parts = drawn.program, ("N=33",) if family != "attention" else (" Q=64", "size=1.0")
    some = all(part in program.description for part in parts) and "gradient" in drawn.stack
    return program.family == family and program.dtype == "float32" and some


def test_what_lanes_share_is_summed() -> None:
    """Of a function whose gradients are known: every map, sharing one of two arrays, on both sides of the gradient."""
    calls = importlib.import_module("soak_jax_calls")
    one, other = np.arange(1.0, 4.0), np.asarray([2.0])

    def call(a: Any, b: Any) -> dict[str, Any]:
        return {"out": a * b}

    for name in calls.MAPS:
        lanes = jax.device_count() if name == "shard_map" else 3
        for order in (0, 1):
            layers = [calls.Layer(name, lanes, frozenset({"a"}))]
            layers.insert(order, calls.Layer("gradient"))
            run = calls.transformed(call, [*layers, calls.Layer("jit")], ("a", "b"))
            b, ct = np.stack([other * (n + 1) for n in range(lanes)]), np.ones((lanes, 3))
            _, grads = run({"a": one, "b": b}, {"out": ct})
            want = np.full(3, b.sum()) if order == 1 or name == "shard_map" else np.broadcast_to(b, (lanes, 3))
            np.testing.assert_allclose(grads["a"], want)
            np.testing.assert_allclose(grads["b"], np.full((lanes, 1), one.sum()))
