"""The family `pages`: random calls over caches in pages, in which all that no query sees is NaN."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import soak_oracle as oracle
import soak_structure
import torch
from soak_attention import compared
from soak_oracle import Spec, Terms
from soak_outcomes import Outcome, begun, outcome_of
from soak_structure import Call, Profile, integers, made
from torch import Tensor

import gossamer as gs
from gossamer.torch import paged, paged_kernel

PROFILE = Profile(
    ("varlen", "shared"), (1, 2, 17, 64, 65, 128, 200, 330), 60_000,
    ("a page that does not exist", "lengths over the room", "edges that decrease", "a pattern without positions"),
)  # fmt: skip
SIZES = (1, 2, 8, 16, 24, 32, 64, 64, 128, 256)
WILD = (-1, 0, -(2**31), 2**31 - 1)  # entries of a table that nobody sees; page 0 is NaN
FORMS = ("", "phsd", "halves", "padded", "beside")


class Cache(NamedTuple):
    """Sequences, and where their keys lie."""

    of_q: list[int]
    of_k: list[int]
    size: int
    P: int
    table: Tensor
    slot: list[int]  # of each key


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    c = soak_structure.draw("pages", PROFILE, seed, device)
    _, *shape = c.shape
    mode = "no_grad" if c.sinks is not None or c.mode == "plain" else c.mode
    unread = device == "cuda" and c.mistake in ("a page that does not exist", "lengths over the room")
    mistake = None if unread or (c.mistake == "edges that decrease" and device == "cuda") else c.mistake
    return c._replace(
        shape=(1, *shape), dims=4, wanted="", mode=mode, compiled=False, mistake=mistake, poisoned=True, bshd=True
    )  # type: ignore[arg-type]


def run(c: Call) -> Outcome:
    """Compute a call and compare it with the definition."""
    return outcome_of(begun("pages", c), lambda found: _run(c, found), lambda error: soak_structure.refusal(c, error))


def rule(r: random.Random) -> Spec:
    """A pattern that goes by positions; keys between those of a step count as seen."""
    one: list[Spec] = [
        ("Dense",), ("Causal",), ("Causal",), ("Local", 1 + r.randrange(90)),
        ("SlidingWindow", r.choice([0, 5, 63, r.randrange(200)]), r.choice([0, 0, 2, None]), 0),
        ("SlidingWindow", r.randrange(90), 0, r.choice([1, 4])), ("Dilated", r.randrange(9), 0, 1 + r.randrange(5)),
        ("Strided", 1 + r.randrange(9), r.randrange(9)),
    ]  # fmt: skip
    if r.random() < 0.2:
        return (r.choice(["And", "Or"]), r.choice(one), r.choice(one))
    return r.choice(one)


def cache_of(r: random.Random, Q: int, K: int) -> Cache:
    """Sequences of Q tokens and K keys, some of neither, over pages in any order."""
    n = r.choice([1, 2, 3, 6])
    of_q, of_k = ([0, *sorted(r.randrange(most + 1) for _ in range(n - 1)), most] for most in (Q, K))
    of_q[-1] = r.choice([Q, Q, r.randrange(of_q[-2], Q + 1)])  # the last tokens may be of no sequence
    size = r.choice(SIZES)
    lengths = [end - first for first, end in pairwise(of_k)]
    width = max(-(-length // size) for length in lengths) + r.choice([0, 1, 4])
    pages = [-(-length // size) for length in lengths]
    P = 1 + sum(pages) + r.choice([0, 1, 3])
    free = r.sample(range(1, P), sum(pages))
    table, slot = [], []
    for number, length in zip(pages, lengths, strict=True):
        listed = [free.pop() for _ in range(number)]
        table.append([*listed, *(r.choice(WILD) for _ in range(width - number))])
        slot += [listed[j // size] * size + j % size for j in range(length)]
    made = torch.tensor(table, dtype=r.choice([torch.int32, torch.int64])).reshape(n, width)
    return Cache(of_q, of_k, size, P, made, slot)


def pool_of(x: Tensor, cache: Cache, seen: Tensor, form: str) -> Tensor:
    """Pages of the keys (1, G, K, size), NaN where no query sees one."""
    _, G, _, width = x.shape
    pool = x.new_full((cache.P * cache.size, G, width), torch.nan)
    pool[torch.tensor(cache.slot, dtype=torch.long, device=x.device)] = torch.where(
        seen[:, None, None], x[0].transpose(0, 1), torch.nan
    )
    pool = pool.view(cache.P, cache.size, G, width)
    if form == "phsd":
        return pool.transpose(1, 2).contiguous()
    if form == "halves":
        return torch.cat([pool, torch.full_like(pool, torch.nan)], -1)[..., :width]
    if form == "padded":
        return torch.cat([pool, torch.full_like(pool, torch.nan)], 1)[:, : cache.size]
    return torch.stack([pool, torch.full_like(pool, torch.nan)], 1)[:, 0] if form == "beside" else pool


def _run(c: Call, outcome: Outcome) -> Outcome:
    _, H, G, Q, K, D, E = c.shape
    generator, r = torch.Generator().manual_seed(c.seed), random.Random(f"pages {c.seed} told")
    sinks = None if c.sinks is None else soak_structure.vector(c.sinks, c.device)
    cache, spec, form = cache_of(r, Q, K), rule(r), r.choice(FORMS)
    in_place = r.random() < 0.5
    counts = torch.zeros((Q, K), dtype=torch.bool, device=c.device)
    seen = torch.zeros(K, dtype=torch.bool, device=c.device)
    steps = "Dilated" in str(spec) or "Strided" in str(spec)
    for s in range(len(cache.of_q) - 1):
        (a, b), (first, end) = cache.of_q[s : s + 2], cache.of_k[s : s + 2]
        if a < b and first < end:
            part = oracle.kept(spec, 1, 1, b - a, end - first, end - first - (b - a), c.device)[0, 0] > 0
            counts[a:b, first:end] = part
            seen[first:end] = True if steps else part.any(0)
    if spec[0] in ("And", "Or") or spec[0] == "Local":  # bounds of a reach may hold keys that no row keeps
        seen[:] = True
    lengths = [end - first for first, end in pairwise(cache.of_k)]
    table, of_q, pattern = cache.table.to(c.device), cache.of_q, made(spec, Q, K)
    if not counts.any():  # no query sees a page, and no wrong one is found
        c = c._replace(mistake=None if c.mistake == "a page that does not exist" else c.mistake)
    if c.mistake == "a page that does not exist":
        table = torch.full_like(table, cache.P)
        pattern = gs.Dense()
    elif c.mistake == "lengths over the room":
        lengths[0] = table.shape[1] * cache.size + 1
    elif c.mistake == "edges that decrease":
        of_q = [Q, *of_q[1:-1], 0]
    elif c.mistake is not None:
        pattern = gs.Longformer(4, (1,))
    used, cu = integers(r, lengths, c.device), integers(r, of_q, c.device)
    by_table = r.random() < 0.7  # where a kernel reads the table, on a GPU
    able = c.dtype != torch.float64 and max(D, E) <= 256 and spec[0] not in ("And", "Or") and c.mistake is None
    invariant = by_table and able and c.device == "cuda" and r.random() < 0.3
    text = f"{cache._replace(table=None, slot=[])}, {spec}, {form}, in place: {in_place}, by table: {by_table}"  # type: ignore[arg-type]
    text += f", invariant: {invariant}"
    outcome = outcome._replace(description=f"{c.description()}\n    {text}")
    shared: Any = None
    kept, page_layout = counts[None, None].expand(1, H, Q, K).long(), "phsd" if form == "phsd" else "pshd"
    before, few, more = set(paged.IN_PLACE), paged_kernel.FEW, paged_kernel.MORE
    if not by_table:
        paged_kernel.FEW = paged_kernel.MORE = 0
    if in_place:
        paged.IN_PLACE.add("cpu")
    else:
        paged.IN_PLACE.clear()
    try:
        for turn in range(c.turns):
            shapes = (1, H, Q, D), (1, G, K, D), (1, G, K, E)
            four = [torch.randn(s, generator=generator, dtype=torch.float64).to(c.dtype).to(c.device) for s in shapes]
            q = torch.where(counts.any(1)[:, None, None], four[0][0].transpose(0, 1), torch.nan)
            k, v = (pool_of(x, cache, seen, form) for x in four[1:])
            options: dict[str, Any] = {"scale": c.scale, "softcap": c.softcap, "sink_logits": sinks, "return_lse": True}
            with torch.inference_mode() if c.mode == "inference_mode" else torch.no_grad():
                if c.kind == "varlen":
                    out, lse = gs.varlen(
                        q, k, v, cu, pattern=pattern, seqused_k=used, block_table=table, page_layout=page_layout,
                        batch_invariant=invariant, **options,
                    )  # fmt: skip
                else:
                    if shared is None:
                        told: Any = {"page_layout": page_layout, "batch_invariant": invariant}
                        pages = gs.Pages(table, used, cache.size, **told)
                        sequences = gs.PackedSequences(cu, pages=pages, pattern=pattern)
                        shared = gs.device_layout(q, k, v, sequences, softcap=c.softcap, layout="bshd")
                    out, lse = gs.attention(q, k, v, shared, layout="bshd", **options)
            if c.mistake is not None:
                return outcome._replace(wrong=f"not refused: {c.mistake}")
            terms = Terms(float(D**-0.5 if c.scale is None else c.scale), K - Q, c.softcap, None, sinks, None)
            results = out.transpose(0, 1)[None], lse[None]
            told = c._replace(return_lse=True)
            leaves = [x.transpose(1, 2) for x in four]
            wrong = compared(told, four, leaves, sinks, kept, terms, results)  # type: ignore[arg-type]
            if wrong is not None:
                return outcome._replace(wrong=f"call {turn + 1}: {wrong}")
    finally:
        paged.IN_PLACE.clear()
        paged.IN_PLACE.update(before)
        paged_kernel.FEW, paged_kernel.MORE = few, more
    return outcome
