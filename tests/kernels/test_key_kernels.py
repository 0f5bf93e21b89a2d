"""The kernels that order lists of keys and cut them into items, against the array operations that define both.

`KEY_CASES=2000 TRITON_INTERPRET=1 pytest tests/kernels/test_key_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gossamer as gs
from gossamer.layouts.device import key_list_layout
from gossamer.layouts.device.arrays import KeyRows
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.torch import device_arrays, fused_structure
from tests.layouts.test_device_layouts import draw_bounds
from tests.support.processes import INTERPRETING, LAUNCHES, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

from gossamer.kernels.structure import key_rows as key_rows_kernels
from gossamer.kernels.triton.gather import device_items as device_items_kernels
from gossamer.kernels.triton.gather.schedule_gather import Work, _work_by_capacity

CASES = int(os.environ.get("KEY_CASES", "12" if INTERPRETING else "32"))
COUNT_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class ArraysWithKernels:
    """torch's operations, with the kernel of single queries for tensors of any device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(device_arrays, name)

    def fused(self, like: Tensor) -> Any:
        return self

    def key_rows(self, *arguments: Any) -> KeyRows:
        return KeyRows(*key_rows_kernels.key_rows(*arguments))


def draw(rng: np.random.Generator, device: torch.device) -> tuple[Any, ...]:
    """indices, counts, lo, hi, Q and K: lists that are unsorted, with keys that repeat or do not exist; any strides."""
    lead = tuple(int(x) for x in rng.choice([1, 1, 2, 3], 2))
    Q, K = (int(rng.choice([1, 5, rng.integers(1, 50)])) for _ in range(2))
    n = int(rng.choice([0, 1, 2, 17, 64, rng.integers(1, 100)]))
    few = int(rng.choice([K, K, 3]))  # keys: many queries list one
    numbers = rng.integers(-2, few + 2, (*lead, Q, n))
    wide = rng.random() < 0.3
    if rng.random() < 0.3:
        far = [2**31 - 1, -(2**31), *([2**32, -(2**32) + 1, 2**40] if wide else [])]
        numbers = np.where(rng.random(numbers.shape) < 0.3, rng.choice(far, numbers.shape), numbers)
    if rng.random() < 0.1:
        numbers[:] = -1
    indices = torch.from_numpy(numbers).to(torch.int64 if wide else torch.int32).to(device)
    if rng.random() < 0.4:
        indices = torch.stack([indices, indices + 1], -1)[..., 0]
    counts = lo = hi = None
    if rng.random() < 0.5:
        counts = torch.from_numpy(rng.integers(0, n + 3, (*lead, Q))).clamp(max=127)
        counts = counts.to(COUNT_TYPES[rng.integers(5)]).to(device)
        counts = torch.stack([counts, counts], -1)[..., 0] if rng.random() < 0.4 else counts
    if rng.random() < 0.5:
        bounds = draw_bounds(rng, tuple(x if rng.random() < 0.5 else 1 for x in lead), Q, K)
        lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device) for x in bounds)
    return indices, counts, lo, hi, Q, K


def lists_of(walk: GatherWalk) -> list[list[int]]:
    """Of every list its entries."""
    starts, counts, entries = (x.reshape(-1).tolist() for x in (walk.starts, walk.counts, walk.indices))
    return [entries[start : start + count] for start, count in zip(starts, counts, strict=True)]


def check_lists(rng: np.random.Generator, device: torch.device) -> GatherLayout:
    """Both directions are those of array operations; the layout that operations made."""
    given, transpose = draw(rng, device), bool(rng.random() < 0.7)
    found, want = (key_list_layout(*given, xp=xp, transpose=transpose) for xp in (ArraysWithKernels(), device_arrays))
    for one, other in zip(found.rows.arrays(), want.rows.arrays(), strict=True):
        assert one.dtype == torch.int32 and torch.equal(one.cpu(), other.cpu())
    if transpose:
        for name in ("starts", "counts"):
            assert torch.equal(getattr(found.columns, name).cpu(), getattr(want.columns, name).cpu())
        assert found.columns.indices.shape == want.columns.indices.shape
        assert lists_of(found.columns) == lists_of(want.columns)
    return want if transpose else key_list_layout(*given, xp=device_arrays)


def check_items(layout: GatherLayout, rng: np.random.Generator) -> None:
    """Items, merges, slots and the longest of each few items are those of array operations."""
    walk = layout.columns if rng.random() < 0.5 else layout.rows
    heads = walk.lead[1] * int(rng.choice([1, 1, 2]))
    walk, room = walk.for_heads(heads), len(walk.indices) // walk.width * (heads // walk.lead[1])
    limit = int(rng.choice([7, 40, 400, 10**6])) if room > 2**12 else int(rng.choice([1, 2, 7, 10**6]))
    want = _work_by_capacity(walk, limit, room)
    found = device_items_kernels.device_items(walk, limit, room // limit)
    assert found.slots == want.slots
    assert torch.equal(found.items, want.items)
    assert torch.equal(found.merges, want.merges)
    each = int(rng.choice([1, 4, 8, 33]))
    longest = device_items_kernels.longest_of(found.items, each)
    assert torch.equal(longest.cpu(), Work(want.items.cpu(), want.merges, want.slots).longest(each))


def draw_long(rng: np.random.Generator, device: torch.device) -> GatherLayout:
    """Lists of very different lengths, whose entries do not matter."""
    lead, rows = tuple(int(x) for x in rng.integers(1, 3, 2)), int(rng.choice([1, 3, 60]))
    counts = (10 ** rng.uniform(0, 6, (*lead, rows)) * (rng.random((*lead, rows)) < 0.8)).astype(np.int32)
    counts = torch.from_numpy(np.minimum(counts, 2**18 // counts.size))
    starts = (counts.reshape(-1).cumsum(0).reshape(counts.shape) - counts).int()
    entries, none = torch.zeros(int(counts.sum()), dtype=torch.int32), torch.zeros((0, 1), dtype=torch.int32)
    walk = GatherWalk(rows, 2**18, 1, *(x.to(device) for x in (starts, counts, entries, none)))
    return GatherLayout(walk, _transpose=[walk], apart=True)


def check(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch | None) -> None:
    """One case; with small programs, so that there are many of them."""
    rng = np.random.default_rng(seed)
    if monkeypatch is not None:
        monkeypatch.setattr(key_rows_kernels, "ENTRIES", int(rng.choice([128, 1024])))
        monkeypatch.setattr(key_rows_kernels, "KEYS", int(rng.choice([32, 256])))
        monkeypatch.setattr(device_items_kernels, "ITEMS", int(rng.choice([32, 128])))
        monkeypatch.setattr(device_items_kernels, "LISTS", int(rng.choice([32, 1024])))
        monkeypatch.setattr(device_items_kernels, "PROGRAMS", int(rng.choice([2, 32])))
    try:
        layout = check_lists(rng, device)
        check_items(layout if rng.random() < 0.6 else draw_long(rng, device), rng)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_keys(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(chunk, CASES, 4):
        check(seed, torch.device("cpu"), monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
def test_in_interpreter() -> None:
    in_interpreter(__file__, "test_random_keys")


COMPILE = f"""{LAUNCHES}
from gossamer.kernels.structure import key_rows
from gossamer.kernels.triton.gather import device_items
from gossamer.layouts.gather import GatherWalk

key_rows.launch = device_items.launch = launch
bounds = torch.zeros(2, 1, 60, dtype=torch.int32)
for indices, counts, n in ((bounds.long(), bounds.byte(), 64), (bounds, None, 5), (bounds, None, 2048)):
    lists = indices[..., None].expand(2, 1, 60, n)
    key_rows.key_rows(lists, counts, *[bounds if n == 64 else None] * 2, 60, 700, True)
none = torch.zeros((0, 1), dtype=torch.int32)
walk = GatherWalk(60, 700, 1, bounds, bounds, bounds, none)
for more in (0, 9):
    device_items.longest_of(device_items.device_items(walk, 40, more).items, 8)
compile_all(13)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, *more(80, 100)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


def test_shapes_under_a_mode() -> None:
    """There the operator is seen, which tells shapes alone."""
    with FakeTensorMode():
        indices = torch.zeros(2, 3, 90, 40, dtype=torch.int32, device="cuda")
        for transpose in (True, False):
            found = fused_structure.kernels.key_rows(indices, None, None, None, 90, 700, transpose)
            keys, entries = (700, 2 * 3 * 90 * 40) if transpose else (0, 0)
            shapes = [(2, 3, 90)] * 2, [(2 * 3 * 90 * 40,)], [(2, 3, keys)] * 2, [(entries,)]
            assert [x.shape for x in found] == [shape for kind in shapes for shape in kind]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("small", [True, False])
def test_random_keys_on_a_gpu(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(CASES):
        check(seed, torch.device("cuda"), monkeypatch if small else None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_indices_on_a_gpu_are_those_on_a_cpu() -> None:
    """A call with keys of its own for each query, and its gradients, in float32."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 3, 700, 64, generator=g) for _ in range(3)]
    indices = torch.randint(-2, 702, (1, 3, 700, 50), generator=g)
    results = []
    for device in ("cpu", "cuda"):
        given = [one.to(device).requires_grad_() for one in x]
        for _ in range(2):  # the second call repeats what the first one wrote down
            out = gs.attention(*given, gs.Indices(indices.to(device)))
            gradients = torch.autograd.grad(out.square().sum(), given)
        results.append([out.detach().cpu(), *(one.cpu() for one in gradients)])
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 2e-5 * max(1, float(other.abs().max()))
