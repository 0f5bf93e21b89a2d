"""torch's BlockMask in and out: the same pairs, the same numbers, and what is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

import gossamer as gs
from gossamer.integrations import flex, flex_mask
from gossamer.integrations.mask_mods import by_formula
from gossamer.layouts import build_gather
from gossamer.torch import block_mask

CPU = torch.device("cpu")
unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= 40 * (h + 1)


def by_batch(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (j >= 30 * b)


IDS = torch.arange(300) // 70 % 3


def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return IDS[i] == IDS[j]


BOTH = and_masks(causal, same_document)


def of_a_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.stack((i >= j, IDS[j] == h)).any(0)


def pairs(mask_mod, B: int, H: int, Q: int, K: int) -> np.ndarray:
    """Every pair of a mask function, (B, H, Q, K)."""
    index = torch.meshgrid(*(torch.arange(n) for n in (B, H, Q, K)), indexing="ij")
    return mask_mod(*index).expand(B, H, Q, K).numpy()


CREATED = [
    (causal, None, None, 300, 300, 128),
    (causal, None, None, 256, 256, 128),
    (causal, None, None, 200, 333, (64, 128)),
    (by_head, None, 3, 250, 190, 64),
    (by_batch, 2, None, 150, 150, 32),
    (noop_mask, None, None, 130, 130, 128),
]


@pytest.mark.parametrize(("mask_mod", "B", "H", "Q", "K", "block"), CREATED)
def test_a_block_mask_becomes_the_same_pairs(mask_mod, B, H, Q, K, block) -> None:
    mask = create_block_mask(mask_mod, B, H, Q, K, device="cpu", BLOCK_SIZE=block)
    layout = flex.from_flex(mask, B=B or 1, H=H or 1)
    assert layout.lead == (B or 1, H or 1)
    kept = np.broadcast_to(layout.expand(), (B or 1, H or 1, Q, K))
    assert np.array_equal(kept, pairs(mask_mod, B or 1, H or 1, Q, K))


def test_pool_entries_are_shared() -> None:
    layout = flex.from_flex(create_block_mask(causal, None, None, 4096, 4096, device="cpu"))
    assert layout.rows.full.counts.sum() == 32 * 31 // 2
    assert layout.rows.bits.counts.sum() == 32
    assert len(layout.rows.pool) == 1


def test_the_mask_function_sees_partial_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(block_mask, "PAIRS_AT_ONCE", 3 * 128 * 128)
    evaluated = block_mask._evaluated

    def count(mask_mod, at, *sizes):
        for part in evaluated(mask_mod, at, *sizes):
            seen.append(len(part[0]))
            yield part

    monkeypatch.setattr(block_mask, "_evaluated", count)
    flex.from_flex(create_block_mask(causal, None, None, 1024, 1024, device="cpu"))
    assert seen == [3, 3, 2]


def test_lists_shared_by_heads_that_the_function_tells_apart() -> None:
    """flex_attention calls the function with the true head whatever the lists say: so do we."""
    shared = create_block_mask(causal, None, None, 200, 200, device="cpu")
    mask = BlockMask.from_kv_blocks(
        shared.kv_num_blocks, shared.kv_indices, BLOCK_SIZE=128, mask_mod=by_head, seq_lengths=(200, 200)
    )
    layout = flex.from_flex(mask, H=3)
    assert layout.lead == (1, 3)
    listed = np.zeros((1, 1, 256, 256), dtype=bool)
    for t in range(2):
        for c in mask.kv_indices[0, 0, t, : mask.kv_num_blocks[0, 0, t]].tolist():
            listed[..., 128 * t : 128 * t + 128, 128 * c : 128 * c + 128] = True
    assert np.array_equal(layout.expand(), pairs(by_head, 1, 3, 200, 200) & listed[..., :200, :200])


@unfused
@pytest.mark.parametrize(("mask_mod", "B", "H"), [(causal, None, None), (by_head, None, 4), (by_batch, 2, None)])
def test_attention_takes_a_block_mask(mask_mod, B, H) -> None:
    mask = create_block_mask(mask_mod, B, H, 150, 150, device="cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 150, 16, generator=generator).requires_grad_() for h in (4, 2, 2))
    expected = flex_attention(*(x.detach() for x in (q, k, v)), block_mask=mask, enable_gqa=True)
    out = gs.attention(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    kept = torch.from_numpy(pairs(mask_mod, 2, 4, 150, 150).copy())
    dense = gs.attention(q, k, v, kept, implementation="reference")
    found, exact = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, dense))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    first = block_mask.layout_for(mask, q)
    assert block_mask.layout_for(mask, q) is first
    assert gs.explain(q, k, v, mask).density == pytest.approx(kept.float().mean().item())


def test_an_own_list_of_full_blocks() -> None:
    """A full block at the ragged edge keeps the keys that exist; entries past the counts are not read."""
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 9], [0, -5]]]], dtype=torch.int32)
    none = torch.zeros(1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        none, torch.zeros_like(indices), counts, indices, BLOCK_SIZE=64, mask_mod=causal, seq_lengths=(100, 90),
        compute_q_blocks=False,
    )  # fmt: skip
    expected = np.zeros((100, 90), dtype=bool)
    expected[:64, 64:] = True
    expected[64:, :64] = True
    assert np.array_equal(flex.from_flex(mask).expand(), expected)


FUNCTIONS = [
    (causal, None, None, 300, 300),
    (causal, 2, 3, 100, 130),
    (BOTH, None, None, 300, 300),
    (or_masks(causal, same_document, noop_mask), None, None, 90, 300),
    (and_masks(by_batch, same_document), 2, None, 300, 200),
    (by_head, 5, 3, 130, 70),
    (or_masks(and_masks(by_batch, by_head), same_document), 3, 2, 150, 100),
]


@pytest.mark.parametrize(("mask_mod", "B", "H", "Q", "K"), FUNCTIONS)
def test_a_mask_function_becomes_a_pattern(mask_mod, B, H, Q, K) -> None:
    """Rows are counted from 0 whatever their positions are; it composes, and has every layout."""
    pattern = gs.from_flex(mask_mod, Q, K, B=B, H=H)
    kept = pairs(mask_mod, B or 1, H or 1, Q, K)
    assert isinstance(pattern, gs.Pattern) and pattern == gs.from_flex(mask_mod, Q, K, B=B, H=H)
    window = gs.SlidingWindow(30, 5)
    for q_offset in (None, 0, 7):
        near = window.materialize(Q, K, q_offset)
        for made, expected in ((pattern, kept), (~pattern | window, ~kept | near), (window & pattern, near & kept)):
            assert made.lead in {(1, 1), (B or 1, 1), (1, H or 1), (B or 1, H or 1)}
            assert np.array_equal(np.broadcast_to(made.materialize(Q, K, q_offset), expected.shape), expected)
            layout = made.layout(Q, K, block_q=64, block_kv=32, q_offset=q_offset)
            assert np.array_equal(np.broadcast_to(layout.expand(), expected.shape), expected)
            gathered = build_gather(made, Q, K, block_q=16, q_offset=q_offset)
            assert np.array_equal(np.broadcast_to(gathered.expand(), expected.shape), expected)
            assert made.density(Q, K, q_offset) == pytest.approx(expected.mean())


def test_a_function_that_torch_calls_with_one_pair_at_a_time() -> None:
    """`stack` has no meaning for rows and keys that are broadcast: FlexAttention calls it for each pair."""
    pattern = gs.from_flex(of_a_head, 300, H=3)
    assert pattern.lead == (1, 3) and gs.from_flex(of_a_head, 300, H=1).lead == (1, 1)
    index = torch.arange(300)
    for h in range(3):
        expected = (index[:, None] >= index) | (h == IDS)
        assert np.array_equal(pattern.materialize(300, 300)[0, h], expected.numpy())


@pytest.mark.parametrize(("mask_mod", "B", "H"), [(BOTH, None, None), (by_head, None, 4)])
def test_attention_with_a_mask_function(mask_mod, B, H) -> None:
    q, k, v = (torch.randn(2, h, 300, 16, requires_grad=True) for h in (4, 2, 2))
    kept = torch.from_numpy(pairs(mask_mod, 1, H or 1, 300, 300).copy())
    results = []
    for pattern in (gs.from_flex(mask_mod, 300, B=B, H=H), kept):
        out = gs.attention(q, k, v, pattern)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_a_mask_function_is_evaluated_some_pairs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def count(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    evaluated = flex_mask.FlexMask._evaluate

    def watch(self: flex_mask.FlexMask, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        kept = evaluated(self, rows, keys)
        sizes.append(kept.size)
        return kept

    monkeypatch.setattr(flex_mask, "PAIRS_AT_ONCE", 1000)
    monkeypatch.setattr(flex_mask.FlexMask, "_evaluate", watch)
    assert np.array_equal(gs.from_flex(count, 97, 120).materialize(97, 120), pairs(count, 1, 1, 97, 120)[0, 0])
    assert sum(size for size in sizes if size <= 1000) == 97 * 120
    i, j = np.random.default_rng(0).integers(-9, 130, (2, 5000))
    kept = gs.from_flex(count, 120).keep(i, j, 120, 120)
    assert np.array_equal(kept[(i >= 0) & (i < 120)], ((i >= j) & (j >= 0) & (j < 120))[(i >= 0) & (i < 120)])


class Module:
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def mask(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.ids[i] == self.ids[j]

    __call__ = mask


ELSEWHERE = torch.zeros(9, device="meta")


def reads_a_global(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ELSEWHERE[i] == ELSEWHERE[j]


def reads_an_argument(ids: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ids[i] == ids[j]


def test_a_mask_function_is_evaluated_where_its_tensors_are() -> None:
    meta = torch.zeros(9, device="meta")
    there = [lambda b, h, i, j: meta[i] == meta[j], reads_a_global, partial(reads_an_argument, meta), Module(meta),
             Module(meta).mask, partial(reads_an_argument, ids=ELSEWHERE)]  # fmt: skip
    for mask_mod in there:
        for nested in (mask_mod, and_masks(causal, mask_mod), or_masks(causal, and_masks(mask_mod, same_document))):
            assert flex_mask.device_of(nested) == torch.device("meta")
    for mask_mod in (causal, same_document, BOTH, Module(IDS), noop_mask):
        assert flex_mask.device_of(mask_mod) == CPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_mask_function_of_tensors_on_a_gpu() -> None:
    ids = IDS.cuda()
    mask_mod = and_masks(causal, lambda b, h, i, j: ids[i] == ids[j])
    pattern = gs.from_flex(mask_mod, 300)
    assert "cuda" in str(pattern._key())
    assert np.array_equal(pattern.materialize(300, 300), pairs(BOTH, 1, 1, 300, 300)[0, 0])
    x = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(gs.attention(x, x, x, pattern), gs.attention(x, x, x, gs.from_flex(BOTH, 300)))


def test_lists_that_do_not_tell_apart_what_the_function_does() -> None:
    shared = create_block_mask(causal, None, None, 200, 200, device="cpu")
    lists = shared.kv_num_blocks, shared.kv_indices
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=by_head, seq_lengths=(200, 200))
    with pytest.raises(ValueError, match="H must be given: the function of mask tells query heads apart, its lists"):
        gs.from_flex(mask)
    assert gs.from_flex(mask, H=1).lead == (1, 1)


def test_what_is_refused() -> None:
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu")
    q = torch.zeros(1, 1, 128, 8)
    k = torch.zeros(1, 1, 256, 8)
    with pytest.raises(ValueError, match=r"BlockMask, is a slice of another one \(mask\[...\]\).*rows"):
        gs.attention(q, k, k, mask[:, :, :1])
    with pytest.raises(ValueError, match=r"BLOCK_SIZE of multiples of 32 up to 1024; got \(16, 128\)"):
        flex.from_flex(create_block_mask(causal, None, None, 64, 256, device="cpu", BLOCK_SIZE=(16, 128)))
    with pytest.raises(ValueError, match=r"\(Q, K\) of the inputs, \(128, 256\)"):
        gs.attention(q, k, k, mask)
    lists = (mask.kv_num_blocks, mask.kv_indices)
    twice = BlockMask.from_kv_blocks(*lists, *lists, mask_mod=causal, seq_lengths=(256, 256))
    with pytest.raises(ValueError, match="lists a block twice"):
        flex.from_flex(twice)
    two = create_block_mask(by_head, None, 2, 128, 128, device="cpu")
    with pytest.raises(ValueError, match="has lists for H=2, the inputs have H=3"):
        flex.from_flex(two, H=3)
    with pytest.raises(ValueError, match="Q must be the number of query rows"):
        gs.to_flex(gs.Causal())
    with pytest.raises(ValueError, match="must be left out for a BlockLayout"):
        gs.to_flex(gs.Causal().layout(64, 64, block_q=64, block_kv=64), 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gs.from_flex(None), "mask must be a torch BlockMask or a function .*; got None"),
        (lambda: gs.from_flex(torch.ones(4, 4)), r"mask must be .*mask_mod\(b, h, q_idx, kv_idx\); got shape"),
        (lambda: gs.from_flex(create_block_mask(causal, None, None, 64, 64, "cpu"), B=0), "B must be an integer"),
        (lambda: gs.from_flex(create_block_mask(causal, None, None, 64, 64, "cpu"), H="2"), "H must be an integer"),
        (
            lambda: gs.from_flex(create_block_mask(causal, None, None, 64, 64, "cpu"), 64),
            "Q, K and device must be left",
        ),
        (lambda: gs.from_flex(causal), "Q must be the number of query rows that the function <function causal"),
        (lambda: gs.from_flex(causal, 0), "Q must be an integer"),
        (lambda: gs.from_flex(causal, 4, 4, device="gpu"), "device must be one of torch's"),
        (lambda: gs.from_flex(by_head, 4), "H must be given: mask tells query heads apart"),
        (lambda: gs.from_flex(by_batch, 4, H=2), "B must be given: mask tells batch elements apart"),
        (
            lambda: gs.from_flex(lambda i, j: i >= j, 4),
            "a function mask_mod.*, raised TypeError: .*positional argument",
        ),
        (lambda: gs.from_flex(lambda b, h, i, j: i - j, 4).materialize(4, 4), "must return a boolean .* torch.int64"),
        (
            lambda: gs.from_flex(causal, 4).materialize(4, 5),
            r"from_flex\(causal, 4, 4\) is for Q=4 and K=4, needs Q=4 a",
        ),
        (
            lambda: gs.from_flex(same_document, 400).materialize(400, 400),
            "raised IndexError: index 300 is out of bounds",
        ),
        (
            lambda: gs.Predicate(BOTH).materialize(9, 9),
            r"from_flex\(mask_mod, Q, K\) makes",
        ),
        (
            lambda: gs.Predicate(lambda i, j: BOTH(0, 0, i, j)).materialize(9, 9),
            r"raised AttributeError.*from_flex\(mask_mod, Q, K\) makes a pattern",
        ),
        (lambda: gs.attention(*[torch.zeros(4, 8)] * 3, gs.from_flex(causal, 4), q_offset=1), "q_offset must be "),
        (lambda: gs.attention(*[torch.zeros(4, 8)] * 3, causal), r"got <function causal.*from_flex\(mask_mod, Q, K\)"),
        (lambda: gs.to_flex(torch.ones(4, 4), 3), r"pattern must be a Pattern or a BlockLayout; got shape \(4, 4\)"),
        (lambda: gs.to_flex(None, 3), "pattern must be a Pattern or a BlockLayout; got None"),
        (lambda: gs.to_flex(gs.Causal(), "3"), "Q must be an integer"),
        (lambda: gs.to_flex(gs.Causal(), 3, 0), "K must be an integer"),
        (lambda: gs.to_flex(gs.Causal(), 3, q_offset=0.5), "q_offset must be an integer"),
        (lambda: gs.to_flex(gs.Causal(), 3, block_size=40), "block_size must be a positive multiple of 32.*got 40"),
        (lambda: gs.to_flex(gs.Causal(), 3, block_size=(32,)), r"block_size must be .*\(query, key\) edges"),
        (lambda: gs.to_flex(gs.Causal(), 3, block_size=None), "block_size must be"),
        (lambda: gs.to_flex(gs.Causal(), 3, device="gpu"), "device must be one of torch's; got 'gpu'"),
    ],
)
def test_errors_name_the_argument(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_compiled_function_converts_outside() -> None:
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
    layout = gs.from_flex(mask)
    x = torch.randn(1, 1, 128, 8)
    compiled = torch.compile(lambda q: gs.attention(q, q, q, layout), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), gs.attention(x, x, x, mask))


PATTERNS = [
    gs.Dense(), gs.Causal(), gs.SlidingWindow(300, 17), gs.SlidingWindow(100, sinks=5), gs.SlidingWindow(None, 4, 9),
    gs.Local(96), gs.BigBird(64), gs.Dilated(20, 3, 8), gs.Strided(64, 30), gs.PowerStrided(2, 4),
    (gs.Local(100) | gs.BigBird(64)) & gs.Causal(), gs.Causal() & ~gs.SlidingWindow(40), ~gs.Dense(),
    gs.Document(np.arange(500) // 150), gs.PerHead([gs.SlidingWindow(30), gs.Dilated(9, 0, 4)]),
]  # fmt: skip
# Those that take fewer queries than keys.
OFFSET = [p for p in PATTERNS if p.lead == (1, 1) and "BigBird" not in repr(p) and "Document" not in repr(p)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_pattern_goes_out_and_comes_back(pattern: gs.Pattern) -> None:
    N = 500
    H = pattern.lead[1]
    kept = np.broadcast_to(pattern.materialize(N, N), (1, H, N, N))
    layout = pattern.layout(N, N, block_q=64, block_kv=128)
    for mask in (gs.to_flex(pattern, N), gs.to_flex(layout)):
        assert mask.shape == (1, H, N, N)
        assert np.array_equal(np.broadcast_to(gs.from_flex(mask, H=H).expand(), kept.shape), kept)
        assert np.array_equal(pairs(mask.mask_mod, 1, H, N, N), kept)


@pytest.mark.parametrize("pattern", OFFSET, ids=str)
def test_rows_are_positions_less_the_offset(pattern: gs.Pattern) -> None:
    mask = gs.to_flex(pattern, 200, 500)
    assert np.array_equal(gs.from_flex(mask).expand(), pattern.materialize(200, 500))
    assert np.array_equal(pairs(mask.mask_mod, 1, 1, 200, 500)[0, 0], pattern.materialize(200, 500))


def test_rows_without_a_key_of_their_own_have_no_document() -> None:
    pattern = ~gs.Causal() | gs.Document(np.arange(129) // 40)
    mask = gs.to_flex(pattern, 150, 129, q_offset=0)
    assert np.array_equal(gs.from_flex(mask).expand(), pattern.materialize(150, 129, 0))
    assert np.array_equal(pairs(mask.mask_mod, 1, 1, 150, 129)[0, 0], pattern.materialize(150, 129, 0))


def test_formulas_are_used_where_they_exist() -> None:
    assert by_formula(gs.Causal() & ~gs.SlidingWindow(4), 9, 9, 0, CPU) is not None
    assert by_formula(gs.Causal() & gs.PowerStrided(2, 4), 9, 9, 0, CPU) is None


@unfused
def test_flex_attention_computes_what_to_flex_says() -> None:
    pattern = gs.SlidingWindow(50) | gs.PowerStrided(2, 4)
    x = torch.randn(1, 2, 200, 16)
    out = flex_attention(x, x, x, block_mask=gs.to_flex(pattern, 200))
    torch.testing.assert_close(out, gs.attention(x, x, x, pattern), rtol=1e-4, atol=1e-5)


FAR = 2**31 - 1


@pytest.mark.parametrize("q_offset", [0, 100, -100, 2**31 - 2**16 - 100, -(2**31) + 2**16 + 100])
@pytest.mark.parametrize(
    "pattern",
    [
        gs.Dilated(FAR, FAR, 12), gs.Dilated(3, 2, FAR), gs.SlidingWindow(FAR, FAR),
        gs.SlidingWindow(FAR, 0, sinks=FAR), gs.Strided(FAR, FAR), gs.Strided(7, FAR),
        gs.Local(FAR), gs.Local(9), ~gs.Dilated(FAR, 0, 5),
    ],
    ids=str,
)  # fmt: skip
def test_formulas_of_32_bit_indices_do_not_wrap(pattern: gs.Pattern, q_offset: int) -> None:
    Q, K = 24, 40
    mask_mod = by_formula(pattern, Q, K, q_offset, CPU)
    assert mask_mod is not None
    zero, rows, keys = (torch.tensor(x, dtype=torch.int32) for x in (0, range(Q), range(K)))
    kept = mask_mod(zero, zero, rows[:, None], keys).expand(Q, K)
    assert (kept.numpy() == pattern.materialize(Q, K, q_offset)).all()


def test_a_mask_function_that_a_compiled_call_meets_first() -> None:
    """The operator of a compiled graph leaves vmap out of the dispatcher, by which the function is evaluated."""
    x, ids = torch.randn(1, 2, 40, 8), torch.arange(40) // 9
    for function in (lambda b, h, i, j: i >= j, lambda b, h, i, j: ids[i] == ids[j]):
        pattern = gs.from_flex(function, 40) & gs.SlidingWindow(30, 30)
        compiled = torch.compile(lambda q, p=pattern: gs.attention(q, q, q, p), fullgraph=True, backend="eager")
        found = compiled(x)
        kept = torch.tensor([[bool(function(0, 0, torch.tensor(i), torch.tensor(j))) and abs(i - j) <= 30
                              for j in range(40)] for i in range(40)])  # fmt: skip
        torch.testing.assert_close(found, gs.attention(x, x, x, kept))
