"""What a call by kernels launches on a Hopper GPU, from its description alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from gossamer.entmax.launch import backward, calls, forward, overflow_rows
from gossamer.entmax.launch.calls import Facts, KernelCall
from gossamer.entmax.launches import STATS
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.launch import Builder, Operand, Prepared, compact
from gossamer.torch import bind

Q, HEADS, D = 2048, 16, 64


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calls, backward):
        monkeypatch.setattr(module, "hopper_here", lambda device: True)
    monkeypatch.setattr(overflow_rows, "processors", lambda device: 132)


def described(top_k: int | None, of_backward: bool = False, lists: bool = True) -> KernelCall:
    shape, rows, L = (1, HEADS, Q, D), HEADS * Q, top_k or 96
    given = {name: Operand("bfloat16", shape, compact(shape)) for name in "qkv"}
    if of_backward:
        given |= {"dout": given["q"], "lam": Operand("float32", (rows,), (1,))}
    if of_backward and lists:
        types = {"list_keys": "int32", "list_weights": "float32"}
        given |= {name: Operand(dtype, (rows, L), (L, 1)) for name, dtype in types.items()}
        given["list_counts"] = Operand("int32", (rows,), (1,))
    return KernelCall(Builder(given), Facts(torch.device("cuda", 0), 0.5, 0.125, top_k, 1, 0))


def launched(prepared: Prepared) -> list[str]:
    """The kernels of a launch; memory that is filled in each call is one too."""
    filled = [name for name, x in prepared.launch.arrays.items() if x.fill is not None and x.lifetime == "call"]
    return [step.kernel.name for step in prepared.launch.steps] + [f"fill {name}" for name in filled]


def test_a_call_with_its_backward_takes_ten_launches() -> None:
    first = launched(forward.prepare(described(None), "out", True, STATS))
    second = launched(backward.prepare(described(None, True), False))
    assert first == ["support_lists", "gather_out_kernel", "long_rows"]
    assert second == [
        "gather_dq_kernel", "column_lists", "order_keys_kernel", "column_lists", "columns_kernel", "tiled_dq_kernel",
        "long_rows_columns",
    ]  # fmt: skip


def test_the_largest_scores_take_nine() -> None:
    first = launched(forward.prepare(described(8), "out", True))
    second = launched(backward.prepare(described(8, True), False))
    assert first == ["support_lists", "list_groups_kernel", "large_kernel", "gather_out_kernel"]
    assert len(second) == 5
    assert len(launched(backward.prepare(described(8, True, lists=False), False))) == 8


def test_parts_of_a_head_take_no_group_for_one_that_is_not_yet_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that later parts write are 0 until then."""
    monkeypatch.setattr(calls, "ROWS_OF_A_PART", 256)
    monkeypatch.setattr(calls, "PAIRS_OF_A_PART", 1)
    monkeypatch.setattr(calls, "BYTES_OF_A_PART", 1)
    found = launched(forward.prepare(described(8), "out", False))
    assert found.count("support_lists") == HEADS * Q // 256 and found[-1] == "fill list_counts"
    found = launched(forward.prepare(described(None), "out", False))
    assert found.count("gather_out_kernel") == HEADS * Q // 256 and found.count("long_rows") == 1
    assert not any("fill" in name for name in found)


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_a_call_with_its_backward_allocates_its_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels leave one another lies in memory that waits, in views that were made before."""
    monkeypatch.setattr(bind, "kernel_of", lambda kernel: lambda *given: None)
    monkeypatch.setattr(bind, "MOST_WAITING_BYTES", 2**40)
    for prepared in (
        forward.prepare(described(None), "out", True, STATS[:1]),
        backward.prepare(described(None, True), False),
    ):
        launch = prepared.launch
        writer = bind._Writer(prepared, torch.device("cpu"))
        writer.shares = True
        writer.function(launch.arguments)
        text = "\n".join(writer.lines)
        words = sum(name.endswith("_words") for name in launch.views)
        assert (text.count("= empty("), text.count("take()")) == (len(launch.results), 1), text
        assert (text.count("= part_at("), text.count("fill_(")) == (words, 0), text
