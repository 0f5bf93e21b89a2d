"""Every shipped Hopper kernel compiles for sm_90a, without a GPU, fits the chip and keeps its numbers in registers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gossamer.cli.compile import shipped
from gossamer.cute.configurations import SHARED_MEMORY, Clears
from gossamer.cute.shipped import Shipped
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.hopper.choice import (
    WIDE,
    TileCall,
    backward_config,
    forward_config,
    gather_config,
    kept_config,
    padded,
    query_config,
    wide_config,
)
from gossamer.kernels.hopper.device.configurations import (
    BackwardConfig,
    ForwardConfig,
    KeptConfig,
    QueryConfig,
    WideConfig,
)
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.shipped import SIZES
from gossamer.plan.capability import reasons
from gossamer.plan.problem import Problem
from tests.support.cubins import machine_code, resources

# Bytes of stack of the kernels that spill.
SPILLS = {"forward-bfloat16-64-64-192-128-softcap": 48}

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_shipped_configurations_fit(size: tuple[int, int]) -> None:
    for score in ("fold", "scale", "softcap"):
        config = forward_config(TileCall("bfloat16", *size, *IMPLEMENTATION.tile(problem(*size)), score))
        assert config.shared_bytes <= SHARED_MEMORY
        assert size == (config.D, config.E)


def test_padding() -> None:
    assert [padded(size) for size in (1, 64, 65, 100, 128, 129, 256)] == [64, 64, 96, 128, 128, 192, 256]
    with pytest.raises(ValueError, match="head size 257"):
        padded(257)
    # A value head that is wider than the key head widens both: the output takes the place of Q in shared memory.
    assert forward_config(TileCall("float16", 64, 128, 128, 128, "fold")).D == 128


def test_configuration_refuses() -> None:
    with pytest.raises(ValueError, match="no forward kernel for tiles 100 x 128"):
        ForwardConfig("bfloat16", 128, 128, block_q=100)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        ForwardConfig("bfloat16", 256, 256, stages=4)
    with pytest.raises(ValueError, match="hold must be 0, 1, 2 or 3, got 4"):
        ForwardConfig("bfloat16", 128, 128, hold=4)
    with pytest.raises(ValueError, match="the dQ kernel needs two stages of K, got 1"):
        QueryConfig("bfloat16", 128, 128, k_stages=1)
    with pytest.raises(ValueError, match="a stage is given back one step later, so there are two at least, got 1"):
        KeptConfig("bfloat16", 128, stages=1)
    with pytest.raises(ValueError, match="no kernel of dQ from dS for tiles 64 x 32"):
        KeptConfig("bfloat16", 128, block_kv=32)
    with pytest.raises(ValueError, match="the column kernel cannot run as"):
        BackwardConfig("bfloat16", 128, 128, keeps=True)
    with pytest.raises(ValueError, match="the kernel of dK and dV needs two stages of Q, got 1"):
        WideConfig("bfloat16", 192, 192, q_stages=1)
    with pytest.raises(ValueError, match="no gather kernel as"):
        GatherConfig("forward", "bfloat16", 64, stages=1)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        GatherConfig("forward", "bfloat16", 128, stages=2, blocks=3)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        GatherConfig("forward", "float32", 64, stages=3)
    for direction, heads in (("columns", 2), ("forward", 65), ("gradients", 0)):
        with pytest.raises(ValueError, match="no gather kernel as"):
            GatherConfig(direction, "bfloat16", 128, 2, heads=heads)
    for direction, size in (("query", 64), ("columns", 64), ("forward", 65)):
        with pytest.raises(ValueError, match=f"no gather kernel of float32 for {direction} with heads of {size}"):
            gather_config(direction, "float32", size, 8, "fold")
    with pytest.raises(ValueError, match="no column kernel for tiles 128 x 64 and heads of 128"):
        BackwardConfig("bfloat16", 128, 128, block_kv=64)
    with pytest.raises(ValueError, match="the column kernel cannot run as"):
        BackwardConfig("bfloat16", 64, 64, q_stages=1)
    for fields in ({"D": 128, "E": 128}, {"D": 64, "E": 64, "score": "softcap"}, {"D": 64, "E": 64, "block_kv": 64}):
        with pytest.raises(ValueError, match="the column kernel cannot run as"):
            BackwardConfig("bfloat16", block_q=64, with_dq=False, step=128, **fields)
    for fields in ({"D": 64, "E": 64, "step": 128}, {"D": 128, "E": 128, "block_q": 64, "block_kv": 64}):
        with pytest.raises(ValueError, match="the column kernel cannot run as"):
            BackwardConfig("bfloat16", with_dq=False, edges=True, **fields)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        BackwardConfig("bfloat16", 128, 128, q_stages=3)
    with pytest.raises(ValueError, match="the column kernel cannot run as"):
        BackwardConfig("bfloat16", 128, 128, 64, 64)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        BackwardConfig("bfloat16", 128, 128, 64, 64, q_stages=3, with_dq=False)


def problem(D: int, E: int, **fields: object) -> Problem:
    values = {"dtype": "bfloat16", "device": "cuda", "sm": 90} | fields
    return Problem(B=1, H=1, G=1, Q=1024, K=1024, D=D, E=E, **values)  # type: ignore[arg-type]


def test_reasons() -> None:
    capability = IMPLEMENTATION.capability
    assert reasons(problem(128, 128), capability) == []
    assert "float32" in reasons(problem(64, 64, dtype="float32"), capability)[0]
    assert "compute capability 9.0" in reasons(problem(64, 64, sm=80), capability)[0]
    assert "alibi_slopes" in reasons(problem(64, 64, score_terms=frozenset({"alibi_slopes"})), capability)[0]
    assert reasons(problem(64, 64, backward=True), capability) == []
    assert "32 x 32" in reasons(problem(64, 64, tile=(32, 32)), capability)[0]
    assert reasons(problem(96, 96, tile=(192, 128)), capability) == []
    assert "192 x 128 for head sizes up to 96" in reasons(problem(128, 64, tile=(192, 128)), capability)[0]


def test_few_queries_take_small_tiles() -> None:
    def tile(Q: int, D: int, backward: bool = False) -> tuple[int, int]:
        return IMPLEMENTATION.tile(replace(problem(D, D), Q=Q, backward=backward))

    assert [tile(Q, 64) for Q in (1, 128, 129)] == [(64, 64), (64, 64), (192, 128)]
    assert [tile(Q, 128) for Q in (1, 64, 65)] == [(64, 64), (64, 64), (128, 128)]
    assert tile(1, 128, backward=True) == (128, 128)


def name_of(kernel: Shipped) -> str:
    """For a test's id."""
    values = kernel.arguments
    if dataclasses.is_dataclass(values[0]):
        c: Any = values[0]
        values = (
            c.dtype,
            c.D,
            getattr(c, "E", c.D),
            c.block_q,
            c.block_kv,
            getattr(c, "score", "fold"),
            *(("no dq",) if not getattr(c, "with_dq", 1) else ()),
            *(("edges",) if getattr(c, "edges", 0) else ()),
            *(("keeps",) if getattr(c, "keeps", 0) else ()),
            *((Clears(c.clears).name.lower(),) if getattr(c, "clears", 0) else ()),
        )
    return "-".join(str(value) for value in (kernel.kind, *values))


def shown_first(found: Iterable[tuple[Any, ...]], config_of: Callable[[Any], Any]) -> list[Any]:
    """The parameters of tests: sizes that fill a chip in bfloat16; those between, and float16, are thorough."""

    def is_shown(config: Any) -> bool:
        dtype = getattr(config, "dtype", config)  # small kernels are told the type alone
        size = getattr(config, "D", getattr(config, "size", 128))
        return dtype == "float32" or (dtype == "bfloat16" and size in (128, 256))

    marks = ((), pytest.mark.thorough)
    return [pytest.param(*x, marks=marks[not is_shown(config_of(x))]) for x in found]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", shown_first(((kernel,) for kernel in shipped()), lambda x: x[0].arguments[0]), ids=name_of
)
def test_every_shipped_kernel_compiles(kernel: Shipped) -> None:
    registers, stack = resources(kernel.kernel.object(*kernel.arguments))
    assert registers and max(registers) <= 255, registers
    assert stack and max(stack) <= SPILLS.get(name_of(kernel), 0), stack


def made_when_needed() -> Iterator[tuple[str, Any]]:
    """Configurations that are not shipped: the backward with tiles of 64 x 64 and key lengths, gathered columns."""
    for score, D, lengths in itertools.product(("fold", "softcap"), (64, 128), (False, True)):
        yield "backward", backward_config(TileCall("bfloat16", D, D, 64, 64, score, lengths), False)
    yield "backward", backward_config(TileCall("float16", 128, 128, 64, 64, "fold"), False)
    for with_dq, lengths in itertools.product((True, False), repeat=2):
        narrow = TileCall("bfloat16", 128, 128, 128, 128, "fold", lengths)
        yield "backward", backward_config(narrow, with_dq, narrow=True)
    for D, tile in itertools.product((96, 128, 256), ((64, 64), (128, 128))):
        for score, lengths in (("fold", False), ("softcap", True)):
            call = TileCall("bfloat16", D, D, *tile, score, lengths)
            if D > WIDE:
                yield "wide", replace(wide_config(call), keeps=True)
            else:
                yield "backward", replace(backward_config(call, False), keeps=True)
            yield "kept", kept_config("bfloat16", D, *tile, lengths)
    yield "kept", kept_config("float16", 96, 192, 128)
    yield "wide", wide_config(TileCall("bfloat16", 256, 256, 64, 64, "fold"))
    for D, E in ((128, 128), (96, 96), (64, 64), (256, 256), (192, 128)):
        call = TileCall("bfloat16", D, E, 192 if D == 64 else 128, 128, "fold", True)
        yield ("wide", wide_config(call)) if D > WIDE else ("backward", backward_config(call, True))
        yield "query_gradient", query_config(call)
    yield "query_gradient", query_config(TileCall("bfloat16", 128, 128, 64, 64, "fold", True))
    yield "query_gradient", query_config(TileCall("bfloat16", 256, 256, 128, 128, "softcap", True))
    # Rows that keep nothing, and keys that nothing attends.
    tiles = (64, (192, 128)), (96, (128, 128)), (128, (128, 128)), (128, (64, 64)), (256, (128, 128))
    for (D, tile), clears in itertools.product(tiles, (Clears.INTERVALS, Clears.KEYS)):
        call = TileCall("bfloat16", D, D, *tile, "fold", clears == Clears.KEYS and D != 96, clears)
        yield "forward", forward_config(call)
        yield "query_gradient", query_config(call)
        if D > WIDE:
            yield "wide", wide_config(call)
        else:
            yield "backward", backward_config(call, tile != (64, 64), D == 128)
    for direction, size in itertools.product(("forward", "query", "columns"), (64, 128)):
        yield "gather", gather_config(direction, "bfloat16", size, size, "fold")
        yield "gather", gather_config(direction, "float16", size, size, "softcap", True)
    for direction, size, gaussian in itertools.product(("forward", "query", "columns"), (64, 128), (False, True)):
        yield "attention", gather_config(direction, "bfloat16", size, size, "fold", particles=True, gaussian=gaussian)
    for score, lengths in itertools.product(("fold", "scale", "softcap"), (False, True)):
        yield "gather", gather_config("forward", "float32", 64, 64, score, lengths)
    # Lists that only a device knows, of heads that share them.
    for direction, heads, size in itertools.product(("forward", "gradients"), (1, 16, 48), (64, 128, 256)):
        yield "gather", gather_config(direction, "bfloat16", size, size, "fold", False, heads)
    for direction, heads in itertools.product(("forward", "gradients"), (2, 64)):
        yield "gather", gather_config(direction, "float16", 128, 128, "softcap", True, heads)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "config"), shown_first(made_when_needed(), lambda x: x[1]), ids=repr)
def test_what_is_made_when_needed_compiles(kind: str, config: Any) -> None:
    from gossamer.kernels.hopper import compiled
    from gossamer.particles.kernels import compiled as of_particles

    registers, stack = resources(getattr(of_particles if kind == "attention" else compiled, kind).object(config))
    # With 256 columns, a soft cap and lengths a few words of an item are kept in memory while its steps run.
    most = 16 if kind == "query_gradient" and config.D == 256 and config.score == "softcap" else 0
    # Beside 192 rows, lengths are kept in memory while steps run: as much without what is cleared.
    most = 72 if kind == "forward" and config.block_q == 192 and config.lengths else most
    # dK and dV of 128 columns leave the computing warpgroup a few registers short.
    most = 16 if kind == "gather" and config.direction == "columns" and config.size == 128 else most
    # Which of their queries keep a key below a length is looked up, which takes the warps that gather two more.
    most = 24 if most == 16 and kind == "gather" and config.lengths else most
    # Those of particles leave that to the warps that gather, and a Gaussian takes a few registers more.
    if kind == "attention" and config.size == 128:
        most = {"forward": 0, "query": 32, "columns": 232}[config.direction]
    # So do all three gradients of 256, and two words more where 48 heads share a list.
    if kind == "gather" and config.direction == "gradients" and config.size == 256:
        most = 32 if config.heads > 16 else 24
    assert stack and max(stack) <= most, stack
    assert config.blocks == 1 or max(registers) <= 128, registers


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 3, 48])
@pytest.mark.parametrize(("direction", "tiles"), [("forward", 1), ("gradients", 2)])  # Q; Q and dO
def test_barriers_wait_for_the_rows_that_heads_fill(
    direction: str, tiles: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMA copies whole queries: a barrier that waits for the other rows of a tile of 64 waits forever."""
    import cutlass.cute as cute

    from gossamer.kernels.hopper import compiled

    counted, expect = [], cute.arch.mbarrier_arrive_and_expect_tx

    def recorded(barrier: Any, size: Any, *more: Any, **given: Any) -> None:
        counted.append(int(size))
        expect(barrier, size, *more, **given)

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(cute.arch, "mbarrier_arrive_and_expect_tx", recorded)
    compiled.gather.build(gather_config(direction, "bfloat16", 128, 128, "fold", False, heads))
    queries = {2: 32, 3: 16, 48: 1}[heads]
    assert set(counted) == {tiles * heads * queries * 128 * 2}


FLAT = [
    ("forward", forward_config(TileCall("bfloat16", 64, 64, 192, 128, "fold"))),
    ("backward", backward_config(TileCall("bfloat16", 128, 128, 128, 128, "fold"), True)),
    ("query_gradient", query_config(TileCall("bfloat16", 64, 64, 64, 64, "fold", True))),
    (
        "backward",
        replace(backward_config(TileCall("bfloat16", 128, 128, 64, 64, "fold"), False), keeps=True),
    ),
    ("kept", kept_config("bfloat16", 128, 64, 64)),
    ("gather", gather_config("columns", "bfloat16", 64, 64, "fold")),
    ("preprocess", "bfloat16", 64, 64),
    ("sum_parts", "bfloat16", 64, 128),
]


@needs_compiler
@pytest.mark.parametrize("roles", ["own", "kept"])
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, *key in FLAT], ids=[kind for kind, *_ in FLAT])
def test_kernels_as_jax_calls_them_compile(kind: str, key: list[Any], roles: str) -> None:
    """The device code is the same, also where an earlier launch has written what this one writes."""
    from gossamer.kernels.hopper import compiled
    from gossamer.kernels.hopper.device.parameters import parameters

    own = [p.role for p in parameters(kind, *key)]
    if roles == "kept" and "made" not in own:
        pytest.skip("makes nothing")
    given = tuple(own if roles == "own" else ["kept" if role == "made" else role for role in own])
    plain = getattr(compiled, kind)
    flat = plain.flat(given)
    assert flat.path(*key) != plain.path(*key)
    assert machine_code(flat.object(*key)) == machine_code(plain.object(*key))
