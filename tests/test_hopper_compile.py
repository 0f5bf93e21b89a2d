"""Every shipped forward configuration of the Hopper kernels compiles for sm_90a, without a GPU, and fits the chip."""

from __future__ import annotations

import pytest

from gossamer.kernels.contract import Problem, reasons
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.hopper.config import HEAD_SIZES, SHARED_MEMORY, ForwardConfig, forward_config, padded

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
SIZES = [(size, size) for size in HEAD_SIZES] + [(192, 128)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_shipped_configurations_fit(size: tuple[int, int]) -> None:
    for score in ("fold", "scale", "softcap"):
        config = forward_config("bfloat16", *size, *IMPLEMENTATION.tile(problem(*size)), score)
        assert config.shared_bytes <= SHARED_MEMORY
        assert size == (config.D, config.E)


def test_padding() -> None:
    assert [padded(size) for size in (1, 64, 65, 100, 128, 129, 256)] == [64, 64, 96, 128, 128, 192, 256]
    with pytest.raises(ValueError, match="head size 257"):
        padded(257)
    # A value head that is wider than the key head widens both: the output takes the place of Q in shared memory.
    assert forward_config("float16", 64, 128, 128, 128, "fold").D == 128


def test_configuration_refuses() -> None:
    with pytest.raises(ValueError, match="no forward kernel for tiles 100 x 128"):
        ForwardConfig("bfloat16", 128, 128, block_q=100)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        ForwardConfig("bfloat16", 256, 256, stages=4)


def problem(D: int, E: int, **fields: object) -> Problem:
    values = {"dtype": "bfloat16", "device": "cuda", "sm": 90} | fields
    return Problem(B=1, H=1, G=1, Q=128, K=128, D=D, E=E, **values)  # type: ignore[arg-type]


def test_reasons() -> None:
    capability = IMPLEMENTATION.capability
    assert reasons(problem(128, 128), capability) == []
    assert "float32" in reasons(problem(64, 64, dtype="float32"), capability)[0]
    assert "compute capability 9.0" in reasons(problem(64, 64, sm=80), capability)[0]
    assert "alibi_slopes" in reasons(problem(64, 64, score_terms=frozenset({"alibi_slopes"})), capability)[0]
    assert "has no backward" in reasons(problem(64, 64, backward=True), capability)[0]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_compiles(size: tuple[int, int]) -> None:
    from gossamer.kernels.hopper import compile as compiled

    block = IMPLEMENTATION.tile(problem(*size))
    assert callable(compiled.forward(forward_config("bfloat16", *size, *block, "fold")))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("score", ["scale", "softcap"])
def test_score_terms_compile(score: str) -> None:
    from gossamer.kernels.hopper import compile as compiled

    assert callable(compiled.forward(forward_config("float16", 128, 128, 128, 128, score)))


@needs_compiler
@pytest.mark.parametrize("E", [64, 128])
def test_merge_compiles(E: int) -> None:
    from gossamer.kernels.hopper import compile as compiled

    assert callable(compiled.merge("bfloat16", E, 128))
