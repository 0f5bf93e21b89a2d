"""Structure made on the device: compiled functions, what `explain` says, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import gossamer as gs
from gossamer.layouts import build_gather
from gossamer.patterns.reach import Reach, Rule
from tests.support.definition import tensors

Q, K = 40, 150


def by_offsets(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    return gs.attention(q, k, v, pattern, q_offset=data, key_starts=data - 30, key_lengths=data + 20)


def by_documents(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    ids = torch.arange(K) // data[:, None].clamp(min=1)
    return gs.attention(q, k, v, gs.DocumentIds(ids) & pattern)


def by_edges(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    return gs.attention(q, k, v, pattern & gs.DocumentIds.from_cu_seqlens(data.clamp(0, K).sort().values, K))


def by_blocks(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    return gs.attention(q, k, v, gs.BlockIndices((data[:, None, None, None] // 64).long()) & pattern)


def by_keys(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    keys = data[:, None, None, None] - torch.arange(2 * Q).reshape(1, 1, Q, 2)
    return gs.attention(q, k, v, gs.Indices(keys) & pattern)


def by_union(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    kept = (gs.Strided(7, 3) | gs.SlidingWindow(20, sinks=4)) & pattern
    return gs.attention(q, k, v, kept, q_offset=data, key_lengths=data + 20)


FUNCTIONS = {f.__name__: f for f in (by_offsets, by_documents, by_edges, by_blocks, by_keys, by_union)}
DATA = [torch.tensor([100, 110]), torch.tensor([140, 3]), torch.tensor([70, 70]), torch.tensor([-5, 1000])]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_once_for_all_data(name: str, dynamic: bool) -> None:
    function, frames = FUNCTIONS[name], CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=frames, dynamic=dynamic)
    inputs = tensors((2, 4, Q, 8), (2, 2, K, 8), (2, 2, K, 8))
    pattern = gs.SlidingWindow(60)
    for data in DATA:
        results = []
        for call in (compiled, function):
            out = call(*inputs, data, pattern)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)
    assert frames.frame_count == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_of_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are not compared: torch 2.11 compiles `==` of named tuples whose blocks alone differ to True."""
    torch._dynamo.reset()
    inputs, pattern = tensors((2, 4, Q, 8), (2, 2, K, 8), (2, 2, K, 8)), gs.Local(60)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")(*inputs, DATA[0], pattern)

    def fails(*_: Any) -> bool:
        raise AssertionError("rules are compared")

    for kind in (Reach, Rule):
        for method in ("__eq__", "__ne__"):
            monkeypatch.setattr(kind, method, fails)
    assert torch.equal(compiled, FUNCTIONS[name](*inputs, DATA[0], pattern))


def test_compiled_for_many_sizes() -> None:
    frames = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(by_offsets, fullgraph=True, backend=frames, dynamic=True)
    for keys in (150, 151, 200, 333):
        q, k, v = tensors((2, 4, Q, 8), (2, 2, keys, 8), (2, 2, keys, 8))
        data = torch.tensor([keys - 30, keys - Q])
        assert torch.equal(compiled(q, k, v, data, gs.Causal()), by_offsets(q, k, v, data, gs.Causal()))
    assert frames.frame_count == 1


SIZES = (300, 65, 130, 128, 257, 1000)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["offsets", "documents", "blocks", "blocks and documents", "varlen"])
def test_compiled_once_for_all_sizes(name: str, gradients: bool) -> None:
    """Of more than one tile; multiples of one are among them."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        N = k.shape[2]
        documents = gs.DocumentIds(torch.arange(N) // 50)
        chosen = gs.BlockIndices((torch.arange((q.shape[2] + 63) // 64)[:, None] - torch.arange(2)).clamp(min=0))
        if name == "offsets":
            return gs.attention(q, k, v, gs.Causal(), q_offset=torch.arange(2) * 9, key_lengths=torch.tensor([40, N]))
        if name == "varlen":
            flat = [x[0].transpose(0, 1) for x in (q, k, v)]
            return gs.varlen(
                *flat,
                (torch.arange(5) * 20).clamp(max=q.shape[2]),
                (torch.arange(5) * 30).clamp(max=N),
                pattern=gs.SlidingWindow(20),
            )
        made = {"documents": documents & gs.Causal(), "blocks": chosen, "blocks and documents": documents & chosen}
        return gs.attention(q, k, v, made[name])

    frames = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=frames, dynamic=True)
    for rows in SIZES:
        x = tensors((2, 4, rows, 8), (2, 2, rows + 70, 8), (2, 2, rows + 70, 8))
        x = x if gradients else [one.detach() for one in x]
        found, wanted = compiled(*x), call(*x)
        torch.testing.assert_close(found, wanted)
        if gradients:
            for one, other in zip(*(torch.autograd.grad(out.sum(), x) for out in (found, wanted)), strict=True):
                torch.testing.assert_close(one, other)
    assert frames.frame_count == 1
    for rows in (40, 50, 33):  # queries of one tile
        x = [one.detach() for one in tensors((2, 4, rows, 8), (2, 2, rows + 70, 8), (2, 2, rows + 70, 8))]
        torch.testing.assert_close(compiled(*x), call(*x))
    assert frames.frame_count <= 2 + gradients  # a call without them is another one


@pytest.mark.parametrize("softcap", [30, 2.5, 2000])
def test_a_soft_cap_of_a_graph_with_open_sizes(softcap: float) -> None:
    torch._dynamo.reset()
    x = tensors((2, 4, 70, 8), (2, 2, 90, 8), (2, 2, 90, 8))
    call = partial(gs.attention, pattern=gs.Causal(), key_starts=DATA[1])
    compiled = torch.compile(lambda *x, cap: call(*x, softcap=cap), fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*x, cap=softcap), call(*x, softcap=softcap))


def test_selections_made_outside_a_compiled_function() -> None:
    frames = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, given: gs.attention(x, x, x, given), fullgraph=True, backend=frames)
    (x,) = tensors((2, 4, K, 8))
    for step in (20, 33, 70):
        given = gs.DocumentIds(torch.arange(K) // step) & gs.Causal()
        assert torch.equal(compiled(x, given), gs.attention(x, x, x, given))
    assert frames.frame_count == 1


@pytest.mark.parametrize("implementation", ["blocked", "reference", None])
def test_the_tile_of_a_compiled_call_is_that_of_its_plan(implementation: str | None) -> None:
    """The operator gets the layout that a call which is not compiled gets."""
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(node.args[4] for node in graph.graph.nodes if "gossamer" in str(node.target))
        return graph

    for rows in (5, 40, 300):
        torch._dynamo.reset()
        q, k, v = tensors((2, 4, rows, 8), (2, 2, K, 8), (2, 2, K, 8))
        data, call = torch.tensor([3, 4]), partial(gs.attention, implementation=implementation)
        torch.compile(call, backend=backend)(q, k, v, gs.Causal(), q_offset=data)
        explained = gs.explain(q, k, v, gs.Causal(), q_offset=data, implementation=implementation)
        assert implementation == "reference" or tuple(found[-1][:2]) == explained.tile


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach().float() for x in tensors((2, 4, Q, 8), (2, 2, K, 8), (2, 2, K, 8)))
    call = torch.compile(by_offsets, fullgraph=True, backend="aot_eager") if compiled else by_offsets
    with torch.autocast("cpu", torch.bfloat16):
        found = call(q, k.bfloat16(), v, DATA[0], gs.Causal())
    wanted = by_offsets(q.bfloat16(), k.bfloat16(), v.bfloat16(), DATA[0], gs.Causal())
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize("pattern", [gs.Causal(), torch.ones(Q, K).bool(), "offsets", "documents"], ids=str)
def test_explain_accepts_what_attention_accepts_under_autocast(pattern: Any) -> None:
    q, k, v = (x.detach().float() for x in tensors((2, 4, Q, 8), (2, 2, K, 8), (2, 2, K, 8)))
    options = {"q_offset": DATA[0]} if isinstance(pattern, str) and pattern == "offsets" else {}
    if isinstance(pattern, str):
        pattern = gs.Causal() if options else gs.DocumentIds(torch.arange(K) // 9)
    with torch.autocast("cpu", torch.bfloat16):
        for inputs in ((q, k.bfloat16(), v), (q, k, v), (q.half(), k, v.bfloat16())):
            assert gs.attention(*inputs, pattern, **options).dtype == torch.bfloat16
            found = gs.explain(*inputs, pattern, **options)
            assert found.problem.dtype == "bfloat16" and "autocast casts the inputs" in str(found)
            cast = {name for name, x in zip("qkv", inputs, strict=True) if x.dtype != torch.bfloat16}
            assert set(found.copies) == cast
            assert all("autocast casts it from float" in why for why in found.copies.values())
        for function in (gs.attention, gs.explain):
            with pytest.raises(ValueError, match="k must be a tensor of q's dtype, float64"):
                function(q.double(), k, v, pattern, **options)
    with pytest.raises(ValueError, match="k must be a tensor of q's dtype, float32"):
        gs.explain(q, k.bfloat16(), v, pattern, **options)


def test_explain() -> None:
    q, k, v = tensors((2, 4, Q, 8), (2, 2, K, 8), (2, 2, K, 8))
    offset = torch.tensor([100, 90])
    found = gs.explain(q, k, v, gs.SlidingWindow(9) & gs.Local(64), q_offset=offset, key_starts=[3, 4])
    text = "made on the device from i - 9 <= j <= i and i // 64 == j // 64, q_offset, key_starts; nothing is read back"
    assert ("structure", text) in found.rows() and found.implementation == "blocked"
    kept = gs.SlidingWindow(9) & gs.Local(64)
    pairs = sum(int(kept.materialize(Q, K, at)[:, 3 + b :].sum()) for b, at in enumerate((100, 90)))
    assert found.density == pytest.approx(pairs / (2 * Q * K))
    ids = gs.DocumentIds(torch.zeros(K, dtype=torch.int32)) & gs.BlockIndices(torch.zeros(1, 1, dtype=torch.int64))
    assert gs.explain(q, k, v, ids).structure == "DocumentIds((150,)) & BlockIndices((1, 1), 64)"
    assert gs.explain(q, k, v, gs.SlidingWindow(9)).structure is None
    listed = gs.explain(q, k, v, gs.Indices(torch.arange(3).expand(Q, 3)) & gs.Causal())
    assert listed.structure == f"Indices(({Q}, 3)) & j <= i" and listed.density == pytest.approx(3 / K)
    assert listed.tile == (1, 1) and listed.tiles == {"gathered columns": 3 * Q}
    assert "the structure is made on the device" in str(found)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


q, kv = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
ids, blocks = gs.DocumentIds(torch.zeros(8).int()), gs.BlockIndices(torch.zeros(1, 1, 1, 1).int())
keys = gs.Indices(torch.zeros(1, 1, 8, 1).int())
# Twenty steps: those of every two are others.
LONG = gs.Dilated(40, 0, 2) | gs.Dilated(40, 0, 3) | gs.Dilated(40, 0, 5) | gs.Dilated(40, 0, 7) | gs.Dilated(40, 0, 11)
OTHERS = gs.Dilated(40, 0, 13) | gs.Dilated(40, 0, 17) | gs.Dilated(40, 0, 19) | gs.Dilated(40, 0, 23)
packed, a_layout = gs.PackedSequences(ints(0, 8), pattern=gs.Dense()), gs.Causal().layout(8, 8, block_q=32, block_kv=32)
NOT_JOINED = r"a BlockLayout is not joined with others: join patterns by & \| ~ and make the layout of the result"
CALLS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "powers": (gs.PowerStrided(2, 3), {"q_offset": ints(1, 2)}, r"PowerStrided\(.*\) has no rule"),
    "global tokens": (gs.Longformer(2, [0]), {"q_offset": ints(1, 2)}, "Longformer without global tokens.*has no rule"),
    "big bird": (gs.BigBird(64), {"key_starts": [0, 1]}, "pattern must go by positions alone.*BigBird"),
    "union": (gs.Causal() | ~gs.Local(3), {"key_starts": [0, 1]}, r"\(Causal\(\) \| ~Local\(block=3\)\) has no rule"),
    "long union": (LONG & OTHERS, {"key_starts": [0, 1]}, "has no rule there"),
    "each head": (gs.PerHead([gs.Causal()] * 4), {"key_starts": [0, 1]}, "PerHead.* has no rule there"),
    "mask": (
        torch.ones(8, 8).bool(), {"key_starts": [0, 1]},
        r"shape \(8, 8\), bool, cpu, has no rule there. Write the starts into the mask: leave out key_starts$",
    ),
    "mask with offsets": (
        torch.ones(8, 8).bool(), {"q_offset": ints(1, 2)},
        "has no rule there. Rows of a mask have no positions: leave out q_offset$",
    ),
    "layout": (
        gs.Causal().layout(8, 8, block_q=32, block_kv=32), {"q_offset": ints(1, 2), "key_starts": [0, 1]},
        "A layout holds .*: leave out q_offset and key_starts, or make it with them by device_layout",
    ),
    "starts of a pattern": (
        gs.BigBird(64), {"key_starts": [0, 1]}, r"Give a boolean mask .* of all that is attended, without key_starts$",
    ),
    "offsets of a pattern": (
        gs.BigBird(64), {"q_offset": ints(1, 2)}, r"without q_offset, or a q_offset that all sequences share, an int$",
    ),
    "packed and an offset": (packed, {"q_offset": 3}, r"q_offset must be None with PackedSequences\(1, every key\)"),
    "packed and offsets": (packed, {"q_offset": ints(1, 2)}, "q_offset must be None with PackedSequences"),
    "packed and slopes": (packed, {"alibi_slopes": torch.zeros(4)}, "alibi_slopes must be None with PackedSequences"),
    "reordered": (gs.CSR([0, 1] + [1] * 7, [0], 8).reordered(), {"q_offset": ints(1, 2)}, "has no rule there"),
    "offsets": (None, {"q_offset": ints(1, 2, 3)}, r"integer tensor, or one of shape \(B,\) = \(2,\); got shape \(3"),
    "offsets of floats": (None, {"q_offset": torch.zeros(2)}, "q_offset must be an int or a 0-d int.*float32"),
    "offsets elsewhere": (None, {"q_offset": ints(1, 2).to("meta")}, "q_offset must be a tensor on q's device, cpu"),
    "offsets and slopes": (
        None, {"q_offset": ints(1, 2), "alibi_slopes": torch.zeros(4)},
        r"alibi_slopes must be None with a q_offset of \(B",
    ),
    "offset": (ids, {"q_offset": 2**31 - 1}, r"q_offset must be an integer up to 2\*\*31"),
    "starts": (None, {"key_starts": ints(1, 2, 3)}, r"key_starts must be integers of shape \(B,\) = \(2,\); got shape"),
    "starts of floats": (None, {"key_starts": torch.zeros(2)}, "key_starts must be integers of shape"),
    "starts elsewhere": (None, {"key_starts": ints(1, 2).to("meta")}, "key_starts must be a tensor on q's device"),
    "start": (None, {"key_starts": 3}, "key_starts must be a torch tensor, a list of integers or None; got 3"),
    "list of starts": (None, {"key_starts": [1]}, r"key_starts, a list, must hold B=2 integers.*got \[1\]"),
    "starts of bools": (None, {"key_starts": [1, True]}, r"key_starts, a list, must hold B=2.*it holds True"),
    "lengths": (None, {"key_starts": [0, 1], "key_lengths": ints(1)}, r"key_lengths must be integers of shape \(B,\)"),
    "documents of other keys": (gs.DocumentIds(ints(1, 2)), {}, "DocumentIds must have K=8 positions, or.* got 2"),
    "documents of others": (gs.DocumentIds(torch.zeros(3, 8).int()), {}, "for B=2 batch elements, or one for all; got"),
    "documents elsewhere": (
        gs.DocumentIds(torch.zeros(8, device="meta").int()), {}, r"tensors of DocumentIds\(\(8,\)\) must be on",
    ),
    "blocks of other rows": (
        gs.BlockIndices(torch.zeros(1, 1, 2, 1).int()), {}, r"heads 1, G=2 or H=4, rows = ceil\(Q / 64\) = 1; got sh",
    ),
    "blocks of other heads": (gs.BlockIndices(torch.zeros(1, 3, 1, 1).int()), {}, "indices of BlockIndices must have"),
    "blocks of others": (gs.BlockIndices(torch.zeros(3, 1, 1, 1).int()), {}, "indices of BlockIndices must have"),
    "no such block": (
        gs.BlockIndices(torch.full((1, 1, 1, 1), 1), check=True), {}, r"must be in \[0, 1\), or -1 where unused; got 1",
    ),
    "a negative block": (
        gs.BlockIndices(torch.full((1, 1), -7), check=True) & gs.Causal(), {}, r"in \[0, 1\), or -1 .*; got -7",
    ),
    "gathered on the host": (
        build_gather(gs.Causal(), 8, 8, block_q=1), {}, "GatherLayout, must be one that device_layout made of Indices",
    ),
    "keys of other rows": (gs.Indices(torch.zeros(1, 1, 7, 1).int()), {}, "heads 1, G=2 or H=4, Q = 8; got shape"),
    "keys of other heads": (gs.Indices(torch.zeros(1, 3, 8, 1).int()), {}, "indices of Indices must have shape"),
    "no such key": (gs.Indices(torch.full((8, 2), 8), check=True), {}, r"Indices must be in \[0, 8\), or -1 .* got 8"),
    "keys of the oracle": (keys, {"implementation": "reference"}, "reference: gathers no listed keys for groups of 1"),
    "keys on tiles": (keys, {"implementation": "hopper"}, "hopper: .*gathers no listed keys for groups of 1"),
    "small": (ids, {"implementation": "small"}, "implementation='small' cannot compute this problem"),
    "merge": (ids, {"merge": "lse"}, "pattern must be a union|merge must be None: each term of DocumentIds"),
    "heads": (ids, {"sink_logits": torch.zeros(3)}, "sink_logits must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_errors_of_calls(call: str) -> None:
    pattern, options, message = CALLS[call]
    for function in (gs.attention, gs.explain):
        with pytest.raises(ValueError, match=message):
            function(q, kv, kv, pattern, **options)


CONSTRUCTORS: dict[str, tuple[Any, str]] = {
    "ids": (lambda: gs.DocumentIds([0, 1]), r"ids must be a tensor \(K,\).*got \[0, 1\].*; gs.Document\(ids\) takes"),  # type: ignore[arg-type]
    "ids of floats": (lambda: gs.DocumentIds(torch.zeros(3)), "ids must be a tensor .* of integers: int8.*float32"),
    "ids of heads": (lambda: gs.DocumentIds(torch.zeros(1, 1, 3).int()), r"ids must be a tensor \(K,\) or \(B, K\)"),
    "edges": (lambda: gs.DocumentIds.from_cu_seqlens(torch.zeros(1, 3).int(), 3), "cu_seqlens must be a tensor of one"),
    "length": (lambda: gs.DocumentIds.from_cu_seqlens(ints(0, 3), -1), "length must be a number of positions, at l"),
    "length of bool": (lambda: gs.DocumentIds.from_cu_seqlens(ints(0, 3), True), "length must be a number of pos"),
    "indices": (lambda: gs.BlockIndices(torch.zeros(1, 1, 1, 1)), r"indices must be a tensor \(B, H, rows, n\) of"),
    "indices rank": (lambda: gs.BlockIndices(torch.zeros(1, 1, 1, 1, 1).int()), "indices must be .* of 4 dimensions"),
    "numpy": (lambda: gs.BlockIndices(np.zeros((1, 1), int)), "indices must be a tensor"),  # type: ignore[arg-type]
    "block": (lambda: gs.BlockIndices(torch.zeros(1, 1).int(), 96), r"block_size must be 64 or 128; got 96"),
    "block of a float": (lambda: gs.BlockIndices(torch.zeros(1, 1).int(), 64.0), "block_size must be 64 or 128"),  # type: ignore[arg-type]
    "length of a float": (lambda: gs.DocumentIds.from_cu_seqlens(ints(0, 3), 3.0), "length must be a number of pos"),  # type: ignore[arg-type]
    "counts": (lambda: gs.BlockIndices(torch.zeros(1, 1).int(), 64, ints(1, 2)), r"counts must be .*of shape \(1,\)"),
    "check": (lambda: gs.BlockIndices(torch.zeros(1, 1).int(), check=1), "check must be True or False; got 1"),  # type: ignore[arg-type]
    "keys": (lambda: gs.Indices(torch.zeros(1, 1, 1, 1)), r"indices must be a tensor \(B, G, Q, n\) of int32 or int64"),
    "keys rank": (lambda: gs.Indices(torch.zeros(3).int()), r"indices must be a tensor \(B, G, Q, n\) of int32"),
    "counts of keys": (lambda: gs.Indices(torch.zeros(1, 1).int(), torch.zeros(1)), "counts must be a tensor of integ"),
    "check of keys": (lambda: gs.Indices(torch.zeros(1, 1).int(), check=1), "check must be True or False; got 1"),  # type: ignore[arg-type]
    "two lists": (lambda: blocks & blocks, "two of BlockIndices and Indices cannot be joined by &"),
    "lists of both kinds": (lambda: keys & blocks, "two of BlockIndices and Indices cannot be joined by &"),
    "union": (lambda: ids | gs.Causal(), r"DocumentIds\(\(8,\)\) joins others by & alone"),
    "union from the right": (lambda: gs.Causal() | blocks, r"BlockIndices\(\(1, 1, 1, 1\), 64\) joins others by"),
    "complement": (lambda: ~ids, r"DocumentIds\(\(8,\)\) has no complement"),
    "no rule": (lambda: ids & gs.PowerStrided(2, 3), "PowerStrided.* no rule there. Give attention one boolean"),
    "no rule from the left": (lambda: gs.BigBird(64) & blocks, "BigBird.* has no rule there"),
    "lists and steps": (lambda: gs.Dilated(3, 0, 2) & blocks, "lists are joined by & with patterns of one interval of"),
    "lists and sinks": (lambda: keys & gs.SlidingWindow(3, sinks=2), "lists are joined by & with patterns of one int"),
    "steps of packed": (
        lambda: gs.PackedSequences(ints(0, 8), pattern=gs.Strided(2, 1)), r"Strided\(.*\), has a step, which is not",
    ),
    "word of packed": (
        lambda: gs.PackedSequences(ints(0, 8), pattern="causal"),  # type: ignore[arg-type]
        "pattern, 'causal'.* has no rule there. Call attention for each sequence",
    ),
    "union of packed patterns": (
        lambda: gs.PackedSequences(ints(0, 8), pattern=~gs.Causal()),
        "device: Dense, Causal, Local, SlidingWindow, any & and | of them, up to 16 intervals a row; ~Causal",
    ),
    "too many unions": (lambda: ids & LONG & OTHERS, "too many unions are joined by &"),
    "mask": (lambda: ids & torch.ones(8, 8).bool(), r"DocumentIds.* joins by & a pattern.*got shape \(8, 8\), bool"),
    "mask from the left": (lambda: torch.ones(8, 8).bool() & ids, r"DocumentIds.* joins by & a pattern.*got shape"),
    "array": (lambda: blocks & np.ones((8, 8), bool), "BlockIndices.* joins by & a pattern"),
    "array from the left": (lambda: np.ones((8, 8), bool) & blocks, "BlockIndices.* joins by & a pattern"),
    "class": (lambda: ids & gs.Causal, r"this is a class, Causal\(...\) is a pattern"),
    "layout": (lambda: ids & a_layout, "DocumentIds.* joins by & a pattern.*got BlockLayout"),
    "layout from the left": (lambda: a_layout & ids, NOT_JOINED),
    "layout & pattern": (lambda: a_layout & gs.Causal(), NOT_JOINED),
    "pattern & layout": (lambda: gs.Causal() & a_layout, NOT_JOINED),
    "layouts": (lambda: a_layout & a_layout, NOT_JOINED),
    "layout | pattern": (lambda: a_layout | gs.Causal(), NOT_JOINED),
    "layout & mask": (lambda: a_layout & torch.ones(8, 8).bool(), NOT_JOINED),
    "mask & layout": (lambda: torch.ones(8, 8).bool() & a_layout, NOT_JOINED),
    "complement of a layout": (lambda: ~a_layout, "a BlockLayout has no complement: make the layout of ~pattern"),
    "packed & pattern": (lambda: packed & gs.Causal(), r"not joined by &: .* Give a pattern .*, pattern=\); got Ca"),
    "pattern & packed": (lambda: gs.Causal() & packed, r"PackedSequences.* is not joined by &"),
    "packed & documents": (lambda: packed & ids, r"PackedSequences.* is not joined by &.*got DocumentIds"),
    "documents & packed": (lambda: ids & packed, r"PackedSequences.* is not joined by &.*got DocumentIds"),
    "packed & mask": (lambda: packed & torch.ones(8, 8).bool(), r"PackedSequences.* is not joined by &.*got shape"),
    "union of packed": (lambda: packed | gs.Causal(), "joins others by & alone"),
    "pattern of packed": (
        lambda: gs.PackedSequences(ints(0, 8), pattern=gs.BigBird(64)),
        "BigBird.* has no rule there. Call attention for each sequence, or give it one boolean mask",
    ),
    "reordered": (lambda: gs.CSR([0, 1], [0], 1).reordered() & ids, "has no rule there"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_errors_of_selections(name: str) -> None:
    make, message = CONSTRUCTORS[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_are_integers_of_numpy_too() -> None:
    for kind in (np.int64, np.int16, np.uint8):
        made = gs.DocumentIds.from_cu_seqlens(ints(0, 3, 8), kind(8)), gs.BlockIndices(ints(0)[None], kind(64))
        for one in made:
            assert gs.attention(q, kv, kv, one, q_offset=kind(0), key_starts=[kind(0), kind(1)]).shape == q.shape


def test_dimensions_of_blocks_that_are_left_out_are_shared() -> None:
    x = tensors((2, 4, 100, 8), (2, 2, 150, 8), (2, 2, 150, 8))
    of_heads = torch.randint(-1, 3, (4, 2, 2), generator=torch.Generator().manual_seed(0))
    for given in (of_heads[0], of_heads):
        whole = given.expand(2, 4, 2, 2)
        found, wanted = (gs.attention(*x, gs.BlockIndices(one)) for one in (given, whole))
        assert torch.equal(found, wanted)


def test_a_check_reads_the_indices_and_cannot_be_compiled() -> None:
    torch._dynamo.reset()
    given = gs.BlockIndices(torch.full((1, 1, 1, 2), 0), check=True)
    gs.attention(q, kv, kv, given)
    compiled = torch.compile(lambda q, kv: gs.attention(q, kv, kv, given), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="check of BlockIndices must be False in a compiled function"):
        compiled(q, kv)
