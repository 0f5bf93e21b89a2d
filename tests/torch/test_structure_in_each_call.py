"""What a call reads of tensors that say what is attended, and when: whoever writes to them, and however."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gossamer as gs
from gossamer.memo import Memo
from gossamer.torch import planning, repeated
from gossamer.torch.given_layouts import layout_from
from gossamer.torch.recording import record
from tests.support.definition import dense, tensors

B, H, G, Q, K = 2, 4, 2, 40, 70
Call = Callable[..., Tensor]


class Given(NamedTuple):
    """Numbers, other numbers of the same shape, and a call that is told by them."""

    first: list[Any]
    second: list[Any]
    call: Call


def by_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor) -> Tensor:
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    return gs.varlen(*flat, cu_q, cu_k, seqused_k=used, pattern=gs.Causal())


IDS = [x // 9 for x in range(K)]
GIVEN: dict[str, Given] = {
    "lengths": Given([[30, 60]], [[70, 7]], lambda q, k, v, x: gs.attention(q, k, v, gs.Causal(), key_lengths=x)),
    "lengths of a mask": Given(
        [[30, 60]], [[70, 7]], lambda q, k, v, x: gs.attention(q, k, v, torch.ones(Q, K).bool(), key_lengths=x)
    ),
    "lengths in a structure": Given(
        [[30, 60], [20, 3]], [[70, 7], [3, 20]],
        lambda q, k, v, x, at: gs.attention(q, k, v, gs.SlidingWindow(9), key_lengths=x, q_offset=at),
    ),
    "starts": Given([[3, 4]], [[0, 30]], lambda q, k, v, x: gs.attention(q, k, v, gs.Causal(), key_starts=x)),
    "one offset": Given([20], [3], lambda q, k, v, x: gs.attention(q, k, v, gs.Causal(), q_offset=x)),
    "one offset and slopes": Given(
        [20], [3],
        lambda q, k, v, x: gs.attention(
            q, k, v, gs.Causal(), q_offset=x, key_starts=[1, 2], alibi_slopes=torch.ones(H).double()
        ),
    ),
    "ids": Given([IDS], [IDS[::-1][3:] + [5] * 3],
                 lambda q, k, v, x: gs.attention(q, k, v, gs.DocumentIds(x) & gs.Causal())),
    "edges": Given([[0, 20, 70]], [[0, 50, 70]],
                   lambda q, k, v, x: gs.attention(q, k, v, gs.DocumentIds.from_cu_seqlens(x, K))),
    "blocks": Given([[[0, -1]]], [[[1, 1]]], lambda q, k, v, x: gs.attention(q, k, v, gs.BlockIndices(x))),
    "counts": Given([[[0, 1]], [2]], [[[0, 1]], [1]],
                    lambda q, k, v, x, n: gs.attention(q, k, v, gs.BlockIndices(x, 64, n))),
    "varlen": Given([[0, 7, 40], [0, 20, 70], [15, 40]], [[0, 9, 30], [0, 50, 60], [50, 2]], by_varlen),
}  # fmt: skip
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "torch": lambda x, to: x.copy_(to),
    "numpy": lambda x, to: np.copyto(x.numpy(), to.numpy()),
    "data": lambda x, to: x.data.copy_(to),
}


def inputs() -> list[Tensor]:
    return tensors((B, H, Q, 8), (B, G, K, 8), (B, G, K, 8))


def numbers(of: list[Any], dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(x, dtype=dtype) for x in of]


def dtypes(name: str) -> tuple[torch.dtype, ...]:
    return (torch.int32, torch.int64) if name in ("blocks", "counts") else (torch.uint8, torch.int32, torch.int64)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", GIVEN)
def test_each_call_reads_what_is_there(name: str, write: str) -> None:
    given = GIVEN[name]
    for dtype in dtypes(name):
        data, other = numbers(given.first, dtype), numbers(given.second, dtype)
        first, second = given.call(*inputs(), *numbers(given.first, dtype)), given.call(*inputs(), *other)
        assert not torch.equal(first, second)
        assert torch.equal(given.call(*inputs(), *data), first)
        for x, to in zip(data, other, strict=True):
            WRITES[write](x, to)
        assert torch.equal(given.call(*inputs(), *data), second)


@pytest.mark.parametrize("way", ["eager", "compiled", "autocast"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", GIVEN)
def test_gradients_are_those_of_what_was_computed(name: str, write: str, way: str) -> None:
    """Also where the next step's numbers are written before they are asked for."""
    given = GIVEN[name]
    torch._dynamo.reset()
    call = torch.compile(given.call, fullgraph=True, backend="aot_eager") if way == "compiled" else given.call
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        for dtype in dtypes(name)[1:]:
            x = inputs()
            wanted = torch.autograd.grad(given.call(*x, *numbers(given.first, dtype)).square().sum(), x)
            data = numbers(given.first, dtype)
            total = call(*x, *data).square().sum()
            for at, to in zip(data, numbers(given.second, dtype), strict=True):
                WRITES[write](at, to)
            for found, want in zip(torch.autograd.grad(total, x), wanted, strict=True):
                torch.testing.assert_close(found, want)


def test_compiled_masks_are_read_in_each_call() -> None:
    """A compiler writes to its buffers as numpy does, and gives one tensor to two operators."""
    q, k, v = inputs()
    first, second = (torch.rand(Q, K) < 0.5 for _ in range(2))
    compiled = torch.compile(lambda q, k, v, mask: gs.attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    mask = first.clone()
    for now in (first, second, first):
        np.copyto(mask.numpy(), now.numpy())
        found, wanted = compiled(q, k, v, mask), gs.attention(q, k, v, now)
        assert torch.equal(found, wanted)
        grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, wanted))
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_both_directions_read_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of the rows of a layout, as their work items are, is made once for a forward and its backward."""
    made = []

    def counted(*given: Any) -> Any:
        made.append(given)
        return layout_from(*given)

    monkeypatch.setattr(planning, "layout_from", counted)
    x = [torch.randn(1, 2, 192, 8, requires_grad=True) for _ in range(3)]
    for _ in range(2):
        blocks = torch.randint(-1, 3, (1, 2, 3, 2))
        gs.attention(*x, gs.BlockIndices(blocks)).sum().backward()
    assert len(made) == 2


def test_a_shared_layout_is_that_of_its_moment() -> None:
    q, k, v = inputs()
    lengths = torch.tensor([30, 60])
    shared = gs.device_layout(q, k, v, gs.Causal(), q_offset=lengths - 1, key_lengths=lengths)
    wanted = gs.attention(q, k, v, gs.Causal(), q_offset=lengths - 1, key_lengths=lengths)
    lengths.fill_(2)
    assert torch.equal(gs.attention(q, k, v, shared), wanted)


# -- layouts and their offset -----------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, -0.125, 1.0]).double()


def layouts(offset: int | None) -> Iterator[gs.BlockLayout]:
    """Of causal attention, made in every way that knows the offset."""
    q, k, v = inputs()
    yield gs.Causal().layout(Q, K, block_q=64, block_kv=64, q_offset=offset)
    yield gs.Causal().layout(Q, K, block_q=64, block_kv=64, q_offset=offset).to("cpu")
    yield gs.device_layout(q, k, v, gs.Causal(), q_offset=offset, key_starts=[0, 0])
    yield pickle.loads(pickle.dumps(gs.Causal().layout(Q, K, block_q=64, block_kv=64, q_offset=offset)))
    if offset is not None:
        at = torch.tensor(offset)
        found = gs.device_layout(q, k, v, gs.Causal(), q_offset=at, key_starts=[0, 0])
        at.fill_(0)
        yield found
        yield gs.Causal().layout(Q, K, block_q=64, block_kv=64, q_offset=np.int64(offset))  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [None, 5, K - Q, -3])
def test_slopes_count_from_the_offset_of_a_layout(offset: int | None) -> None:
    x = inputs()
    position = np.arange(Q) + (K - Q if offset is None else offset)
    mask = position[:, None] >= np.arange(K)[None]
    wanted = dense(*x, mask, slopes=SLOPES, position=position)
    for layout in layouts(offset):
        found = gs.attention(*x, layout, alibi_slopes=SLOPES, alibi_distance="signed", return_lse=True)
        for one, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, want)
        plain = gs.attention(*x, layout, return_lse=True)
        for one, want in zip(plain, dense(*x, mask), strict=True):
            torch.testing.assert_close(one, want)


@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_another_offset_than_that_of_a_layout_is_refused(slopes: Tensor | None) -> None:
    x = inputs()
    for layout in layouts(5):
        for wrong in (K - Q, 4, torch.tensor(4)):
            with pytest.raises(ValueError, match="q_offset must be left out with a BlockLayout that was made with"):
                gs.attention(*x, layout, q_offset=wrong, alibi_slopes=slopes)
    same = gs.Causal().layout(Q, K, block_q=64, block_kv=64, q_offset=5)
    for at in (5, np.int64(5), torch.tensor(5)):
        how: dict[str, Any] = {} if slopes is None else {"alibi_distance": "signed"}
        found, wanted = (gs.attention(*x, same, q_offset=one, alibi_slopes=slopes, **how) for one in (at, None))
        assert torch.equal(found, wanted)


def test_rows_that_are_counted_from_0_take_the_offset_that_is_given() -> None:
    x = inputs()
    layout = gs.BlockMask(np.ones((1, 2), dtype=bool), 64).layout(Q, K, block_q=64, block_kv=64)
    wanted = dense(*x, np.ones((Q, K), dtype=bool), slopes=SLOPES, position=np.arange(Q) + 11)
    found = gs.attention(*x, layout, q_offset=11, alibi_slopes=SLOPES, alibi_distance="signed", return_lse=True)
    for one, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, want)


def test_slopes_are_refused_where_sequences_have_offsets_of_their_own() -> None:
    x = inputs()
    of_each = gs.device_layout(*x, gs.Causal(), q_offset=torch.tensor([3, 4]))
    packed = gs.device_layout(*x, gs.PackedSequences(torch.tensor([0, 7, Q]), torch.tensor([0, 20, K])))
    for layout in (of_each, packed, of_each.to("cpu")):
        for function in (gs.attention, gs.explain):
            with pytest.raises(gs.Unsupported, match="alibi_slopes must be None with a BlockLayout in which each"):
                function(*x, layout, alibi_slopes=SLOPES, alibi_distance="signed")
            with pytest.raises(ValueError, match="q_offset must be left out"):
                function(*x, layout, q_offset=3)


# -- where there is nothing to read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GIVEN)
def test_shapes_without_numbers(name: str) -> None:
    """On `meta`, and under a mode of fake tensors, as patterns are: out is told by shapes."""
    given = GIVEN[name]
    wanted = given.call(*inputs(), *numbers(given.first, torch.int64))
    if "mask" not in name and "slopes" not in name:  # these tensors are made inside the call, on the CPU
        on_meta = [x.to("meta") for x in (*inputs(), *numbers(given.first, torch.int64))]
        found = given.call(*on_meta)
        assert found.is_meta and found.shape == wanted.shape and found.dtype == wanted.dtype
    if "one offset" in name:  # which is read
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = given.call(*(mode.from_tensor(x) for x in (*inputs(), *numbers(given.first, torch.int64))))
        assert found.shape == wanted.shape and found.stride() == wanted.stride()


def test_a_layout_on_meta() -> None:
    q, k, v, at = (x.to("meta") for x in (*inputs(), torch.tensor([3, 4])))
    made = gs.device_layout(q, k, v, gs.Causal(), q_offset=at)
    assert made.rows.full.counts.is_meta and gs.attention(q, k, v, made).shape == q.shape


# -- structures are plain values --------------------------------------------------------------------------------------


def test_structures_are_copied_and_pickled() -> None:
    x = inputs()
    cu = torch.tensor([0, 7, Q]), torch.tensor([0, 20, K])
    for one in (
        gs.DocumentIds(torch.arange(K) // 9),
        gs.DocumentIds.from_cu_seqlens(cu[1], K) & gs.SlidingWindow(9),
        gs.BlockIndices(torch.tensor([[0, 1]]), 64, torch.tensor([1])) & gs.Causal(),
        gs.PackedSequences(*cu, seqused_k=torch.tensor([15, 40]), pattern=gs.Causal()),
    ):
        wanted = gs.attention(*x, one)
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert torch.equal(gs.attention(*x, other), wanted) and repr(other) == repr(one)


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_only_places_of_truth_values_keep_a_call_from_being_recorded() -> None:
    """They say how long a result is; integers do not, by which packed sequences find their edges."""
    x, at, cpu = torch.arange(9), torch.tensor([3, 3, 8]), torch.device("cpu")
    again = record(lambda: [x[at]], [x, at], cpu).again
    assert again is not None
    assert torch.equal(again(x + 1, at - 3)[0], torch.tensor([1, 1, 6]))
    some = x > 4
    assert record(lambda: [x[some]], [x, some], cpu).again is None


NUMBERED: dict[str, Given] = {
    **{name: GIVEN[name] for name in ("ids", "edges", "blocks", "counts")},
    "keys": Given([[[0, 30, -1]] * Q], [[[69, 2, 2]] * Q], lambda q, k, v, x: gs.attention(q, k, v, gs.Indices(x))),
    "packed": Given(
        [[0, 7, 40], [0, 20, 70]], [[0, 9, 30], [0, 50, 60]],
        lambda q, k, v, cu_q, cu_k: gs.varlen(
            *(x[0].transpose(0, 1) for x in (q, k, v)), cu_q, cu_k, pattern=gs.Causal()
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", NUMBERED)
def test_what_is_kept_by_numbers_is_of_those_alone(name: str, write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors on a CPU: what is written to them later changes nothing that was kept, in either direction."""
    given = NUMBERED[name]
    monkeypatch.setattr(repeated, "_numbered", Memo(4))
    for dtype in dtypes("blocks" if name == "keys" else name):
        first, second = numbers(given.first, dtype), numbers(given.second, dtype)
        monkeypatch.setattr(repeated, "MOST_READ_BYTES", 0)
        wanted = [gradients(given.call, now) for now in (first, second)]
        assert not len(repeated._numbered)
        monkeypatch.setattr(repeated, "MOST_READ_BYTES", 2**18)
        data = numbers(given.first, dtype)
        for turn in range(6):
            for x, to in zip(data, (first, second)[turn % 2], strict=True):
                WRITES[write](x, to)
            for _ in range(2):
                for found, want in zip(gradients(given.call, data), wanted[turn % 2], strict=True):
                    torch.testing.assert_close(found, want)
        assert len(repeated._numbered) == 2
        repeated._numbered.clear()


def gradients(call: Call, data: list[Tensor]) -> list[Tensor]:
    x = inputs()
    out = call(*x, *data)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


def test_numbers_that_are_kept_are_checked_where_that_is_asked_for() -> None:
    """Calls without a check come first, and keep the layout of what it would refuse."""
    x, keys = inputs(), torch.full((1, 1, Q, 2), K)  # no key
    for _ in range(3):
        gs.attention(*x, gs.Indices(keys))
    for _ in range(3):
        with pytest.raises(ValueError, match=r"indices of Indices must be in \[0, 70\), or -1 where unused; got 70"):
            gs.attention(*x, gs.Indices(keys, check=True))
    edges = torch.tensor([0, 50, 20])
    for _ in range(3):
        with pytest.raises(ValueError, match="must not decrease"):
            gs.attention(*x, gs.DocumentIds.from_cu_seqlens(edges, K))


def test_layouts_of_tensors_are_the_callers_own() -> None:
    """A layout that `device_layout` gives may be written to; attention keeps another one by its numbers."""
    x, ids = inputs(), torch.tensor(IDS)
    wanted = gs.attention(*x, gs.DocumentIds(ids.clone()))
    for _ in range(3):
        made = gs.device_layout(*x, gs.DocumentIds(ids))
        for array in made.rows.arrays():
            array.zero_()
        assert torch.equal(gs.attention(*x, gs.DocumentIds(ids)), wanted)
