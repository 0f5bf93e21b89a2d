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
from tests.torch.test_device_structure import tensors

Q, K = 40, 150


def by_offsets(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    return gs.attention(q, k, v, pattern, q_offset=data, key_starts=data - 30, key_lengths=data + 20)


def by_documents(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    ids = torch.arange(K) // data[:, None].clamp(min=1)
    return gs.attention(q, k, v, gs.DocumentIds(ids) & pattern)


def by_edges(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    return gs.attention(q, k, v, pattern & gs.DocumentIds.from_cu_seqlens(data.sort().values, K))


def by_blocks(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    return gs.attention(q, k, v, gs.BlockIndices((data[:, None, None, None] // 64).long()) & pattern)


def by_keys(q: Tensor, k: Tensor, v: Tensor, data: Tensor, pattern: gs.Pattern) -> Tensor:
    keys = data[:, None, None, None] - torch.arange(2 * Q).reshape(1, 1, Q, 2)
    return gs.attention(q, k, v, gs.Indices(keys) & pattern)


FUNCTIONS = {f.__name__: f for f in (by_offsets, by_documents, by_edges, by_blocks, by_keys)}
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


def test_compiled_for_many_sizes() -> None:
    frames = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(by_offsets, fullgraph=True, backend=frames, dynamic=True)
    for keys in (150, 151, 200, 333):
        q, k, v = tensors((2, 4, Q, 8), (2, 2, keys, 8), (2, 2, keys, 8))
        data = torch.tensor([keys - 30, keys - Q])
        assert torch.equal(compiled(q, k, v, data, gs.Causal()), by_offsets(q, k, v, data, gs.Causal()))
    assert frames.frame_count == 1


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
# Of six reaches: 21 different ones are what two of them have in common.
LONG = (
    gs.SlidingWindow(1, sinks=2) | gs.Dilated(2, 0, 3) | gs.Dilated(2, 0, 5) | gs.Dilated(2, 0, 7) | gs.Dilated(2, 0, 9)
)
CALLS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "powers": (gs.PowerStrided(2, 3), {"q_offset": ints(1, 2)}, r"PowerStrided\(.*\) has no rule"),
    "global tokens": (gs.Longformer(2, [0]), {"q_offset": ints(1, 2)}, "Longformer without global tokens.*has no rule"),
    "big bird": (gs.BigBird(64), {"key_starts": [0, 1]}, "pattern must go by positions alone.*BigBird"),
    "union": (gs.Causal() | ~gs.Local(3), {"key_starts": [0, 1]}, r"\(Causal\(\) \| ~Local\(block=3\)\) has no rule"),
    "long union": (LONG & LONG, {"key_starts": [0, 1]}, "has no rule there"),
    "each head": (gs.PerHead([gs.Causal()] * 4), {"key_starts": [0, 1]}, "PerHead.* has no rule there"),
    "mask": (torch.ones(8, 8).bool(), {"key_starts": [0, 1]}, r"shape \(8, 8\), bool, cpu has no rule there"),
    "layout": (gs.Causal().layout(8, 8, block_q=32, block_kv=32), {"q_offset": ints(1, 2)}, "has no rule there"),
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
    "documents of other keys": (gs.DocumentIds(ints(1, 2)), {}, "ids of DocumentIds must have K=8 positions; got 2"),
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
    "length": (lambda: gs.DocumentIds.from_cu_seqlens(ints(0, 3), 0), "length must be a number of positions of at"),
    "length of bool": (lambda: gs.DocumentIds.from_cu_seqlens(ints(0, 3), True), "length must be a number of pos"),
    "indices": (lambda: gs.BlockIndices(torch.zeros(1, 1, 1, 1)), r"indices must be a tensor \(B, H, rows, n\) of"),
    "indices rank": (lambda: gs.BlockIndices(torch.zeros(1, 1, 1, 1, 1).int()), "indices must be .* of 4 dimensions"),
    "numpy": (lambda: gs.BlockIndices(np.zeros((1, 1), int)), "indices must be a tensor"),  # type: ignore[arg-type]
    "block": (lambda: gs.BlockIndices(torch.zeros(1, 1).int(), 96), r"block_size must be 64 or 128; got 96"),
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
    "no rule": (lambda: ids & gs.PowerStrided(2, 3), "PowerStrided.* has no rule there"),
    "no rule from the left": (lambda: gs.BigBird(64) & blocks, "BigBird.* has no rule there"),
    "lists and steps": (lambda: gs.Dilated(3, 0, 2) & blocks, "lists are joined by & with patterns of one interval of"),
    "lists and sinks": (lambda: keys & gs.SlidingWindow(3, sinks=2), "lists are joined by & with patterns of one int"),
    "too many unions": (lambda: ids & LONG & LONG, "too many unions are joined by &"),
    "reordered": (lambda: gs.CSR([0, 1], [0], 1).reordered() & ids, "has no rule there"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_errors_of_selections(name: str) -> None:
    make, message = CONSTRUCTORS[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_check_reads_the_indices_and_cannot_be_compiled() -> None:
    torch._dynamo.reset()
    given = gs.BlockIndices(torch.full((1, 1, 1, 2), 0), check=True)
    gs.attention(q, kv, kv, given)
    compiled = torch.compile(lambda q, kv: gs.attention(q, kv, kv, given), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="check of BlockIndices must be False in a compiled function"):
        compiled(q, kv)
