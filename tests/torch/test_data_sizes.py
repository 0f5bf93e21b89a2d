"""Sizes that only the data know, `x[mask]` and `.item()`, in compiled functions, with gradients and of no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.torch.structure import operator
from tests.support.thorough import more

N, H, D = 100, 4, 16
PATTERNS = {"dense": None, "causal": gs.Causal(), "window": gs.SlidingWindow(9, 3), "dilated": gs.Dilated(9, 0, 4)}
Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
IDS, CHOSEN = torch.arange(N) // 9, torch.arange(5 * N).reshape(N, 5) * 7 % 50


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    """No graph of a test before, and sizes that are data become part of one."""
    torch._dynamo.reset()
    more = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(**more):
        yield


def heads_first(x: Tensor, chosen: Tensor) -> Tensor:
    return x[chosen].transpose(0, 1)[None]


def by_pattern(pattern: gs.Pattern | None, **options: Any) -> Run:
    def call(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        kept = heads_first(x, chosen)
        return gs.attention(kept, kept, kept, pattern, return_lse=True, **options)

    return call


def thirds(n: Any) -> Tensor:
    return torch.arange(4) * n // 3


def packed(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = x[chosen]
    return gs.varlen(kept, kept[:, :2], kept[:, :2], thirds(kept.shape[0]), pattern=gs.Causal(), return_lse=True)


def of_as_many_sequences(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Only the data know how many sequences there are."""
    edges = chosen.nonzero().squeeze(1)
    pattern = gs.SlidingWindow(5, sinks=2)
    return gs.varlen(x, x, x, edges, edges, seqused_k=edges[1:] - edges[:-1] - 1, pattern=pattern, return_lse=True)


def of_a_number(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    n = chosen.sum().item()
    torch._check(n >= 0)
    torch._check(n <= N)
    kept = x[:n]
    return gs.varlen(kept, kept, kept, thirds(n), pattern=gs.Causal() & gs.SlidingWindow(20), return_lse=True)


def shared_by_layers(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = x[chosen]
    sequences = gs.PackedSequences(thirds(kept.shape[0]), pattern=gs.Causal())
    layout = gs.device_layout(kept, kept, kept, sequences, layout="bshd")
    out, _ = gs.attention(kept, kept, kept, layout, layout="bshd", return_lse=True)
    return gs.attention(out, out, out, layout, layout="bshd", return_lse=True)


def documents(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = heads_first(x, chosen)
    return gs.attention(kept, kept, kept, gs.DocumentIds(IDS[chosen]) & gs.Causal(), return_lse=True)


def documents_by_edges(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = heads_first(x, chosen)
    ids = gs.DocumentIds.from_cu_seqlens(thirds(kept.shape[2]), kept.shape[2])
    options: dict[str, Any] = {"q_offset": 2, "alibi_slopes": torch.ones(H, dtype=x.dtype)}
    return gs.attention(kept, kept, kept, ids & gs.Causal() & gs.SlidingWindow(20), **options, return_lse=True)


def batches(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Batch elements are chosen, each with numbers of its own."""
    chosen = chosen[:20]
    kept = x.reshape(20, 5, H, D)[chosen].transpose(1, 2)
    numbers = chosen.nonzero().squeeze(1)
    of_each: dict[str, Any] = {"q_offset": numbers % 2, "key_starts": numbers % 3, "key_lengths": 5 - numbers % 2}
    ids = gs.DocumentIds((torch.arange(5).expand(20, 5)[chosen] + numbers[:, None]) // 4)
    return gs.attention(kept, kept, kept, ids & gs.SlidingWindow(3, 1), **of_each, return_lse=True)


def every_nth_key(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = heads_first(x, chosen)
    return gs.attention(kept, kept, kept, gs.Strided(8, 2) & gs.Causal(), key_starts=[3], return_lse=True)


def lists_of_keys(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = heads_first(x, chosen)
    listed, counts = CHOSEN[chosen][None, None], 2 + IDS[chosen][None, None] % 3
    return gs.attention(kept, kept, kept, gs.Indices(listed, counts) & gs.Causal(), return_lse=True)


def lists_of_blocks(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    kept = heads_first(x, chosen)
    rows = (kept.shape[2] + 63) // 64
    blocks = (torch.arange(rows)[:, None] - torch.arange(2)).expand(1, 2, rows, 2)
    pattern = gs.BlockIndices(blocks) & gs.DocumentIds(IDS[chosen]) & gs.Causal()
    return gs.attention(kept, kept[:, :2], kept[:, :2], pattern, return_lse=True)


RUNS: dict[str, Run] = {name: by_pattern(pattern) for name, pattern in PATTERNS.items()} | {
    "an offset": by_pattern(gs.Causal(), q_offset=3),
    "packed": packed,
    "sequences": of_as_many_sequences,
    "a number": of_a_number,
    "a layout": shared_by_layers,
    "documents": documents,
    "edges": documents_by_edges,
    "batches": batches,
    "every n-th key": every_nth_key,
    "lists of keys": lists_of_keys,
    "lists of blocks": lists_of_blocks,
}


def choices(name: str) -> list[Tensor]:
    """Of some rows, most, none and all; of sequences there is at least one edge."""
    found = []
    for share in (0.5, 0.95, 0.0, 1.0):
        chosen = torch.rand(N, generator=torch.Generator().manual_seed(int(100 * share))) < share
        chosen[0] |= name == "sequences"
        found.append(chosen)
    return found


def check_compiled(name: str, **options: Any) -> None:
    run = torch.compile(RUNS[name], fullgraph=True, **options)
    x = torch.randn(N, H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for chosen in choices(name):
        results = []
        for function in (run, RUNS[name]):
            out, lse = function(x, chosen)
            total = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
            results.append([out, lse, *torch.autograd.grad(total, x)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", RUNS)
def test_compiled(name: str) -> None:
    check_compiled(name, backend="aot_eager", dynamic=True)


@pytest.mark.parametrize("name", ["dense", "packed", "lists of blocks"])
def test_compiled_where_other_sizes_are_constants(name: str) -> None:
    check_compiled(name, backend="aot_eager")


@pytest.mark.parametrize("name", ["packed", "documents", "lists of keys"])
def test_compiled_where_torch_does_not_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older torch cannot be asked in a compiled function whose size it is."""
    monkeypatch.setattr(operator, "TELLS", False)
    check_compiled(name, backend="aot_eager", dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "lists of keys", *more("edges", "every n-th key", "lists of blocks")])
def test_compiled_by_inductor(name: str) -> None:
    check_compiled(name)


@pytest.mark.parametrize(
    ("name", "strict"),
    [("causal", True), ("packed", True), *((n, False) for n in ("causal", "a number", "edges", "lists of keys"))],
)
def test_exported(name: str, strict: bool) -> None:
    run = RUNS[name]

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            return run(x, chosen)

    x = torch.randn(N, H, D)
    exported = torch.export.export(Module(), (x, choices(name)[0]), strict=strict).module()
    for chosen in choices(name):
        torch.testing.assert_close(exported(x, chosen), run(x, chosen))


def test_sizes_that_do_not_fit_raise_where_the_call_runs() -> None:
    def of_ids(x: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
        kept = heads_first(x, chosen)
        return gs.attention(kept, kept, kept, gs.DocumentIds(IDS[others]))

    def of_lengths(x: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
        kept, lengths = x[chosen][:, None], others.nonzero().squeeze(1)
        return gs.attention(kept, kept, kept, key_starts=lengths * 0, key_lengths=lengths)

    def of_keys(x: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
        q, k, v = heads_first(x, chosen), heads_first(x, others), heads_first(x, chosen)
        return gs.attention(q, k, v)

    x, one, other = torch.randn(N, H, D), torch.arange(N) < 40, torch.arange(N) < 41
    for call, message in ((of_ids, "ids of DocumentIds must have K=40 positions, or more .* got 41"),
                          (of_lengths, r"key_starts must be integers of shape \(B,\) = \(40,\)"),
                          (of_keys, "v must have the heads and positions of k")):  # fmt: skip
        run = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(x, one, one), call(x, one, one))
        for function in (run, call):
            with pytest.raises(ValueError, match=message):
                function(x, one, other)


def test_operator() -> None:
    """Its fake, and that no result shares memory with another."""
    structures = [
        gs.PackedSequences(thirds(70), pattern=gs.Causal()) , gs.DocumentIds(IDS[:70]) & gs.Strided(8, 2),
        gs.Indices(CHOSEN[:70][None, None]) & gs.Causal(), gs.BlockIndices(torch.tensor([[0, 1], [1, -1]])),
        gs.DocumentIds.from_cu_seqlens(thirds(70), 70) & gs.DocumentIds(IDS[None, :70]),
    ]  # fmt: skip
    for structure in structures:
        tile = (64, 64) if structure.block is None else (structure.block, structure.block * (structure.block > 1))
        given = operator.Inputs(structure, operator.Sizes(1, 2, 1, 70, 70), torch.device("cpu"), None, None, None, None)
        arguments = operator.arguments_of(given, tile)
        torch.library.opcheck(torch.ops.gossamer.structure.default, arguments)
        found = torch.ops.gossamer.structure.default(*arguments)
        memory = [x.untyped_storage().data_ptr() for x in found if x.numel()]
        assert len(set(memory)) == len(memory)
