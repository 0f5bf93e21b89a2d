"""The comparison of machine code tells kernels apart, and says which were renamed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from gossamer.kernels.hopper import missing_packages
from tests.support.cubins import machine_code

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from compare_code import compare

    assert compare({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == ([], True)
    assert compare({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == (["differs: b"], False)
    assert compare({"new": "1"}, {"old": "1"}) == (["gone: old; now new", "new: new; before old"], True)
    lines, equal = compare({"new": "1"}, {"old": "2"})
    assert lines == ["gone: old; no kernel now has its code", "new: new; no kernel before has its code"] and not equal


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_machine_code_is_of_instructions_and_not_of_names() -> None:
    from gossamer.kernels.hopper import compiled

    data = compiled.merge.object("bfloat16", 64, 64)
    code = machine_code(data)
    assert machine_code(data.replace(b"kernel_cutlass", b"kernel_another")) == code
    assert machine_code(compiled.merge.object("float16", 64, 64)) != code
    end = struct.pack("<Q", 0x000000000000794D)  # the first half of EXIT
    assert data.count(end) and machine_code(data.replace(end, struct.pack("<Q", 0x0000000000007918))) != code
    with pytest.raises(ValueError, match="must hold a cubin with code, got 12 bytes"):
        machine_code(b"no cubin yet")
