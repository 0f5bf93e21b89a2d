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
from typing import Any, get_type_hints

from gossamer.kernels.relaunch import PLAIN, Blocks, Pointer, Strides, compiled_for, padded, parameters
from gossamer.kernels.triton.block.config import SMALL, TABLE, TileConfig
from gossamer.kernels.triton.block.launch_block import KERNELS, STREAMED
from gossamer.kernels.triton.block.parameters import Form, TileList
from gossamer.kernels.triton.config import ARCHITECTURES, BUCKETS, DIRECTIONS, SHARED_MEMORY, Direction
from gossamer.layouts.walk import KINDS

ARRAYS = {"q", "k", "v", "out", "part_out", "dout", "dq", "dk", "dv"}  # of the inputs' type
ARRAYS_FLOAT = {"lse", "dlse", "part_lse", "row_terms", "sinks", "slopes", "part", "part_acc", "part_ml", "part_dk",
                "part_dv"}  # fmt: skip
FLOATS = {"scale", "cap", "plain_scale"}
# Numbers that a kernel is compiled for no value of, or for one that is nothing special.
NUMBERS = {"n_items", "n_programs", "n_slots", "n_tiles", "Q", "K", "q_offset", "H", "G", "heads", "list_b", "list_h",
           "lead_heads"}  # fmt: skip
DIVISIBLE = {"padded_Q", "delta_offset"}


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
    D, E = padded(variant.D), padded(variant.E)
    form = Form(
        variant.D, variant.E, D, E, config.rows, config.columns, tile_rows, tile_columns, variant.group,
        B_FROM_GRID=True, H_FROM_GRID=True, HAS_ITEMS=True, HAS_SLOTS=variant.splits_rows,
        HAS=tuple(mode in variant.modes for mode in KINDS),
        CONTIGUOUS=tuple(mode in variant.contiguous for mode in KINDS),
        FOLD="softcap" not in variant.terms and not variant.alibi, SOFTCAP="softcap" in variant.terms,
        ALIBI=variant.alibi, SINK="sink" in variant.terms and direction == "forward",
        LENGTHS="lengths" in variant.terms, PRECISION=config.precision, TMA=config.tma, CLEAR=variant.clear,
    )  # fmt: skip
    values: dict[str, Any] = {"FORM": form}
    if config.tma:
        for name in STREAMED[direction]:
            size = variant.D if name in ("q", "k") else variant.E
            block = 1, 1, config.columns, padded(size)
            values[name] = Blocks(variant.dtype, (1, 1, tile_columns, size), (padded(size),) * 3 + (1,), block)
    signature = [
        values[name] if name in values else stand_in(name, kind, variant.dtype)
        for name, kind in parameters(kernel).items()
    ]
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    return compiled_for(kernel, signature, options, sm)


def stand_in(name: str, kind: Any, dtype: str) -> Any:
    """What a kernel of this folder is compiled for of a parameter or field: an array, a number, or a tuple of them.

    Args:
        kind: the NamedTuple that it is; None: no tuple.
    """
    if kind is Strides:
        return Strides(16, 16, 16)
    if name == "tiles":
        return (stand_in("", TileList, dtype),) * len(KINDS)
    if hasattr(kind, "_fields"):
        return kind(*(stand_in(field, hint, dtype) for field, hint in get_type_hints(kind).items()))
    if name in ARRAYS | ARRAYS_FLOAT:
        return Pointer(dtype if name in ARRAYS else "float32", True)
    if name in FLOATS:
        return 0.5
    if name in DIVISIBLE | NUMBERS:
        return 16 if name in DIVISIBLE else PLAIN
    return Pointer("int32", True)


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
