"""One contract, every implementation: named cases against float64, and what each refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer
from gossamer.kernels.contract import Implementation
from gossamer.kernels.hopper import missing_packages
from gossamer.layouts import cached_gather, cached_layout
from gossamer.plan.capability import reasons
from gossamer.plan.problem import Problem, Unsupported
from gossamer.plan.table import NAMES as IMPLEMENTATIONS
from gossamer.plan.table import available, load
from gossamer.testing import inputs, tolerance
from gossamer.testing.cases import LOW, SMALL, Case
from gossamer.torch.mask_layouts import packed_mask_of
from tests.support import launches
from tests.support.exact import NAMES, Exact, exact_of, no_gpu, within_nan
from tests.support.unkept import check_unkept

no_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


def implementation_of(name: str) -> Implementation:
    found = load(name.split("/")[0])
    assert not isinstance(found, str), found
    return found


IN_EVERY_TYPE = ("window", "all_terms")
WITH_KERNELS = ("small", "hopper", "triton")


def turns(name: str, at: int, case: Case, dtypes: frozenset[str]) -> set[str]:
    """The types in which a GPU computes the case at a place of the list: one of `dtypes`, by turns, or all.

    Of kernels each type is another compilation, which takes longer than all that a case computes.
    """
    low = [dtype for dtype in LOW if dtype in dtypes]
    if name not in WITH_KERNELS or case.name in IN_EVERY_TYPE:
        return set(low)
    return {low[at % len(low)]}


def parameters() -> Iterator[Any]:
    """Every implementation of the table on its devices; elsewhere a few cases hold what it says when it refuses."""
    for name in IMPLEMENTATIONS:
        capability = implementation_of(name).capability
        devices = capability.devices
        for at, case in enumerate(SMALL):
            some = turns(name, at, case, capability.dtypes)
            for dtype in case.dtypes:
                # The low precisions take the same path on a CPU; a few cases hold them.
                few = case.name in ("window", "per_head", "all_terms", "empty_rows")
                if dtype in ("float32", "float64") or few if "cpu" in devices else "smoke" in case.tags:
                    yield pytest.param(name, case, dtype, "cpu", id=f"{name}-cpu-{dtype}-{case.name}")
                on_gpu = dtype in some or dtype not in LOW or dtype not in capability.dtypes
                if "cuda" in devices and on_gpu and name != "reference":  # which the others are compared with
                    marks = [pytest.mark.gpu, no_gpu, *([no_compiler] if name == "hopper" else [])]
                    if dtype in capability.dtypes and dtype not in some and at % 2 and case.name not in IN_EVERY_TYPE:
                        marks.append(pytest.mark.thorough)
                    yield pytest.param(name, case, dtype, "cuda", id=f"{name}-cuda-{dtype}-{case.name}", marks=marks)


def gathering() -> Iterator[Any]:
    """The implementations that read gather layouts, as name/rows of a group, up to the widest heads they gather."""
    for name in IMPLEMENTATIONS:
        choices = implementation_of(name).capability.gathers
        widest = max((choice.max_head_dim or inf for choice in choices), default=0)
        device = "cpu" if any("cpu" in choice.devices for choice in choices) else "cuda"
        marks = [pytest.mark.gpu, no_gpu, *([no_compiler] if name == "hopper" else [])] if device == "cuda" else []
        dtypes = frozenset({"bfloat16", "float32", *(["float64"] if device == "cpu" else [])})
        for at, case in enumerate(c for c in SMALL if max(c.D, c.E) <= widest):
            for rows in sorted({1, 64}.intersection(choice.block_q for choice in choices)):
                read = frozenset().union(*(choice.dtypes for choice in choices if choice.block_q == rows))
                # The two sizes of groups have different types in turn.
                some = dtypes if device == "cpu" else turns(name, at + rows % 2, case, read & dtypes)
                for dtype in sorted((dtypes - read | some).intersection(case.dtypes)):
                    at_rows = f"{name}/{rows}"
                    yield pytest.param(
                        at_rows, case, dtype, device, id=f"{at_rows}-{device}-{dtype}-{case.name}", marks=marks
                    )


def problem_for(implementation: Implementation, case: Case, dtype: str, device: str) -> Problem:
    """With a backward, where the implementation has one."""
    return inputs.problem_of(case, dtype, device, backward=implementation.capability.backward)


INTO = ("window", "block_mask_by_head", "composed", "all_terms", "empty_rows")


ALL = [*parameters(), *gathering()]
COMPUTED = [p for p in ALL if p.values[3] in implementation_of(p.values[0]).capability.devices]


class Runs:
    """What the tests of the contract call."""

    rows = 0  # of a group of a gather layout

    @pytest.fixture(autouse=True)
    def _rows(self, name: str) -> None:
        self.rows = int(name.partition("/")[2] or 0)

    def layout(self, implementation: Implementation, e: Exact) -> Any:
        if self.rows:
            layout = cached_gather(
                e.pattern, e.case.Q, e.case.K, block_q=self.rows, q_offset=e.terms.q_offset, device=e.leaves[0].device
            )
            _ = layout.columns
            return layout
        if implementation.layout == "dense":
            return e.mask
        if implementation.layout == "packed_mask":
            return packed_mask_of(e.mask, e.case.Q, e.case.K)
        block_q, block_kv = implementation.tile(e.problem)
        layout = cached_layout(
            e.pattern, e.case.Q, e.case.K, block_q=block_q, block_kv=block_kv, q_offset=e.terms.q_offset,
            device=e.leaves[0].device,
        )  # fmt: skip
        _ = layout.columns
        return layout

    def run(self, implementation: Implementation, e: Exact, problem: Problem, dlse: Tensor | None) -> list[Tensor]:
        with torch.no_grad():
            q, k, v = (x.detach() for x in e.leaves[:3])
            layout = self.layout(implementation, e)
            out, lse = launches.forward(implementation, problem, layout, e.terms, q, k, v)
            if not problem.backward:
                return [out, lse]
            grads = launches.backward(implementation, problem, layout, e.terms, e.dout, dlse, q, k, v, out, lse)
        return [out, lse, *grads]


@pytest.mark.parametrize(("name", "case", "dtype", "device"), ALL)
class TestNumbers(Runs):
    def test_numbers(self, name: str, case: Case, dtype: str, device: str, poison: None) -> None:
        implementation = implementation_of(name)
        problem = problem_for(implementation, case, dtype, device)
        refused = reasons(problem, implementation.capability)
        if refused:
            x = inputs.make(case, dtype, device, requires_grad=True)
            with pytest.raises(Unsupported) as raised:
                gossamer.attention(*x.qkv, x.pattern, implementation=implementation.name, **x.options())
            assert all(reason in str(raised.value) for reason in refused)
            return
        e = exact_of(case, dtype, device)
        found = self.run(implementation, e, problem, e.dlse)
        assert found[0].dtype == e.leaves[0].dtype and found[0].is_contiguous()
        assert found[1].dtype == (torch.float64 if dtype == "float64" else torch.float32)
        assert len(found) == (2 + len(e.leaves) if problem.backward else 2)
        for result, actual, exact, low in zip(NAMES, found, e.exact, e.low, strict=False):
            assert actual.shape == exact.shape
            tolerance.check(result, actual, exact, low)
        empty = e.exact[1] == -torch.inf
        assert (found[0][empty] == 0).all() and (found[1][empty] == -torch.inf).all()
        if problem.backward:
            assert (found[2][empty] == 0).all()


@pytest.mark.parametrize(("name", "case", "dtype", "device"), [p for p in COMPUTED if p.values[1].name in INTO])
class TestPlaces(Runs):
    def test_into_given_tensors(self, name: str, case: Case, dtype: str, device: str) -> None:
        """The same bits, where they were asked for and nowhere else; lse and the inputs may be strided as well."""
        implementation = implementation_of(name)
        problem = problem_for(implementation, case, dtype, device)
        if refused := reasons(problem, implementation.capability):
            pytest.skip("; ".join(refused))
        e = exact_of(case, dtype, device)
        out, lse, *gradients = self.run(implementation, e, problem, e.dlse)
        q, k, v = (x.detach() for x in e.leaves[:3])
        layout, plain = self.layout(implementation, e), [out, lse, *gradients[:3]]
        room, found = zip(*(within_nan(x) for x in plain), strict=True)
        with torch.no_grad():
            launches.forward(implementation, problem, layout, e.terms, q, k, v, into=found[:2])
            if problem.backward:
                dlse = within_nan(e.dlse)[1].copy_(e.dlse)
                launches.backward(
                    implementation, problem, layout, e.terms, e.dout, dlse, q, k, v, found[0], found[1], into=found[2:]
                )
        for x, given, around in zip(plain, found, room, strict=True):
            assert torch.equal(given, x)
            assert int(around.isnan().sum()) == around.numel() - x.numel()


@pytest.mark.parametrize(("name", "case", "dtype", "device"), COMPUTED)
class TestBits(Runs):
    def test_same_bits_twice(self, name: str, case: Case, dtype: str, device: str) -> None:
        implementation = implementation_of(name)
        problem = problem_for(implementation, case, dtype, device)
        problem = Problem(**vars(problem) | {"deterministic": True})
        if reasons(problem, implementation.capability):
            assert device not in implementation.capability.deterministic or reasons(
                problem_for(implementation, case, dtype, device), implementation.capability
            )
            return
        e = exact_of(case, dtype, device)
        first, second = (self.run(implementation, e, problem, None) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("name", "case", "dtype", "device"), [p for p in COMPUTED if "unkept" in p.values[1].tags])
class TestUnkept(Runs):
    def test_nothing_unkept_reaches_a_result(self, name: str, case: Case, dtype: str, device: str) -> None:
        """NaN and infinities in what no kept pair has, in all operands at once: the bits that zeros give."""
        implementation = implementation_of(name)
        problem = problem_for(implementation, case, dtype, device)
        if refused := reasons(problem, implementation.capability):
            pytest.skip("; ".join(refused))
        e = exact_of(case, dtype, device)
        there = inputs.unkept(e.mask, e.terms, (case.B, case.H, case.Q), case.G)
        given = [*(x.detach() for x in e.leaves[:3]), e.dout, e.dlse]

        def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> list[Tensor]:
            filled = copy(e)
            filled.leaves, filled.dout = [q, k, v, *e.leaves[3:]], dout
            return self.run(implementation, filled, problem, dlse)

        check_unkept(run, there, given, sinks=e.terms.sink_logits is not None)


def test_cases_say_what_is_unkept() -> None:
    for case in SMALL:
        e = exact_of(case, case.dtypes[-1], "cpu")
        there = inputs.unkept(e.mask, e.terms, (case.B, case.H, case.Q), case.G)
        assert bool(there.rows.any() or there.keys.any()) == ("unkept" in case.tags), case


@pytest.mark.parametrize("strides", inputs.STRIDES)
@pytest.mark.parametrize(("name", "case", "dtype", "device"), [p for p in COMPUTED if p.values[1].name == "window"])
class TestStrides(Runs):
    def test_inputs_of_any_strides(self, name: str, case: Case, dtype: str, device: str, strides: str) -> None:
        """The same numbers as of contiguous ones, to the tolerance of either."""
        implementation = implementation_of(name)
        problem = problem_for(implementation, case, dtype, device)
        if refused := reasons(problem, implementation.capability):
            pytest.skip("; ".join(refused))
        e = exact_of(case, dtype, device)
        q, k, v = inputs.make(case, dtype, device, strides=strides).qkv
        layout = self.layout(implementation, e)
        with torch.no_grad():
            found = launches.forward(implementation, problem, layout, e.terms, q, k, v)
        for result, actual, exact, low in zip(NAMES, found, e.exact, e.low, strict=False):
            tolerance.check(result, actual, exact, low)


@pytest.mark.parametrize("strides", inputs.STRIDES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
def test_strided_inputs(strides: str, device: str) -> None:
    case = next(c for c in SMALL if c.name == "window")
    given = inputs.make(case, "float32", device, strides=strides, requires_grad=True)
    plain = inputs.make(case, "float32", device, requires_grad=True)
    results = []
    for x in (given, plain):
        out = gossamer.attention(*x.qkv, x.pattern)
        results.append([out, *torch.autograd.grad(out.square().sum(), x.qkv)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_blocked_in_pieces_and_without_kept_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers when every list is cut, every run is a view, and masks are made on the fly."""
    from gossamer.kernels.blocked import batches, tile_masks

    monkeypatch.setattr(batches, "SCRATCH_BYTES", {"cpu": 1 << 15, "cuda": 1 << 15})
    monkeypatch.setattr(batches, "VIEW_BYTES", 0)
    monkeypatch.setattr(tile_masks, "KEEP_BYTES", 0)
    for wanted in ("causal", "bigbird", "block_mask_by_head", "all_terms", "documents_by_batch", "empty_rows"):
        e = Exact(next(c for c in SMALL if c.name == wanted), "float64", "cpu")
        implementation = implementation_of("blocked")
        layout = e.pattern.layout(e.case.Q, e.case.K, block_q=32, block_kv=32, q_offset=e.terms.q_offset).to("cpu")
        q, k, v = (x.detach() for x in e.leaves[:3])
        with torch.no_grad():
            out, lse = launches.forward(implementation, e.problem, layout, e.terms, q, k, v)
            grads = launches.backward(implementation, e.problem, layout, e.terms, e.dout, e.dlse, q, k, v, out, lse)
        for actual, exact in zip([out, lse, *grads], e.exact, strict=True):
            assert tolerance.error(actual, exact) < (1e-6 if actual.dtype == torch.float32 else 1e-12)


def test_gradcheck() -> None:
    """The explicit backward, lse and sinks included, is the derivative of the forward."""
    pattern = gossamer.SlidingWindow(3) & ~gossamer.Local(2)  # some rows keep nothing

    def f(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out, lse = gossamer.attention(q, k, v, pattern, sink_logits=sink, softcap=2.0, return_lse=True)
        return torch.cat([out, lse[..., None]], -1)

    shapes = ((1, 2, 7, 3), (1, 1, 7, 3), (1, 1, 7, 2), (2,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(f, leaves)


def test_names_and_availability() -> None:
    assert available("reference") == available("blocked") == []
    with pytest.raises(ValueError, match="is not one of small, hopper, triton, blocked, reference"):
        load("nothing")


MEMORY = """
import resource, torch, gossamer as gs
q, k, v = (torch.randn(1, 4, 131072, 64, requires_grad=True) for _ in range(3))
out = gs.attention(q, k, v, gs.SlidingWindow(256))
out.backward(torch.ones_like(out))
rows = torch.tensor([0, 70000, 131071])
for r in rows.tolist():
    keys = slice(max(0, r - 256), r + 1)
    exact = torch.nn.functional.scaled_dot_product_attention(q[:, :, r : r + 1], k[:, :, keys], v[:, :, keys])
    torch.testing.assert_close(out[:, :, r : r + 1], exact, rtol=1e-4, atol=1e-5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_at_131072_tokens() -> None:
    """Forward and backward of a window stay within 4 GiB, torch itself and the tensors included."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert int(done.stdout) * 1024 < 4 << 30
