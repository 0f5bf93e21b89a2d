"""Heads wider than 256 by Triton: every mask mode and term in the interpreter, and compiled without a GPU.

The interpreter is chosen when triton is imported, so the cases run in a process of their own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.processes import INTERPRETING, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

import gossamer as gs
from gossamer.layouts import cached_layout
from gossamer.patterns import BlockMask, Causal, Dense, Dilated, Document, PerHead, SlidingWindow
from gossamer.testing import inputs, tolerance
from gossamer.testing.cases import Case, square


def _half_empty(N: int) -> BlockMask:
    mask = np.tril(np.ones((-(-N // 16), -(-N // 16)), dtype=bool))
    mask[::2] = False
    return BlockMask(mask, 16)


CASES = (
    square("wide_window", 140, lambda: SlidingWindow(50), D=300, H=2, G=1),
    square("wide_values", 70, Causal, D=16, E=270, K=90),
    square("wide_empty_rows", 70, lambda: _half_empty(70), D=260, E=24),
    square("wide_per_head", 130, lambda: PerHead([SlidingWindow(30), Dilated(4, 0, 5)]), D=264, E=16, G=1),
    square("wide_documents", 100, lambda: Document(np.repeat([[0, 1], [2, 2]], 50, axis=1)), B=2, D=280, E=8),
    square("wide_one_query", 1, Dense, K=150, D=258, E=258),
    square(
        "wide_terms", 70, lambda: SlidingWindow(60), B=2, H=2, G=1, D=257, E=32, K=90, key_lengths=(90, 0),
        softcap=5.0, sink_logits=True, alibi_slopes="each", alibi_distance="absolute",
    ),
)  # fmt: skip

if INTERPRETING:
    from gossamer.kernels.triton.wide import launch_wide as wide
    from tests.support.exact import NAMES, Exact
    from tests.support.launches import backward, forward
    from tests.support.unkept import check_unkept

    def check(case: Case, dtype: str, tile: tuple[int, int]) -> list[torch.Tensor]:
        e = Exact(case, dtype, "cpu")
        q, k, v = (x.detach() for x in e.leaves[:3])
        layout = cached_layout(
            e.pattern, case.Q, case.K, block_q=tile[0], block_kv=tile[1], q_offset=e.terms.q_offset, device="cpu"
        )
        out, lse = forward(wide, e.problem, layout, e.terms, q, k, v)
        grads = backward(wide, e.problem, layout, e.terms, e.dout, e.dlse.float(), q, k, v, out, lse)
        found = [out, lse, *grads]
        assert len(found) == 2 + len(e.leaves)
        for result, actual, exact, low in zip(NAMES, found, e.exact, e.low, strict=False):
            tolerance.check(result, actual, exact.detach(), low.detach())
        empty = e.exact[1] == -torch.inf
        assert (out[empty] == 0).all() and (lse[empty] == -torch.inf).all() and (grads[0][empty] == 0).all()

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cotangents: torch.Tensor) -> list[torch.Tensor]:
            out, lse = forward(wide, e.problem, layout, e.terms, q, k, v)
            return [out, lse, *backward(wide, e.problem, layout, e.terms, *cotangents, q, k, v, out, lse)]

        there = inputs.unkept(e.mask, e.terms, (case.B, case.H, case.Q), case.G)
        if there.rows.any() or there.keys.any():
            sinks = e.terms.sink_logits is not None
            check_unkept(run, there, [q, k, v, e.dout, e.dlse.float()], sinks=sinks, poisons=inputs.POISONS[:1])
        return found

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(case: Case) -> None:
        check(case, "float32", (64, 64))

    def test_passes_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
        for case, tile in ((CASES[0], (32, 64)), (CASES[3], (64, 32))):
            whole = check(case, "float32", tile)
            wide._tiles.clear()
            monkeypatch.setattr(wide, "SCRATCH_BYTES", 1)
            for a, b in zip(whole, check(case, "float32", tile), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            wide._tiles.clear()
            monkeypatch.undo()

    def test_half_precision_and_given_places() -> None:
        case = CASES[1]
        whole = check(case, "float16", (96, 64))
        e = Exact(case, "float16", "cpu")
        layout = cached_layout(e.pattern, case.Q, case.K, block_q=96, block_kv=64, q_offset=20, device="cpu")
        q, k, v = (x.detach() for x in e.leaves[:3])
        places = [torch.full((*x.shape[:2], 2 * x.shape[2], *x.shape[3:]), torch.nan, dtype=x.dtype)[:, :, ::2]
                  for x in whole[:5]]  # fmt: skip
        forward(wide, e.problem, layout, e.terms, q, k, v, into=tuple(places[:2]))
        given = (e.dout, e.dlse.float(), q, k, v, *whole[:2])
        backward(wide, e.problem, layout, e.terms, *given, into=tuple(places[2:]))
        assert all(torch.equal(a, b) for a, b in zip(whole, places, strict=True))

else:

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        names = [f"test_case[{case.name}]" for case in CASES]
        names += ["test_passes_give_the_same_numbers", "test_half_precision_and_given_places"]
        in_interpreter(__file__, *names)


COMPILE = """
import sys
from gossamer.kernels.relaunch import PLAIN, Pointer, Strides, compiled_for, filled, parameters
from gossamer.kernels.triton.wide import kernels
from gossamer.kernels.triton.wide.parameters import GradientForm, OutputForm, ProductForm
from gossamer.kernels.triton.compile import report
from gossamer.kernels.triton.config import SHARED_MEMORY
from gossamer.kernels.triton.wide.launch_wide import product_step

sm = int(sys.argv[1])
NUMBERS = dict.fromkeys("Q K q_offset slots first_row rows columns n_rows H lead_b lead_h".split(), PLAIN)
NUMBERS |= dict.fromkeys(("scale", "cap", "factor"), 0.5) | dict.fromkeys(("lengths", "slopes", "sinks"))
NUMBERS |= {f"at_{name}": Strides(16, 16, 16) for name in ("q", "k", "v", "out", "lse", "x", "result")}
NUMBERS |= dict.fromkeys(
    "tiles begins counts lo hi pool row_starts order order_begins starts".split(), Pointer("int32", True)
)
for dtype, edge, block, precision in (("bfloat16", 128, 256, "ieee"), ("float32", 64, 128, "tf32x3")):
    shape = dict(TILE_ROWS=128, TILE_COLUMNS=128, PRECISION=precision)
    products = dict(GROUP=1, D=1024, E=1024, R=edge, C=edge, STEP=product_step(dtype, sm), SOFTCAP=False, **shape)
    products |= dict(ALIBI=0)
    results = dict(R=64, C=64, BLOCK=block, CLEAR=True, **shape)
    gradient = dict(MEMBERS=1, X_GROUP=1, SIZE=1024, ADD=False, **results)
    work = [(kernels.products_kernel, ProductForm, products | {"BACKWARD": back}) for back in (False, True)]
    work += [(kernels.output_kernel, OutputForm, dict(GROUP=1, E=1024, **results))]
    work += [(kernels.gradient_kernel, GradientForm, gradient | {"TRANSPOSED": keys}) for keys in (False, True)]
    for kernel, form, constants in work:
        values = dict.fromkeys("q k v x out dout result weights".split(), Pointer(dtype, True)) | NUMBERS
        values |= dict.fromkeys(("lse", "delta", "scores"), Pointer("float32", True))
        kept = Pointer(dtype if constants.get("BACKWARD") else "float32", True)
        values |= {"first": kept, "second": kept, "FORM": filled(form, constants)}
        signature = [values[name] if kind is None or name == "FORM" else filled(kind, values)
                     for name, kind in parameters(kernel).items()]
        options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
        compiled = compiled_for(kernel, signature, options, sm)
        found = report(compiled, sm)
        print(kernel.__name__, dtype, "sm", sm, found)
        assert found.shared <= SHARED_MEMORY[sm] and found.spills <= 1024
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="the interpreter does not compile")
@pytest.mark.parametrize("sm", [89, *more(80, 90, 100)])
def test_it_compiles(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch finds none")
def test_more_heads_than_a_grid_is_high() -> None:
    """A grid has 65,535 programs along its second and third dimensions: two halves have fewer."""
    q, k, v = (torch.randn(70000, 1, 2, 264, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))

    def results(*given: torch.Tensor) -> list[torch.Tensor]:
        out = gs.attention(*given, Causal(), implementation="triton")
        return [out, *torch.autograd.grad((out * given[2]).sum(), given)]

    halves = zip(*(results(*part) for part in zip(*(x.chunk(2) for x in (q, k, v)), strict=True)), strict=True)
    for whole, both in zip(results(q, k, v), halves, strict=True):
        assert torch.equal(whole, torch.cat(both))
