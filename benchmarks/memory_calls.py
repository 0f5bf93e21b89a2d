"""A few small calls of every family of kernels, which `check_memory.py` runs under a tool that watches memory.

A family names the folders of the package whose device code its calls run. Nothing is made before a call runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from bound import bound
from torch import Tensor

import gossamer as gs
from gossamer import particles as gp
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import VECTORS
from gossamer.layouts.gather import build_gather
from gossamer.patterns import Pattern
from gossamer.plan.table import load
from gossamer.testing import inputs
from gossamer.testing.cases import Case, square

CUDA = torch.device("cuda")
Call = Callable[[], None]


class Family(NamedTuple):
    """Kernels that are checked together, by one process."""

    folders: tuple[str, ...]  # of the package, with the device code that runs
    calls: dict[str, Call]


def launched(
    case: Case, *, dtype: str = "bfloat16", implementation: str = "hopper", tile: tuple[int, int] | None = None,
    gather: int | None = None, deterministic: bool = False, backward: bool = True, split: int | None = None,
    **of_backward: Any,
) -> None:  # fmt: skip
    """A forward and a backward over tiles, or over columns that `gather` rows share, past all that plans a call.

    Args:
        split: of the Hopper kernels: work is cut into items of so many steps.
        of_backward: more of the launch of their backward.
    """
    problem = replace(inputs.problem_of(case, dtype, "cuda", backward=backward), deterministic=deterministic)
    x, able = inputs.make(case, dtype, "cuda").batched(), load(implementation)
    assert not isinstance(able, str), able
    made: Any
    if gather is None:
        rows, keys = tile or able.tile(problem)
        made = case.pattern().layout(case.Q, case.K, block_q=rows, block_kv=keys, q_offset=x.terms.q_offset)
    else:
        made = build_gather(case.pattern(), case.Q, case.K, block_q=gather, q_offset=x.terms.q_offset)
    layout, scoring = made.to(CUDA), Scoring(x.terms.scale, x.terms.q_offset, x.terms.softcap)
    vectors = {name: getattr(x.terms, name) for name in VECTORS if getattr(x.terms, name) is not None}

    def computed(direction: str, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        prepare = partial(able.prepare, problem, layout, direction, scoring)
        if implementation == "hopper" and gather != 1:
            module = importlib.import_module(f"gossamer.kernels.hopper.launch.{'gather' if gather else direction}")
            more = {"split": split} | (of_backward if direction == "backward" else {})
            prepare = partial(getattr(module, direction), problem, layout, scoring, **more)
        return bound(prepare, given | vectors)()

    given: dict[str, Tensor] = {"q": x.q, "k": x.k, "v": x.v}
    out, lse = computed("forward", given)
    if backward:
        saved = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse), **given, "out": out, "lse": lse}
        computed("backward", saved)


def attended(
    pattern: Any, *, N: int = 200, K: int | None = None, heads: tuple[int, int] = (2, 1), D: int = 64,
    E: int | None = None, dtype: torch.dtype = torch.bfloat16, backward: bool = True, **options: Any,
) -> None:  # fmt: skip
    """`attention`, and its gradients."""
    H, G = heads
    x = _drawn(dtype, (1, H, N, D), (1, G, K or N, D), (1, G, K or N, E or D))
    with torch.set_grad_enabled(backward):
        out, lse = gs.attention(*x, pattern() if callable(pattern) else pattern, return_lse=True, **options)
    if backward:
        torch.autograd.grad(out.float().square().sum() + lse.sum(), x)


def _drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator(CUDA).manual_seed(0)
    return [torch.randn(s, device=CUDA, generator=g, dtype=dtype).requires_grad_() for s in shapes]


def _integers(low: int, high: int, *shape: int) -> Tensor:
    g = torch.Generator(CUDA).manual_seed(1)
    return torch.randint(low, high, shape, device=CUDA, generator=g, dtype=torch.int32)


def _scattered(rows: int, keys: int) -> Pattern:
    """Rows of 0 to 40 keys, and one of all."""
    g = torch.Generator().manual_seed(2)
    counts = torch.randint(0, 40, (rows,), generator=g).tolist()
    columns = [torch.randperm(keys, generator=g)[:n].sort().values for n in counts]
    columns[rows // 2] = torch.arange(keys)
    starts = torch.tensor([0, *[len(one) for one in columns]]).cumsum(0)
    return gs.CSR(starts.numpy(), torch.cat(columns).numpy(), keys)


def entmax(
    *, dtype: torch.dtype = torch.bfloat16, size: float = 1.0, N: int = 300, D: int = 64, **options: Any
) -> None:
    """`entmax_attention` of scores of a deviation of about `size`, one key of which nearly every row lists."""
    q, k, v = (x.detach() for x in _drawn(torch.float32, (2, 4, N, D), (2, 2, N, D), (2, 2, N, D)))
    q[..., :4] += 1
    k[:, :, 7, :4] += 8
    x = [(one * by).to(dtype).requires_grad_() for one, by in zip((q, k, v), (size, 1.0, 1.0), strict=True)]
    out = gs.entmax_attention(*x, causal=options.pop("causal", True), implementation="kernels", **options)
    torch.autograd.grad(out.float().square().sum(), x)


def largest_keys() -> None:
    q, k = (x.detach() for x in _drawn(torch.bfloat16, (1, 4, 300, 64), (1, 2, 300, 64)))
    gs.topk_keys(q, k, k_keep=8, causal=True, implementation="kernels")


def sparsek(*, D: int = 64, N: int = 300, gate: str | None = "v", dtype: torch.dtype = torch.bfloat16) -> None:
    q, k, v = _drawn(dtype, (1, 4, N, D), (1, 2, N, D), (1, 2, N, D))
    (u,) = _drawn(torch.float32, (1, 2, N))
    out = gs.sparsek_attention(q, k, v, u, k_keep=20, window=30, gate=gate)
    torch.autograd.grad(out.float().square().sum(), [q, k, v, u] if gate else [q, k, v])


def thresholds(N: int = 700) -> None:
    (u,) = _drawn(torch.float32, (3, N))
    found = gs.sparsek_causal(u, 20)
    found = found if isinstance(found, tuple) else (found,)
    torch.autograd.grad(sum(x.square().sum() for x in found if x.requires_grad), u)


def structures() -> dict[str, Call]:
    """Calls of which the device alone knows the numbers."""
    B, N = 2, 300
    ends, ids = partial(_integers, 1, N + 1, B), lambda: _integers(0, 2, B, N).cumsum(1) // 20
    blocks, keys = partial(_integers, -2, 6, B, 2, -(-N // 64), 3), partial(_integers, -2, N + 3, B, 2, N, 20)

    def call(make: Callable[[list[Tensor]], Tensor]) -> Call:
        def run() -> None:
            x = _drawn(torch.bfloat16, (B, 4, N, 64), (B, 2, N, 64), (B, 2, N, 64))
            torch.autograd.grad(make(x).float().square().sum(), x)

        return run

    def lengths(pattern: Pattern) -> Call:
        return call(lambda x: gs.attention(*x, pattern, q_offset=ends() - N, key_lengths=ends()))

    def edges() -> Tensor:
        return torch.tensor([0, 0, 33, 200, N], device=CUDA, dtype=torch.int32)

    return {
        "lengths": lengths(gs.SlidingWindow(50)),
        "steps": lengths(gs.Strided(40, 20)),
        "documents": call(lambda x: gs.attention(*x, gs.DocumentIds(ids()) & gs.Causal())),
        "edges": call(lambda x: gs.attention(*x, gs.DocumentIds.from_cu_seqlens(edges(), N) & gs.Local(40))),
        "blocks": call(lambda x: gs.attention(*x, gs.BlockIndices(blocks(), 64) & gs.Causal())),
        "keys": call(lambda x: gs.attention(*x, gs.Indices(keys()))),
        "packed": call(lambda x: gs.varlen(*(y[0].transpose(0, 1) for y in x), edges(), pattern=gs.Causal())),
        "pages": partial(structure_over_pages, gs.SlidingWindow(100, sinks=4), page=64),
        "pages that are copied": partial(structure_over_pages, gs.Strided(40, 20), page=16),
    }


def one_query(pattern: Pattern, *, K: int = 700, starts: bool = False, **options: Any) -> None:
    """Decoding: the last position of sequences whose lengths the device alone knows, one of them empty."""
    lengths = _integers(1, K + 1, 4)
    lengths[1] = 0
    given = {"q_offset": lengths - 1, "key_lengths": lengths} | ({"key_starts": lengths // 3} if starts else {})
    q, k, v = (x.detach() for x in _drawn(torch.bfloat16, (4, 8, 1, 64), (4, 2, K, 64), (4, 2, K, 64)))
    gs.attention(q, k, v, pattern, **given, **options)


def over_pages(pattern: Pattern, *, page: int, tokens: int = 1, **options: Any) -> None:
    """Decoding over a cache in pages: sequences whose lengths the device alone knows, one of them empty."""
    R, n = 4, -(-700 // page)
    used = _integers(tokens, 701, R)
    used[1] = 0
    table = torch.randperm(R * n, device=CUDA).view(R, n).int()
    edges = torch.arange(R + 1, device=CUDA, dtype=torch.int32) * tokens
    shapes = (R * tokens, 8, 64), (R * n, page, 2, 64), (R * n, page, 2, 64)
    q, k, v = (x.detach() for x in _drawn(torch.bfloat16, *shapes))
    gs.varlen(q, k, v, edges, pattern=pattern, seqused_k=used, block_table=table, **options)


def structure_over_pages(pattern: Pattern, *, page: int) -> None:
    """The structure of a step of prompts and decodes, one sequence of no queries and one of no keys."""
    n = -(-700 // page)
    used = torch.tensor([700, 0, 513, 64], device=CUDA)
    table = torch.randperm(4 * n, device=CUDA).view(4, n).int()
    edges = torch.tensor([0, 600, 601, 601, 641], device=CUDA)
    shapes = (644, 8, 64), (4 * n, page, 2, 64), (4 * n, page, 2, 64)
    q, k, v = (x.detach() for x in _drawn(torch.bfloat16, *shapes))
    given = gs.PackedSequences(edges, pages=gs.Pages(table, used, page), pattern=pattern)
    step = gs.device_layout(q, k, v, given, layout="bshd")
    gs.attention(q, k, v, step, layout="bshd")


def pages_chosen(*, page: int, heads: int, topk: int) -> None:
    """Bounds of a cache as it is written, and the pages that one token of each sequence attends to."""
    R, n = 4, -(-700 // page)
    k = torch.randn(R * n, page, 2, 64, device=CUDA).bfloat16()
    used, table = _integers(1, 701, R), torch.randperm(R * n, device=CUDA).view(R, n)
    bounds = gs.PageBounds.empty(k)
    bounds.update(k, torch.arange(R * n * page - 3, device=CUDA))
    q = torch.randn(R, heads, 64, device=CUDA).bfloat16()
    gs.topk_pages(q, bounds, torch.arange(R + 1, device=CUDA), table, used, page, topk=topk)


def chosen(score: str, **options: Any) -> None:
    q, k = (x.detach() for x in _drawn(torch.bfloat16, (1, 4, 500, 64), (1, 2, 500, 64)))
    gs.topk_blocks(q, k, causal=True, score=score, **options)


def summed(N: int, d: int, radius: float, box: Any, channels: int = 3) -> None:
    """Sums over neighbours, forces, and their gradients."""
    g = torch.Generator(CUDA).manual_seed(0)
    x, mass, values = (torch.rand(*s, device=CUDA, generator=g).requires_grad_() for s in ((N, d), (N,), (N, channels)))
    cells, law = gp.Cells.build(x, radius, box), gp.ShortRangeGravity(radius / 5.5)
    soft = gp.ShortRangeGravity(radius / 5.5, radius / 100)
    for out, of in (
        (gp.radial_sum(cells, values, gp.Gaussian(radius / 3)), (x, values)),
        (gp.radial_sum(cells, mass, gp.Gaussian(radius / 3)), (x,)),
        (gp.radial_force(cells, mass, law), (x, mass)),
        (gp.radial_force(cells, mass, soft), (x,)),
    ):
        torch.autograd.grad(out.square().sum(), of)


def neighbors(N: int, radius: float, D: int, kernel: str, capacity: int | None = None) -> None:
    """Attention between neighbours and its gradients."""
    g = torch.Generator(CUDA).manual_seed(0)
    x = torch.rand(N, 3, device=CUDA, generator=g).requires_grad_()
    q, k, v = _drawn(torch.bfloat16, *[(N, 2, D)] * 3)
    lists = gp.Neighbors.allocate(x, radius, 1.0, capacity)
    out = gp.neighbor_attention(q, k, v, lists, kernel=kernel, bandwidth=None if kernel == "dot" else radius / 3)
    torch.autograd.grad(out.float().square().sum(), [q, k, v])


def _case(N: int, pattern: Callable[[], Pattern], **more: Any) -> Case:
    return square("checked", N, pattern, **{"H": 2, "G": 1, "D": 64} | more)


def _sinks() -> Pattern:
    return gs.SlidingWindow(100, sinks=5)


SMALL = {"tile": (64, 64)}
CAPPED = {"softcap": 5.0, "sink_logits": True}
FAMILIES = {
    "small": Family(
        ("kernels/small",),
        {
            "causal": partial(attended, gs.Causal, N=64, implementation="small"),
            "float32, wide": partial(attended, _sinks, N=40, D=96, dtype=torch.float32, implementation="small"),
        },
    ),
    "hopper forward": Family(
        ("cute", "kernels/hopper/device/forward"),
        {
            "D 64": partial(launched, _case(300, gs.Causal), backward=False),
            "cut": partial(launched, _case(500, _sinks, D=128), split=1, backward=False),
            "64 x 64, lengths": partial(
                launched, _case(130, gs.Causal, B=2, key_lengths=(30, 130)), backward=False, **SMALL
            ),
            "soft cap, sinks": partial(launched, _case(200, gs.Causal, D=128, **CAPPED), backward=False),
            "wide": partial(launched, _case(200, gs.Causal, D=192, E=128), backward=False),
        },
    ),
    "hopper backward": Family(
        ("kernels/hopper/device/backward",),
        {
            "D 128": partial(launched, _case(300, gs.Causal, D=128)),
            "D 64": partial(launched, _case(300, _sinks)),
            "64 x 64": partial(launched, _case(200, _sinks), **SMALL),
            "cut": partial(launched, _case(500, _sinks, D=128), split=1),
            "soft cap, sinks": partial(launched, _case(200, gs.Causal, D=128, **CAPPED)),
        },
    ),
    "hopper dQ by rows": Family(
        ("kernels/hopper/device/backward",),
        {
            "D 64": partial(launched, _case(300, _sinks), deterministic=True),
            "D 128": partial(launched, _case(300, gs.Causal, D=128), deterministic=True, most_kept=0),
            "cut": partial(launched, _case(500, _sinks), deterministic=True, split=1),
        },
    ),
    "hopper wide": Family(
        ("kernels/hopper/device/backward",),
        {
            "dQ by rows": partial(launched, _case(200, gs.Causal, D=192, E=128), most_kept=0),
            "kept dS": partial(launched, _case(300, gs.Causal, D=192, E=128), most_kept=2**30),
            "256": partial(launched, _case(200, _sinks, D=256), most_kept=0),
        },
    ),
    "hopper kept dS": Family(
        ("kernels/hopper/device/backward",),
        {
            "128 x 128": partial(launched, _case(300, gs.Causal, D=128), deterministic=True, most_kept=2**30),
            "64 x 64": partial(launched, _case(200, _sinks, D=96), most_kept=2**30, **SMALL),
            "heads in turn": partial(
                launched, _case(300, _sinks, H=4, G=4, D=128), deterministic=True, most_kept=2**18
            ),
        },
    ),
    "hopper edges": Family(
        ("kernels/hopper/device/backward",),
        {"window": partial(launched, _case(700, lambda: gs.SlidingWindow(150), D=128))},
    ),
    "hopper gather": Family(
        ("kernels/hopper/device/gather",),
        {
            "D 64": partial(launched, _case(200, lambda: _scattered(200, 200)), gather=64),
            "D 128, cut": partial(launched, _case(200, lambda: _scattered(200, 200), D=128), gather=64, split=1),
        },
    ),
    "hopper gather float32": Family(
        ("kernels/hopper/device/gather", "kernels/hopper/device/gather/float32"),
        {
            "D 64": partial(
                launched, _case(200, lambda: _scattered(200, 200)), gather=64, dtype="float32", backward=False
            )
        },
    ),
    "hopper gather of heads": Family(
        ("kernels/hopper/device/gather", "kernels/hopper/schedule"),
        {
            "8 heads": lambda: attended(gs.Indices(_integers(-2, 200, 1, 1, 200, 30)), heads=(8, 1)),
            "64 heads": lambda: attended(gs.Indices(_integers(-2, 70, 1, 1, 70, 30)), N=70, heads=(64, 1), D=128),
        },
    ),
    "hopper rows": Family(
        ("kernels/hopper/device/rows",),
        {
            "D 64": partial(launched, _case(200, lambda: _scattered(200, 200)), gather=1),
            "D 128": partial(launched, _case(130, lambda: _scattered(130, 130), D=128), gather=1),
        },
    ),
    "triton block": Family(
        ("kernels", "kernels/triton", "kernels/triton/block"),
        {
            "sinks, cut": partial(attended, lambda: gs.Longformer(20, (0, 77)), N=700, implementation="triton"),
            "soft cap": partial(attended, gs.Causal, softcap=3.0, implementation="triton"),
            "float32": partial(attended, _sinks, dtype=torch.float32, D=40, implementation="triton"),
            "one query": partial(attended, gs.Causal, N=1, K=2000, backward=False, implementation="triton"),
        },
    ),
    "one query": Family(
        ("kernels/triton/one_query",),
        {
            "causal": partial(one_query, gs.Causal()),
            "window": partial(one_query, gs.SlidingWindow(100)),
            "first keys, soft cap": partial(one_query, gs.Causal(), starts=True, softcap=5.0),
        },
    ),
    "pages by table": Family(
        ("kernels/triton/paged",),
        {
            "causal": partial(over_pages, gs.Causal(), page=16),
            "window and sinks, four tokens": partial(over_pages, gs.SlidingWindow(100, sinks=4), page=64, tokens=4),
            "pages of 1, cut alike": partial(over_pages, gs.Causal(), page=1, batch_invariant=True),
        },
    ),
    "triton gather": Family(
        ("kernels", "kernels/triton", "kernels/triton/gather"),
        {
            f"{rows} rows": partial(
                launched, _case(200, lambda: _scattered(200, 200)), gather=rows, implementation="triton"
            )
            for rows in (1, 16, 64)
        },
    ),
    "triton wide": Family(
        ("kernels/triton/wide",),
        {
            "300, 520": partial(attended, _sinks, N=150, D=300, E=520, implementation="triton"),
            "float32": partial(attended, gs.Causal, N=100, D=260, dtype=torch.float32, implementation="triton"),
        },
    ),
    "entmax lists": Family(
        ("entmax/triton", "entmax/hopper/support"),
        {
            "sharp": partial(entmax, size=4.0),
            "top 8": partial(entmax, top_k=8),
            "top 64": partial(entmax, top_k=64),
            "keys": largest_keys,
        },
    ),
    "entmax tiles": Family(
        ("entmax/triton", "entmax/hopper/long_rows"),
        {
            "flat": partial(entmax, size=0.1),
            "tau alone": partial(entmax, dtype=torch.float16, size=0.5, save="tau"),
            "D 128, every key": partial(entmax, size=0.1, D=128, causal=False),
        },
    ),
    "entmax by Triton": Family(("entmax/triton",), {"float32": partial(entmax, dtype=torch.float32, alpha=1.25)}),
    "SparseK": Family(
        ("sparse_k/triton", "sparse_k/hopper", "sparse_k/thresholds_triton"),
        {
            "D 64": sparsek,
            "D 128, no gate": partial(sparsek, D=128, gate=None),
            "by Triton": partial(sparsek, D=40, gate="kv"),
        },
    ),
    "thresholds": Family(("sparse_k/thresholds_triton",), {"700": thresholds}),
    "structure": Family(("kernels/structure", "kernels/hopper/schedule"), structures()),
    "chosen blocks": Family(
        ("blocks/triton",),
        {
            "mean": partial(chosen, "mean", topk=3),
            "bound, a share": partial(chosen, "bound", top_p=0.8, per="group"),
            "pages": partial(pages_chosen, page=16, heads=16, topk=5),
            "pages of 1": partial(pages_chosen, page=1, heads=2, topk=100),
        },
    ),
    "particles": Family(
        ("particles/kernels/radial/device", "particles/triton"),
        {
            "periodic": partial(summed, 700, 3, 0.2, 1.0),
            "half the box": partial(summed, 300, 3, 0.45, 1.0, 1),
            "mixed": partial(summed, 500, 2, 0.1, (None, 1.0), 5),
            "few": partial(summed, 33, 1, 0.1, None),
        },
    ),
    "neighbors": Family(
        ("particles/kernels/neighbors/device", "particles/kernels/attention"),
        {
            "dot": partial(neighbors, 700, 0.2, 64, "dot"),
            "both": partial(neighbors, 700, 0.2, 64, "dot+gaussian"),
            "far apart": partial(neighbors, 130, 0.3, 128, "dot+gaussian"),
            "cut": partial(neighbors, 300, 0.2, 24, "dot", 8),
            "one": partial(neighbors, 1, 0.2, 64, "dot"),
        },
    ),
}


def run(name: str) -> None:
    """Compute the calls of a family."""
    for what, call in FAMILIES[name].calls.items():
        call()
        torch.cuda.synchronize()
        print(f"{name}: {what}", flush=True)
