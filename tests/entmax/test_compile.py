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


# Every launch of some kernels, or of all, is compiled in place of being run, on tensors of a CPU.
INSTEAD = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from gossamer.entmax.launch.calls import KernelCall
from gossamer.entmax.launch.backward import backward
from gossamer.entmax.launch.forward import forward
from gossamer.kernels.triton.config import SHARED_MEMORY
sm, only = int(sys.argv[1]), sys.argv[2:]
types = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
         torch.bool: "i1"}
made = set()

def compile_instead(self, grid):
    name = self.fn.__name__
    def call(*arguments, num_warps=4, num_stages=3, **named):
        if only and name not in only:
            return
        values = dict(zip(self.arg_names, arguments)) | named
        constants = {p.name: values[p.name] for p in self.params if p.is_constexpr}
        signature = {}
        for p in self.params:
            x = values[p.name]
            kind = "fp32" if isinstance(x, float) else "i32"
            kind = "*" + types[x.dtype] if isinstance(x, torch.Tensor) else kind
            signature[p.name] = "constexpr" if p.is_constexpr else kind
        source = ASTSource(fn=self, signature=signature, constexprs=constants)
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        shared = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).metadata.shared
        assert shared <= SHARED_MEMORY[sm], (name, shared)
        made.add(name)
    return call

JITFunction.__getitem__ = compile_instead
"""
SCRIPT = """
for dtype, D, top_k, same, G, positions in (
    (torch.bfloat16, 64, None, 0.5, 2, False), (torch.float32, 64, 8, None, 1, True),
    (torch.float16, 128, 64, 0.0, 2, False),
):
    q, k = torch.empty(1, 2, 600, D, dtype=dtype), torch.empty(1, G, 600, D, dtype=dtype)
    at = torch.zeros(1, 2, 600, dtype=torch.int64) if positions else None
    call = KernelCall(q, k, k, torch.zeros(2), same, 0.1, top_k, 1, 0, None, None, at, at)
    found = forward(call, keep_lists=True)
    backward(call, found.lists, found.stats.lam, q, True)
assert len(made) == 19, made
"""

# The largest tiles of the kernel of supports: more than 32 of the k largest, and the largest head sizes.
SELECTION = """
for dtype, D, top_k in (
    (torch.float32, 128, 57), (torch.float32, 256, 57), (torch.float32, 256, 8), (torch.float16, 256, 57),
):
    q = torch.empty(1, 1, 64, D, dtype=dtype)
    call = KernelCall(q, q, q, torch.zeros(1), 0.5, 0.1, top_k, 1, 0, None, None, None, None)
    forward(call, keep_lists=True, with_out=False)
assert len(made) == 2, made
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
def test_triton_kernels_compile(sm: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiled(INSTEAD + SCRIPT, sm, cache=tmp_path)


@pytest.mark.slow
def test_what_selects_fits_for_all_types_and_sizes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compiled(INSTEAD + SELECTION, 90, "select_kernel", "large_kernel", cache=tmp_path)
