"""`varlen` against its definition: each sequence by itself, by loops over pairs and a dense softmax in float64."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import gossamer as gs
from gossamer.memo import Memo
from gossamer.torch import repeated, request
from tests.support.definition import dense, tensors
from tests.support.host_reads import nothing_waits
from tests.torch.test_device_structure import RULES, STEPS, check, extremes, integers


def packed(draw: random.Random, most: int) -> list[int]:
    """Edges of sequences, some of them empty."""
    return [0, *accumulate(draw.choice([0, 1, draw.randint(0, most), draw.randint(0, most)]) for _ in range(4))]


@pytest.mark.parametrize("seed", range(24))
def test_sequences(seed: int) -> None:
    draw = random.Random(seed)
    pattern, keep = RULES[draw.choice([name for name in RULES if name not in STEPS])]
    most = draw.choice([3, 40])
    cu_q = packed(draw, most)
    cu_k = cu_q if draw.random() < 0.3 else packed(draw, most)
    behind = draw.choice([0, 1, 9])  # rows and keys of no sequence
    T, S = max(1, cu_q[-1] + behind), max(1, cu_k[-1] + (behind if cu_k is cu_q else draw.choice([0, 5])))
    if cu_k is cu_q:
        S = T
    used = [draw.choice([end - first, draw.randint(0, end - first), extremes(draw, S)])
            for first, end in pairwise(cu_k)]  # fmt: skip
    with_used = draw.random() < 0.5
    mask = np.zeros((1, 1, T, S), dtype=bool)
    for n, first in enumerate(cu_k[:-1]):
        Lk, Lq = cu_k[n + 1] - first, cu_q[n + 1] - cu_q[n]
        Lk = max(0, min(Lk, used[n])) if with_used else Lk
        for r in range(Lq):
            for j in range(Lk):
                mask[0, 0, cu_q[n] + r, first + j] = keep(r + Lk - Lq, j)
    G, times = draw.choice([1, 2]), draw.choice([1, 3])
    inputs = tensors((1, G * times, T, 4), (1, G, S, 4), (1, G, S, 6), seed=seed)
    terms: dict[str, Any] = {"softcap": draw.choice([None, 2.0]), "scale": draw.choice([None, 0.7])}
    if draw.random() < 0.5:
        inputs += tensors((G * times,), seed=seed + 1)
    edges_q, edges_k = integers(cu_q, draw), None if cu_k is cu_q else integers(cu_k, draw)
    lengths = integers(used, draw) if with_used else None

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        turned = [x[0].transpose(0, 1) for x in (q, k, v)]
        out, lse = gs.varlen(
            *turned, edges_q, edges_k, 7, 7, pattern, seqused_k=lengths, sink_logits=sinks, return_lse=True, **terms
        )
        assert out.shape == (T, G * times, 6) and lse.shape == (G * times, T)
        return out.transpose(0, 1)[None], lse[None]

    check(run, inputs, mask, **terms)


def test_out_is_written() -> None:
    q, k, v = (x.detach() for x in tensors((6, 2, 4), (6, 1, 4), (6, 1, 3)))
    out = torch.full((6, 2, 3), torch.nan, dtype=torch.float64)
    cu = torch.tensor([0, 2, 5])
    found = gs.varlen(q, k, v, cu, pattern=gs.Causal(), out=out)
    assert found is out and torch.equal(out, gs.varlen(q, k, v, cu, pattern=gs.Causal()))
    assert (out[5] == 0).all() and out[:5].abs().min() > 0


def test_sequences_that_do_not_begin_at_0() -> None:
    q, k, v = tensors((1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 4))
    mask = np.zeros((6, 6), dtype=bool)
    mask[2:5, 1:4] = True
    found, lse = gs.varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([2, 5]), torch.tensor([1, 4]), return_lse=True
    )
    wanted, other = dense(q, k, v, mask)
    torch.testing.assert_close(found.transpose(0, 1), wanted[0])
    torch.testing.assert_close(lse, other[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_share_one_structure(compiled: bool) -> None:
    x, y = (tensors((20, 4, 4), (24, 2, 4), (24, 2, 4), seed=seed) for seed in (0, 1))
    cu_q, cu_k, used = torch.tensor([0, 5, 20]), torch.tensor([0, 9, 24]), torch.tensor([7, 15])
    rule = gs.SlidingWindow(4)

    def step(x: list[Tensor], y: list[Tensor], *lengths: Tensor) -> tuple[Tensor, Tensor]:
        cu_q, cu_k, used = lengths
        packed = gs.PackedSequences(cu_q, cu_k, seqused_k=used, pattern=rule)
        shared = gs.device_layout(*x, packed, layout="bshd")
        return gs.attention(*x, shared, layout="bshd"), gs.attention(*y, shared, layout="bshd")

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    for one, found in zip((x, y), run(x, y, cu_q, cu_k, used), strict=True):
        wanted = gs.varlen(*one, cu_q, cu_k, seqused_k=used, pattern=rule)
        assert torch.equal(found, wanted)
        grads = (torch.autograd.grad(out.square().sum(), one, retain_graph=True) for out in (found, wanted))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


WILD = (([-3, 2, 99], [0, 2, 6]), ([0, 4, 2], [0, 4, 4]), ([2**40, 2**40, 2**40], [6, 6, 6]))


def test_edges_that_nobody_reads_are_clamped() -> None:
    """On a GPU, and in compiled functions."""
    x = tensors((6, 2, 4), (6, 2, 4), (6, 2, 4))
    torch._dynamo.reset()
    compiled = torch.compile(lambda cu: gs.varlen(*x, cu, pattern=gs.Causal()), fullgraph=True, backend="eager")
    for wild, tame in WILD:
        assert torch.equal(compiled(torch.tensor(wild)), gs.varlen(*x, torch.tensor(tame), pattern=gs.Causal()))


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor], ids=lambda form: form.__name__)
def test_edges_of_the_host(form: Any) -> None:
    """Lists, arrays and tensors on the CPU are read: what would be clamped in silence raises."""
    x = tensors((6, 2, 4), (6, 2, 4), (6, 2, 4))
    q, cu = x[0], torch.tensor([0, 2, 6])
    for edges, used in (([0, 2, 6], None), ([1, 1, 5], [0, 3])):
        given = None if used is None else form(used)
        wanted = gs.varlen(*x, torch.tensor(edges), seqused_k=None if used is None else torch.tensor(used))
        assert torch.equal(gs.varlen(*x, form(edges), seqused_k=given), wanted)
    for wild, _ in WILD:
        message = "must not decrease" if wild[2] < wild[1] else r"must be in \[0, . = \[0, 6\]; got "
        for name, args in (("cu_seq_q", (form(wild), cu)), ("cu_seq_k", (cu, form(wild)))):
            with pytest.raises(ValueError, match=f"{name} {message}".replace("0, .", "0, [TS].")):
                gs.varlen(*x, *args)
            with pytest.raises(ValueError, match=name):
                gs.device_layout(*x, gs.PackedSequences(*args, check=True), layout="bshd")
    for wild, _ in WILD:
        with pytest.raises(ValueError, match="cu_seqlens must"):
            gs.attention(q[:, 0], q[:, 0], q[:, 0], gs.DocumentIds.from_cu_seqlens(form(wild), 6) & gs.Causal())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was made since."""
    made: list[Any] = []
    make = request.structured
    monkeypatch.setattr(request, "structured", lambda *given: (made.append(given), make(*given))[1])
    monkeypatch.setattr(repeated, "_numbered", Memo(4))
    monkeypatch.setattr(repeated, "_came", Memo())
    monkeypatch.setattr(repeated, "known", Memo())
    return made


FORMS: dict[str, Any] = {
    "varlen": lambda q, k, v, cu: gs.varlen(q, k, v, cu, seqused_k=[1, *[2] * (len(cu) - 2)], pattern=gs.Causal()),
    "sequences": lambda q, k, v, cu: gs.attention(q, k, v, gs.PackedSequences(cu), softcap=3.0, layout="bshd"),
    "documents": lambda *x: gs.attention(*x[:3], gs.DocumentIds.from_cu_seqlens(x[3], 6) & gs.Causal(), layout="bshd"),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_the_host_tells_is_kept_by_numbers_that_come_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without and with gradients, from lists and from an array that is written to between calls.

    The first call of all is recorded, and so are all numbers made.
    """
    run, edges = FORMS[name], np.array([0, 2, 6])
    wanted = {n: run(*tensors((6, 2, 4), (6, 2, 4), (6, 2, 4)), torch.tensor([0, n, 6])) for n in (2, 5)}
    made = counted(monkeypatch)
    for turn, n in enumerate((2, 5, 2)):
        x = tensors((6, 2, 4), (6, 2, 4), (6, 2, 4))
        edges[1] = n
        with torch.no_grad():
            for given in (edges, edges.tolist()):
                assert torch.equal(run(*x, given), wanted[n])
        for _ in range(2):
            out = run(*x, edges)
            assert torch.equal(out, wanted[n])
        grads = torch.autograd.grad(out.square().sum(), x)
        again = run(*x, torch.tensor([0, n, 6]))
        assert all(map(torch.equal, grads, torch.autograd.grad(again.square().sum(), x)))
        of_host = [given for given in made if given[1].numbers is not None]
        assert len(of_host) <= 4, "the first call, and the first layout, with gradients and without"
        assert len(repeated._numbered) == 2 * min(turn + 1, 2)
    with pytest.raises(ValueError, match="must"):
        run(*x, [0, 9, 6])


def test_layers_share_the_layout_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    x, made = tensors((6, 2, 4), (6, 2, 4), (6, 2, 4)), counted(monkeypatch)
    first, second, third = (gs.device_layout(*x, gs.PackedSequences([0, 2, 6]), layout="bshd") for _ in range(3))
    other = gs.device_layout(*x, gs.PackedSequences([0, 3, 6]), layout="bshd")
    assert second.rows is third.rows and other.rows is not second.rows is not first.rows
    assert torch.equal(first.rows.lo, second.rows.lo) and not torch.equal(first.rows.lo, other.rows.lo)
    assert len(made) == 1, "the others repeat what it wrote down"
    x = tensors((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    for starts in (None, torch.tensor([1])):  # with what a tensor tells, numbers are not all
        for _ in range(3):
            gs.attention(*x, gs.DocumentIds.from_cu_seqlens([0, 2, 6], 6), key_starts=starts)
    assert len(repeated._numbered) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_the_host_tells_is_made_for_each_stream() -> None:
    """Nothing waits once it is made, and a call on another stream reads nothing that may still be written."""
    x = [y.detach().cuda().bfloat16() for y in tensors((600, 2, 64), (600, 2, 64), (600, 2, 64))]
    wanted = {n: gs.varlen(*x, torch.tensor([0, n, 600]).cuda(), pattern=gs.Causal()) for n in range(50, 90)}
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for n, want in wanted.items():
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [gs.varlen(*x, [0, n, 600], pattern=gs.Causal()) for _ in range(2)]
                with nothing_waits():
                    found.append(gs.varlen(*x, [0, n, 600], pattern=gs.Causal()))
        torch.cuda.synchronize()
        assert all(torch.equal(one, want) for one in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_the_host_tells_of_a_join_is_on_the_device_in_every_call() -> None:
    x = tensors((2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4))
    for edges in ([0, 2, 6], [0, 3, 6], [0, 2, 6]):
        for starts in (None, torch.tensor([1, 2])):
            documents = gs.DocumentIds.from_cu_seqlens(edges, 6) & gs.Causal()
            wanted = gs.attention(*(y.float() for y in x), documents, key_starts=starts)
            given = (y.detach().float().cuda() for y in x)
            found = gs.attention(*given, documents, key_starts=None if starts is None else starts.cuda())
            torch.testing.assert_close(found.cpu(), wanted.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_edges_of_a_gpu_are_read_where_that_is_asked_for() -> None:
    x = [y.cuda() for y in tensors((6, 2, 4), (6, 2, 4), (6, 2, 4))]
    for wild, tame in WILD:
        found = gs.varlen(*x, torch.tensor(wild, device="cuda"), pattern=gs.Causal())
        assert torch.equal(found, gs.varlen(*x, tame, pattern=gs.Causal()))  # a list follows the call
        with pytest.raises(ValueError, match="cu_seq_q must"):
            gs.varlen(*x, wild)
        packed = gs.PackedSequences(torch.tensor(wild, device="cuda"), check=True)
        with pytest.raises(ValueError, match="cu_seq_q must"):
            gs.attention(*x, packed, layout="bshd")
        documents = gs.DocumentIds.from_cu_seqlens(torch.tensor(wild, device="cuda"), 6, check=True)
        with pytest.raises(ValueError, match="cu_seqlens must"):
            gs.attention(*x, documents, layout="bshd")


def test_check_cannot_be_compiled() -> None:
    x, cu = tensors((6, 2, 4), (6, 2, 4), (6, 2, 4)), torch.tensor([0, 6])
    torch._dynamo.reset()
    run = torch.compile(
        lambda cu: gs.attention(*x, gs.PackedSequences(cu, check=True), layout="bshd"), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="check of PackedSequences must be False in a compiled function"):
        run(cu)


def test_every_batch_element_has_the_sequences() -> None:
    q, k, v = tensors((2, 2, 9, 4), (2, 1, 9, 4), (2, 1, 9, 4))
    packed = gs.PackedSequences(torch.tensor([0, 4, 9]), pattern=gs.Causal())
    ids = gs.DocumentIds(torch.tensor([0] * 4 + [1] * 5)) & gs.Causal()
    assert torch.equal(gs.attention(q, k, v, packed), gs.attention(q, k, v, ids))
    assert gs.explain(q, k, v, packed).structure == "PackedSequences(2, j <= i)"


def test_compiled_for_any_lengths() -> None:
    q, k, v = tensors((20, 2, 4), (24, 1, 4), (24, 1, 4))
    frames = CompileCounter()

    def step(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return gs.varlen(q, k, v, cu_q, cu_k, pattern=gs.SlidingWindow(3))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=frames)
    for cu_q, cu_k in (([0, 5, 20], [0, 9, 24]), ([0, 0, 3], [0, 24, 24]), ([0, 20, 20], [0, 1, 2])):
        edges = torch.tensor(cu_q), torch.tensor(cu_k)
        assert torch.equal(compiled(q, k, v, *edges), step(q, k, v, *edges))
    assert frames.frame_count == 1


x, kv, cu = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8), torch.tensor([0, 2, 6])
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "dimensions": ((x[None], kv, kv, cu), {}, r"q must be a tensor \(positions, heads, size\) of packed"),
    "no tensor": ((x, kv, None, cu), {}, "v must be a tensor .positions, heads, size.* got None"),
    "edges": ((x, kv, kv, [0, 6.0]), {}, "cu_seq_q must be a tensor of one dimension of at least one ent"),
    "edges of floats": ((x, kv, kv, cu.float()), {}, "cu_seq_q must be a tensor of one dimension of at least one ent"),
    "no edge": ((x, kv, kv, cu[:0]), {}, "cu_seq_q must be a tensor of one dimension of at least one entry"),
    "other edges": ((x, kv, kv, cu, cu[None]), {}, "cu_seq_k must be a tensor of one dimension of at least one ent"),
    "numbers": ((x, kv, kv, cu, cu[:2]), {}, "cu_seq_q and cu_seq_k must tell of as many sequences"),
    "used": ((x, kv, kv, cu), {"seqused_k": cu}, r"seqused_k must be a tensor of one dimension of shape \(2,\)"),
    "used list": ((x, kv, kv, cu), {"seqused_k": [1, 2, 3]}, r"seqused_k must be a tensor .* of shape \(2,\)"),
    "shapes as given": ((x, kv[:, :, :4], kv, cu), {}, r"k must have the head size of q, D=8; got shape \(6, 2, 4\)"),
    "pattern": ((x, kv, kv, cu), {"pattern": gs.BigBird(64)}, "go by positions alone.*BigBird.* has no rule"),
    "out": ((x, kv, kv, cu), {"out": x[:5]}, r"out must be a tensor \(6, 4, 8\) of"),
    "out of a gradient": (
        (x.clone().requires_grad_(), kv, kv, cu), {"out": x.clone()}, "out must be None where a gradient is asked for",
    ),
    "heads": ((x, x[:, :3], x[:, :3], cu), {}, r"heads G that divides q's H=4; got G=3, shape \(6, 3, 8\)"),
    "device": ((x, kv, kv, cu.to("meta")), {}, "must be on q's device, cpu; got"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    args, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        gs.varlen(*args, **options)
