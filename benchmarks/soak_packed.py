"""The family `packed`: random calls over packed documents and sequences, starts, lengths and offsets on the device."""

from __future__ import annotations

import random
from typing import Any

import soak_oracle as oracle
import soak_structure
import torch
from soak_outcomes import Outcome
from soak_structure import Call, Profile, Told, integers, joined, kept_by, made, rule
from torch import Tensor

import gossamer as gs

PROFILE = Profile(
    ("documents", "documents", "edges", "sequences", "sequences", "varlen", "varlen", "bounds", "bounds"),
    (1, 2, 7, 16, 31, 33, 64, 65, 100, 129, 200), 60_000,
    (
        "ids of floats", "ids of fewer positions", "edges of two dimensions", "a pattern without positions",
        "edges out of range", "edges that decrease",
    ),
)  # fmt: skip


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    c = soak_structure.draw("packed", PROFILE, seed, device)
    # Only edges on the host are read, and refused; those on a GPU are clamped.
    unread = device == "cuda" or c.kind in ("documents", "bounds")
    none = unread and c.mistake in ("edges out of range", "edges that decrease")
    none |= c.kind == "documents" and c.mistake == "edges of two dimensions"  # ids may have two
    return c._replace(mistake=None) if none else c


def run(c: Call) -> Outcome:
    """Compute a call and compare it with the definition."""
    tell = {"documents": _documents, "edges": _documents, "bounds": _bounds}.get(c.kind, _sequences)
    return soak_structure.run(c, tell)


def _documents(c: Call, r: random.Random, four: list[Tensor], _: list[Tensor]) -> Told:
    B, H, _, Q, K, _, _ = c.shape
    offset, options = K - Q, dict[str, Any]()
    if r.random() < 0.2:
        offset = options["q_offset"] = r.choice([0, 3, -2, K, r.randrange(-K, 2 * K)])
    i = torch.arange(Q) + offset
    inside = (i >= 0) & (i < K)
    if c.kind == "documents":
        rows = r.choice([1, B])
        runs = [_runs(r, K) for _ in range(rows)]
        number = torch.tensor([[n for n, size in enumerate(one) for _ in range(size)] for one in runs])
        # Ids of neighbours differ; an id that returns begins another document.
        labels = r.choice([[0, 1], [5, -7, 100], list(range(100)), [3]])
        ids = torch.tensor([[labels[n % len(labels)] for n in one] for one in number.tolist()])
        if len(labels) == 1:
            number = torch.zeros_like(number)
        fits = [torch.int8, torch.int16, torch.int32, torch.int64, *[torch.uint8] * (min(labels) >= 0)]
        ids = ids.to(r.choice(fits)).to(c.device)
        ids = ids[0] if rows == 1 and r.random() < 0.5 else ids
        if c.mistake == "ids of floats":
            ids = ids.float()
        elif c.mistake == "ids of fewer positions":
            ids = ids[..., :-1]  # more are right where there is an offset
        structure = gs.DocumentIds(ids)
        text = f"ids {ids.tolist()}"
    else:
        host = on_host(c, r)
        edges = _mistaken(c, edges_of(r, K, c.device == "cuda" and not host), K)
        tensor = _given(c, r, edges, host)
        if c.mistake == "edges of two dimensions":
            tensor = torch.as_tensor(tensor)[None]
        elif c.mistake == "ids of floats":
            tensor = torch.as_tensor(tensor).float()
        structure = gs.DocumentIds.from_cu_seqlens(tensor, K - (c.mistake == "ids of fewer positions"))
        highest, clean = 0, []
        for edge in edges:  # one that is less than one before it counts as that
            highest = max(highest, min(edge, K))
            clean.append(highest)
        position = torch.arange(K)
        which = torch.searchsorted(torch.tensor(clean), position, right=True) - 1
        number = torch.where((which >= 0) & (which < len(clean) - 1), which, -1 - position)[None]
        text = f"edges {edges}"
    mine = number.expand(B, K)
    at = mine[:, i.clamp(0, K - 1)]
    same = (at[:, :, None] == mine[:, None]) & inside[:, None]
    if c.kind == "edges":
        same = same & (mine >= 0)[:, None]
    spec: Any = ("Longformer", 4, (1,), 1) if c.mistake == "a pattern without positions" else rule(r, False)
    kept = same[:, None].to(c.device) & (kept_by(spec, Q, K, [offset], c.device) > 0)
    pattern = joined(r, structure, spec, Q, K)
    kept = _within(c, r, kept, options)
    return Told(pattern, options, kept.expand(B, H, Q, K).long(), f"{text}, {spec}, {options}", four)


def _mistaken(c: Call, edges: list[int], N: int) -> list[int]:
    """Edges with the mistake of a call, if it is one of edges."""
    if c.mistake == "edges out of range":
        return [*edges, N + 1]
    return [*edges, edges[-1], edges[-1] - 1] if c.mistake == "edges that decrease" else edges


def edges_of(r: random.Random, K: int, wild: bool) -> list[int]:
    """Edges of documents, ascending; some `wild` ones are out of range, or decrease.

    Those that the host has are read, and refused if they do; those on a GPU are clamped.
    """
    edges = sorted(r.randrange(-2 * wild, K + 1 + 2 * wild) for _ in range(r.choice([1, 2, 4, 9])))
    if wild and r.random() < 0.3:
        edges[r.randrange(len(edges))] = r.choice([0, K, -5, K + 9])
    return edges


def on_host(c: Call, r: random.Random) -> bool:
    """Whether edges are given in a list or an array, as outside of compiled functions they may be."""
    return not c.compiled and r.random() >= 0.75 and c.mistake != "edges of two dimensions"


def _given(c: Call, r: random.Random, edges: list[int], host: bool) -> Any:
    """Edges as a user gives them: a tensor on the device, or what the host has."""
    x = integers(r, edges, c.device)
    if not host:
        return x
    return edges if r.random() < 0.5 else x.cpu().numpy()


def _runs(r: random.Random, n: int) -> list[int]:
    found = []
    while sum(found) < n:
        found.append(min(n - sum(found), r.choice([1, 2, 9, 40, 1 + r.randrange(n)])))
    return found


def _within(c: Call, r: random.Random, kept: Tensor, options: dict[str, Any], starts: bool = False) -> Tensor:
    """kept without the keys outside of lengths and starts, which become options."""
    B, K = c.shape[0], c.shape[4]
    j = torch.arange(K, device=c.device)
    if r.random() < 0.3:
        lengths = [r.choice([0, 1, K // 2, K - 1, K, K + 3, -2]) for _ in range(B)]
        given: Any = integers(r, lengths, c.device)
        options["key_lengths"] = given.tolist() if r.random() < 0.2 and not c.compiled else given
        kept = kept & (j < torch.tensor(lengths, device=c.device).clamp(0, K)[:, None, None, None])
    if starts or r.random() < 0.2:
        begins = [r.choice([0, 1, K // 2, K, K + 2, -2]) for _ in range(B)]
        options["key_starts"] = integers(r, begins, c.device)
        kept = kept & (j >= torch.tensor(begins, device=c.device).clamp(0, K)[:, None, None, None])
    return kept


def _bounds(c: Call, r: random.Random, four: list[Tensor], _: list[Tensor]) -> Told:
    """Offsets of each sequence, starts and lengths."""
    B, H, _, Q, K, _, _ = c.shape
    spec: Any = rule(r, False)
    if c.mistake is not None:
        spec = ("Longformer", 4, (0,), 1)
    options: dict[str, Any] = {}
    offsets = [K - Q] * B
    each = r.random() < 0.6
    if each:
        offsets = [r.choice([0, K - Q, 5, -3, r.randrange(-K, 2 * K)]) for _ in range(B)]
        options["q_offset"] = integers(r, offsets, c.device)
    kept = _within(c, r, kept_by(spec, Q, K, offsets, c.device) > 0, options, starts=not each)
    kept = kept.expand(B, H, Q, K)
    return Told(made(spec, Q, K), options, kept.long(), f"{spec}, {options}", four)


def _sequences(c: Call, r: random.Random, four: list[Tensor], _: list[Tensor]) -> Told:
    _, H, _, Q, K, _, _ = c.shape
    n = r.choice([1, 1, 2, 3, 6])
    of_q = sorted(r.randrange(Q + 1) for _ in range(n + 1))
    of_k = sorted(r.randrange(K + 1) for _ in range(n + 1))
    if r.random() < 0.7:
        of_q[0], of_k[0] = 0, 0
    if r.random() < 0.7:
        of_q[-1], of_k[-1] = Q, K
    same = Q == K and r.random() < 0.4
    if same:
        of_k = of_q
    used = [r.choice([0, 1, 5, K, -1]) for _ in range(n)] if r.random() < 0.35 else None
    spec: Any = r.choice([
        ("Dense",), ("Causal",), ("Causal",), ("Local", 1 + r.randrange(9)),
        ("SlidingWindow", r.randrange(20), r.choice([0, 2, None]), 0), ("SlidingWindow", r.randrange(9), 0, 2),
        ("Or", ("Local", 5), ("SlidingWindow", 3, 0, 0)),
    ])  # fmt: skip
    kept = torch.zeros((Q, K), dtype=torch.bool, device=c.device)
    for s in range(n):
        (a, b), (first, end) = of_q[s : s + 2], of_k[s : s + 2]
        length = end - first if used is None else min(end - first, max(0, used[s]))
        if a < b and length:
            part = oracle.kept(spec, 1, 1, b - a, length, length - (b - a), c.device)[0, 0] > 0
            kept[a:b, first : first + length] |= part
    pattern: Any = made(spec, Q, K)
    if c.mistake == "a pattern without positions":
        pattern = gs.Longformer(4, (1,))
    if c.mistake in ("edges out of range", "edges that decrease"):
        of_q = [*of_q, of_q[-1], of_q[-1]][: 2 + len(_mistaken(c, of_k, K)) - 2]
        of_k = _mistaken(c, of_k, K)
        used = None
    cu_q, cu_k = (_given(c, r, edges, on_host(c, r)) for edges in (of_q, of_k))
    seqused = None if used is None else integers(r, used, c.device)
    if c.mistake == "ids of floats":
        cu_q = torch.as_tensor(cu_q).float()
    elif c.mistake == "ids of fewer positions":
        cu_k = integers(r, [*of_k, of_k[-1]], c.device)
    elif c.mistake == "edges of two dimensions":
        cu_q = cu_q[None]
    text = f"{of_q}, {of_k}, {used}, {spec}"
    counts = kept.expand(1, H, Q, K).long()
    none = spec == ("Dense",) and r.random() < 0.5 and c.mistake is None
    if c.kind == "varlen":
        options = {"cu_seq_q": cu_q, "cu_seq_k": cu_k, "seqused_k": seqused, "pattern": None if none else pattern}
        if same and r.random() < 0.5 and c.mistake is None:
            options["cu_seq_k"] = None
        return Told(None, options, counts, text, four)
    packed = gs.PackedSequences(cu_q, cu_k, seqused_k=seqused, pattern=None if none else pattern)
    return Told(packed, {}, counts, text, four)
