"""The gather kernels compile for GPUs that are not there: registers without spills, shared memory that fits."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from gossamer.kernels.relaunch import compiled_for, filled, padded, parameters
from gossamer.kernels.triton.compile import report, stand_in
from gossamer.kernels.triton.config import SHARED_MEMORY
from gossamer.kernels.triton.gather import row_kernels, tile_kernels
from gossamer.kernels.triton.gather.config import GATHERS, group_config, piece, row_config
from gossamer.kernels.triton.gather.parameters import RowForm, TileForm
from gossamer.layouts.gather import WIDTHS


def compiled(direction: str, block_q: int, dtype: str, D: int, sm: int) -> Any:
    """Triton's kernel of the shipped configuration, with every feature that costs registers off."""
    bits = 32 if dtype == "float32" else 16
    constants: dict[str, Any] = {
        "D": D, "E": D, "BLOCK_D": padded(D), "BLOCK_E": padded(D), "GROUP": 1, "MEMBERS": 1, "B_FROM_GRID": True,
        "H_FROM_GRID": True, "FLAT": False, "HAS_SLOTS": True, "SOFTCAP": False, "ALIBI": 0, "SINK": False,
        "LENGTHS": False,
    }  # fmt: skip
    if block_q == 1:
        kernel, form = getattr(row_kernels, f"rows_{direction}_kernel"), RowForm
        chosen = row_config(direction, bits, D, D)  # type: ignore[arg-type]
        constants |= {"RP": chosen.items, "C": chosen.columns, "SD": piece(D, bits), "SE": piece(D, bits)}
        constants |= {"STREAMED": (D, D)}
        options = {"num_warps": chosen.warps, "num_stages": 1, "maxnreg": chosen.registers}
    else:
        kernel, form = getattr(tile_kernels, f"tiles_{direction}_kernel"), TileForm
        groups = group_config(direction, bits, D, D, block_q)  # type: ignore[arg-type]
        constants |= {"R": block_q, "C": WIDTHS[block_q], "PRECISION": groups.precision}
        options = {"num_warps": groups.warps, "num_stages": groups.stages}
    signature = [
        filled(form, constants) if name == "FORM" else stand_in(name, kind, dtype)
        for name, kind in parameters(kernel).items()
    ]
    return compiled_for(kernel, signature, options | {"enable_fp_fusion": True}, sm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("block_q", "D"), [(1, 64), (1, 128), (16, 64)])
@pytest.mark.parametrize("direction", ["forward", "dq", "dkdv"])
def test_no_spills(direction: str, block_q: int, D: int, dtype: str) -> None:
    found = report(compiled(direction, block_q, dtype, D, 90), 90)
    assert not found.spills and found.shared <= SHARED_MEMORY[90]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("direction", ["forward", "dq", "dkdv"])
def test_columns_are_loaded_once_and_none_waits_for_another(direction: str, D: int) -> None:
    text = compiled(direction, 1, "bfloat16", D, 90).asm["ttgir"]
    before, loop = text[: text.index("scf.for")], text[text.index("scf.for") :]
    load = re.compile(r"(%\w+) = tt\.load %\w+, %\w+, (%\w+) (?:\S+ = \S+ )?: tensor<\w+x!tt\.ptr<i32>")
    assert len(load.findall(loop)) == row_config(direction, 16, D, D).columns  # type: ignore[arg-type]
    first = load.findall(before)
    assert len(first) > 4 and all(other.startswith("%cst") for _, other in first)


@pytest.mark.slow
@pytest.mark.parametrize("choice", GATHERS, ids=lambda c: f"{c.block_q}-{'-'.join(sorted(c.dtypes))}")
def test_the_largest_offered_sizes_fit(choice: Any) -> None:
    dtype = "float32" if "float32" in choice.dtypes else "bfloat16"
    # The GPU with the least shared memory that the choice is offered on.
    sm = min((s for s in SHARED_MEMORY if s >= choice.min_sm), key=lambda s: SHARED_MEMORY[s])
    found = report(compiled("dkdv", choice.block_q, dtype, choice.max_head_dim, sm), sm)
    assert found.shared <= SHARED_MEMORY[sm]
