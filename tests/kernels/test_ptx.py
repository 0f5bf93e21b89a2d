"""Kernels in Triton as PTX whose parameters are declared anew, for XLA."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from gossamer.kernels import relaunch
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Builder, Direction, Operand, Step, compact, names_of
from gossamer.kernels.ptx import Call, Number, call_of
from gossamer.kernels.triton import IMPLEMENTATION, KERNELS
from gossamer.patterns import BigBird, Dilated, Pattern
from gossamer.plan.problem import Problem
from tests.support.thorough import more

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


class Pair(NamedTuple):
    first: Any
    n: Any


@triton.jit(do_not_specialize=["m"])
def sums_kernel(a, pair: Pair, m, factor, out, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)
    b_x = tl.load(a + at * pair.n) + tl.load(pair.first + at) * factor
    tl.store(out + at + m, b_x)


def step_of(n: int) -> Step:
    x = Operand("float32", (64,), (1,))
    b = Builder({"x": x, "y": x, "out": x})
    values = {"a": "x", "pair": Pair("y", n), "m": 3, "factor": 0.5, "out": "out", "FORM": (2, True)}
    relaunch.step(b, "triton", "sums_kernel", sums_kernel, (5,), values, {"num_warps": 2, "enable_fp_fusion": True})
    (step,) = b._steps
    return step


def parameters_read(text: str) -> list[int]:
    """Of each parameter that the code reads, its place among the declared ones, in the order of the code."""
    name = re.search(r"\.entry (\w+)\(", text)
    assert name is not None
    return [int(n) for n in re.findall(rf"\[{name[1]}_given_(\d+)\]", text)]


def test_arrays_come_first_in_any_order_and_numbers_behind() -> None:
    call = call_of(sums_kernel, step_of(4), 90, {"y": 0, "out": 1, "x": 3}, 5)
    assert call._replace(text="") == Call(
        "sums_kernel", "", 2, 0, (5, 1, 1), (Number(4, "i32"), Number(3, "i32"), Number(0.5, "fp32"), *SCRATCH)
    )
    declared = re.findall(r"\.param \.(\w+)[^,\n]* sums_kernel_given_(\d+)", call.text)
    assert declared == list(
        zip(["u64"] * 5 + ["u32", "u32", "f32", "u64", "u64"], map(str, range(10)), strict=True)
    )  # of all pointers, and numbers
    assert sorted(parameters_read(call.text)) == [0, 1, 3, 5, 6, 7]
    assert "_param_" not in call.text


SCRATCH = Number(0, "u64"), Number(0, "u64")


def test_one_array_may_stand_for_two() -> None:
    call = call_of(sums_kernel, step_of(4), 90, {"x": 0, "y": 0, "out": 1}, 2)
    assert sorted(parameters_read(call.text)) == [0, 0, 1, 2, 3, 4]


def test_numbers_that_a_kernel_is_compiled_for_are_not_passed() -> None:
    call = call_of(sums_kernel, step_of(1), 90, {"x": 0, "y": 1, "out": 2}, 3)
    assert call.numbers == (Number(3, "i32"), Number(0.5, "fp32"), *SCRATCH)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, *more(80)])
@pytest.mark.parametrize("pattern", [BigBird(64), Dilated(8, 0, dilation=3)], ids=str)
def test_the_text_of_a_call_is_taken_by_the_assembler(pattern: Pattern, sm: int, tmp_path: Path) -> None:
    Q, D = 700, 64
    operands = {
        name: Operand("float32", (1, 2, Q, D), compact((1, 2, Q, D))) for name in ("dout", "q", "k", "v", "out")
    }
    operands["lse"] = Operand("float32", (1, 2, Q), compact((1, 2, Q)))
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        p = Problem(1, 2, 2, Q, Q, D, D, "float32", "cuda", sm, 132, backward=direction == "backward")
        layout: Any = pattern.layout(Q, Q, block_q=128, block_kv=128).to("cpu")
        given = {n: operands[n] for n in (("q", "k", "v") if direction == "forward" else operands)}
        for step in IMPLEMENTATION.prepare(p, layout, direction, Scoring(0.1, 0), given).launch.steps:
            names = dict.fromkeys(names_of(step.arguments))
            places = {name: at for at, name in enumerate(reversed(names))}
            call = call_of(KERNELS[step.kernel.name], step, sm, places, len(places) + 1)
            numbers = len(call.numbers)
            assert call.text.count(".param .u64") >= len(places) and f"_given_{len(places) + numbers}" in call.text
            (tmp_path / "kernel.ptx").write_text(call.text)
            target = re.search(r"\.target (\w+)", call.text)
            assert target is not None
            files = str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")
            subprocess.run([str(PTXAS), f"-arch={target[1]}", *files], check=True, capture_output=True)
