"""Every int of the public interface may be a whole number of numpy or torch; booleans and fractions are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gossamer as gs
import gossamer.nn
from gossamer.layouts import BlockLayout, Walk
from gossamer.patterns import Pattern
from gossamer.sparse_k.cache import Entries

KINDS: dict[str, Callable[[int], Any]] = {
    "np.int64": np.int64, "np.int32": np.int32, "np.uint8": np.uint8, "numpy array": np.array, "tensor": torch.tensor,
}  # fmt: skip
torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
u, scores = torch.randn(2, 40), torch.randn(1, 2, 64)
entries = Entries(k, v, scores, torch.arange(64).expand(1, 2, 64))
ids = torch.tensor([0] * 30 + [1] * 34)
window = gs.SlidingWindow(5, 0)
blocks = np.tri(4, dtype=bool)


def pages_chosen(**options: Any) -> Any:
    torch.manual_seed(0)
    bounds, table = gs.PageBounds.of(torch.randn(5, 8, 2, 16)), torch.arange(5)[None]
    given = {"page_size": 8, "topk": 4, **options}
    return gs.topk_pages(torch.randn(1, 4, 16), bounds, [0, 1], table, [33], **given).block_table


def chosen(**options: Any) -> Any:
    made = gs.topk_blocks(q, k, causal=True, **{"block_size": 64, "topk": 3, **options})
    return made.block_size, *made.tensors


def over_pages(most: Any) -> torch.Tensor:
    pools = (x.transpose(1, 2).unflatten(1, (8, 8))[0] for x in (k, v))
    table = torch.tensor([[2, 7, 9]])  # of which the third is not looked at, and does not exist
    return gs.varlen(q[0, :, :5].transpose(0, 1), *pools, [0, 5], max_k=most, seqused_k=[12], block_table=table)


# By (callable, parameter): the call as a function of the number, and the number.
ROWS: dict[tuple[str, str], tuple[Callable[[Any], Any], int]] = {
    ("BlockIndices", "block_size"): (lambda n: gs.BlockIndices(torch.tensor([[0]]), n), 64),
    ("DocumentIds.from_cu_seqlens", "length"): (lambda n: gs.DocumentIds.from_cu_seqlens(torch.tensor([0, 9]), n), 9),
    ("Pages", "page_size"): (lambda n: gs.Pages(torch.tensor([[0]]), [3], n), 16),
    ("varlen", "max_k"): (over_pages, 12),
    ("attention", "q_offset"): (lambda n: gs.attention(q, k, v, window, q_offset=n), 3),
    ("device_layout", "q_offset"): (lambda n: gs.device_layout(q, k, v, gs.DocumentIds(ids), q_offset=n), 3),
    ("explain", "q_offset"): (lambda n: gs.explain(q, k, v, window, q_offset=n), 3),
    ("entmax_attention", "top_k"): (lambda n: gs.entmax_attention(q, k, v, top_k=n), 7),
    ("explain_entmax", "top_k"): (lambda n: gs.explain_entmax(q, k, v, top_k=n), 7),
    ("topk_keys", "k_keep"): (lambda n: gs.topk_keys(q, k, k_keep=n), 7),
    ("attention_forward", "k_keep"): (lambda n: gs.attention_forward(q, k, v, scores=scores, k_keep=n), 7),
    ("from_flex", "Q"): (lambda n: gs.from_flex(causal, n, 64), 64),
    ("from_flex", "K"): (lambda n: gs.from_flex(causal, 64, n), 64),
    ("from_flex", "B"): (lambda n: gs.from_flex(causal, 64, 64, B=n), 1),
    ("from_flex", "H"): (lambda n: gs.from_flex(causal, 64, 64, H=n), 1),
    ("to_flex", "Q"): (lambda n: gs.to_flex(window, n, 64).to_dense(), 64),
    ("to_flex", "K"): (lambda n: gs.to_flex(window, 64, n).to_dense(), 64),
    ("to_flex", "q_offset"): (lambda n: gs.to_flex(window, 64, 128, q_offset=n).to_dense(), 3),
    ("to_flex", "block_size"): (lambda n: gs.to_flex(window, 64, block_size=n).to_dense(), 32),
    ("sparsek", "k"): (lambda n: gs.sparsek(u, n), 3),
    ("sparsek", "dim"): (lambda n: gs.sparsek(u, 2, dim=n), 1),
    ("sparsek_causal", "k"): (lambda n: gs.sparsek_causal(u, n), 3),
    ("last_topk", "k"): (lambda n: gs.last_topk(u, n), 3),
    ("sparsek_attention", "k_keep"): (lambda n: gs.sparsek_attention(q, k, v, scores, k_keep=n, window=4), 9),
    ("sparsek_attention", "window"): (lambda n: gs.sparsek_attention(q, k, v, scores, k_keep=9, window=n), 5),
    ("sparsek_attention", "q_offset"): (
        lambda n: gs.sparsek_attention(q[:, :, :20], k, v, scores, k_keep=9, q_offset=n), 5),
    ("explain_sparsek", "q_offset"): (
        lambda n: gs.explain_sparsek(q[:, :, :20], k, v, scores, k_keep=9, q_offset=n), 5),
    ("explain_sparsek", "k_keep"): (lambda n: gs.explain_sparsek(q, k, v, scores, k_keep=n, window=4), 9),
    ("explain_sparsek", "window"): (lambda n: gs.explain_sparsek(q, k, v, scores, k_keep=9, window=n), 5),
    ("topk_pages", "page_size"): (lambda n: pages_chosen(page_size=n), 8),
    ("topk_pages", "topk"): (lambda n: pages_chosen(topk=n), 3),
    ("topk_pages", "first"): (lambda n: pages_chosen(first=n), 1),
    ("topk_pages", "local"): (lambda n: pages_chosen(local=n), 1),
    ("topk_blocks", "block_size"): (lambda n: chosen(block_size=n), 64),
    ("topk_blocks", "topk"): (lambda n: chosen(topk=n), 2),
    ("topk_blocks", "local"): (lambda n: chosen(local=n), 2),
    ("topk_blocks", "first"): (lambda n: chosen(first=n), 1),
    ("CSR", "num_keys"): (lambda n: gs.CSR([0, 1, 2], [0, 1], n), 3),
    ("CSR.from_edge_index", "num_nodes"): (lambda n: gs.CSR.from_edge_index([[0, 1], [1, 2]], n), 3),
    ("CSR.from_pattern", "Q"): (lambda n: gs.CSR.from_pattern(window, n, 9), 9),
    ("CSR.from_pattern", "K"): (lambda n: gs.CSR.from_pattern(window, 9, n), 9),
    ("CSR.from_pattern", "q_offset"): (lambda n: gs.CSR.from_pattern(window, 9, 9, q_offset=n), 2),
    ("BigBird", "block"): (lambda n: gs.BigBird(n), 32),
    ("BigBird", "window_blocks"): (lambda n: gs.BigBird(32, window_blocks=n), 3),
    ("BigBird", "global_blocks"): (lambda n: gs.BigBird(32, global_blocks=n), 3),
    ("BigBird", "random_blocks"): (lambda n: gs.BigBird(32, random_blocks=n), 3),
    ("BigBird", "seed"): (lambda n: gs.BigBird(32, seed=n), 3),
    ("BlockMask", "block"): (lambda n: gs.BlockMask(blocks, n), 32),
    ("Dilated", "left"): (lambda n: gs.Dilated(n, 0, 2), 3),
    ("Dilated", "right"): (lambda n: gs.Dilated(3, n, 2), 3),
    ("Dilated", "dilation"): (lambda n: gs.Dilated(3, 0, n), 2),
    ("DilatedSegment", "segment"): (lambda n: gs.DilatedSegment(n, 2), 32),
    ("DilatedSegment", "dilation"): (lambda n: gs.DilatedSegment(32, n), 2),
    ("DilatedSegment", "offset"): (lambda n: gs.DilatedSegment(32, 2, n), 1),
    ("Local", "block"): (lambda n: gs.Local(n), 32),
    ("LongNet", "segments"): (lambda n: gs.LongNet((n,), (2,), heads=2), 32),
    ("LongNet", "dilations"): (lambda n: gs.LongNet((32,), (n,), heads=2), 2),
    ("LongNet", "heads"): (lambda n: gs.LongNet((32,), (2,), heads=n), 2),
    ("LongNet.branch", "which"): (lambda n: gs.LongNet((32,), (2,), heads=2).branch(n, 0), 0),
    ("LongNet.branch", "head"): (lambda n: gs.LongNet((32,), (2,), heads=2).branch(0, n), 1),
    ("Longformer", "window"): (lambda n: gs.Longformer(n), 32),
    ("Longformer", "global_tokens"): (lambda n: gs.Longformer(32, (n,)), 3),
    ("Longformer", "dilation"): (lambda n: gs.Longformer(32, dilation=n), 2),
    ("Neighborhood", "shape"): (lambda n: gs.Neighborhood((n, 3), 1), 3),
    ("Neighborhood", "reach"): (lambda n: gs.Neighborhood((3, 3), n), 1),
    ("PowerStrided", "base"): (lambda n: gs.PowerStrided(n), 2),
    ("PowerStrided", "local"): (lambda n: gs.PowerStrided(2, n), 2),
    ("SlidingWindow", "left"): (lambda n: gs.SlidingWindow(n, 0), 3),
    ("SlidingWindow", "right"): (lambda n: gs.SlidingWindow(3, n), 3),
    ("SlidingWindow", "sinks"): (lambda n: gs.SlidingWindow(3, 0, n), 3),
    ("SlidingWindow.of_size", "size"): (lambda n: gs.SlidingWindow.of_size(n), 3),
    ("SlidingWindow.of_size", "sinks"): (lambda n: gs.SlidingWindow.of_size(3, sinks=n), 3),
    ("Strided", "stride"): (lambda n: gs.Strided(n, 3), 3),
    ("Strided", "local"): (lambda n: gs.Strided(3, n), 3),
    ("Pattern.density", "Q"): (lambda n: window.density(n, 64), 64),
    ("Pattern.density", "K"): (lambda n: window.density(64, n), 64),
    ("Pattern.density", "q_offset"): (lambda n: window.density(64, 64, n), 3),
    ("Pattern.keep", "Q"): (lambda n: window.keep(np.arange(4), np.arange(4), n, 64), 64),
    ("Pattern.keep", "K"): (lambda n: window.keep(np.arange(4), np.arange(4), 64, n), 64),
    ("Pattern.keep", "q_offset"): (lambda n: window.keep(np.arange(4), np.arange(4), 64, 64, n), 3),
    ("Pattern.materialize", "Q"): (lambda n: window.materialize(n, 64), 64),
    ("Pattern.materialize", "K"): (lambda n: window.materialize(64, n), 64),
    ("Pattern.materialize", "q_offset"): (lambda n: window.materialize(64, 64, n), 3),
    ("Pattern.layout", "Q"): (lambda n: window.layout(n, 64, block_q=32, block_kv=32), 64),
    ("Pattern.layout", "K"): (lambda n: window.layout(64, n, block_q=32, block_kv=32), 64),
    ("Pattern.layout", "block_q"): (lambda n: window.layout(64, 64, block_q=n, block_kv=32), 32),
    ("Pattern.layout", "block_kv"): (lambda n: window.layout(64, 64, block_kv=n, block_q=32), 32),
    ("Pattern.layout", "q_offset"): (lambda n: window.layout(64, 64, q_offset=n, block_q=32, block_kv=32), 3),
    ("SparseKAttention", "dim"): (lambda n: gossamer.nn.SparseKAttention(n, 2, k_keep=8, window=4), 16),
    ("SparseKAttention", "heads"): (lambda n: gossamer.nn.SparseKAttention(16, n, k_keep=8, window=4), 2),
    ("SparseKAttention", "kv_heads"): (lambda n: gossamer.nn.SparseKAttention(16, 2, n, k_keep=8, window=4), 1),
    ("SparseKAttention", "k_keep"): (lambda n: gossamer.nn.SparseKAttention(16, 2, k_keep=n, window=4), 8),
    ("SparseKAttention", "window"): (lambda n: gossamer.nn.SparseKAttention(16, 2, k_keep=8, window=n), 4),
    ("SparseKCache", "k_keep"): (lambda n: gossamer.nn.SparseKCache(entries, n, 4).k_keep, 8),
    ("SparseKCache", "window"): (lambda n: gossamer.nn.SparseKCache(entries, 8, n).window, 4),
    ("SplashAttention", "head_dim"): (lambda n: gossamer.nn.SplashAttention(n), 8),
    ("SplashAttention", "k_keep"): (lambda n: gossamer.nn.SplashAttention(8, k_keep=n), 8),
}  # fmt: skip
# What a library calls with numbers of its own; `pattern` is a handle (below), and max_q is not read.
OWN = {
    "at", "check", "listed_pairs", "tile_candidates", "cuda", "ipu", "mtia", "xpu", "to_empty", "scores", "up_to",
    "check_numbers", "held", "over_pages", "numbers", "of_head",
}  # fmt: skip
READ_LATER = {("device_layout", "q_offset"), ("explain", "q_offset")}  # a tensor is an offset that the device knows
UNREAD = {("varlen", "max_q")}


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def asked() -> Iterator[tuple[str, str]]:
    """(callable, parameter) of every int that the public interface takes."""
    public = [(name, getattr(gs, name)) for name in gs.__all__] + [
        (name, getattr(gossamer.nn, name)) for name in gossamer.nn.__all__
    ]
    for name, what in public:
        held = [(name, what)]
        if inspect.isclass(what):
            held += [(f"{name}.{x}", getattr(what, x)) for x in dir(what) if x[0] != "_" and x not in OWN]
        for label, one in held:
            try:
                parameters = inspect.signature(one).parameters.values()
            except (TypeError, ValueError):
                continue
            method = label.partition(".")[2]
            if method and getattr(Pattern, method, None) is not None and issubclass(what, Pattern):
                label = f"Pattern.{method}"  # inherited
            for p in parameters:
                if p.name not in OWN and p.name != "pattern" and "int" in str(p.annotation):
                    yield label, p.name


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, down to the numbers that they hold."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (BlockLayout, Walk)):
        fields = [name for name in one.__dict__ if not name.startswith("_")]
        return all(same(getattr(one, name), getattr(other, name)) for name in fields if name != "lists")
    if isinstance(one, torch.nn.Module):
        return repr(one) == repr(other)
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


def test_every_int_has_a_row() -> None:
    wanted = set(asked()) - UNREAD
    assert wanted - set(ROWS) == set()
    assert {at for at in ROWS if at not in wanted} == set()


@pytest.mark.parametrize("at", ROWS, ids=".".join)
def test_whole_numbers_of_any_library(at: tuple[str, str]) -> None:
    call, n = ROWS[at]
    wanted = call(n)
    for name, kind in KINDS.items():
        if name == "tensor" and at in READ_LATER:
            continue
        assert same(call(kind(n)), wanted), name


@pytest.mark.parametrize("at", ROWS, ids=".".join)
def test_what_is_no_whole_number_is_refused(at: tuple[str, str]) -> None:
    for wrong in (True, np.True_, torch.tensor(True), 2.0, np.float64(2), "2", np.array([2, 3])):
        if at == ("Neighborhood", "reach") and isinstance(wrong, np.ndarray):
            continue  # a number for each axis
        with pytest.raises(ValueError, match=r"must|takes"):
            ROWS[at][0](wrong)


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_handles(kind: Callable[[int], Any]) -> None:
    wanted = gs.attention(q, k, v, window)
    handle = kind(window.handle)
    assert torch.equal(gs.attention(q, k, v, handle), wanted)
    union = window | gs.Local(16)
    merged = gs.attention(q, k, v, union, merge="lse")
    assert torch.equal(gs.attention(q, k, v, kind(union.handle), merge="lse"), merged)
    assert torch.equal(gs.attention(q, k, v, handle, key_starts=[0]), wanted)
    assert str(gs.explain(q, k, v, handle)) == str(gs.explain(q, k, v, window))


def test_lists_of_lengths() -> None:
    wanted = gs.attention(q, k, v, key_lengths=[9], key_starts=[3])
    for kind in KINDS.values():
        assert torch.equal(gs.attention(q, k, v, key_lengths=[kind(9)], key_starts=(kind(3),)), wanted)
