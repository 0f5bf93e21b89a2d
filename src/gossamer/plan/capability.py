"""The limits of an implementation as data, and the reasons for a refusal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from gossamer.plan.problem import SCORE_TERMS, Problem

DEVICES = ("cpu", "cuda")
DTYPES = ("float16", "bfloat16", "float32", "float64")


class GatherChoice(NamedTuple):
    """A group of rows whose gather layout an implementation can read."""

    block_q: int
    dtypes: frozenset[str]
    max_head_dim: int | None = None  # of D and of E; None: any
    min_sm: int | None = None  # for CUDA devices
    devices: frozenset[str] = frozenset({"cuda"})
    reuse: float = 0.0  # pairs that a gathered column serves, below which it was not seen to win
    spread: bool = False  # few long lists are cut for all processors (`layouts.gather.item_limit`); else in two
    backward: bool = True  # else it computes the forward alone

    def reads(self, problem: Problem) -> bool:
        """Whether its kernels fit the problem's types, head sizes, device and directions."""
        p = problem
        device = p.device in self.devices and (p.device == "cpu" or (p.sm or 0) >= (self.min_sm or 0))
        sized = self.max_head_dim is None or max(p.D, p.E) <= self.max_head_dim
        directions = self.backward or not p.backward
        return device and p.dtype in self.dtypes and sized and directions


@dataclass(frozen=True)
class Capability:
    """The limits of an implementation. Dispatch, errors, the support table and test selection all read this."""

    devices: frozenset[str]
    dtypes: frozenset[str]
    max_head_dim: int | None = None  # of D and of E; None: any
    max_float32_head_dim: int | None = None  # in float32; None: as in the other types
    min_sm: int | None = None  # for CUDA devices
    max_sm: int | None = None
    score_terms: frozenset[str] = frozenset()  # of SCORE_TERMS, what it computes
    max_softcap: float | None = None  # over which its tanh is too coarse; None: any
    backward: bool = True
    deterministic: frozenset[str] = frozenset({"cpu", "cuda"})  # devices on which a deterministic run exists
    tiles: frozenset[tuple[int, int]] | None = None  # layout tiles that it walks; None: any
    max_head_dim_of: tuple[tuple[tuple[int, int], int], ...] = ()  # (tile, the largest D and E with it)
    max_pairs: tuple[int, int] | None = None  # B * H * Q * K of a forward, and of a backward; None: any
    max_walk: tuple[int, int] | None = None  # keys of a forward; keys and queries of a backward; None: any
    max_grid: int | None = None  # batch elements, and heads, of a backward, and of what it gathers alone; None: any
    alignment: int | None = None  # of the inputs' addresses and strides, in bytes; others are copied first
    float32_results: bool = True  # writes into float32 tensors for 16-bit inputs as well
    # Devices on which a bound forward with key_lengths takes fewer keys than its problem has, and reads no others.
    grows: frozenset[str] = frozenset()
    gathers: tuple[GatherChoice, ...] = ()  # gather layouts that it reads besides block layouts
    # Rows that gather together, of several queries or heads, by lists that only a device knows; dK and dV are added.
    unions: tuple[GatherChoice, ...] = ()
    slower: frozenset[str] = frozenset()  # score terms with which a CPU computes tile by tile, not by fused attention

    def __post_init__(self) -> None:
        known = {
            "devices": DEVICES,
            "deterministic": DEVICES,
            "grows": DEVICES,
            "dtypes": DTYPES,
            "score_terms": SCORE_TERMS,
            "slower": SCORE_TERMS,
        }
        for name, names in known.items():
            if strange := getattr(self, name) - set(names):
                raise ValueError(f"{name} of a capability must be among {', '.join(names)}; got {_names(strange)}")


def reasons(problem: Problem, capability: Capability) -> list[str]:
    """Every reason why `capability` does not cover `problem`; empty when it does."""
    p, c = problem, capability
    refusals = []
    if p.device not in c.devices:
        refusals.append(f"needs a {_names(c.devices)} tensor, got {p.device}")
    elif p.device == "cuda" and c.min_sm is not None and (p.sm is None or p.sm < c.min_sm):
        refusals.append(f"needs compute capability {_sm(c.min_sm)} or later, got {_sm(p.sm)}")
    elif p.device == "cuda" and c.max_sm is not None and (p.sm is None or p.sm > c.max_sm):
        refusals.append(f"needs compute capability {_sm(c.max_sm)} or earlier, got {_sm(p.sm)}")
    if p.dtype not in c.dtypes:
        refusals.append(f"dtype {p.dtype} not in {{{_names(c.dtypes)}}}")
    most, where = c.max_head_dim, ""
    if p.dtype == "float32" and c.max_float32_head_dim is not None:
        most, where = c.max_float32_head_dim, " in float32"
    for name, size in (("D", p.D), ("E", p.E)):
        if most is not None and size > most:
            refusals.append(f"head size {name}={size} is over {most}{where}")
    if c.max_pairs is not None and (pairs := c.max_pairs[p.backward]) < p.B * p.H * p.Q * p.K:
        refusals.append(f"computes every pair: B x H x Q x K = {p.B * p.H * p.Q * p.K:,} is over {pairs:,}")
    if c.max_walk is not None:
        most, longest = c.max_walk[p.backward], max(p.K, p.Q * p.backward)
        if longest > most:
            refusals.append(f"walks every row from end to end: {longest:,} positions are over {most:,}")
    if p.backward and c.max_grid is not None and max(p.B, p.H) > c.max_grid:
        refusals.append(f"has a backward for up to {c.max_grid:,} batch elements and heads, got {p.B:,} and {p.H:,}")
    if p.tile is not None and c.tiles == frozenset():
        refusals.append("walks no layout")
    elif p.tile is not None and c.tiles is not None and p.tile not in c.tiles:
        walked = ", ".join(f"{q} x {kv}" for q, kv in sorted(c.tiles))
        block_q, block_kv = p.tile
        refusals.append(f"walks layout tiles of {walked}, got {block_q} x {block_kv}")
    if p.gather is not None:
        refusals += _list_refusals(p, c)
    for (block_q, block_kv), most in c.max_head_dim_of:
        if p.tile == (block_q, block_kv) and max(p.D, p.E) > most:
            refusals.append(f"walks layout tiles of {block_q} x {block_kv} for head sizes up to {most}")
    missing = p.score_terms - c.score_terms
    if missing:
        refusals.append(f"does not compute {_names(missing)}")
    if p.softcap is not None and c.max_softcap is not None and p.softcap > c.max_softcap:
        refusals.append(f"has a tanh for a softcap up to {c.max_softcap:g}, got {p.softcap:g}")
    if p.backward and not c.backward:
        refusals.append("has no backward")
    if p.deterministic and p.device in c.devices and p.device not in c.deterministic:
        refusals.append(f"has no deterministic mode on {p.device}")
    return refusals


def _list_refusals(p: Problem, c: Capability) -> list[str]:
    """The reasons for which a capability does not cover lists that only a device knows."""
    rows, heads = p.gather, f" of {p.gather_heads} heads" * (p.gather_heads > 1)
    if rows == p.gather_heads == 1:
        able = any(choice.block_q == 1 and choice.reads(p) for choice in c.gathers)
    else:
        able = any(choice.reads(p) for choice in c.unions)
        if able and p.backward and p.deterministic:
            return ["adds dK and dV of groups of queries in memory, in any order: deterministic are single queries"]
    return [] if able else [f"gathers no listed keys for groups of {rows} of these queries{heads}"]


def gathers_alone(problem: Problem, capability: Capability) -> bool:
    """Whether an implementation computes a problem over gathered columns, whose types its tiles do not have."""
    if problem.dtype in capability.dtypes or problem.tile is not None:
        return False
    if capability.max_grid is not None and max(problem.B, problem.H) > capability.max_grid:
        return False
    dtypes = frozenset({problem.dtype} if any(c.reads(problem) for c in capability.gathers) else ())
    return not reasons(problem, replace(capability, dtypes=dtypes))


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _sm(sm: int | None) -> str:
    return "none" if sm is None else f"{sm // 10}.{sm % 10}"


class Candidate(Protocol):
    """The part of an implementation that a plan asks; `kernels.contract.Implementation` computes as well.

    `layout` says which form it reads: "dense" (a boolean tensor broadcastable to (B, H, Q, K), the oracle alone),
    "packed_mask" (a bit for each pair, (Bl, Hl, Q, 4 ceil(K / 128)) int32, or None for every pair) or "block"
    (a BlockLayout of tensors on the inputs' device, with `columns` present for the backward). One whose
    capability lists `gathers` reads a GatherLayout in its place.
    """

    name: str
    capability: Capability
    layout: Literal["dense", "packed_mask", "block"]

    def unavailable(self) -> list[str]:
        """The reasons for which it cannot run on this machine (a failed import, no compiler); empty when it can."""

    def tile(self, problem: Problem) -> tuple[int, int]:
        """(block_q, block_kv) of the layout it wants."""

    def tile_choices(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        """Other tiles, for patterns that leave much of `tile` empty; often none."""
