"""The soak: its oracle agrees with the patterns, its calls run clean, and what is wrong is found and said."""

from __future__ import annotations

import ast
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import gossamer as gs
from tests.support.exact import no_gpu
from tests.support.processes import INTERPRETING, in_interpreter

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALLS = 300
FAMILIES = {  # how many calls of each are computed here
    "attention": 50,
    "particles": 60,
    "neighbors": 60,
    "entmax": 60,
    "topk": 60,
    "sparsek": 80,
    "blocks": 40,
    "lists": 60,
    "packed": 80,
    "pages": 60,
    "repeated": 15,
}


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The folder of the scripts, which import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", ["soak_oracle", "soak_entmax_oracle", "soak_sparsek_oracle", "soak_rounding"])
def test_an_oracle_imports_nothing_of_the_package(name: str) -> None:
    tree = ast.parse((BENCHMARKS / f"{name}.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    allowed = {"__future__", "collections", "math", "typing", "numpy", "torch", "soak_rounding"}
    assert {str(name).split(".")[0] for name in names} <= allowed


@pytest.mark.parametrize(("B", "H", "Q", "K"), [(2, 3, 24, 24), (1, 2, 7, 40), (3, 1, 50, 30)])
def test_the_oracles_masks_are_those_of_the_patterns(B: int, H: int, Q: int, K: int) -> None:
    import soak_oracle
    import soak_patterns

    r = random.Random(Q)
    specs = [make(r, Q, K) for make in soak_patterns.SHARED.values() for _ in range(4)]
    specs += [soak_patterns.spec_of(r, B, H, Q, K) for _ in range(60)]
    for offset in (K - Q, 0, -9, 2**31 - 2**17):
        for spec in specs:
            pattern = soak_patterns.pattern_of(spec, Q, K, r)
            kept = torch.from_numpy(pattern.materialize(Q, K, offset))
            assert (soak_oracle.kept(spec, B, H, Q, K, offset) == kept).all(), (spec, offset)


def test_every_pattern_is_drawn() -> None:
    import soak_calls

    drawn = {soak_calls.draw(seed, "cpu").spec[0] for seed in range(2000)}
    assert drawn >= (set(gs.patterns.__all__) - {"Pattern"}) | {"And", "Or", "Not"}


def test_calls_on_a_gpu_share_what_is_compiled() -> None:
    """Few forms, which have everything in them; other calls have other forms."""
    import soak_calls

    def forms(first: int) -> set[tuple[Any, ...]]:
        calls = [soak_calls.draw(seed, "cuda") for seed in range(first, first + soak_calls.BLOCK)]
        assert {(c.dtype, *c.shape[-2:]) for c in calls} == set(p.sizes)
        assert {c.implementation for c in calls} >= {None, "hopper", "triton", "small"}
        for name in ("lengths", "sinks", "slopes", "softcap", "scale", "deterministic"):
            assert {getattr(c, name) is None for c in calls} == {True, False}, name
        terms = ("lengths", "sinks", "slopes", "softcap")
        return {
            (c.dtype, c.shape[-2:], c.places, c.implementation, *(getattr(c, n) is None for n in terms)) for c in calls
        }

    p = soak_calls.PROFILES["cuda"]
    some, others = forms(0), forms(soak_calls.BLOCK)
    assert len(some) == len(others) == p.builds
    assert len(some & others) < p.builds // 4


def test_edges_that_the_host_has_are_right_on_a_gpu() -> None:
    """They are read there too, and refused: only those on the device are drawn out of range, to be clamped."""
    import soak_packed

    drawn = [(c, random.Random(seed)) for seed in range(400) if (c := soak_packed.draw(seed, "cuda")).mistake is None]
    hosts = {True: 0, False: 0}
    for c, r in drawn:
        host = soak_packed.on_host(c, r)
        edges = soak_packed.edges_of(r, 33, not host)
        wrong = edges != sorted(edges) or min(edges) < 0 or max(edges) > 33
        assert not (host and wrong), edges
        hosts[host] += wrong or host
    assert min(hosts.values()) > 20


def test_a_soft_cap_of_tiny_scores_may_be_off_by_its_tanh() -> None:
    """1 - 2 / (exp(2 x) + 1) in float32 with a cap of 50, of one key: lse is the capped score."""
    import soak_oracle

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 128, generator=generator, dtype=torch.float64) for n in (500, 1, 1))
    counts, zero = torch.ones(1, 1, 500, 1), torch.zeros(1, 1, 500, dtype=torch.float64)
    terms = soak_oracle.Terms(1e-5, 0, 50.0)
    true = soak_oracle.exact(q, k, v, counts, terms)[1]
    x = ((q @ k.mT)[..., 0] * (2e-5 / 50.0)).float()
    computed = 50.0 * (1 - 2 / (torch.exp(x) + 1))
    off = (computed.double() - true).abs()
    moved, rough = (
        soak_oracle.rounding(q, k, v, counts, terms, q, zero, torch.bfloat16, False, rough=rough)["lse"]
        for rough in (False, True)
    )
    assert bool((off > moved).any()) and bool((off <= rough).all())
    assert float(rough.max()) < 50 * 2.0**-20


@pytest.mark.parametrize("first", [0, CALLS])
def test_calls_run_clean(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    import soak

    assert soak.main(["--seed", str(first), "--calls", str(CALLS), "--workers", "0"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert f"{CALLS} calls" in printed and "blocked in parts" in printed


def test_families_are_those_of_the_script() -> None:
    import soak

    assert list(FAMILIES) == list(soak.FAMILIES)
    assert {soak.family_of("all", seed) for seed in range(len(FAMILIES))} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_each_family_run_clean(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    import soak

    given = ["--family", family, "--calls", str(FAMILIES[family]), "--workers", "0", "--seed", "900"]
    assert soak.main(given) == 0, capsys.readouterr().out
    assert f"{family} " in capsys.readouterr().out


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "attention"])
def test_calls_of_each_family_run_clean_on_a_gpu(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    import soak

    given = ["--family", family, "--calls", "2", "--workers", "0", "--device", "cuda"]
    assert soak.main(given) == 0, capsys.readouterr().out


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("first", [0, 9])
def test_calls_run_clean_on_a_gpu(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As many calls as there are types and head sizes, each with one of them."""
    import soak
    import soak_calls

    calls = len(soak_calls.PROFILES["cuda"].sizes)
    given = ["--seed", str(first), "--calls", str(calls), "--workers", "0", "--device", "cuda"]
    assert soak.main(given) == 0, capsys.readouterr().out


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a thousandth in one kind of result, in float64 and float32, is a failure with its command."""
    import soak
    import soak_attention
    import soak_calls

    seeds = [seed for seed in range(200) if plain(soak_calls.draw(seed, "cpu"))][:4]

    def off(*args: Any, **kwargs: Any) -> Any:
        found = gs.attention(*args, **kwargs)
        return (found[0] + 1e-3, *found[1:]) if isinstance(found, tuple) else found + 1e-3

    for seed in seeds:
        assert soak.main(["--one", str(seed)]) == 0, capsys.readouterr().out
    monkeypatch.setattr(soak_attention, "attention", off)
    for seed in seeds:
        assert soak.main(["--one", str(seed)]) == 1
        message = capsys.readouterr().out
        assert f"WRONG python benchmarks/soak.py --family attention --one {seed} --device cpu" in message
        assert "out[" in message
        assert "1 wrong" in message


def off(function: Any) -> Any:
    """A function of which one number is off by a thousandth of all."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        first, *more = found if isinstance(found, tuple) else (found,)
        error = 1e-3 * first.detach().double().abs().amax().clamp(min=1e-3)
        one = torch.zeros_like(first.detach())
        one.view(-1)[0] = 1
        first = first + (one * error if first.is_floating_point() else one).to(first.dtype)
        return (first, *more) if more else first

    return wrong


@pytest.mark.parametrize(
    ("family", "function"),
    [
        ("entmax", "entmax_attention"),
        ("topk", "topk_keys"),
        ("sparsek", "sparsek_attention"),
        ("lists", "attention"),
        ("packed", "attention"),
        ("repeated", "attention"),
        ("blocks", "attention"),
        ("blocks", "topk_blocks"),
    ],
)
def test_a_wrong_result_of_a_family_is_found(
    family: str, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib

    import soak

    drawn = importlib.import_module(soak.FAMILIES[family])
    named = soak.FAMILIES[family] if function == "topk_blocks" else drawn.run.__module__
    module = importlib.import_module("soak_structure" if function == "attention" else named)
    calls = {seed: drawn.draw(seed, "cpu") for seed in range(1500)}
    seeds = [seed for seed, c in calls.items() if exactly_compared(c, function)][:5]
    assert len(seeds) == 5
    for seed in seeds:
        assert soak.main(["--family", family, "--one", str(seed)]) == 0, capsys.readouterr().out
    wrong = off(getattr(module, function)) if function != "topk_blocks" else other_blocks(module.topk_blocks)
    monkeypatch.setattr(module, function, wrong)
    for seed in seeds:
        assert soak.main(["--family", family, "--one", str(seed)]) == 1, seed
        assert f"--family {family} --one {seed} --device cpu" in capsys.readouterr().out


def other_blocks(function: Any) -> Any:
    """A choice of blocks that says that it covers more than it does."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        chosen = function(*args, **kwargs)
        chosen.covered = chosen.covered + 1e-2
        return chosen

    return wrong


def exactly_compared(c: Any, function: str) -> bool:
    """Whether rounding of such a call is small, and every row is compared."""
    if getattr(c, "family", "") in ("lists", "packed", "blocks", "repeated"):
        few = c.mistake is c.softcap is c.sinks is c.scale is None and not c.compiled and c.kind != "varlen"
        few = few and c.dtype in (torch.float64, torch.float32)
        return few and (function == "attention" or c.kind == "mean")
    few = c.mistake is None and c.mode == "gradients" and c.scale in (None, 0.25, 1.0) and not c.compiled
    few = few and c.dtype in (torch.float64, torch.float32) and c.shape[4] > 4
    if function == "sparsek_attention":
        return few and c.kind == "attention" and c.keep == "topk" and c.scores in ("plain", "narrow")
    return few and c.implementation != "kernels" and c.steps and c.shape[5] in (4, 16)


def plain(c: Any) -> bool:
    """A call in float32 or float64 that is computed, and whose rounding is small."""
    few = c.scale is c.softcap is c.slopes is c.sinks is c.q_offset is c.mistake is None
    return few and c.dtype in (torch.float32, torch.float64) and c.implementation is None and c.form == "pattern"


def test_an_error_that_is_no_refusal_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import soak
    import soak_attention
    import soak_calls

    seed = next(seed for seed in range(200) if plain(soak_calls.draw(seed, "cpu")))
    for error, message in (
        (RuntimeError("broken"), "RuntimeError: broken"),
        (ValueError("k is odd"), "refused: ValueError"),
    ):

        def fails(*args: Any, _error: Exception = error, **kwargs: Any) -> Any:
            raise _error

        monkeypatch.setattr(soak_attention, "attention", fails)
        assert soak.main(["--one", str(seed)]) == 1
        assert message in capsys.readouterr().out


def test_an_error_in_code_without_a_file_is_said() -> None:
    from soak_outcomes import Outcome, outcome_of

    code = compile("raise RuntimeError('broken')", "<made at run time>", "exec")

    def fails(outcome: Outcome) -> Outcome:
        exec(code)
        return outcome

    found = outcome_of(Outcome(1, "none", "none", None, None, ""), fails, lambda error: None)
    assert found.wrong == "RuntimeError: broken (<made at run time>:1)"


@pytest.fixture
def call_of_16_bits() -> Any:
    """A call of `sparsek_attention` in float16 with few keys: of kv gates, for the gradients of lse alone."""
    import soak_sparsek

    return soak_sparsek.Call(
        8249, "cpu", "attention", torch.float16, torch.float32, (1, 1, 1, 1, 40, 40, 64), 2, "far", 1, 40, "support",
        "kv", True, 3.0, False, True, "lse", ("plain", "plain", "plain", "plain"), -1, "gradients", False, None,
    )  # fmt: skip


if INTERPRETING:

    def test_kernels_of_16_bits(call_of_16_bits: Any) -> None:
        import soak_sparsek

        assert soak_sparsek.run(call_of_16_bits).wrong is None

else:

    @pytest.mark.slow
    def test_interpreted() -> None:
        """P and dS are rounded to 16 bits, which moves what lse alone gives to q and k."""
        pytest.importorskip("triton")
        in_interpreter("tests/bench/test_soak.py", "test_kernels_of_16_bits")


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_scale_that_is_off_is_seen_in_16_bits(
    factor: float, call_of_16_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soak_sparsek

    def off(*args: Any, scale: float, **options: Any) -> Any:
        return gs.sparsek_attention(*args, scale=factor * scale, **options)

    assert soak_sparsek.run(call_of_16_bits).wrong is None
    monkeypatch.setattr(soak_sparsek, "sparsek_attention", off)
    assert soak_sparsek.run(call_of_16_bits).wrong is not None


def crashes(pipe: Any, family: str, device: str) -> None:
    pipe.send(None)
    pipe.recv()
    os._exit(3)


def hangs(pipe: Any, family: str, device: str) -> None:
    pipe.send(None)
    pipe.recv()
    time.sleep(600)


@pytest.mark.parametrize(("target", "message"), [(crashes, "crashed: exit code 3"), (hangs, "took longer than 0 s")])
def test_a_process_that_crashes_or_hangs_is_a_failure(
    target: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the call that it was at."""
    import soak

    monkeypatch.setitem(soak.LIMIT, "cpu", 0.01)
    counts = soak.soak("attention", "cpu", 1, 7, 1, 60.0, target)
    assert (counts.calls, counts.wrong) == (1, 1)
    printed = capsys.readouterr().out
    assert "--family attention --one 7 --device cpu" in printed
    assert message in printed


def test_a_description_names_zeros() -> None:
    import soak_outcomes

    class Drawn(NamedTuple):
        seed: int = 3
        scale: float | None = 0.0
        steps: int = 0
        mode: str = ""
        bshd: bool = False
        cap: float | None = None

    assert soak_outcomes.options_of(Drawn(), "seed") == "scale=0.0, steps=0"
