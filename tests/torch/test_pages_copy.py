"""Pages are copied behind one another, clean of what no query sees, and where that is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.torch import paged
from gossamer.torch.arguments import AttentionOptions
from gossamer.torch.paged_copy import copied_pages
from tests.support.processes import INTERPRETING, LAUNCHES, compiled, in_interpreter, triton_on_a_cpu

ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)]  # of (pages, slots, heads, size) in memory
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def check(device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 4, width: int = 5) -> None:
    """Copies are those of a loop over slots; what is not seen may be NaN."""
    P, G = 6, 3
    for order in ORDERS:
        for listed in ([4, 0, 4], [2], [5, 3, 1, 0, 2]):
            room = torch.randn([(P + 1, size, G, width + 2)[n] for n in order], device=device).to(dtype)
            pool = room.permute([order.index(n) for n in range(4)])[1:, ..., :width]
            unseen = torch.rand(len(listed) * size, device=device) < 0.4
            wanted = torch.zeros(len(listed) * size, G, width, dtype=dtype, device=device)
            seen_somewhere = torch.zeros(P, size, dtype=torch.bool, device=device)
            for row in range(len(wanted)):
                if not unseen[row]:
                    wanted[row] = pool[listed[row // size], row % size]
                    seen_somewhere[listed[row // size], row % size] = True
            pool[~seen_somewhere] = torch.nan
            pages = torch.tensor(listed, dtype=torch.int32, device=device)
            assert torch.equal(copied_pages(pool, pages, unseen), wanted), (order, listed)


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from triton_on_a_cpu(monkeypatch, paged, "paged_layout")

    def test_by_the_kernel(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        def by_torch(*_: Any, **__: Any) -> Any:
            raise AssertionError("operations of torch copied")

        monkeypatch.setattr(torch.Tensor, "masked_fill_", by_torch)
        for dtype in DTYPES:
            check(dtype=dtype)
        check(size=1, width=128)
        check(size=64, width=300)

else:

    @pytest.mark.parametrize(
        ("tokens", "n", "most", "where"),
        [
            (8, 2, 2**29, "where they lie"),
            (1024, 2, 2**29, "copied"),
            (1024, 2, 2**10, "where they lie"),
            (1024, 40, 2**20, "where they lie"),
        ],
    )
    def test_narrow_tiles_are_for_few_queries_and_for_large_copies(
        tokens: int, n: int, most: int, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tokens of a sequence that have two rows each, over n pages in the table."""
        monkeypatch.setattr(paged, "IN_PLACE", {"cpu"})
        monkeypatch.setattr(paged, "tile_of", lambda *_: (128, 128))
        monkeypatch.setattr(paged, "MOST_COPIED", most)
        q, k = torch.randn(tokens, 4, 32), torch.randn(50, 64, 2, 32)
        pages = gs.Pages(torch.arange(n)[None], [100], 64)
        sequences = gs.PackedSequences([0, tokens], pages=pages, pattern=gs.Causal())
        layout = paged.paged_call(q, k, k, sequences, AttentionOptions(layout="bshd")).layout
        assert (layout.between is None) == (where == "copied")
        assert layout.parts[-1].layout.block_kv == (128 if where == "copied" else 64)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_by_operations(dtype: torch.dtype) -> None:
        check(dtype=dtype)

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(__file__, "test_by_the_kernel")


COMPILE = """
from gossamer.kernels.triton.paged import copy_slots as module
module.launch = launch
for dtype, size, width in ((torch.bfloat16, 64, 128), (torch.float32, 1, 72)):
    pool = torch.zeros(3, size, 2, width, dtype=dtype)
    module.copy_slots(pool, torch.zeros(2, dtype=torch.int32), torch.zeros(2 * size, dtype=torch.bool))
compile_all(2)
"""


@pytest.mark.slow
def test_kernel_compiles(tmp_path: Path) -> None:
    compiled(LAUNCHES + COMPILE, 90, cache=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype=dtype)
    check("cuda", dtype=dtype, size=64, width=128)
