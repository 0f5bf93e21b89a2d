"""The kernels of SparseK attention and of thresholds compile without a GPU, fit its shared memory, and on compute
capability 9.0 ptxas leaves their products asynchronous.

Compilation runs in a process of its own, with a cache that is thrown away.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import compiled
from tests.support.thorough import more

pytest.importorskip("triton")

COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gossamer.sparse_k.launch import triton as triton_calls
from gossamer.kernels.relaunch import constants
from gossamer.sparse_k.triton import forward, key_gradients, lists, query_gradient
from gossamer.sparse_k.triton.steps import Form
from gossamer.sparse_k.thresholds_triton import gradient, order, starts, walks
from gossamer.sparse_k.thresholds_triton import launch as prefixes
from gossamer.kernels.triton.compile import _ptxas
from gossamer.kernels.triton.config import SHARED_MEMORY

sm, size = map(int, sys.argv[1:])
KINDS = dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), "*bf16")
KINDS |= dict.fromkeys(("u", "tau", "lse", "dlse", "delta", "dtau", "du", "scores", "score"), "*fp32")
KINDS |= dict.fromkeys(("part_dk", "part_dv", "part_du"), "*fp32") | {"sums": "*i64", "sum": "*i64"}
KINDS |= {"shares": "*fp64", "totals": "*fp64"}


def compile_one(kernel, constants, warps=4, stages=1, registers=None):
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = KINDS.get(name.removesuffix("_ptr"), "*i32")
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("factor", "scale") else "i32"
            if name.startswith("stride") or name in ("N", "capacity", "chunk"):
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    assert made.metadata.shared <= SHARED_MEMORY[sm], (kernel.__name__, made.metadata.shared)
    if sm == 90 and kernel is forward.gated_forward:
        ptx = Path(tempfile.mkdtemp()) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        command = [_ptxas(sm), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "serialized" not in said, (kernel.__name__, said)


triton_calls.shared_memory = lambda device: SHARED_MEMORY[sm]
x = SimpleNamespace(q=torch.empty(1, 1, 1, size, dtype=torch.bfloat16), v=torch.empty(1, 1, 1, size))
for kernel, name in (
    (forward.gated_forward, "forward"),
    (query_gradient.gated_query_gradient, "query"),
    (key_gradients.entry_gradients, "entries"),
    (key_gradients.gated_key_gradients, "windows"),
):
    t = triton_calls.tiles(name, x)
    form = Form(size, size, size, size, "v", "tf32", t.m, t.n, name == "forward", False, False, 1)
    compile_one(kernel, {"FORM": constants(form)}, t.warps, t.stages, t.registers)
if size == 64:
    sums = {"OVER": True, "CHUNKS": 128}
    compile_one(query_gradient.row_sums, {"E": 64, "SIZE_E": 64, "HAS_DLSE": True, "BLOCK": 64})
    compile_one(key_gradients.link_entries, sums | {"STEPS": 11, "BLOCK": 256})
    compile_one(key_gradients.add_entries, sums | {"D": 64, "E": 64, "SIZE_D": 64, "SIZE_E": 64, "BLOCK": 16})
    compile_one(lists.count_live, {"BLOCK": 1024})
    compile_one(lists.write_live, {"BLOCK": 1024})
    for ordered in (True, False):
        compile_one(lists.live_lists, {"ORDERED": ordered, "BLOCK": 2048}, 8)
    one, edges, nodes = {"ONE": 1 << 44}, {"EDGES": prefixes.EDGES}, {"NODE": prefixes.NODE, "LANES": 32}
    table = one | edges | {"CHUNK": prefixes.CHUNK}
    compile_one(order.count_places, {"BLOCK": 1024})
    compile_one(order.write_prefixes, {"BLOCK": 1024})
    compile_one(starts.find_edges, edges, 8)
    compile_one(starts.add_keys, table | {"BLOCK": 1024})
    of_columns = {"COLUMNS": 2 * prefixes.EDGES, "BLOCK": 16, "PART": 64}
    compile_one(starts.sum_chunks, {"CHUNK": prefixes.CHUNK} | of_columns)
    compile_one(starts.find_starts, table | {"NODE": prefixes.NODE})
    compile_one(walks.walk_thresholds, one | nodes, 1)
    compile_one(walks.walk_largest, nodes, 1)
    compile_one(walks.walk_both, one | nodes, 1)
    compile_one(gradient.find_ranges, {"BLOCK": 1024})
    compile_one(gradient.sum_shares, {"BLOCK": 1024})
    compile_one(gradient.sum_totals, {"BLOCK": 256})
    compile_one(gradient.add_ranges, {"SUMMED": 1024, "BLOCK": 1024})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "size"), [(89, 256), (90, 128), *more((80, 64), (80, 128), (80, 256), (89, 128), (90, 64), (90, 256))]
)
def test_kernels_compile(sm: int, size: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, size, cache=tmp_path)
