"""Which calls kernels compute, and their launches: planned as torch's are, from the same limits and measured costs.

Calls in 16 bits are computed by the kernels for Hopper, those in float32 by kernels in Triton. A recipe is a call as
data, for arrays of some sizes; its lists are numpy's until they are placed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from gossamer.cute.row_items import LISTS
from gossamer.jax.kernels import targets
from gossamer.jax.kernels.targets import HOPPER, TRITON
from gossamer.kernels.contract import Implementation, Scoring
from gossamer.kernels.hopper import ALONE
from gossamer.kernels.hopper.device.gather.configurations import ROWS
from gossamer.kernels.hopper.device.rows.configurations import RowsConfig
from gossamer.kernels.launch import EDGE, Builder, Direction, Kernel, Launch, Operand, Prepared, with_own
from gossamer.kernels.parts import PartitionedCall, Selection
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.layouts.gather import GatherLayout, build_gather
from gossamer.layouts.items import BEGIN, END
from gossamer.memo import Memo
from gossamer.patterns import Pattern
from gossamer.plan.capability import Candidate, Capability, reasons
from gossamer.plan.plan import Plan, choose
from gossamer.plan.problem import Problem
from gossamer.plan.table import load

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Arrays = Mapping[str, Any]  # of a launch's lists, by name
Source = Pattern | BlockLayout

GATHERED = "_indices"  # how arrays of columns are called in launches for Hopper
UNKNOWN = "reads lists whose numbers are known when a program is written"

_recipes: Memo[Made] = Memo()
_layouts: Memo[Any] = Memo()
_plans: Memo[Plan] = Memo()


def on_chip(problem: Problem) -> Problem:
    """The static facts of a call as a plan for the GPU wants them."""
    found = targets.chip()
    sm, processors = (None, 1) if found is None else found
    return replace(problem, device="cuda", sm=sm, processors=processors, backward=False)


def implementation_of(dtype: str) -> str:
    """The name of the implementation whose kernels compute calls of a type."""
    return TRITON if dtype == "float32" else HOPPER


def refusals(problem: Problem, source: Source | None, named: str | None = None) -> list[str]:
    """Every reason why kernels do not compute a call; empty when they do.

    Args:
        problem: as `on_chip` gives it.
        source: what says which pairs are kept; None: arrays whose numbers are not known here.
        named: the implementation that was asked for; None: that of the type.
    """
    if targets.chip() is None:
        return ["jax finds no CUDA device"]
    if isinstance(source, BlockLayout):
        problem = replace(problem, tile=(source.block_q, source.block_kv))
    problem = replace(problem, backward=True)
    if (named or implementation_of(problem.dtype)) == HOPPER:
        found = reasons(problem, ALONE.capability) or targets.missing()
    else:
        found = targets.missing_for_triton() or reasons(problem, _of_triton())
    return found if source is not None else [*found, UNKNOWN]


def _of_triton() -> Capability:
    """What kernels in Triton compute from JAX."""
    every = _implementation(TRITON).capability
    terms = every.score_terms - {"alibi_slopes", "alibi_distance"}
    return replace(every, dtypes=frozenset({"float32"}), score_terms=terms)


def _implementation(name: str) -> Any:
    """An implementation that plans may choose, and whose launches are run."""
    return ALONE if name == HOPPER else load(name)


class Made(NamedTuple):
    """A recipe, and its lists by direction."""

    recipe: Recipe
    lists: Mapping[str, Arrays]
    source: Any  # what they were made of, which lives as long: it is known by its identity


class Directed(NamedTuple):
    """One direction of a call: its launch, and how the arrays of the caller and the results lie."""

    launch: Launch
    operands: Mapping[str, Operand]


class Work(NamedTuple):
    """What kernels do."""

    kernels: tuple[str, ...]  # of both directions
    tile: tuple[int, int]
    tiles: int  # that are visited; of gathered keys, steps of as many columns
    all_tiles: int
    bits_tiles: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """The launches of a call. Equal ones launch the same kernels with the same numbers."""

    problem: Problem
    scoring: Scoring
    directed: Mapping[Direction, Directed] = field(repr=False)
    pattern: Pattern | None = field(repr=False)  # from which those of other sizes are made
    gathers: bool  # over lists of columns: a layout of tiles would be large and nearly empty
    digest: str
    layout: Any = field(repr=False)  # of the forward in Triton, of numpy arrays

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.problem, self.scoring, self.digest, self.pattern

    def work(self, lists: Mapping[str, Arrays]) -> Work:
        """What its kernels do, of one head and one forward.

        Args:
            lists: its own, by direction.
        """
        steps = [s.kernel for d in DIRECTIONS for s in self.directed[d].launch.steps if s.kernel.implementation != EDGE]
        kernels, p = tuple(kernel.name for kernel in steps), self.problem
        if isinstance(self.layout, GatherLayout):
            rows = self.layout.block_q
            listed = int(self.layout.rows.counts.astype(np.int64).sum()) // math.prod(self.layout.lead)
            return Work(kernels, (rows, 1), listed, -(-p.Q // rows) * p.K, 0)
        if self.layout is not None:
            walk = self.layout.rows
            of_kind = {
                kind: int(x.counts.astype(np.int64).sum()) // math.prod(walk.lead) for kind, x in walk.lists.items()
            }
            every = walk.tiles * -(-p.K // walk.block_columns)
            return Work(kernels, (walk.block_rows, walk.block_columns), sum(of_kind.values()), every, of_kind["bits"])
        config, *_ = steps[0].key
        items = [np.asarray(x) for name, x in lists["forward"].items() if name.endswith("rows_items")]
        if isinstance(config, RowsConfig):
            Bl, Hl = (1, 1) if self.pattern is None else self.pattern.lead
            listed = sum(int((x[:, END] - x[:, BEGIN]).sum()) for x in items) // (Bl * (p.H if Hl > 1 else 1))
            return Work(kernels, (1, 1), listed, p.Q * p.K, 0)
        block_q, block_kv = (ROWS, ROWS) if self.gathers else (config.block_q, config.block_kv)
        counts = {kind: sum(int(x[:, word].sum()) for x in items) for kind, (_, word) in LISTS.items()}
        heads, every = p.B * p.H, -(-p.Q // block_q) * -(-p.K // block_kv)
        return Work(kernels, (block_q, block_kv), sum(counts.values()) // heads, every, counts["bits"] // heads)

    def at(self, B: int, H: int, G: int) -> Made | None:
        """The recipe for so many batch elements and heads; None where what is kept is known for others alone."""
        if self.pattern is None:
            return None
        Bl, Hl = self.pattern.lead
        if Bl not in (1, B) or Hl not in (1, H):
            return None
        return made_for(replace(self.problem, B=B, H=H, G=G), self.scoring, self.pattern)


def made_for(problem: Problem, scoring: Scoring, source: Source) -> Made:
    """The launches of a call and their lists, as numpy arrays; kept for calls that come again."""
    key = (problem, scoring, source if isinstance(source, Pattern) else id(source))

    def make() -> Made:
        described = {d: _described(problem, scoring, source, d) for d in DIRECTIONS}
        directed = {d: Directed(x.prepared.launch, x.operands) for d, x in described.items()}
        lists: dict[str, Arrays] = {
            d: {name: np.asarray(y) for name, y in x.prepared.layout.items()} for d, x in described.items()
        }
        digest = hashlib.sha256(repr([(d, x.launch) for d, x in directed.items()]).encode()).hexdigest()
        layout = described["forward"].layout
        gathers = isinstance(layout, GatherLayout)
        if layout is None:  # in parts, of which some may gather
            gathers = any(name.endswith(GATHERED) for name in lists["forward"])
        pattern = source if isinstance(source, Pattern) else None
        of_triton = layout if implementation_of(problem.dtype) == TRITON else None
        return Made(Recipe(problem, scoring, directed, pattern, gathers, digest, of_triton), lists, source)

    return _recipes.get_or_make(key, make, lambda made: nbytes(made.lists))


def nbytes(lists: Mapping[str, Arrays]) -> int:
    """Bytes of lists; those that both directions have count once."""
    every = {id(x): int(x.nbytes) for arrays in lists.values() for x in arrays.values()}
    return sum(every.values())


class _Described(NamedTuple):
    """One direction of a call."""

    prepared: Prepared
    operands: Mapping[str, Operand]  # how its arrays lie
    layout: BlockLayout | GatherLayout | None  # of numpy arrays; None where it is computed in parts


def _described(problem: Problem, scoring: Scoring, source: Source, direction: Direction) -> _Described:
    """One direction of a call."""
    given, results = _operands(problem, direction)
    operands = given | results
    problem = replace(problem, backward=direction == "backward")
    name, edge = implementation_of(problem.dtype), JaxEdge()
    selected = Selection(_implementation(name), source)
    if isinstance(source, Pattern):
        plan = edge.plan(problem, direction == "backward")
        # Parts are views that begin anywhere in an array, of which Triton's launches from JAX know none.
        if name == HOPPER and plan.partition(source.handle, scoring.q_offset):
            call = PartitionedCall(plan, edge, source, scoring, operands)
            prepared = call.forward() if direction == "forward" else call.backward()
            return _Described(with_own(prepared, results), operands, None)
        selected = edge.select(plan, source, scoring.q_offset)
    prepared = selected.implementation.prepare(problem, selected.layout, direction, scoring, operands)
    return _Described(with_own(prepared, results), operands, selected.layout)


def _operands(p: Problem, direction: Direction) -> tuple[dict[str, Operand], dict[str, Operand]]:
    """What is given and made: kernels see (B, heads, positions, size), memory is (B, positions, heads, size)."""

    def of(heads: int, positions: int, size: int | None, dtype: str = p.dtype) -> Operand:
        if size is None:
            return Operand(dtype, (p.B, heads, positions), (positions * heads, 1, heads))
        strides = (positions * heads * size, size, heads * size, 1)
        return Operand(dtype, (p.B, heads, positions, size), strides)

    q, k, v = of(p.H, p.Q, p.D), of(p.G, p.K, p.D), of(p.G, p.K, p.E)
    out, lse = of(p.H, p.Q, p.E), of(p.H, p.Q, None, "float32")
    vectors = {"key_lengths": Operand("int32", (p.B,), (1,)), "sink_logits": Operand("float32", (p.H,), (1,))}
    if direction == "backward":
        # The gradient of sinks is computed outside: it is the same on all devices.
        vectors.pop("sink_logits")
        given = {"dout": out, "dlse": lse, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        made = {"dq": q, "dk": k, "dv": v}
    else:
        given, made = {"q": q, "k": k, "v": v}, {"out": out, "lse": lse}
    return given | {name: x for name, x in vectors.items() if name in p.score_terms}, made


class JaxEdge:
    """What the parts of a call (`kernels.parts`) ask of JAX: plans and layouts for kernels that it calls."""

    def plan(self, problem: Problem, backward: bool) -> Plan:
        problem = replace(problem, backward=backward)
        one = _implementation(implementation_of(problem.dtype))
        return _plans.get_or_make(problem, lambda: Plan(problem, (cast(Candidate, one),), ()))

    def select(self, plan: Plan, pattern: Pattern, q_offset: int) -> Selection:
        chosen, p = choose(plan, pattern, q_offset), plan.problem
        size = (pattern, p.Q, p.K, q_offset, chosen.block_q, chosen.block_kv)
        options = {"block_q": chosen.block_q, "q_offset": q_offset}
        make: Callable[[], Any] = partial(build_gather, pattern, p.Q, p.K, **options)
        if chosen.form == "block":
            make = partial(build, pattern, p.Q, p.K, block_kv=chosen.block_kv, **options)
        layout = _layouts.get_or_make(size, make, lambda x: 2 * sum(int(a.nbytes) for a in x.rows.arrays()))
        return Selection(cast(Implementation, chosen.implementation), layout)

    def combine(self, b: Builder, out: str, lse: str, part_out: str, part_lse: str) -> None:
        b.step(Kernel(EDGE, "combine"), part_out, part_lse, out, lse)
