"""Compile the kernels for a GPU that is not there, and read what the compiler says of them.

`python -m gossamer.kernels.triton.compile --sm 90` prints registers, spills and shared memory of each configuration.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.block.config import SMALL, TABLE, TileConfig
from gossamer.kernels.triton.block.forward import forward_kernel
from gossamer.kernels.triton.block.key_gradients import dkdv_kernel
from gossamer.kernels.triton.block.query_gradient import dq_kernel
from gossamer.kernels.triton.config import ARCHITECTURES, BUCKETS, DIRECTIONS, SHARED_MEMORY, Direction
from gossamer.layouts.walk import KINDS

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
STREAMED = {"forward": ("k", "v"), "dq": ("k", "v"), "dkdv": ("q", "dout")}
POINTERS_16 = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
POINTERS_FLOAT = {"lse", "dlse", "row_terms", "sinks", "slopes", "part", "part_acc", "part_ml", "part_dk", "part_dv"}
FLOATS = {"scale", "cap", "plain_scale"}
TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
# Arguments of which nothing is known at compile time: `do_not_specialize` of the kernels.
PLAIN = {"n_items", "n_slots", "n_tiles", "Q", "K", "q_offset", "H", "G", "list_b", "list_h", "lead_heads"}


@dataclass(frozen=True)
class Variant:
    """What of a call is compiled into a kernel besides its tile configuration."""

    dtype: str = "bfloat16"
    D: int = 128
    E: int = 128
    group: int = 1
    modes: tuple[str, ...] = KINDS
    contiguous: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()  # of softcap, sink, lengths
    alibi: int = 0  # as `scores.alibi` gives it
    splits_rows: bool = True
    clear: bool = True
    tile: tuple[int, int] = (128, 128)


@dataclass(frozen=True)
class Report:
    """What the compiler says of a kernel."""

    shared: int  # bytes of shared memory
    registers: int  # of a thread
    spills: int  # bytes stored to and loaded from local memory by a thread
    stack: int  # bytes of local memory of a thread


def compile_kernel(direction: Direction, config: TileConfig, variant: Variant, sm: int) -> Any:
    """Triton's compiled kernel for compute capability `sm`."""
    kernel = KERNELS[direction]
    config = config.fit(*variant.tile)
    tile_rows, tile_columns = variant.tile
    constants: dict[str, Any] = {
        "D": variant.D,
        "E": variant.E,
        "BLOCK_D": padded(variant.D),
        "BLOCK_E": padded(variant.E),
        "R": config.rows,
        "C": config.columns,
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": tile_columns,
        "GROUP": variant.group,
        "B_FROM_GRID": True,
        "H_FROM_GRID": True,
        "HAS_ITEMS": True,
        "CLEAR": variant.clear,
        "HAS_SLOTS": variant.splits_rows,
        "FOLD": "softcap" not in variant.terms and not variant.alibi,
        "PRECISION": config.precision,
        "TMA": config.tma,
    }
    for mode in KINDS:
        constants[f"HAS_{mode.upper()}"] = mode in variant.modes
        constants[f"{mode.upper()}_CONTIGUOUS"] = mode in variant.contiguous
    for term in ("softcap", "sink", "lengths"):
        constants[term.upper()] = term in variant.terms
    constants["ALIBI"] = variant.alibi
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if config.tma and name in STREAMED[direction]:
            size = padded(variant.D if name in ("q", "k") else variant.E)
            signature[name] = f"tensordesc<{TYPES[variant.dtype].removeprefix('*')}[1, 1, {config.columns}, {size}]>"
            continue
        signature[name] = argument_type(name, variant.dtype)
        if name not in PLAIN | FLOATS:
            attributes[(at,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def argument_type(name: str, dtype: str) -> str:
    """What Triton calls the type of a kernel's argument, by its name."""
    if name in POINTERS_16:
        return TYPES[dtype]
    if name in POINTERS_FLOAT:
        return "*fp32"
    if name in FLOATS:
        return "fp32"
    if name.startswith("stride_") or name in PLAIN | {"padded_Q", "delta_offset"}:
        return "i32"
    return "*i32"


def report(compiled: Any, sm: int) -> Report:
    """Registers and spills, by assembling the kernel's PTX once more with `ptxas -v`."""
    suffix = re.search(r"\.target sm_(?P<sm>\w+)", compiled.asm["ptx"])
    assert suffix is not None
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [_ptxas(sm), "-v", f"--gpu-name=sm_{suffix['sm']}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = [re.search(pattern, text) for pattern in (r"Used (?P<n>\d+) registers", r"(?P<n>\d+) bytes stack frame")]
    registers, stack = (int(found["n"]) if found else 0 for found in numbers)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
    return Report(compiled.metadata.shared, registers, spills, stack)


def _ptxas(sm: int) -> str:
    from triton.backends.nvidia import compiler

    return str(compiler.get_ptxas(sm).path)


def shipped(sm: int) -> Iterator[tuple[Direction, TileConfig, Variant]]:
    """Every configuration of the table for an architecture, with all mask modes."""
    for direction in DIRECTIONS:
        for bits, dtype in ((16, "bfloat16"), (32, "float32")):
            for bucket in BUCKETS:
                yield direction, TABLE[direction, bits, bucket][sm], Variant(dtype, bucket, bucket)
    if sm >= 90:
        for (direction, bucket), small in SMALL.items():
            yield direction, small, Variant("bfloat16", bucket, bucket, tile=(64, 64))


def main(arguments: list[str] | None = None) -> None:
    """Print what the compiler says of every shipped configuration."""
    summary, *_ = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--sm", type=int, nargs="*", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 32], choices=[16, 32])
    options = parser.parse_args(arguments)
    for sm in options.sm:
        for direction, config, variant in shipped(sm):
            if (32 if variant.dtype == "float32" else 16) not in options.bits:
                continue
            found = report(compile_kernel(direction, config, variant, sm), sm)
            print(
                f"sm_{sm} {direction:8s} {variant.dtype:9s} D={variant.D:<4d} {config.rows}x{config.columns} "
                f"warps={config.warps} stages={config.stages} shared={found.shared} of {SHARED_MEMORY[sm]} "
                f"registers={found.registers} spills={found.spills}",
                flush=True,
            )


if __name__ == "__main__":
    main()
