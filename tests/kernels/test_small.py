"""The kernels for small problems: every contract case in Triton's interpreter, and every tile compiled.

The interpreter is chosen when triton is imported, so the cases run in a process of their own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.processes import INTERPRETING, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

import gossamer as gs
from gossamer.testing import inputs, tolerance
from gossamer.testing.cases import SMALL, Case
from gossamer.torch.mask_layouts import packed_mask_of, unpack

PARTS = 2

if INTERPRETING:
    from gossamer.kernels.small import launch_small as launch
    from tests.support import launches
    from tests.support.exact import NAMES, Exact
    from tests.support.unkept import check_unkept

    def forward(
        e: Exact, q: Tensor, k: Tensor, v: Tensor, packed_mask: Tensor | None, tile: launch.Tile | None = None
    ) -> tuple[Tensor, ...]:
        return launches.forward(launch, e.problem, packed_mask, e.terms, q, k, v, tile=tile)

    @torch.no_grad()
    def check(case: Case, tile: launch.Tile | None) -> None:
        with torch.enable_grad():
            e = Exact(case, "float32", "cpu")
        packed_mask = packed_mask_of(e.mask, case.Q, case.K)
        q, k, v = (x.detach() for x in e.leaves[:3])
        out, lse = forward(e, q, k, v, packed_mask, tile=tile)
        grads = launches.backward(
            launch, e.problem, packed_mask, e.terms, e.dout, e.dlse.float(), q, k, v, out, lse, tile=tile
        )
        found = [out, lse, *grads]
        assert len(found) == 2 + len(e.leaves)
        for result, actual, exact, low in zip(NAMES, found, e.exact, e.low, strict=False):
            tolerance.check(result, actual, exact, low)
        empty = e.exact[1] == -torch.inf
        assert (out[empty] == 0).all() and (lse[empty] == -torch.inf).all() and (grads[0][empty] == 0).all()
        if "unkept" not in case.tags:
            return

        def run(q: Tensor, k: Tensor, v: Tensor, *cotangents: Tensor) -> list[Tensor]:
            out, lse = forward(e, q, k, v, packed_mask, tile=tile)
            given = (*cotangents, q, k, v, out, lse)
            return [out, lse, *launches.backward(launch, e.problem, packed_mask, e.terms, *given, tile=tile)]

        there = inputs.unkept(e.mask, e.terms, (case.B, case.H, case.Q), case.G)
        sinks = e.terms.sink_logits is not None
        check_unkept(run, there, [q, k, v, e.dout, e.dlse.float()], sinks=sinks, poisons=inputs.POISONS[:1])

    @pytest.mark.parametrize("case", SMALL, ids=str)
    def test_case(case: Case) -> None:
        check(case, None)

    @torch.no_grad()
    def test_one_row_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
        """As for more batch elements or heads than the other dimensions of a grid have."""
        case = next(c for c in SMALL if c.B > 1 and c.H > c.G > 1)
        with torch.enable_grad():
            e = Exact(case, "float32", "cpu")
        q, k, v = (x.detach() for x in e.leaves[:3])
        packed_mask, results = packed_mask_of(e.mask, case.Q, case.K), []
        for one in (False, True):
            monkeypatch.setattr(launch, "one_row", lambda p, one=one: one)
            out, lse = forward(e, q, k, v, packed_mask)
            dq, dk, dv, *_ = launches.backward(launch, e.problem, packed_mask, e.terms, e.dout, None, q, k, v, out, lse)
            results.append((out, lse, dq, dk, dv))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_other_tiles() -> None:
        for name in ("causal", "odd_sizes", "all_terms"):
            check(next(c for c in SMALL if c.name == name), launch.Tile(64, 128, 4, 1))

    @pytest.mark.parametrize("strides", inputs.STRIDES)
    def test_strides_and_no_mask(strides: str) -> None:
        case = next(c for c in SMALL if c.name == "dense")
        e = Exact(case, "float32", "cpu")
        given = inputs.make(case, "float32", strides=strides)
        packed_mask = packed_mask_of(e.mask, case.Q, case.K)
        found = forward(e, *given.qkv, None)
        for actual, same, exact, low in zip(found, forward(e, *given.qkv, packed_mask), e.exact, e.low, strict=False):
            assert torch.equal(actual, same)
            tolerance.check("result", actual, exact, low)

else:

    @pytest.mark.slow
    @pytest.mark.parametrize("part", [0, *more(*range(1, PARTS))])
    def test_in_the_interpreter(part: int) -> None:
        tests = [f"test_case[{case.name}]" for case in SMALL][part::PARTS]
        if part == 0:
            tests += ["test_strides_and_no_mask", "test_other_tiles", "test_one_row_of_programs"]
        in_interpreter(__file__, *tests)


COMPILE = """
import sys
from gossamer.kernels.relaunch import PLAIN, Pointer, Strides, compiled_for, filled, parameters
from gossamer.plan.problem import Problem
from gossamer.kernels.small import kernels, launch_small as launch
from gossamer.kernels.small.parameters import Form
from gossamer.kernels.triton.config import SHARED_MEMORY

dtype, *targets = sys.argv[1:]
seen = set()
for D, N in ((64, 128), (128, 128), (128, 4096), (256, 128), (256, 4096), (64, 4096)):
    problem = Problem(1, 8, 8, N, N, D, D, dtype, "cuda", processors=132, backward=True)
    if dtype == "float32" and D > 128:
        continue
    for kernel, tile in (
        (kernels.forward_kernel, launch.forward_tile(problem)),
        (kernels.backward_kernel, launch.backward_tile(problem)),
    ):
        if (kernel, D, tile) in seen:
            continue
        seen.add((kernel, D, tile))
        precision = "ieee" if dtype == "bfloat16" else "tf32x3"
        values = dict(GROUP=1, D=D, E=D, BLOCK_D=D, BLOCK_E=D, R=tile.R, C=tile.C, SOFTCAP=False)
        values |= {"PRECISION": precision, "ONE_ROW": False, "ALIBI": 0, "lse": Pointer("float32", False)}
        values |= dict.fromkeys(("slopes", "sinks", "lengths", "dlse")) | {"packed_mask": Pointer("int32", False)}
        values |= dict.fromkeys("q k v out dout dq dk dv".split(), Pointer(dtype, False))
        values |= dict.fromkeys("Q K q_offset mask_b mask_h H".split(), PLAIN)
        values |= dict.fromkeys(("scale", "cap", "plain_scale"), 0.5)
        values |= {f"at_{name}": Strides(PLAIN, PLAIN, PLAIN) for name in "qkv"}
        signature = [filled(kind or Form, values) if name not in values else values[name]
                     for name, kind in parameters(kernel).items()]
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
        for sm in map(int, targets):
            shared = compiled_for(kernel, signature, options, sm).metadata.shared
            print(kernel.__name__, dtype, D, N, tile, "sm", sm, "shared", shared)
            assert shared <= SHARED_MEMORY[sm]
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="the interpreter does not compile")
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_every_tile_compiles(tmp_path: Path, dtype: str) -> None:
    """For the two architectures with the least and the most shared memory."""
    compiled(COMPILE, dtype, 89, 90, cache=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch finds none")
@pytest.mark.parametrize("shape", [(70000, 1, 1, 16), (1, 70000, 1, 16), (70000, 1, 3, 16)], ids=str)
def test_more_heads_than_a_grid_is_high(shape: tuple[int, ...]) -> None:
    """A grid has 65,535 programs along its second and third dimensions: two halves have fewer."""
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=shape[2] == 1) for _ in range(3))

    def results(*given: torch.Tensor) -> list[torch.Tensor]:
        out, lse = gs.attention(*given, gs.Causal(), return_lse=True, implementation="small")
        grads = torch.autograd.grad((out * given[2]).sum() + lse.sum(), given) if out.requires_grad else ()
        return [out, lse, *grads]

    axis = shape.index(70000)
    halves = zip(*(results(*part) for part in zip(*(x.chunk(2, axis) for x in (q, k, v)), strict=True)), strict=True)
    for whole, both in zip(results(q, k, v), halves, strict=True):
        assert torch.equal(whole, torch.cat(both, axis))


def test_rows_far_apart_are_copied() -> None:
    """One head of a long fused cache: its last row lies 2**32 numbers behind the first, and offsets have 32 bits."""
    from gossamer.kernels.launch import operand_of
    from gossamer.kernels.small.launch_small import readable

    cache = torch.empty(1, 1, 2**20, 4096, device="meta")
    assert not readable(operand_of(cache[..., :64])) and readable(operand_of(cache[:, :, : 2**18, :64]))
    assert readable(operand_of(cache[..., :64].contiguous()))


def test_masks_that_batch_elements_share_are_another_launch() -> None:
    """(1, 2, Q, W) and (2, 2, Q, W) have the same strides."""
    from gossamer.kernels.contract import Scoring
    from gossamer.kernels.launch import operand_of
    from gossamer.kernels.small import IMPLEMENTATION
    from gossamer.plan.problem import Problem

    one, two = torch.zeros(1, 2, 8, 4), torch.zeros(2, 2, 8, 4)
    assert one.stride() == two.stride()
    problem = Problem(2, 2, 2, 8, 8, 16, 16, "float32", "cpu")
    given = {name: operand_of(torch.zeros(2, 2, 8, 16)) for name in ("q", "k", "v")}
    (first,), (second,) = (
        IMPLEMENTATION.prepare(problem, packed_mask, "forward", Scoring(1.0, 0), given).launch.steps
        for packed_mask in (one, two)
    )
    assert first.kernel != second.kernel and len(first.arguments) == len(second.arguments)
    differ = [(a, b) for a, b in zip(first.arguments, second.arguments, strict=True) if a != b]
    ((a, b),) = differ  # the strides of the mask
    assert (a.value.mask_b, b.value.mask_b) == (0, 64)  # type: ignore[union-attr]


def test_packed_masks_hold_the_mask() -> None:
    mask = torch.from_numpy(np.random.default_rng(0).random((2, 1, 37, 150)) < 0.5)
    packed_mask = packed_mask_of(mask, 37, 150)
    assert packed_mask.shape == (2, 1, 37, 8) and packed_mask.dtype == torch.int32
    assert torch.equal(unpack(packed_mask.flatten(0, 1))[:, :, :150].view(2, 1, 37, 150), mask)
    assert not unpack(packed_mask.flatten(0, 1))[:, :, 150:].any()
