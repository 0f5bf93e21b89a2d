"""`prepare`: a pattern laid out for calls of some sizes, as a pytree that enters `jit` as an argument."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gossamer.checks import show
from gossamer.jax import choice, compat
from gossamer.jax.arguments import check_flags, describe, is_array, numbers, shape_of
from gossamer.jax.kernels import recipes
from gossamer.jax.kernels.recipes import Made, Recipe
from gossamer.jax.tiles import Extent, TileLists, Walked, both_directions, both_gathered, regrouped
from gossamer.kernels.contract import Scoring
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.layouts.dense import from_dense
from gossamer.layouts.gather import build_gather
from gossamer.memo import Memo
from gossamer.patterns import CSR, Dense, Pattern
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.plan.arguments import instead
from gossamer.plan.problem import Problem

EMBEDDED = 2**20  # bytes of lists that a program may hold as constants without a warning
TILE = choice.TILE
OTHER_CALLS = "its Prepared was prepared for other calls, and of no pattern"
PATTERN = (
    "None, a Pattern, a Prepared, a BlockLayout of numpy arrays, a boolean array that broadcasts to "
    "(B, H, Q, K), or a jax.experimental.sparse.BCSR matrix (Q, K)"
)

_plans: Memo[Prepared] = Memo()
_on_device: Memo[Prepared] = Memo()


class Label(str):
    """What a Prepared was made from, in words. All are equal: a program is that of any Prepared of the same shapes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return 0


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "columns", "lists"],
         meta_fields=["row_extent", "column_extent", "q_offset", "name", "recipe"])  # fmt: skip
@dataclass(frozen=True)
class Prepared:
    """What `prepare` makes: the tiles that a pattern keeps, as arrays, and all else as configuration.

    A pytree: as an argument of a jitted function its arrays are no constants of the program. It is given to `attention`
    in the place of the pattern.

    Examples:
        >>> q = jnp.ones((1, 300, 2, 16))
        >>> plan = gsj.prepare(gs.SlidingWindow(100), q, q)
        >>> step = jax.jit(lambda plan, q: gsj.attention(q, q, q, plan))
        >>> step(plan, q).shape
        (1, 300, 2, 16)
    """

    rows: TileLists
    columns: TileLists
    row_extent: Extent
    column_extent: Extent
    q_offset: int | None  # of row 0; None where rows are counted from 0
    name: Label
    lists: dict[str, dict[str, Any]] = field(default_factory=dict)  # of kernels, by direction
    recipe: Recipe | None = None  # of kernels: see `jax.kernels`

    @property
    def Q(self) -> int:
        return self.row_extent.rows

    @property
    def K(self) -> int:
        return self.row_extent.columns

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, of which what both directions have counts once; leaves that are no arrays have none."""
        arrays = {id(x): x for x in jax.tree.leaves(self) if hasattr(x, "dtype")}
        return sum(int(x.size) * x.dtype.itemsize for x in arrays.values())

    def __repr__(self) -> str:
        return f"Prepared({self.name}, Q={self.Q}, K={self.K}, {self.nbytes:,} bytes)"


def prepare(
    pattern: Any, query: Any, key: Any, value: Any = None, *, q_offset: int | None = None, scale: float | None = None,
    softcap: float | None = None, key_lengths: bool = False, sink_logits: bool = False, deterministic: bool = False,
) -> Prepared:  # fmt: skip
    """Lay a pattern out for calls with queries and keys of these shapes, for the forward and the backward.

    `attention` does so itself, and keeps what it made. But inside of `jit` the lists become constants of the program,
    which for large ones takes long to compile; a Prepared that is an argument of the jitted function does not.

    Args:
        pattern: what is attended, as `attention` takes it.
        query: (B, T, N, H), (T, N, H) or (N, D), an array or a `jax.ShapeDtypeStruct`: its shape alone is read.
        key: likewise.
        value: likewise; None: as `key`.
        q_offset: position of query row 0, K - Q by default.
        scale: of the calls; softcap and deterministic likewise. Kernels on a GPU read lists that follow from them:
            a call with other terms makes its own, where the Prepared was made of a pattern, or runs in `lax`.
        key_lengths: whether calls have them; sink_logits likewise.

    Raises:
        ValueError: the pattern does not fit, or is an array whose numbers are not known yet, or a term is wrong.

    Examples:
        >>> q = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)
        >>> plan = gsj.prepare(gs.BigBird(64), q, q)
        >>> plan.Q, plan.K
        (4096, 4096)
    """
    check_flags(key_lengths=key_lengths, sink_logits=sink_logits, deterministic=deterministic)
    value = key if value is None else value
    (B, Q, H, D), (_, K, G, _), (*_, E) = shape_of(query, "query"), shape_of(key, "key"), shape_of(value, "value")
    dtype = str(jnp.dtype(query.dtype))
    scale, q_offset, softcap = numbers(scale, q_offset, softcap, Q, K, D, dtype)
    terms = {"key_lengths": key_lengths, "sink_logits": sink_logits, "softcap": softcap is not None}
    terms["q_offset"] = q_offset not in (None, K - Q)
    problem = Problem(
        B, H, G, Q, K, D, E, dtype, jax.default_backend(), deterministic=deterministic,
        score_terms=frozenset(name for name, there in terms.items() if there), softcap=softcap,
    )  # fmt: skip
    plan = plan_of(pattern, Asked(problem, scale, q_offset))
    return plan if compat.is_staged() else jax.tree.map(jnp.asarray, plan)


class Asked(NamedTuple):
    """A call without its arrays."""

    problem: Problem
    scale: float
    q_offset: int | None  # as it was given
    kernels: bool = True  # whether they may compute it
    named: str | None = None  # those that were asked for
    by_rows: bool = False  # whether it walks rows of tiles alone, each whole


class ByKernels(NamedTuple):
    """The kernels that compute a call, or every reason why none do."""

    made: Made | None
    reasons: list[str]


def by_kernels(resolved: Pattern | BlockLayout | Prepared, asked: Asked) -> ByKernels:
    """What kernels do of a call with what its pattern stands for."""
    p, source, offset = asked.problem, None if isinstance(resolved, Prepared) else resolved, asked.q_offset
    if not isinstance(resolved, Pattern) and resolved.q_offset is not None:
        offset = resolved.q_offset
    offset = p.K - p.Q if offset is None else offset
    terms = (p.score_terms - {"q_offset"}) | ({"q_offset"} if offset != p.K - p.Q else frozenset())
    problem = recipes.on_chip(replace(p, score_terms=terms))
    scoring = Scoring(asked.scale, offset, problem.softcap)
    if asked.named not in (None, recipes.implementation_of(p.dtype)):
        return ByKernels(None, recipes.refusals(problem, source, asked.named))
    if isinstance(resolved, Prepared):
        recipe = resolved.recipe
        if recipe is None:
            return ByKernels(None, recipes.refusals(problem, None, asked.named))
        if (recipe.problem, recipe.scoring) == (problem, scoring):
            return ByKernels(Made(recipe, resolved.lists, resolved), [])
        if recipe.pattern is None:
            return ByKernels(None, [OTHER_CALLS, *recipes.refusals(problem, None, asked.named)])
        source = recipe.pattern
    assert source is not None
    reasons = recipes.refusals(problem, source, asked.named)
    return ByKernels(None if reasons else recipes.made_for(problem, scoring, source), reasons)


def why_no_kernels(pattern: Any, asked: Asked) -> list[str]:
    """Every reason why no kernels compute a call."""
    p = asked.problem
    return by_kernels(resolved_pattern(pattern, p.B, p.H, p.Q, p.K), asked).reasons


def plan_of(pattern: Any, asked: Asked) -> Prepared:
    """The prepared form of what `attention` is given as its pattern, of numpy arrays but where it is a Prepared itself.

    Raises:
        ValueError: it is none of what is accepted, or does not fit.
    """
    p = asked.problem
    resolved = resolved_pattern(pattern, p.B, p.H, p.Q, p.K)
    q_offset = asked.q_offset
    if isinstance(resolved, Pattern):
        resolved.check(p.Q, p.K, p.H, p.B, placed=q_offset is not None)
        if not (p.Q and p.K):  # of no pairs there is no layout
            return _without_tiles(resolved, p, q_offset)
    elif isinstance(resolved, Prepared):
        resolved = _fitting(resolved, p.B, p.H, p.Q, p.K, q_offset)
    made = by_kernels(resolved, asked).made if asked.kernels else None
    gathers = made is not None and made.recipe.gathers
    if isinstance(resolved, Prepared) and resolved.recipe is not None and resolved.recipe.gathers and not gathers:
        # It has no tiles; of these calls they are read.
        recipe = resolved.recipe
        assert recipe.pattern is not None
        resolved, q_offset = recipe.pattern, recipe.scoring.q_offset
    if gathers and not isinstance(resolved, Prepared):
        assert isinstance(resolved, Pattern)
        plan = _without_tiles(resolved, p, q_offset)
    else:
        together = 0
        if made is None and isinstance(resolved, Pattern) and not asked.by_rows:
            together = choice.gathered_rows(resolved, p, p.K - p.Q if q_offset is None else q_offset)
        plan = lists_of(resolved, p.B, p.H, p.Q, p.K, q_offset, together)
    if made is None:
        return replace(plan, lists={}, recipe=None) if plan.recipe else plan
    return replace(plan, lists={d: dict(x) for d, x in made.lists.items()}, recipe=made.recipe)


def _without_tiles(pattern: Pattern, p: Problem, q_offset: int | None) -> Prepared:
    """The prepared form of a pattern without its tiles: of no pairs, or for kernels alone."""
    offset = p.K - p.Q if q_offset is None else q_offset
    return without_tiles(show(pattern), p.Q, p.K, pattern.lead, offset if pattern.reads_positions else None)


def without_tiles(name: str, Q: int, K: int, lead: tuple[int, int], q_offset: int | None) -> Prepared:
    """A Prepared that has none."""
    rows, columns = (Extent(*sizes, TILE, TILE, lead, ()) for sizes in ((Q, K), (K, Q)))
    return Prepared(no_lists(), no_lists(), rows, columns, q_offset, Label(name))


def no_lists() -> TileLists:
    """The lists of no tiles."""
    none = np.zeros(0, np.int32)
    bounds, pool = np.zeros((0, 0), np.int32), np.zeros((0, TILE, TILE // 32), np.uint32)
    return TileLists(none, none, none, none, bounds, bounds, pool, (), none)


def lists_of(
    resolved: Pattern | BlockLayout | Prepared, B: int, H: int, Q: int, K: int, q_offset: int | None, together: int = 0
) -> Prepared:
    """The prepared form with the tiles, or the gathered columns, that `blocked` reads.

    Args:
        together: rows of a pattern that gather columns together; 0: tiles.

    Raises:
        ValueError: it is none of what is accepted, or does not fit.
    """
    if isinstance(resolved, Prepared):
        return _fitting(resolved, B, H, Q, K, q_offset)
    if isinstance(resolved, BlockLayout):
        if q_offset not in (None, resolved.q_offset):
            raise ValueError(f"q_offset must be left out with a mask or a layout; got {q_offset}")
        both = both_directions(resolved)
        return _fitting(_walked(*both, resolved.q_offset, f"{type(resolved).__name__}"), B, H, Q, K, None)
    offset = K - Q if q_offset is None else q_offset
    resolved.check(Q, K, H, B, placed=q_offset is not None)
    key = (resolved, Q, K, offset, together)

    def make() -> Prepared:
        if not together:
            both = both_directions(build(resolved, Q, K, block_q=TILE, block_kv=TILE, q_offset=offset))
        elif isinstance(resolved, (choice.PlacedCSR, ReorderedCSR)):
            layout = build_gather(resolved.inner, Q, K, block_q=together, q_offset=offset)
            both = both_gathered(layout, resolved.order)
        else:
            both = both_gathered(build_gather(resolved, Q, K, block_q=together, q_offset=offset), None)
        return _walked(*both, offset if resolved.reads_positions else None, show(resolved))

    return _plans.get_or_make(key, make, lambda plan: plan.nbytes)


def for_call(pattern: Any, asked: Asked) -> Prepared:
    """The prepared form that a call reads: on the device, or as constants of the program that is written here."""
    plan = plan_of(pattern, asked)
    if isinstance(pattern, Prepared) and plan.recipe in (None, pattern.recipe):
        return plan
    if asked.by_rows:
        rows = regrouped(Walked(plan.row_extent, plan.rows))
        plan = replace(plan, rows=rows.lists, row_extent=rows.extent, columns=no_lists())
    if compat.is_staged():
        if plan.nbytes > EMBEDDED:
            warnings.warn(
                f"the lists of {plan.name}, {plan.nbytes / 2**20:.1f} MiB, become constants of a compiled function: "
                f"make a Prepared by gossamer.jax.prepare(pattern, query, key) outside, and give it as an argument",
                stacklevel=3,
            )
        return plan
    if not isinstance(pattern, Pattern) and pattern is not None:
        return plan
    p = asked.problem
    key = (pattern, p.Q, p.K, plan.q_offset, asked.q_offset, plan.recipe, asked.by_rows)
    return _on_device.get_or_make(key, lambda: jax.tree.map(jnp.asarray, plan), lambda plan: plan.nbytes)


def _walked(rows: Walked, columns: Walked, q_offset: Any, name: str) -> Prepared:
    return Prepared(rows.lists, columns.lists, rows.extent, columns.extent, q_offset, Label(name))


def resolved_pattern(pattern: Any, B: int, H: int, Q: int, K: int) -> Pattern | BlockLayout | Prepared:
    """What the `pattern` argument stands for."""
    if pattern is None:
        return Dense()
    if isinstance(pattern, (Pattern, Prepared)):
        return pattern
    if isinstance(pattern, BlockLayout):
        if pattern.device is not None:
            raise ValueError("pattern, a BlockLayout, must be of numpy arrays: pattern.layout(Q, K, ...) makes one")
        return pattern
    if is_array(pattern) and hasattr(pattern, "__array__"):
        return _of_mask(pattern, B, H, Q, K)
    if type(pattern).__name__ == "BCSR" and hasattr(pattern, "indptr"):
        return _of_bcsr(pattern)
    raise ValueError(f"pattern must be {PATTERN}; got {describe(pattern)}{_instead(pattern)}")


def _instead(given: Any) -> str:
    """What to give instead of something that is no pattern, for the end of a message."""
    if known := instead(given):
        return known
    if type(given).__module__.startswith("jax.experimental.pallas"):
        return "; from_splash(mask) takes a mask of splash attention"
    package, _, room = type(given).__module__.partition(".")
    if package == "gossamer" and room.startswith("torch."):
        return (
            "; structure of tensors is for torch: from JAX Document(ids) takes ids that are known, and prepare_blocks "
            "lists of blocks that are arrays"
        )
    return "; Predicate(fn) takes a function fn(i, j)" if callable(given) else ""


def _of_mask(mask: Any, B: int, H: int, Q: int, K: int) -> BlockLayout | Pattern:
    """The layout of a boolean array that broadcasts to (B, H, Q, K); of one without pairs any pattern."""
    wanted = f"pattern, an array, must be boolean and broadcast to (B, H, Q, K) = {(B, H, Q, K)}"
    if compat.is_abstract(mask):
        raise ValueError(
            f"{wanted} with numbers that are known here; this one is computed in a program: make a Prepared of it by "
            f"gossamer.jax.prepare(mask, query, key) outside"
        )
    mask = np.asarray(mask)
    fits = 0 < mask.ndim <= 4 and all(
        n in (1, want) for n, want in zip(reversed(mask.shape), (K, Q, H, B), strict=False)
    )
    if mask.dtype != bool or not fits:
        raise ValueError(f"{wanted}; got {describe(mask)}")
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    (Bl, Hl), edge = mask.shape[:2], TILE
    if not (Q and K):
        return Dense()
    return from_dense(np.broadcast_to(mask, (Bl, Hl, Q, K)), block_q=edge, block_kv=edge)


def _of_bcsr(matrix: Any) -> Pattern:
    """The pattern of the stored entries of a sparse matrix of JAX."""
    if matrix.n_batch or matrix.n_dense or len(matrix.shape) != 2:
        raise ValueError(f"pattern, a BCSR matrix, must have two dimensions; got shape {matrix.shape}")
    if compat.is_abstract(matrix.indptr):
        raise ValueError(
            "pattern, a BCSR matrix, must be known here: make a Prepared of it by gossamer.jax.prepare outside"
        )
    if 0 in matrix.shape:
        return Dense()
    indptr = np.asarray(matrix.indptr)
    indices = np.asarray(matrix.indices)[: indptr.max()]
    (Q, K), rows = matrix.shape, np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    stored = indices < K  # padding points past the end
    return CSR._from_pairs(rows[stored], indices[stored], Q, K)


def _fitting(plan: Prepared, B: int, H: int, Q: int, K: int, q_offset: int | None) -> Prepared:
    """The prepared form, if a call may use it."""
    if (plan.Q, plan.K) != (Q, K):
        raise ValueError(f"pattern, {plan!r}, is of Q={plan.Q}, K={plan.K}; the inputs have Q={Q}, K={K}")
    Bl, Hl = plan.row_extent.lead
    if Bl not in (1, B) or Hl not in (1, H):
        raise ValueError(f"pattern, {plan!r}, is of {Bl} batch elements and {Hl} heads; the inputs have {B} and {H}")
    if q_offset is not None and q_offset != plan.q_offset:
        held = "counts rows from 0" if plan.q_offset is None else f"was made with q_offset={plan.q_offset}"
        raise ValueError(f"q_offset must be left out with a Prepared, which {held}; got {q_offset}")
    return plan


def offset_of(plan: Prepared, given: int | None, distances: bool) -> int:
    """The position of query row 0 in a call.

    Args:
        distances: ALiBi reads them.

    Raises:
        ValueError: one is given that nothing would read.
    """
    if plan.q_offset is not None:
        return plan.q_offset
    if given is not None and given != plan.K - plan.Q and not distances:
        raise ValueError(
            f"q_offset must be left out with {plan.name}, whose rows are counted from 0, not by their positions; "
            f"got {given}"
        )
    return plan.K - plan.Q if given is None else given
