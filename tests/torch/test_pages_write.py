"""Keys and values are written to their slots of a cache in pages, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.torch import paged, paged_write
from gossamer.torch.paged_write import write_pages
from tests.support.modes import NothingIsRead
from tests.support.processes import INTERPRETING, compiled, in_interpreter, triton_on_a_cpu

ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]  # of (pages, heads, slots, size) in memory
SLOTS = ([5, -1, 0, -1], [-1, -1, 11, 2], [-1, -1, -1, -1], [], [7], [3, 4, 5, 6])


def check(device: str = "cpu", slot_type: torch.dtype = torch.int64, dtype: torch.dtype = torch.float32) -> None:
    P, G, size, D, E = 3, 2, 4, 5, 3
    for order in ORDERS:
        for slots in SLOTS:
            room = torch.randn([(P + 1, G, size, D + E + 2)[n] for n in order], device=device).to(dtype)
            cache = room.permute([order.index(n) for n in range(4)])[1:, ..., : D + E]
            k, v = torch.randn(6, G, D + E, device=device).to(dtype).split([D, E], -1)
            wanted = room.clone()
            inside = wanted.permute([order.index(n) for n in range(4)])[1:, ..., : D + E]
            for row, slot in enumerate(slots):
                if slot >= 0:
                    inside[slot // size, :, slot % size] = torch.cat([k[row], v[row]], -1)
            told = torch.tensor([slots, slots], dtype=slot_type, device=device).T[:, 0]
            if device == "cpu":
                with NothingIsRead():
                    write_pages(cache, k, v, told)
            else:
                write_pages(cache, k, v, told)
            assert torch.equal(room, wanted), (order, slots)


def test_types_are_those_of_the_cache() -> None:
    cache, x, slots = torch.zeros(2, 1, 4, 8), torch.zeros(1, 1, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"value must be of the cache's dtype, torch.float32; got .*float16"):
        write_pages(cache, x, x.half(), slots)


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from triton_on_a_cpu(monkeypatch, paged, "paged_layout")

    def test_by_the_kernel(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        def computed(*_: Any, **__: Any) -> Any:
            raise AssertionError("operations of torch wrote")

        monkeypatch.setattr(paged_write.torch, "where", computed)
        check(slot_type=torch.int32)
        check(dtype=torch.bfloat16)

else:

    @pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
    def test_by_operations(slot_type: torch.dtype) -> None:
        check(slot_type=slot_type)

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(__file__, "test_by_the_kernel")


COMPILE = """
import sys
from gossamer.kernels.launch import Operand
from gossamer.kernels.relaunch import compiled_for
from gossamer.kernels.triton import KERNELS
from gossamer.kernels.triton.paged.write_slots import write
for dtype, D, E in (("bfloat16", 128, 128), ("float32", 72, 40)):
    size = D + E
    new = {name: Operand(dtype, (4, 2, n), (2 * size, size, 1)) for name, n in (("key", D), ("value", E))}
    cache = Operand(dtype, (3, 2, 16, size), (32 * size, size, 2 * size, 1))
    (step,) = write({"cache": cache, **new, "slots": Operand("int64", (4,), (1,))}).launch.steps
    _, options, signature = step.kernel.key
    compiled_for(KERNELS[step.kernel.name], signature, dict(options), int(sys.argv[1]))
"""


@pytest.mark.slow
def test_kernel_compiles(tmp_path: Path) -> None:
    compiled(COMPILE, 90, cache=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype=dtype)
