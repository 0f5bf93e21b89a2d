"""The gather kernels against float64: in Triton's interpreter on the CPU, and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import gossamer as gs
from gossamer.kernels.triton.gather import launch_gather as gather
from gossamer.kernels.triton.gather import schedule_gather
from gossamer.kernels.triton.gather.config import RowConfig
from gossamer.layouts.device import key_list_layout
from gossamer.layouts.gather import WIDTHS, GatherLayout, build_gather
from gossamer.torch import device_arrays
from tests.support.launches import backward, forward
from tests.support.processes import INTERPRETING, in_interpreter
from tests.support.thorough import more
from tests.support.triton_cases import CASES, Case, check_case_unkept, compare, make

GROUP_SIZES = tuple(WIDTHS)


def hubs(Q: int, K: int) -> gs.CSR:
    """A few pairs a row, one row that sees everything, and one key that everything sees."""
    mask = np.random.default_rng(2).random((Q, K)) < 0.05
    mask[3] = mask[:, 5] = True
    return gs.CSR(np.cumsum([0, *mask.sum(1)]), np.nonzero(mask)[1], K)


SCATTERED = [
    Case("hubs", hubs(40, 100), Q=40, K=100, limit=1),
    Case("group-of-heads", 0.1, B=2, H=4, G=2, Q=70, K=90),
    Case("group-of-heads-by-head", 0.1, H=4, G=2, lead=(1, 4), Q=70, K=90, limit=1),
    Case("by-batch", 0.1, B=2, H=2, G=1, lead=(2, 1), Q=70, K=90, terms={"alibi": (0.1, 0.4), "lengths": (90, 31)}),
    Case("power-strided", gs.PowerStrided(2, 3), Q=140, K=140, D=64, E=64, dtype=torch.float16),
]
NAMES = (
    "causal-split", "window-half", "bigbird", "per-head-grouped", "random", "random-per-batch-and-head",
    "random-grouped-lists", "empty-rows", "nothing-kept", "head-sizes", "large-heads", "one-query", "strided",
    "negative-scale", "softcap", "alibi", "alibi-absolute", "alibi-each", "sink", "sink-split", "lengths-bits",
    "window-lengths", "padded",
    "every-term", "offset",
)  # fmt: skip
ON_DEVICE = [
    *(case for case in SCATTERED if case.name != "power-strided"),
    Case("lists-of-key-heads", 0.1, B=2, H=4, G=2, lead=(2, 2), Q=70, K=90, terms={"sink": (0.5, -1.0, 0.0, 2.0)}),
    Case("lists-of-key-heads-cut", 0.3, H=4, G=2, lead=(1, 2), Q=40, K=90, limit=1),
    Case("nothing-listed", 0.0, Q=20, K=30, limit=1),
]
# Unions of groups, too, where lists are cut and shared.
LISTED = [(case, 1) for case in ON_DEVICE] + [(case, 16) for case in ON_DEVICE if case.name.endswith("-cut")]
ALL = SCATTERED + [case for case in CASES if case.name in NAMES]
# Single rows have kernels of their own; groups of several sizes share the code of others and take turns.
TURNS = [(case, n) for at, case in enumerate(ALL) for n in (1, GROUP_SIZES[1 + at % (len(GROUP_SIZES) - 1)])]


def listed(mask: np.ndarray, block_q: int, device: str) -> GatherLayout:
    """The layout of a mask (Bl, Hl, Q, K) from lists on a device, shuffled, with repeated and missing keys."""
    rng, K = np.random.default_rng(7), mask.shape[-1]
    n = int(mask.sum(-1).max()) + 3
    indices = np.full((*mask.shape[:3], n), -1, dtype=np.int32)
    for at in np.ndindex(*mask.shape[:3]):
        keys = np.flatnonzero(mask[at])
        some = np.concatenate([keys, rng.choice(keys, 2), [K]]) if len(keys) else keys
        indices[at][: len(some)] = some
        rng.shuffle(indices[at])
    given = torch.from_numpy(indices).to(device)
    return key_list_layout(given, None, None, None, *mask.shape[2:], block_q=block_q, xp=device_arrays)


def run(
    case: Case, device: str, block_q: int, config: Any = None, on_device: bool = False, unkept: bool = False
) -> tuple[Any, ...]:
    """The results of the gather kernels, and what they are compared with."""
    problem, _, mask, terms, inputs = make(case, device)
    host = mask.cpu().numpy()
    if on_device:
        layout = listed(host.reshape(*case.lead, case.Q, case.K), block_q, device)
        if case.lead[1] not in (1, case.H):  # what is compared keeps the pairs of each query head
            mask = mask.repeat_interleave(case.H // case.G, 1)
    else:
        pattern = gs.BlockMask(host, 1)
        layout = build_gather(pattern, case.Q, case.K, block_q=block_q, q_offset=terms.q_offset).to(device)
    # Lists without tiles are counted in columns; where all are long, cutting them is slow in the interpreter.
    limit = (
        None
        if case.limit is None
        else 1 + on_device
        if block_q > 1
        else 16
        if case.name == "hubs" or on_device
        else None
    )
    options: dict[str, Any] = {"config": config, "limit": limit}

    def results(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        out, lse = forward(gather, problem, layout, terms, q, k, v, **options)
        return out, lse, *backward(gather, problem, layout, terms, dout, dlse, q, k, v, out, lse, **options)

    if unkept:
        check_case_unkept(case, mask, terms, inputs, results)
    return (mask, terms, inputs), results(*inputs)


def check(case: Case, device: str, block_q: int, config: Any = None, on_device: bool = False) -> None:
    against, found = run(case, device, block_q, config, on_device, unkept=True)
    compare(case, *against, found)


if INTERPRETING:

    @pytest.mark.parametrize("block_q", GROUP_SIZES)
    @pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
    def test_case(case: Case, block_q: int) -> None:
        # Many rows in a program: the interpreter pays for programs.
        check(case, "cpu", block_q, RowConfig(256, 4) if block_q == 1 else None)

    @pytest.mark.parametrize(("case", "block_q"), LISTED, ids=lambda x: x.name if isinstance(x, Case) else str(x))
    def test_lists_of_a_device(case: Case, block_q: int) -> None:
        check(case, "cpu", block_q, RowConfig(256, 4), on_device=True)

    @pytest.mark.parametrize("config", [RowConfig(2, 16), RowConfig(4, 2), RowConfig(16, 1)], ids=str)
    def test_every_row_configuration_gives_the_same_rows(config: RowConfig) -> None:
        check(next(case for case in ALL if case.name == "hubs"), "cpu", 1, config)

    def test_more_copies_than_a_grid_has_in_a_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
        case = next(case for case in ALL if case.name == "group-of-heads")
        _, found = run(case, "cpu", 1, RowConfig(16, 4))
        monkeypatch.setattr(schedule_gather, "MOST_OF_A_DIMENSION", 1)
        _, flat = run(case, "cpu", 1, RowConfig(16, 4))
        assert all(torch.equal(a, b) for a, b in zip(found, flat, strict=True))

    def test_what_a_row_keeps_reaches_that_row_alone() -> None:
        mask = np.zeros((12, 20), dtype=bool)
        for row in range(11):  # lists of every length beside each other, and one of nothing
            mask[row, row : 2 * row + 1] = True
        case = Case("lengths", gs.BlockMask(mask, 1), B=1, H=1, G=1, Q=12, K=20)
        problem, _, _, terms, (q, k, v, dout, dlse) = make(case, "cpu")
        layout = build_gather(gs.BlockMask(mask, 1), 12, 20, block_q=1).to("cpu")
        config = RowConfig(4, 4)
        for key in (0, 7):
            keeps = torch.from_numpy(mask[:, key])
            nan = torch.zeros(20, 1).index_fill_(0, torch.tensor(key), float("nan"))
            for given in ((k + nan, v), (k, v + nan)):
                out, lse = forward(gather, problem, layout, terms, q, *given, config=config)
                dq, _, _ = backward(gather, problem, layout, terms, dout, dlse, q, *given, out, lse, config=config)
                for result in (out, dq):
                    assert torch.equal(result.isnan().any(-1)[0, 0], keeps)

else:

    @pytest.mark.slow
    @pytest.mark.parametrize("part", [1, 2, *more(0, 3)])
    def test_in_the_interpreter(part: int) -> None:
        tests = [f"test_case[{case.name}-{rows}]" for case, rows in TURNS][part::4]
        tests += [f"test_lists_of_a_device[{case.name}-{rows}]" for case, rows in LISTED][part::4]
        if part == 1:
            tests += [
                "test_every_row_configuration_gives_the_same_rows",
                "test_more_copies_than_a_grid_has_in_a_dimension",
                "test_what_a_row_keeps_reaches_that_row_alone",
            ]
        in_interpreter(__file__, *tests)


LARGE = [
    Case("large-random", 0.02, H=4, G=2, Q=900, K=1100, D=64, E=64),
    Case("large-power", gs.PowerStrided(2, 40), H=2, G=2, Q=2000, K=2000, D=128, E=128),
    Case("large-heads-apart", 0.05, H=4, G=2, lead=(1, 4), Q=500, K=500, D=96, E=192),
    Case("large-wide", 0.05, H=1, G=1, Q=300, K=500, D=256, E=256, limit=1),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch finds none")
class TestOnGPU:
    @pytest.mark.parametrize(
        ("case", "block_q"),
        TURNS,
        ids=lambda x: x.name if isinstance(x, Case) else str(x),
    )
    def test_case(self, case: Case, block_q: int) -> None:
        check(case, "cuda", block_q)

    @pytest.mark.parametrize("block_q", GROUP_SIZES)
    @pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: case.name)
    def test_lists_of_a_device(self, case: Case, block_q: int) -> None:
        check(case, "cuda", block_q, on_device=True)

    # Types take turns over cases and sizes of groups, of which no implementation offers large ones of wide heads.
    @pytest.mark.parametrize(
        ("case", "block_q", "dtype"),
        [
            (case, n, (torch.float16, torch.bfloat16, torch.float32)[(i + j) % 3])
            for i, case in enumerate(LARGE)
            for j, n in enumerate(GROUP_SIZES)
            if max(case.D, case.E) <= 128 or n <= 16
        ],
        ids=lambda x: x.name if isinstance(x, Case) else str(x),
    )
    def test_large(self, case: Case, block_q: int, dtype: torch.dtype) -> None:
        check(dataclasses.replace(case, dtype=dtype), "cuda", block_q)

    @pytest.mark.parametrize("block_q", GROUP_SIZES)
    def test_two_runs_give_the_same_bits(self, block_q: int) -> None:
        case = dataclasses.replace(LARGE[0], dtype=torch.bfloat16, limit=1)
        first, second = (run(case, "cuda", block_q)[1] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first[:5], second[:5], strict=True))
