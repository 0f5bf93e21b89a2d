"""The family `blocks`: random calls of `topk_blocks`, whose choice is checked, attended and bounded by `kept_mass`.

A choice is right when it holds the blocks that are always kept, and of the others those of the highest scores, each
within rounding; of `top_p` the least number that reaches it.
"""

from __future__ import annotations

import random
from typing import Any

import soak_oracle as oracle
import soak_structure
import torch
from soak_oracle import Terms
from soak_outcomes import Outcome
from soak_structure import Call, Profile, Told, joined, kept_by, rule
from torch import Tensor

import gossamer as gs

PROFILE = Profile(
    ("mean", "mean", "bound", "bound"), (1, 40, 64, 65, 128, 130, 200, 256, 300, 450), 150_000,
    ("topk of 0", "top_p of 0", "top_p of 2", "blocks of 32", "score of text", "per of text", "k of another head size"),
)  # fmt: skip


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    return soak_structure.draw("blocks", PROFILE, seed, device)


def run(c: Call) -> Outcome:
    """Compute a call and compare it with the definition."""
    return soak_structure.run(c, _told)


def topk_blocks(*args: Any, **kwargs: Any) -> Any:
    """The function that is tested; tests of this script replace it by a wrong one."""
    return gs.topk_blocks(*args, **kwargs)


class Wrong(Exception):
    """A choice that is wrong."""


def _told(c: Call, r: random.Random, four: list[Tensor], inputs: list[Tensor]) -> Told:
    B, H, _, Q, K, D, _ = c.shape
    r = random.Random(f"blocks {c.seed}")  # the same options in each turn
    block, causal, per = r.choice([64, 64, 128]), r.random() < 0.7, r.choice(["head", "group"])
    local, first = r.choice([0, 1, 1, 2]), r.choice([0, 1, 1, 2])
    C = -(-K // block)
    straddles = (K - Q) % block != 0
    always_most = min(C, first + (local + straddles + (0 if causal else local - 1) if local else 0))
    topk: int | None = max(1, always_most) + r.choice([0, 1, 2, 100])
    top_p = r.choice([None, None, 0.3, 0.9, 1.0, 1e-6])
    if top_p is not None and r.random() < 0.4:
        topk = None
    options: dict[str, Any] = {
        "causal": causal, "block_size": block, "topk": topk, "top_p": top_p, "score": c.kind, "local": local,
        "first": first, "per": per, "scale": c.scale, "layout": "bshd" if c.bshd and c.dims > 2 else "bhnd",
    }  # fmt: skip
    options |= {
        "topk of 0": {"topk": 0}, "top_p of 0": {"top_p": 0.0}, "top_p of 2": {"top_p": 2.0},
        "blocks of 32": {"block_size": 32}, "score of text": {"score": "largest"}, "per of text": {"per": "row"},
    }.get(c.mistake or "", {})  # fmt: skip
    q, k, _ = inputs
    if c.mistake == "k of another head size":
        k = torch.cat([k, k], -1)
    chosen = topk_blocks(q.detach(), k.detach(), **options)
    text = f"{options}, indices {tuple(chosen.indices.shape)}"
    scale = D**-0.5 if c.scale is None else c.scale
    kept = _checked(c, chosen, four, block, causal, per == "group", local, first, topk, top_p, scale)
    pairs = kept.repeat_interleave(block, 2)[:, :, :Q].repeat_interleave(block, 3)[..., :K]
    j, i = torch.arange(K, device=c.device), torch.arange(Q, device=c.device)[:, None] + (K - Q)
    visible = (j <= i) if causal else torch.ones((Q, K), dtype=torch.bool, device=c.device)
    counts = (pairs & visible).expand(B, H, Q, K)
    if c.kind == "bound":
        _mass(c, chosen, inputs, four, counts, visible, scale, options["layout"])
    spec = rule(r, True) if r.random() < 0.4 else ("Dense",)
    counts = counts & (kept_by(spec, Q, K, [K - Q], c.device) > 0)
    return Told(joined(r, chosen, spec, Q, K), {}, counts.long(), f"{text}, {spec}", four)


def _scores(c: Call, q: Tensor, k: Tensor, block: int, group: bool, scale: float) -> Tensor:
    """(B, heads, T, C) float64: of blocks, from the definition, block by block."""
    B, H, G, Q, K, _, _ = c.shape
    C, T = -(-K // block), -(-Q // block)
    found = torch.zeros((B, H, T, C), dtype=torch.float64, device=c.device)
    for t in range(T):
        rows = q[:, :, t * block : (t + 1) * block]
        for n in range(C):
            keys = k[:, :, n * block : (n + 1) * block].repeat_interleave(H // G, 1)
            if c.kind == "mean":
                found[:, :, t, n] = scale * (rows.mean(2) * keys.mean(2)).sum(-1)
            else:
                least, most = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
                each = torch.maximum(scale * rows * least, scale * rows * most).sum(-1)
                found[:, :, t, n] = each.amax(2)
    if group:
        found = found.unflatten(1, (G, -1))
        found = found.mean(2) if c.kind == "mean" else found.amax(2)
    return found


def _checked(
    c: Call, chosen: Any, four: list[Tensor], block: int, causal: bool, group: bool, local: int, first: int,
    topk: int | None, top_p: float | None, scale: float,
) -> Tensor:  # fmt: skip
    """(B, heads, T, C) bool, heads H: the chosen blocks. Wrong where the choice is."""
    B, H, G, Q, K, *_ = c.shape
    C, T, heads = -(-K // block), -(-Q // block), G if group else H
    n = C if topk is None else min(topk, C)
    index = chosen.indices
    if index.shape != (B, heads, T, n) or index.dtype != torch.int32:
        raise Wrong(f"indices are {tuple(index.shape)} of {index.dtype}")
    q, k = (x.detach().double() for x in four[:2])
    score = _scores(c, q, k, block, group, scale)
    size = abs(scale) * (q.abs().amax((1, 2)).sum(-1) * k.abs().amax((1, 2)).sum(-1))[:, None, None]
    error = 16 * torch.finfo(torch.float32).eps * (size + 1e-30)
    row = torch.arange(T, device=c.device)[:, None] * block
    at, begin = torch.arange(C, device=c.device), row + K - Q
    end = (row + block).clamp(max=Q) - 1 + K - Q
    visible = (at * block <= end) if causal else torch.ones((T, C), dtype=torch.bool, device=c.device)
    low, high = begin.clamp(min=0) // block, torch.div(end, block, rounding_mode="floor")
    near = (at > low - local) & (at < high + (1 if causal else local)) & (end >= 0) & (local > 0)
    always = ((at < first) | near) & visible
    used = index >= 0
    if (used[..., 1:] & ~used[..., :-1]).any() or (index >= C).any() or (index < -1).any():
        raise Wrong("unused entries are not the last ones, or no block is meant")
    if n == 0:
        return torch.zeros((B, H, T, C), dtype=torch.bool, device=c.device)
    times = torch.zeros((B, heads, T, C + 1), device=c.device)
    times = times.scatter_add(3, torch.where(used, index, C).long(), torch.ones_like(index, dtype=times.dtype))
    kept = times[..., :C] > 0
    if (times[..., :C] > 1).any() or (kept & ~visible).any() or (always & ~kept).any():
        raise Wrong("a block is listed twice, is not visible, or is always kept and is not there")
    count, most = kept.sum(-1), visible.sum(-1).clamp(max=n)
    if top_p is None and (count != most).any():
        raise Wrong(f"{count.tolist()} blocks are kept, not {most.tolist()}")
    left = torch.where(visible & ~kept, score, -torch.inf).amax(-1)
    taken = torch.where(kept & ~always, score, torch.inf).amin(-1)
    if (left > taken + error).any():
        raise Wrong(f"a block that is left out has a higher score by {float((left - taken).max()):.3g}")
    of_list = torch.where(used, score.gather(-1, index.clamp(min=0).long()), -torch.inf)
    of_list = torch.where(always.expand(kept.shape).gather(-1, index.clamp(min=0).long()) & used, torch.inf, of_list)
    if (of_list[..., 1:] > of_list[..., :-1] + error[..., None]).any():
        raise Wrong("blocks are not in the order of their scores")
    share = torch.where(visible, score, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    covered = (share * kept).sum(-1)
    wide = 4 * error + 1e-5
    if ((chosen.covered - covered).abs() > wide * 2).any() or chosen.covered.dtype != torch.float32:
        raise Wrong(f"covered is {chosen.covered.tolist()}, not {covered.tolist()}")
    if top_p is not None:
        if ((covered < top_p - wide) & (count < most)).any():
            raise Wrong("fewer blocks are kept than reach top_p")
        last = torch.where(kept & ~always, share, torch.inf).amin(-1)
        more = (last < torch.inf) & (top_p < 1) & (covered - last > top_p + wide)
        if more.any():
            raise Wrong("more blocks are kept than reach top_p")
    return kept.repeat_interleave(H // heads, 1)


def _mass(
    c: Call, chosen: Any, inputs: list[Tensor], four: list[Tensor], counts: Tensor, visible: Tensor, scale: float,
    layout: str,
) -> None:  # fmt: skip
    """Wrong where `kept_mass` is over the probability that is kept."""
    B, H, _, Q, K, _, _ = c.shape
    with torch.no_grad():
        _, lse = gs.attention(*inputs, chosen, scale=c.scale, return_lse=True, layout=layout)
        mass = chosen.kept_mass(lse).reshape(B, H, Q).double()
    exact = [x.detach().double() for x in four]
    every = visible.long().expand(B, H, Q, K)
    terms = Terms(scale, K - Q)
    with torch.no_grad():
        (_, of_kept), (_, of_all) = oracle.exact(*exact, counts.long(), terms), oracle.exact(*exact, every, terms)
    true = torch.where(of_all > -torch.inf, (of_kept - of_all).exp(), 1.0)
    if not ((mass >= 0) & (mass <= true * (1 + 1e-12))).all():
        raise Wrong(f"kept_mass is over what is kept by {float((mass - true).max()):.3g}")
    nothing = (every == counts).all(-1)
    if not (mass[nothing] == 1).all():
        raise Wrong("kept_mass is not 1 where nothing is dropped")
