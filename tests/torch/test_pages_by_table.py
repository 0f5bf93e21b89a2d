"""Few queries of each sequence over pages by the kernel that reads the table itself, against the definition."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.torch import calls, decoding, paged
from tests.support.processes import INTERPRETING, in_interpreter
from tests.torch.test_device_structure import RULES
from tests.torch.test_pages import LAYOUTS, check, drawn, mixed, run

pytest.importorskip("triton")


ABLE = [
    name for name, (pattern, _) in RULES.items()
    if pattern is None or (
        len(pattern.device_rule().reaches) <= 2 and all(len(reach.blocks) < 2 for reach in pattern.device_rule().reaches)
    )
]  # fmt: skip


def made() -> int:
    """Launches that calls share."""
    return sum(key[0] == "by table" for key in calls.known._entries)


def few(draw: random.Random, most: int) -> list[tuple[int, int]]:
    """(queries, keys) of sequences, few queries of each on average."""
    lengths = mixed(draw, most)
    return [*lengths, (1, 5), *[(0, 5)] * max(0, -(-sum(n for n, _ in lengths) // 8) - len(lengths))]


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The kernels of Triton compute calls on a CPU, and structure is not made."""
        from gossamer.kernels.triton import IMPLEMENTATION
        from gossamer.memo import forget_all

        def structured(*_: Any) -> Any:
            raise AssertionError("structure was made")

        limits = dataclasses.replace(IMPLEMENTATION.capability, devices=frozenset({"cpu"}), min_sm=None)
        monkeypatch.setattr(type(IMPLEMENTATION), "capability", limits)
        monkeypatch.setattr(paged, "paged_layout", structured)
        for forget in (forget_all, decoding.sees_on.cache_clear):
            forget()
        yield
        for forget in (forget_all, decoding.sees_on.cache_clear):
            forget()

    def narrow(case: Any, dtype: torch.dtype) -> Any:
        return case._replace(q=case.q.to(dtype), k=case.k.to(dtype), v=case.v.to(dtype))

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("name", ABLE)
    def test_rules(on_a_cpu: None, name: str, seed: int) -> None:
        draw = random.Random(f"{name} {seed}")
        page, most = draw.choice([(1, 9), (2, 20), (8, 40), (16, 70), (16, 150), (24, 70), (64, 150), (128, 300)])
        case = drawn(
            draw, name, page=page, lengths=few(draw, most), heads=draw.choice([(1, 1), (4, 1), (6, 2)]),
            sinks=draw.random() < 0.4, softcap=draw.choice([None, 2.0]), shared=draw.random() < 0.3,
        )  # fmt: skip
        check(case, run(narrow(case, torch.float32), RULES[name][0], draw.choice(LAYOUTS)), 3e-5)
        assert made() == 1

else:

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(__file__, "test_rules")
