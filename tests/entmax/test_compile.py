"""The kernels of entmax compile without a GPU: Triton's for two architectures, the Hopper kernel without spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.entmax.hopper.long_rows.configurations import (
    LongRowsColumnsConfig,
    LongRowsConfig,
    long_rows_columns_config,
    long_rows_config,
)
from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.kernels.hopper import missing_packages
from tests.support.cubins import resources
from tests.support.processes import compiled
from tests.support.thorough import more

CONFIGS = {
    "checked": SupportConfig("bfloat16", 64, 29, same=0.5, bounds="causal"),
    "largest": SupportConfig("float16", 64, 29, same=0.5, top=True, bounds="causal"),
    "keys": SupportConfig("bfloat16", 64, 29, top=True, weighed=False),
    "any alpha": SupportConfig("bfloat16", 128, 29, step=64, bounds="intervals"),
    "sparsemax": SupportConfig("bfloat16", 128, 29, step=64, same=1.0, top=True),
}

# (dtype, D, E, alpha - 1, bounds) of the kernels of rows without a list.
TILES = [
    ("bfloat16", 64, 64, 0.5, "causal"), ("bfloat16", 64, 64, 0.25, "every"), ("float16", 40, 64, -1.0, "intervals"),
    ("bfloat16", 128, 128, 0.25, "causal"), ("float16", 96, 64, 1.0, "every"),
    ("bfloat16", 128, 128, -1.0, "intervals"),
]  # fmt: skip
SPILLS = {("long_rows_columns", 64, 64): 8}  # bytes of stack, of 160 registers a thread


def test_configurations_refuse() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory"):
        SupportConfig("bfloat16", 128, 29)
    with pytest.raises(ValueError, match="the kernel of supports cannot run as"):
        SupportConfig("bfloat16", 64, 29, top=False, weighed=False)
    for kind in (LongRowsConfig, LongRowsColumnsConfig):
        with pytest.raises(ValueError, match="of tiles of rows as"):
            kind("bfloat16", 96, 64)
        with pytest.raises(ValueError, match="bytes of shared memory"):
            kind("bfloat16", 128, 128, groups=3, **{"stages" if kind is LongRowsColumnsConfig else "v_stages": 9})


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_selecting_kernel_compiles(name: str) -> None:
    from gossamer.entmax.hopper import compiled as kernels

    registers, stack = resources(kernels.support_lists.object(CONFIGS[name]))
    assert registers and max(registers) <= 255
    assert not any(stack)


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
@pytest.mark.slow
@pytest.mark.parametrize("given", TILES, ids=str)
@pytest.mark.parametrize("kind", ["long_rows", "long_rows_columns"])
def test_the_kernels_of_tiles_compile(kind: str, given: tuple[Any, ...]) -> None:
    from gossamer.entmax.hopper import compiled as kernels

    configure = {"long_rows": long_rows_config, "long_rows_columns": long_rows_columns_config}[kind]
    config = configure(*given)
    registers, stack = resources(getattr(kernels, kind).object(config))
    assert registers and max(registers) <= 255
    assert max(stack) <= SPILLS.get((kind, config.D, config.E), 0), stack


# Of the launches of calls on a CPU every Triton kernel, or some, is compiled for a GPU.
COMPILE = """
import sys
import torch
from gossamer.entmax.launch import backward, forward
from gossamer.entmax.launch.calls import Facts, KernelCall
from gossamer.entmax.launch.kernels import KERNELS
from gossamer.entmax.launches import STATS
from gossamer.kernels.launch import Builder, Operand, compact
from gossamer.kernels.relaunch import Programs, compiled_for
from gossamer.kernels.triton.config import SHARED_MEMORY
sm, only = int(sys.argv[1]), sys.argv[2:] or list(KERNELS)
made = set()

def call(dtype, shapes, same, top_k, positions=False):
    q, k = shapes
    given = {"q": (dtype, q), "k": (dtype, k), "v": (dtype, k)}
    if positions:
        given |= {"q_positions": ("int64", q[:3]), "k_positions": ("int64", (q[0], q[1], k[2]))}
    rows, L = q[0] * q[1] * q[2], top_k or 96
    lists = {"list_keys": ("int32", (rows, L)), "list_weights": ("float32", (rows, L)),
             "list_counts": ("int32", (rows,)), "lam": ("float32", (rows,)), "dout": (dtype, q)}
    facts = Facts(torch.device("cpu"), same, 0.1, top_k, 1, 0)
    return [KernelCall(Builder({name: Operand(kind, shape, compact(shape)) for name, (kind, shape) in arrays.items()}),
                       facts) for arrays in (given, given | lists)]

def compile_all(prepared):
    for step in prepared.launch.steps:
        name = step.kernel.name
        if name in only:
            programs = Programs(*step.kernel.key)
            kernel = compiled_for(KERNELS[name], programs.signature, dict(programs.options), sm)
            assert kernel.metadata.shared <= SHARED_MEMORY[sm], (name, kernel.metadata.shared)
            made.add(name)
"""
SCRIPT = """
for dtype, D, top_k, same, G, positions in (
    ("bfloat16", 64, None, 0.5, 2, False), ("float32", 64, 8, None, 1, True), ("float16", 128, 64, 0.0, 2, False),
):
    shapes = (1, 2, 600, D), (1, G, 600, D)
    of_forward, of_backward = call(dtype, shapes, 0.3 if same is None else same, top_k, positions)
    compile_all(forward.prepare(of_forward, "out", True, STATS))
    compile_all(backward.prepare(of_backward, True))
assert len(made) == len(KERNELS), set(KERNELS) - made
"""

# The largest tiles of the kernel of supports: more than 32 of the k largest, and the largest head sizes.
SELECTION = """
of_forward, _ = call(dtype, ((1, 1, 64, D),) * 2, 0.5, top_k)
compile_all(forward.prepare(of_forward, "lists", True))
assert len(made) == 2, made
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, *more(80)])
def test_triton_kernels_compile(sm: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiled(COMPILE + SCRIPT, sm, cache=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "D", "top_k"),
    [("float32", 256, 57), *more(("float32", 128, 57), ("float32", 256, 8), ("float16", 256, 57))],
)
def test_what_selects_fits_for_all_types_and_sizes(dtype: str, D: int, top_k: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = f"{COMPILE}dtype, D, top_k = {dtype!r}, {D}, {top_k}\n{SELECTION}"
    compiled(script, 90, "select_kernel", "large_kernel", cache=tmp_path)
