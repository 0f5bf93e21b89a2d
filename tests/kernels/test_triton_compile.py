"""Every shipped tile configuration compiles for every architecture, without a GPU, and fits its shared memory.

Compilation runs in processes of its own, with a cache that is thrown away.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import compiled
from tests.support.thorough import more

pytest.importorskip("triton")

from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.block.config import CANDIDATES, TABLE, TileConfig, config
from gossamer.kernels.triton.config import ARCHITECTURES, BUCKETS, DIRECTIONS, SHARED_MEMORY, architecture

# What is compiled besides the shipped configurations: score terms, odd head sizes, contiguous lists, grouped queries.
EXTRA = """
from gossamer.kernels.triton.compile import Variant
from gossamer.kernels.triton.block.config import TileConfig, config
extra = [
    Variant("float16", 64, 64, terms=("softcap", "sink", "lengths"), alibi=4),
    Variant("bfloat16", 72, 40, terms=("lengths",), group=4, splits_rows=False),
    Variant("bfloat16", 128, 128, modes=("full", "interval"), contiguous=("full", "interval"), splits_rows=False),
    Variant("bfloat16", 64, 64, tile=(32, 128)),
]
work = [(d, config(d, 16, v.D, v.E, sm), v) for d in ("forward", "dq", "dkdv") for v in extra]
work += [(d, TileConfig(64, 64, 4, 2, tma=True), Variant(D=72)) for d in ("forward", "dq", "dkdv")]
"""

COMPILE = """
import sys
from gossamer.kernels.triton.compile import compile_kernel, shipped
from gossamer.kernels.triton.config import SHARED_MEMORY
sm = int(sys.argv[1])
{work}
for direction, config, variant in work:
    shared = compile_kernel(direction, config, variant, sm).metadata.shared
    print(direction, config, variant, "uses", shared, "bytes of shared memory")
    assert shared <= SHARED_MEMORY[sm], f"over {{SHARED_MEMORY[sm]}}"
"""


JOIN = """
import sys
from gossamer.kernels.relaunch import compiled_for, parameters
from gossamer.kernels.triton.combine_results import combine_results_kernel
from gossamer.kernels.triton.compile import stand_in
from gossamer.kernels.triton.config import ROWS_OF_A_PROGRAM
for dtype, size in (("bfloat16", 128), ("float16", 40), ("float32", 256)):
    constants = {"E": size, "BLOCK_E": max(64, size), "R": ROWS_OF_A_PROGRAM, "rows": 7}
    signature = [constants[name] if name in constants else stand_in(name, kind, dtype)
                 for name, kind in parameters(combine_results_kernel).items()]
    options = {"num_warps": 4, "enable_fp_fusion": True}
    made = compiled_for(combine_results_kernel, signature, options, int(sys.argv[1]))
    lines = made.asm["ptx"].splitlines()
    loads, stores = ([at for at, line in enumerate(lines) if word in line] for word in ("ld.global", "st.global"))
    # It works in place, and each warp reads the lse of all rows: none may write one that another has not read.
    assert any("bar.sync" in line for line in lines[max(loads) : min(stores)]), made.asm["ptx"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "dtype"),
    [(90, "bfloat16"), (89, "float32"), *more((89, "bfloat16"), (90, "float32")),
     *more(*((sm, dtype) for sm in (80, 100) for dtype in ("bfloat16", "float32")))],
)  # fmt: skip
def test_shipped_configurations_compile(sm: int, dtype: str, tmp_path: Path) -> None:
    work = f"work = [w for w in shipped(sm) if w[2].dtype == {dtype!r}]"
    compiled(COMPILE.format(work=work), sm, cache=tmp_path)


@pytest.mark.slow
def test_variants_compile(tmp_path: Path) -> None:
    compiled(COMPILE.format(work=EXTRA), 90, cache=tmp_path)
    compiled(JOIN, 90, cache=tmp_path)


def test_table_is_complete() -> None:
    for direction in DIRECTIONS:
        for bits in (16, 32):
            for bucket in BUCKETS:
                assert set(TABLE[direction, bits, bucket]) == set(ARCHITECTURES)
        for bucket in BUCKETS:
            assert CANDIDATES[direction, bucket]


def test_config_by_head_size_and_gpu() -> None:
    assert [padded(n) for n in (1, 16, 17, 64, 96, 129, 256)] == [16, 16, 32, 64, 128, 256, 256]
    assert [architecture(sm) for sm in (80, 86, 87, 89, 90, 100, 103, 120)] == [80, 89, 89, 89, 90, 100, 100, 89]
    assert config("dq", 16, 65, 8, 90) == TABLE["dq", 16, 128][90]
    assert config("forward", 32, 64, 200, 80) == TABLE["forward", 32, 256][80]
    assert set(SHARED_MEMORY) == set(ARCHITECTURES)


def test_fit_divides_the_tile() -> None:
    whole = TileConfig(128, 64, 8, 2)
    assert whole.fit(128, 128) is whole
    assert whole.fit(96, 160) == TileConfig(32, 32, 4, 2)
    assert whole.fit(256, 64) == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((48, 64, 4, 2), "rows must be a power of two"),
        ((64, 16, 4, 2), "columns must be a power of two and at least 32, got 16"),
        ((64, 64, 3, 2), "warps must be 4 or 8, got 3"),
        ((64, 64, 4, 0), "stages must be 1 to 5, got 0"),
        ((64, 64, 4, 2, "tf32x2"), "precision must be ieee, tf32x3 or tf32"),
    ],
)
def test_bad_configurations_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TileConfig(*arguments)
