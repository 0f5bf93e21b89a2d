"""The kernels of single rows compile without a GPU, and keep what they load in registers."""

from __future__ import annotations

import pytest

from gossamer.kernels.hopper import compiled, missing_packages
from gossamer.kernels.hopper.device.rows.configurations import DIRECTIONS, SIZES, WARPS, RowsConfig
from gossamer.kernels.hopper.device.rows.words import Word
from gossamer.layouts import items
from tests.support.cubins import resources

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
STACK = 64  # bytes of a thread: pointers that wait for the end, nothing of a loop


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_they_fit(direction: str, size: int) -> None:
    config = RowsConfig(direction, "bfloat16", size, True)
    registers, stack = resources(compiled.rows.object(config))
    assert max(registers) * 32 * WARPS * config.blocks <= 65536 and max(stack) <= STACK


@needs_compiler
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_term_compiles(direction: str) -> None:
    shares = direction == "columns"
    assert compiled.rows.object(RowsConfig(direction, "float16", 64, False, "softcap", True, shares))


def test_items_are_read_as_they_are_written() -> None:
    assert {word.name: word.value for word in Word} == {name: getattr(items, name) for name in Word.__members__}
    assert len(Word) == items.ITEM


def test_what_there_is_no_kernel_for() -> None:
    for direction, size in (("gradients", 64), ("forward", 96)):
        with pytest.raises(ValueError, match="no kernel of single rows as"):
            RowsConfig(direction, "bfloat16", size, True)
