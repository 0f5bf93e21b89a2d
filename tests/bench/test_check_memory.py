"""The calls that run under a tool which watches memory: every folder of device code is among them; reports are read."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.launch import operand_of
from gossamer.plan.plan import Problem
from gossamer.testing import inputs
from gossamer.torch.planning import Chip

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PACKAGE = Path(gs.__file__).parent
DEVICE = re.compile(r"^\s*@(cute\.(kernel|jit)|triton\.jit|triton\.heuristics)", re.M)


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The folder of the scripts, which import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_every_folder_of_device_code_is_of_a_family() -> None:
    import memory_calls

    there = {path.parent for path in PACKAGE.rglob("*.py") if DEVICE.search(path.read_text())}
    named = {folder for family in memory_calls.FAMILIES.values() for folder in family.folders}
    assert {str(path.relative_to(PACKAGE)) for path in there} == named


def test_families_and_calls_are_listed_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import check_memory
    import memory_calls

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_memory.main(["--tool", "none"]) == 0
    printed = capsys.readouterr().out
    for name, family in memory_calls.FAMILIES.items():
        assert name in printed and all(f"    {call}\n" in printed for call in family.calls)
    assert "not run" in printed
    assert check_memory.main([]) == 1, "asked for a tool, it says that nothing ran"


PUBLIC = ("attention", "entmax_attention", "topk_keys", "varlen")
NAMED = {"small", "triton block", "triton wide"}  # whose implementation runs on a GPU alone


def families() -> list[str]:
    sys.path.insert(0, str(BENCHMARKS))
    import memory_calls

    sys.path.remove(str(BENCHMARKS))
    return list(memory_calls.FAMILIES)


@pytest.mark.parametrize("family", families())
def test_calls_are_well_formed(family: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a CPU: public functions by what computes there, launches as far as they are described."""
    import memory_calls

    described: list[str] = []

    def anywhere(name: str) -> Any:
        right = getattr(gs, name)

        def call(*given: Any, **options: Any) -> Any:
            options.pop("implementation", None)
            options.pop("batch_invariant", None)  # of a GPU
            return right(*given, **options)

        return call

    def describe(prepare: Any, given: dict[str, Tensor]) -> Any:
        launch = prepare({name: operand_of(x) for name, x in given.items()})
        described.append(str(launch))
        q, k, v = given["q"], given["k"], given["v"]
        if "dout" in given:
            return lambda: ()
        wide = torch.empty(q.shape[:3])
        return lambda: (q.new_empty(*q.shape[:3], v.shape[3]) * math.nan if k is not None else q, wide)

    for name in PUBLIC:
        monkeypatch.setattr(memory_calls.gs, name, anywhere(name))
    monkeypatch.setattr(memory_calls, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(memory_calls, "bound", describe)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    make, of = inputs.make, inputs.problem_of

    def problem(case: Any, dtype: str, device: str, **more: Any) -> Problem:
        return replace(of(case, dtype, "cpu", **more), device="cuda", **Chip(90, 132)._asdict())

    monkeypatch.setattr(inputs, "make", lambda case, dtype, device: make(case, dtype, "cpu"))
    monkeypatch.setattr(inputs, "problem_of", problem)
    memory_calls.run(family)
    assert capsys.readouterr().out.count(f"{family}: ") == len(memory_calls.FAMILIES[family].calls)
    launches = [one for one in memory_calls.FAMILIES[family].calls.values() if "launched" in str(one)]
    assert len(described) >= len(launches)


PRINTED = """
========= COMPUTE-SANITIZER
hopper forward: D 64
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "?" on CUDA API call to cuPointerGetAttribute.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: [0x2f52fb] in libcuda.so.1
=========         Host Frame: at::foo()+0x12 in torch.so
=========
========= Error: Race reported between Write access at kernel_cutlass_a_object_at__tensorptri64+0x1230
=========     and Read access at kernel_cutlass_a_object_at__tensorptri64+0x4560 [16 hazards]
=========     and Read access at kernel_cutlass_a_object_at__tensorptri64+0x4570 [16 hazards]
=========
========= Invalid __global__ read of size 4 bytes
=========     at void ns::copy<float>(float *, int)+0x70
=========     by thread (3,0,0) in block (7,0,0)
=========     Access to 0x7f0000000400 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main [0x12]
=========
========= Invalid __global__ read of size 4 bytes
=========     at void ns::copy<float>(float *, int)+0x70
=========     by thread (4,0,0) in block (7,0,0)
=========
========= Barrier error detected. Divergent thread(s) in block.
=========     at some_kernel+0x1a0
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Target application terminated before first instrumented API call
========= ERROR SUMMARY: 5 errors
"""


def test_reports_are_told_apart() -> None:
    import check_memory

    call, race, first, second, barrier, tool = check_memory.reports(PRINTED)
    assert call == ("call", "cuPointerGetAttribute gave CUDA_ERROR_INVALID_VALUE (1)", "", "", ())
    assert race.kind == "kernel" and race.text == "Error: Race reported between Write"
    assert race.kernel == "kernel_cutlass_a_object_at__tensorptri64"
    assert race.places == ("Write 0x1230", "Read 0x4560", "Read 0x4570")
    assert first == second == ("kernel", "Invalid __global__ read of size 4 bytes", "global", "copy", ("0x70",))
    assert (barrier.kind, barrier.kernel, barrier.places) == ("kernel", "some_kernel", ("0x1a0",))
    assert tool.kind == "tool" and "terminated" in tool.text


def test_the_table_says_what_failed(tmp_path: Path) -> None:
    """Processes that end well, with a report, with an error, and never."""
    import check_memory

    say = "import sys; print({!r}); sys.exit({})"
    scripts = {
        "small": say.format("small: causal\nsmall: float32, wide", 0),
        "hopper forward": say.format(PRINTED, 0),
        "particles": say.format("no such kernel", 3),
        "neighbors": "import time; time.sleep(60)",
    }
    jobs = [(name, "memcheck", [sys.executable, "-c", script]) for name, script in scripts.items()]
    ended = list(check_memory.side_by_side(jobs, 4, 5.0))
    lines, well = check_memory.table(ended)
    text = "\n".join(lines)
    of = {line.split("  ")[0]: line for line in lines}
    assert not well
    assert of["small"].split()[-3:] == ["2/2", "0", "0"]
    assert of["hopper forward"].split()[4:7] == ["1/5", "4", "1"] and "kernel_cutlass" in of["hopper forward"]
    assert "0/4 !3" in of["particles"] and "no such kernel" in text
    assert "stopped" in of["neighbors"]
    assert "2 x memcheck: kernel: Invalid __global__ read of size 4 bytes in copy: 0x70" in text
    _, well = check_memory.table([one for one in ended if one.family == "small"])
    assert well
