"""Mask functions of transformers, read into patterns: equal to what they say of every pair."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.integrations.transformers import attention_mask, certificate, reading, register
from gossamer.integrations.transformers.attention_mask import Mask, make_mask
from gossamer.integrations.transformers.device import KeptPairs, Rules, Where
from gossamer.patterns.reach import Reach
from tests.support.transformers_models import _bidirectional_window_overlay, window_of_halves, window_of_sides
from tests.support.transformers_models import masking_utils as hf

TREES = 500


@pytest.fixture(autouse=True)
def uncertified() -> Iterator[None]:
    certificate.forget()
    yield
    certificate.forget()


def dense(mask: Mask, kept: KeptPairs | None = None, by: gs.patterns.Pattern | None = None) -> np.ndarray:
    """(B, Q, K): the pairs that a layer attends to with a mask object, or with another way to say what it keeps."""
    B, _, Q, K = mask.shape
    mask.kept = mask.kept if kept is None else kept
    given = mask.attended(by, B, torch.device("cpu"))
    q, k, v = torch.zeros(B, 1, Q, 8), torch.zeros(B, 1, K, 8), torch.eye(K).expand(B, 1, K, K)
    return (gs.attention(q, k, v, given.pattern, **given.options)[:, 0] > 0).numpy()


def expected(fn: Callable[..., Any], where: Where, padding: torch.Tensor | None) -> np.ndarray:
    """(B, Q, K): what a mask function says of a list of all pairs."""
    shape = (where.B, where.Q, where.K)
    b, r, c = (torch.from_numpy(x.ravel()) for x in np.indices(shape))
    q, kv = r + where.q_offset, c + where.kv_offset
    kept = fn(b, torch.zeros_like(b), q, kv).expand(len(b))
    if padding is not None:
        kept = kept & (kv < padding.shape[1]) & padding[b, kv.clamp(max=padding.shape[1] - 1)]
    return kept.numpy().reshape(shape)


def runs(rng: random.Random, n: int) -> list[int]:
    """Ids (n,) that grow by one at random places: documents."""
    ids = [0]
    for _ in range(n - 1):
        ids.append(ids[-1] + (rng.random() < 0.2))
    return ids


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    """Positions that begin anew in each document, somewhere."""
    out = torch.zeros_like(ids)
    for b in range(len(ids)):
        for at in range(1, ids.shape[1]):
            out[b, at] = out[b, at - 1] + 1 if ids[b, at] == ids[b, at - 1] else 0
    return out


def leaf(rng: random.Random, B: int, n: int) -> Callable[..., Any]:
    """A closure over positions [0, n)."""
    size = rng.randint(1, n + 2)
    padding = torch.tensor([rng.randrange(n) for _ in range(B)])
    ids = torch.tensor([runs(rng, n) for _ in range(B)])
    anything = torch.tensor([[rng.randint(-1, 3) for _ in range(n)] for _ in range(B)])
    makers: list[Callable[[], Callable[..., Any]]] = [
        lambda: hf.causal_mask_function,
        lambda: hf.bidirectional_mask_function,
        lambda: hf.sliding_window_overlay(size),
        lambda: hf.sliding_window_bidirectional_overlay(size),
        lambda: _bidirectional_window_overlay(size),
        lambda: window_of_sides((size, rng.randrange(n))),
        lambda: window_of_halves(size, rng.random() < 0.5),
        lambda: hf.chunked_overlay(size, padding if rng.random() < 0.5 else padding * 0),
        lambda: hf.packed_sequence_mask_function(rng.choice((ids, anything))),
        lambda: hf.blockwise_overlay(rng.choice((anything, torch.where(anything[:, :1] >= 0, ids, -ids.sign())))),
        lambda: hf.padding_mask_function(anything >= 0),
    ]
    return rng.choice(makers)()


def tree(rng: random.Random, B: int, n: int, depth: int, mapped: bool = False) -> Callable[..., Any]:
    """`and` and `or` of closures; with packed positions above some of them, once as in transformers."""
    if depth == 0 or rng.random() < 0.25:
        return leaf(rng, B, n)
    if not mapped and rng.random() < 0.3 and hasattr(hf, "packed_sequence_compatibility_function"):
        ids = torch.tensor([runs(rng, n) for _ in range(B)])
        return hf.packed_sequence_compatibility_function(tree(rng, B, n, depth - 1, True), positions_of(ids), ids)
    join = hf.and_masks if rng.random() < 0.5 else hf.or_masks
    return join(*(tree(rng, B, n, depth - 1, mapped) for _ in range(rng.randint(1, 3))))


def test_random_trees_of_closures_are_what_they_say() -> None:
    rng = random.Random(0)
    evaluated, ways = 0, dict[str, int]()
    for _ in range(TREES):
        B, n = rng.randint(1, 3), rng.randint(2, 9)
        kv_offset = rng.randrange(n // 2) if n > 3 else 0
        K = rng.randint(1, n - kv_offset)
        Q = rng.randint(1, K)
        where = Where(B, Q, K, kv_offset + rng.randint(0, K - Q), kv_offset)
        padding = None
        if rng.random() < 0.5:
            padding = torch.tensor([[rng.random() < 0.8 for _ in range(rng.randint(1, n))]] * B)
        fn = tree(rng, B, n, 3)
        mask = make_mask(B, Q, K, where.q_offset, kv_offset, fn, padding)
        assert mask.where == where
        wanted = expected(fn, where, padding)
        for kept in (mask.kept, *mask.making.every()):
            np.testing.assert_array_equal(dense(mask, kept), wanted, err_msg=repr(kept))
            ways[kept.planned] = ways.get(kept.planned, 0) + 1
            evaluated += "Evaluated" in repr(kept)
    assert evaluated == 0  # symbols read every closure
    assert min(ways[way] for way in ("once", "on the device", "on the host")) > TREES / 10


def moved(fn: Any, name: str, variable: str, by: int) -> Any:
    """A mask function in which a variable of the closures of a name is off."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple) and all(isinstance(x, int) for x in value):
            return value[0] + by, *value[1:]
        return value.roll(by, 1) if isinstance(value, Tensor) and value.ndim == 2 else value + by

    def inside(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(inside(x) for x in value)
        return moved(value, name, variable, by) if isinstance(value, types.FunctionType) else value

    if not fn.__closure__:
        return fn
    held = {at: inside(cell.cell_contents) for at, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True)}
    if name in f"{fn.__module__}.{fn.__qualname__}":
        held[variable] = of(held[variable])
    cells = tuple(types.CellType(held[at]) for at in fn.__code__.co_freevars)
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)


def test_a_symbol_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """kv > q - W read as kv >= q - W."""
    more = lambda self, other: self.within(other, None)  # noqa: E731
    monkeypatch.setattr(reading.Distance, "__gt__", more)
    for W in (2, 8, 512, 4096):
        with pytest.raises(gs.Unsupported, match="is not what it says"):
            make_mask(1, 64, 3 * W, 2 * W, 0, hf.sliding_window_causal_mask_function(W))


def test_registering_compares_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.Distance, "__le__", lambda self, other: self.within(None, other + 1))
    with pytest.raises(gs.Unsupported, match=r"causal_mask_function was read as .* which is not what it says"):
        register("gossamer-misread")
    monkeypatch.undo()
    register("gossamer-misread")


def planted() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(a word of a closure's name, the variable that is wrong, a mask function) of each closure that has numbers."""
    for W in (2, 8, 512, 4096, 131072):
        yield "masking_utils.sliding_window_overlay", "sliding_window", hf.sliding_window_causal_mask_function(W)
        yield (
            "masking_utils.sliding_window_bidirectional_overlay",
            "sliding_window",
            hf.sliding_window_bidirectional_mask_function(W),
        )
        yield "modeling_gemma3._bid", "sliding_window", _bidirectional_window_overlay(W)
        yield "modeling_gemma4.sliding", "sliding_window", window_of_sides((W, W // 2))
        yield "modeling_t5gemma2.sliding", "sliding_window", window_of_halves(W, False)
        yield "chunked_overlay", "chunk_size", hf.chunked_causal_mask_function(W, torch.zeros(2, dtype=int))
        yield "chunked_overlay", "left_padding", hf.chunked_causal_mask_function(W, torch.tensor([3, 0]))
    for n in (64, 4096):
        documents, image = (torch.arange(n) * 3 // n)[None].repeat(2, 1), torch.full((2, n), -1)
        image[:, n // 4 : n // 4 + n // 8] = 0
        packed = hf.packed_sequence_mask_function(documents)
        yield "packed_sequence_mask_function.", "packed_sequence_mask", hf.and_masks(hf.causal_mask_function, packed)
        yield "blockwise", "block_sequence_ids", hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(image))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_every_size_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    for word, variable, fn in planted():
        n = certificate._reach(fn) or 64
        with monkeypatch.context() as patch:
            wrongly = lambda fn, word=word, at=variable: reading.read(moved(fn, word, at, wrong))  # noqa: E731
            patch.setattr(attention_mask, "read", wrongly)
            with pytest.raises(gs.Unsupported, match="is not what it says"):
                make_mask(2, n, n, 0, 0, fn)
        make_mask(2, n, n, 0, 0, fn)
        certificate.forget()


def test_a_mask_of_no_other_values_is_a_plain_pattern() -> None:
    """Of the common masks equal ones are equal patterns, of which one plan serves every forward."""
    for fn, pattern in (
        (hf.causal_mask_function, gs.Causal()),
        (hf.sliding_window_causal_mask_function(5), gs.SlidingWindow(4)),
        (hf.bidirectional_mask_function, gs.Dense()),
        (hf.sliding_window_bidirectional_mask_function(5), gs.SlidingWindow(5, 5)),
        (
            hf.or_masks(hf.sliding_window_causal_mask_function(5), _bidirectional_window_overlay(5)),
            gs.SlidingWindow(4, 4),
        ),
    ):
        for padding in (torch.ones(2, 8, dtype=torch.bool), None):
            mask = make_mask(2, 8, 8, 0, 0, fn, padding)
            given = mask.attended(None, 2, torch.device("cpu"))
            assert mask.kept.planned == "once" and given.pattern == pattern
            assert all(x is None for x in given.options.values())


def test_padding_is_an_interval_of_keys_or_a_mask_of_them() -> None:
    ones = torch.ones(2, 8, dtype=torch.bool)
    right, left, holes = ones.clone(), ones.clone(), ones.clone()
    right[0, 5:], left[0, :3], holes[0, 4] = False, False, False
    of = lambda padding: make_mask(2, 8, 8, 0, 0, hf.causal_mask_function, padding).kept  # noqa: E731
    assert (
        of(right).what == Rules(Reach(right=0), ())
        and of(right).starts is None
        and of(right).lengths.tolist() == [5, 8]
        and of(right).planned == "once"
    )
    for padding, lengths in ((left, [8, 8]), (left & right, [5, 8])):
        kept = of(padding)
        assert kept.what == Rules(Reach(right=0), ()) and kept.planned == "on the device"
        assert kept.starts.tolist() == [3, 0] and kept.lengths.tolist() == lengths
    assert "Keys(2x8)" in repr(of(holes).what) and of(holes).planned == "on the host"
    nothing = ones.clone()
    nothing[1] = False
    assert not dense(make_mask(2, 8, 8, 0, 0, hf.causal_mask_function, nothing))[1].any()
    # What a causal query cannot see is not looked at: the rest of a static cache is no padding.
    static = make_mask(2, 1, 32, torch.tensor(7), 0, hf.causal_mask_function, ones).kept
    assert static.what == Rules(Reach(right=0), ()) and static.starts is static.lengths is None


def test_ids_that_return_are_one_document() -> None:
    """A device has documents as runs of ids; others are planned on the host."""
    for ids, planned in (([3, 3, 9, 1, 1], "on the device"), ([3, 3, 9, 3, 1], "on the host"), ([3] * 5, "once")):
        fn = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(torch.tensor([ids])))
        mask = make_mask(1, 5, 5, 0, 0, fn)
        assert mask.kept.planned == planned
        np.testing.assert_array_equal(dense(mask), expected(fn, mask.where, None))


def test_what_a_cache_changes_later_was_copied() -> None:
    offset, padding = torch.tensor(4), torch.ones(1, 9, dtype=torch.bool)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    fn = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids))
    padding[0, 0] = False
    mask = make_mask(1, 3, 9, offset, 0, fn, padding)
    before = dense(mask)
    offset.add_(3)
    padding[:] = True
    ids[:] = -1
    np.testing.assert_array_equal(dense(mask), before)


def test_what_generate_and_hooks_ask_of_a_mask() -> None:
    mask = make_mask(2, 3, 9, 6, 0, hf.causal_mask_function)
    assert mask.shape == (2, 1, 3, 9) and mask.to("cpu", non_blocking=True) is mask and mask.contiguous() is mask
    assert mask[:, :, :, :9] is mask and mask[:, :, -3:, :] is mask
    for cut in (lambda: mask[:, :, :, :4], lambda: mask[0]):
        with pytest.raises(gs.Unsupported, match="cannot be cut"):
            cut()
    with pytest.raises(AttributeError, match="has no 'kv_indices'"):
        mask.kv_indices  # noqa: B018


def test_an_unknown_function_is_evaluated() -> None:
    by_index = lambda b, h, q, kv: (q + kv + b) % 3 != 0  # noqa: E731

    def by_pair(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(q % 2 == 0, kv <= q, b == 1)

    for fn, use_vmap in ((by_index, False), (by_index, True), (by_pair, True)):
        whole = hf.and_masks(hf.sliding_window_overlay(4), fn)
        mask = make_mask(2, 5, 8, 3, 2, whole, None, use_vmap)
        assert "Evaluated" in repr(mask) and mask.kept.planned == "on the host"
        np.testing.assert_array_equal(dense(mask), expected(whole, mask.where, None))
    with pytest.raises(gs.Unsupported, match=r"<lambda> is not known to gossamer.*at most 67108864.*1 x 16384 x 16384"):
        make_mask(1, 2**14, 2**14, 0, 0, by_index)
    true = make_mask(1, 2**14, 2**14, 0, 0, hf.or_masks(hf.causal_mask_function, transformers_true()))
    assert true.kept == KeptPairs(Rules(Reach(), ()))  # as Gemma 3 and others write it: not asked for each pair


def transformers_true() -> Callable[..., Any]:
    fn = lambda *args: torch.tensor(True, dtype=torch.bool)  # noqa: E731
    fn.__module__ = "transformers.models.gemma3.modeling_gemma3"
    return fn


def test_each_form_is_certified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    asked = certificate._asked
    monkeypatch.setattr(certificate, "_asked", lambda *args: (compared.append(args[-1].shape[1]), asked(*args))[1])
    for _ in range(3):
        for W in (4, 5):
            make_mask(1, 9, 9, 0, 0, hf.sliding_window_causal_mask_function(W))
    assert compared == [certificate.PAIRS // certificate.DRAWS] * certificate.DRAWS * 2


def test_nothing_is_certified_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = hf.sliding_window_causal_mask_function(4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(gs.Unsupported, match="run the model once before"):
        make_mask(1, 9, 9, 0, 0, fn)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    make_mask(1, 9, 9, 0, 0, fn)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert make_mask(1, 9, 9, 0, 0, fn).kept.what == Rules(Reach(3, 0), ())


def test_a_restriction_counts_absolute_positions() -> None:
    for padding in (None, torch.arange(12)[None] >= torch.tensor([[0], [7]])):
        whole = make_mask(2, 12, 12, 0, 0, hf.causal_mask_function, padding)
        cached = make_mask(2, 3, 7, 9, 5, hf.causal_mask_function, padding)  # a sliding cache that dropped five keys
        for by, rule in (
            (gs.Local(4), True),
            (gs.SlidingWindow(2, sinks=6), False),
            (gs.SlidingWindow(2), True),
            (gs.Local(5) & gs.SlidingWindow(3), True),
            (gs.Strided(3, 2), False),
            (gs.Longformer(4, (1, 10)), False),
        ):
            wanted = dense(whole, by=by)
            kept = np.tril(np.ones((12, 12), bool)) & by.materialize(12, 12)
            real = np.ones((2, 1, 12), bool) if padding is None else padding[:, None].numpy()
            np.testing.assert_array_equal(wanted, kept & real)
            np.testing.assert_array_equal(dense(cached, by=by), wanted[:, 9:, 5:])
            planned = cached.attended(by, 2, torch.device("cpu")).planned
            assert planned == ("once" if padding is None else "on the device" if rule else "on the host")


def test_layouts_of_the_patterns_of_masks() -> None:
    """The tiles of each pattern of the integration, expanded, are what it keeps."""
    rng = np.random.default_rng(0)
    from gossamer.integrations.transformers.patterns import Blocks, Evaluated, Keys, Shifted

    Q, K = 90, 150
    ids = np.sort(rng.integers(-9, 9, (2, K)))
    alternating = rng.integers(-1, 2, (1, K))
    holes = rng.random((2, K)) < 0.9
    holes[:, 32:64], holes[:, 96:128] = True, False
    for pattern in (
        Keys(holes), Blocks(ids), Blocks(alternating),
        Evaluated(rng.random((2, Q, K)) < 0.5), Shifted(gs.Longformer(8, (5, 60)), 42), Shifted(gs.Local(48), 17),
    ):  # fmt: skip
        causal = pattern & gs.Causal()
        for composed, offset in ((pattern, 47), (causal, 47), (causal, 0), (pattern | gs.SlidingWindow(7), 47)):
            wanted = composed.materialize(Q, K, offset).reshape(-1, Q, K)
            for b, kept in enumerate(wanted):
                layout = composed.at(b, 0).layout(Q, K, block_q=32, block_kv=32, q_offset=offset)
                np.testing.assert_array_equal(layout.expand(), kept)
                np.testing.assert_array_equal(gs.BlockLayout(layout.columns).expand(), kept.T)
