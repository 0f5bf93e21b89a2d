"""The operator of a call under every transformation: `custom_vjp(custom_vmap(custom_partitioning(implementation)))`.

The gradient is a rule outside of all; a batched axis is folded into B; batch elements and heads may lie on several
devices, each of which computes its own. `custom_partitioning` has no rule of batching, so that it is innermost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from gossamer.jax import blocked, compat
from gossamer.jax.arguments import is_empty
from gossamer.jax.blocked import Gradients
from gossamer.jax.kernels import call, targets
from gossamer.jax.kernels.recipes import Recipe
from gossamer.jax.once import once
from gossamer.jax.tiles import TileLists
from gossamer.jax.tiling import Config, Numbers, Vectors
from gossamer.kernels.launch import Direction
from gossamer.plan.problem import Unsupported

logger = logging.getLogger("gossamer")

FORWARD_MODE = (
    "attention has no forward mode and no second derivative (jvp, jacfwd, hessian, grad of grad) where its gradient is "
    'a rule of its own: attention(..., implementation="blocked") is plain lax, which has both'
)
OTHER_SIZES = "its kernels have lists for other sizes, which were made of no pattern"
MOST_OPERATORS = 1024
LISTS = (TileLists, Numbers, dict)  # what no axis of batch elements is folded into

Operator = Callable[..., tuple[Array, Array]]
Lists = dict[str, dict[str, Array]]  # by direction and name
Present = tuple[int, ...]  # dimensions of each of the vectors, 0 of one that a call has not


@lru_cache(MOST_OPERATORS)
def operator(config: Config, present: Present, recipe: Recipe | None = None) -> Operator:
    """(out, lse) of (rows, columns, numbers, lists, q, k, v, vectors), with a gradient of its own.

    Args:
        present: which of the vectors a call has, by their dimensions.
        recipe: of kernels that compute it on a GPU; the lists are theirs, by direction.
    """
    forward = _directed("forward", config, present, recipe)
    forward_once = once(forward, FORWARD_MODE)
    backward_once = once(_directed("backward", config, present, recipe), FORWARD_MODE)

    @jax.custom_vjp
    def attend(
        rows: TileLists, columns: TileLists, numbers: Numbers, lists: Lists, q: Array, k: Array, v: Array,
        vectors: Vectors,
    ) -> tuple[Array, Array]:  # fmt: skip
        out, lse = forward(rows, numbers, _of(lists, "forward"), q, k, v, vectors)
        return out, lse

    def with_residuals(*arguments: Any) -> Any:
        rows, columns, numbers, lists, q, k, v, vectors = arguments
        out, lse = forward_once(rows, numbers, _of(lists, "forward"), q, k, v, vectors)
        return (out, lse), (rows, columns, numbers, lists, q, k, v, vectors, out, lse)

    def gradients(saved: Any, cotangents: Any) -> Any:
        rows, columns, numbers, lists, q, k, v, vectors, out, lse = saved
        dout, dlse = cotangents
        dq, dk, dv = backward_once(
            rows, columns, numbers, _of(lists, "backward"), q, k, v, out, lse, dout, dlse, vectors
        )
        slopes = vectors.alibi_slopes
        of_vectors = Vectors(
            alibi_slopes=None if slopes is None else jnp.zeros_like(slopes)
        )  # see `arguments.constant`
        if vectors.sink_logits is not None:
            # The sink is a key with value 0, so that dS = P * (0 - delta).
            sinks, terms = vectors.sink_logits, blocked.row_terms(out, lse, dout, dlse)
            dsinks = -(jnp.exp(sinks - terms.lse) * terms.delta).sum((0, 1)).astype(sinks.dtype)
            of_vectors = of_vectors._replace(sink_logits=compat.as_varying_as(dsinks, sinks))
        dq, dk, dv = (compat.as_varying_as(dx, x) for dx, x in ((dq, q), (dk, k), (dv, v)))
        return None, None, None, None, dq, dk, dv, of_vectors

    attend.defvjp(with_residuals, gradients)
    return attend


def forward_of(config: Config, present: Present, recipe: Recipe | None = None) -> Callable[..., Any]:
    """(out, lse) of (rows, numbers, the forward's lists, q, k, v, vectors), without a gradient: see `operator`."""
    return _directed("forward", config, present, recipe)


@lru_cache(2 * MOST_OPERATORS)
def _directed(direction: Direction, config: Config, present: Present, recipe: Recipe | None) -> Callable[..., Any]:
    """One direction, without a gradient."""
    function = (_forward if direction == "forward" else _backward)(config, recipe)

    def folded(given: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """What computes arrays into which an axis is folded, and the lists among them that it reads."""
        (at,) = [at for at, x in enumerate(given) if isinstance(x, dict)]
        q, k = given[at + 1], given[at + 2]
        made = None if recipe is None or is_empty(q, k) else recipe.at(q.shape[0], q.shape[2], k.shape[2])
        if made is None:
            return wrapped, given
        lists = {name: jnp.asarray(x) for name, x in made.lists[direction].items()}
        return _directed(direction, config, present, made.recipe), [*given[:at], lists, *given[at + 1 :]]

    wrapped = _batched(_partitioned(function, config, present), folded)
    return jax.jit(wrapped)


def _of(lists: Lists, direction: Direction) -> dict[str, Array]:
    """The lists of one direction."""
    return lists.get(direction, {})


def _forward(config: Config, recipe: Recipe | None) -> Callable[..., Any]:
    def by_lax(
        rows: TileLists, numbers: Numbers, lists: Any, q: Array, k: Array, v: Array, vectors: Vectors
    ) -> tuple[Array, Array]:
        out, lse = blocked.forward(config, rows, numbers, q, k, v, vectors)
        return out, lse

    def attention_forward(
        rows: TileLists, numbers: Numbers, lists: dict[str, Array], q: Array, k: Array, v: Array, vectors: Vectors
    ) -> tuple[Array, Array]:
        mine = _local(recipe, "forward", lists, q, k)
        if mine is None:
            return by_lax(rows, numbers, lists, q, k, v, vectors)

        def by_kernels(
            rows: TileLists, numbers: Numbers, lists: Any, q: Array, k: Array, v: Array, vectors: Vectors
        ) -> tuple[Array, Array]:
            return call.forward(mine.recipe, lists, q, k, v, vectors)

        return _by_platform(mine.recipe, by_kernels, by_lax, rows, numbers, mine.lists, q, k, v, vectors)

    return attention_forward


def _backward(config: Config, recipe: Recipe | None) -> Callable[..., Any]:
    def by_lax(
        rows: TileLists, columns: TileLists, numbers: Numbers, lists: Any, *arrays: Any
    ) -> tuple[Array, Array, Array]:
        q, k, v, out, lse, dout, dlse, vectors = arrays
        terms = blocked.row_terms(out, lse, dout, dlse)
        dq, dk, dv = blocked.backward(config, rows, columns, numbers, q, k, v, terms.lse, dout, terms.delta, vectors)
        return dq, dk, dv

    def attention_backward(
        rows: TileLists, columns: TileLists, numbers: Numbers, lists: dict[str, Array], *arrays: Any
    ) -> tuple[Array, Array, Array]:
        q, k, *_ = arrays
        mine = _local(recipe, "backward", lists, q, k)
        if mine is None:
            return by_lax(rows, columns, numbers, lists, *arrays)

        def by_kernels(
            rows: TileLists, columns: TileLists, numbers: Numbers, lists: Any, *arrays: Any
        ) -> tuple[Array, Array, Array]:
            return call.backward(mine.recipe, lists, *arrays)

        return _by_platform(mine.recipe, by_kernels, by_lax, rows, columns, numbers, mine.lists, *arrays)

    return attention_backward


class _Local(NamedTuple):
    """The kernels of the arrays that are here: a shard, or copies of a batched axis."""

    recipe: Recipe
    lists: dict[str, Array]  # of one direction


def _local(
    recipe: Recipe | None, direction: Direction, lists: dict[str, Array], q: Array, k: Array
) -> _Local | None:  # fmt: skip
    """What computes arrays of these sizes; None where no kernels do."""
    if recipe is None or is_empty(q, k):
        return None
    (B, _, H, _), (_, _, G, _) = q.shape, k.shape
    p = recipe.problem
    if (B, H, G) == (p.B, p.H, p.G):
        return _Local(recipe, lists)
    made = recipe.at(B, H, G)
    if made is None and recipe.gathers:
        raise Unsupported(f"attention of {B} batch elements and {H} heads: {OTHER_SIZES}")
    if made is None:
        logger.info(f"attention of {B} batch elements and {H} heads runs by blocked, in lax: {OTHER_SIZES}")
        return None
    return _Local(made.recipe, {name: jnp.asarray(x) for name, x in made.lists[direction].items()})


def _by_platform(
    recipe: Recipe, by_kernels: Callable[..., Any], by_lax: Callable[..., Any], *arguments: Any
) -> Any:  # fmt: skip
    """By kernels where a program runs on a GPU, else by lax; by kernels alone where the tiles of lax are not made."""
    branches = {targets.driver.platform: by_kernels}
    if recipe.gathers:
        return lax.platform_dependent(*arguments, **branches)
    return lax.platform_dependent(*arguments, default=by_lax, **branches)


def _batched(function: Callable[..., Any], of_folded: Callable[..., Any]) -> Callable[..., Any]:
    """With a rule of `vmap`: the axis joins the batch elements, each of whose lists its copies share."""
    wrapped = custom_vmap(function)

    @wrapped.def_vmap
    def rule(axis_size: int, in_batched: list[Any], *arguments: Any) -> tuple[Any, Any]:
        *tensors, vectors = arguments
        *of_tensors, batched = in_batched
        of_lists = [b for x, b in zip(arguments, in_batched, strict=True) if isinstance(x, LISTS)]
        # Slopes (B, H) join the batch as lengths do.
        slopes = vectors.alibi_slopes
        each = {"key_lengths"} | ({"alibi_slopes"} if slopes is not None and _dims(slopes, batched) == 2 else set())
        if any(jax.tree.leaves((of_lists, batched._replace(**dict.fromkeys(each))))):
            out = _one_by_one(wrapped, arguments, in_batched)
            return out, jax.tree.map(lambda _: True, out)

        def folded(x: Array, batched: bool) -> Array:
            x = jnp.moveaxis(x, 0, 1) if batched else jnp.repeat(x[:, None], axis_size, axis=1)
            return x.reshape(x.shape[0] * axis_size, *x.shape[2:])

        given = [x if isinstance(x, LISTS) else folded(x, b) for x, b in zip(tensors, of_tensors, strict=True)]
        for name in each:
            x = getattr(vectors, name)
            if x is not None:
                vectors = vectors._replace(**{name: folded(x, getattr(batched, name))})
        run, given = of_folded(given)
        q, q_batched = next((x, b) for x, b in zip(tensors, of_tensors, strict=True) if not isinstance(x, LISTS))
        B = q.shape[1 if q_batched else 0]
        out = tuple(jnp.moveaxis(x.reshape(B, axis_size, *x.shape[1:]), 1, 0) for x in run(*given, vectors))
        return out, jax.tree.map(lambda _: True, out)

    return wrapped


def _dims(slopes: Array, batched: Any) -> int:
    """Dimensions of the slopes of one call of a batched axis."""
    return slopes.ndim - bool(batched.alibi_slopes)


def _one_by_one(function: Callable[..., Any], arguments: Any, batched: Any) -> Any:
    """What a function gives for each element of a batched axis, one after the other."""
    leaves, tree = jax.tree.flatten(tuple(arguments))
    which = jax.tree.leaves(tuple(batched))
    assert len(which) == len(leaves), "a flag for each array"

    def one(mapped: list[Array]) -> Any:
        each = iter(mapped)
        return function(*jax.tree.unflatten(tree, [next(each) if b else x for x, b in zip(leaves, which, strict=True)]))

    return lax.map(one, [x for x, b in zip(leaves, which, strict=True) if b])


def _partitioned(function: Callable[..., Any], config: Config, present: Present) -> Callable[..., Any]:
    """With a rule of sharding: batch elements and heads stay where they are, all else is the same everywhere."""
    wrapped = custom_partitioning(function)

    def partition(mesh: Any, given: Any, results: Any) -> tuple[Any, Any, Any, Any]:
        every = jax.tree.leaves(given)
        at = len(every) - len(_forms(present, len(results)))
        q, k = every[at], every[at + 1]
        placed = _placed(config, q.sharding, k.shape)
        forms = [""] * at + _forms(present, len(results))
        arguments = [_sharding(placed, form, len(x.shape)) for form, x in zip(forms, every, strict=True)]
        made = [_sharding(placed, form, 0) for form in _made(len(results))]
        return mesh, function, tuple(made), jax.tree.unflatten(jax.tree.structure(given), arguments)

    def rule(mesh: Any, values: Any, results: Any) -> tuple[str, dict[str, Any]]:
        return _sharding_rule(present, config, [list(x.shape) for x in values], [list(x.shape) for x in results])

    wrapped.def_partition(partition=partition, sharding_rule=rule)

    def call(*arguments: Any) -> Any:
        with compat.constants_staged():  # a program that JAX partitions may have none that were computed before
            return wrapped(*arguments)

    return call


def _sharding_rule(
    present: Present, config: Config, values: list[Any], results: list[Any]
) -> tuple[str, dict[str, Any]]:
    """An einsum-like rule, of which shardings are told on: a query head is one of `r` of a key head `g`.

    Args:
        values: the shapes of all arrays in order: those of lists, the tensors of the call, the vectors.
    """
    forms = _forms(present, len(results))
    lists = values[: len(values) - len(forms)]
    of_lists = [[f"l{at}x{dim}" for dim in range(len(shape))] for at, shape in enumerate(lists)]
    (_, _, H, _), (_, _, G, _), *_ = values[len(lists) :]
    given, made = [" ".join(names) for names in of_lists] + forms, _made(len(results))
    rule = f"{', '.join(given)} -> {', '.join(made)}"
    group = H // G
    rule = " ".join(_heads(word, group) for word in rule.split(" "))
    Bl, Hl = config.rows.lead
    # In the order in which they come up in the rule.
    whole = [name for names in of_lists for name in names] + ["b"] * (Bl > 1) + ["t"] + ["g"] * (Hl > 1)
    whole += ["r"] * (group > 1) + ["d", "s", "e"]
    return rule, {"need_replication_factors": tuple(whole)} | ({"r": group} if group > 1 else {})


def _forms(present: Present, results: int) -> list[str]:
    """The dimensions of the arrays of a direction behind the lists: `b` batch elements, `h` and `g` heads."""
    of_vectors = [form if n == 1 else f"b {form}" for form, n in zip(("b", "h", "h"), present, strict=True) if n]
    # Of a backward: out, lse, dout and dlse.
    of_rows = ["b t h e", "b t h", "b t h e", "b t h"] if results == len(Gradients._fields) else []
    return ["b t h d", "b s g d", "b s g e", *of_rows, *of_vectors]


def _made(results: int) -> list[str]:
    """The dimensions of the results of a direction."""
    return ["b t h d", "b s g d", "b s g e"] if results == len(Gradients._fields) else ["b t h e", "b t h"]


class _Placed(NamedTuple):
    """Where batch elements and heads are: axes of a mesh, or None."""

    mesh: Any
    batch: Any
    heads: Any


def _placed(config: Config, sharding: Any, shape: tuple[int, ...]) -> _Placed:
    """Where those of a call are computed, from where q lies; k has this shape.

    Each device has whole groups of query heads, and lists of its own only where all share them.
    """
    spec: list[Any] = list(sharding.spec)
    batch, _, heads, _ = spec + [None] * (len(shape) - len(spec))
    axes = heads if isinstance(heads, tuple) else (heads,) * (heads is not None)
    (Bl, Hl), G = config.rows.lead, shape[2]
    apart = G % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0
    return _Placed(sharding.mesh, None if Bl > 1 else batch, heads if Hl == 1 and apart else None)


def _sharding(placed: _Placed, form: str, dims: int) -> NamedSharding:
    """Of an array with these dimensions; of a list, which is everywhere, only their number is known."""
    axes = {"b": placed.batch, "h": placed.heads, "g": placed.heads}
    spec = [axes.get(letter) for letter in form.split()] if form else [None] * dims
    return NamedSharding(placed.mesh, PartitionSpec(*spec))


def _heads(word: str, group: int) -> str:
    """The query heads of a rule by their key heads."""
    letter, comma = word.rstrip(","), "," * word.endswith(",")
    return word if letter != "h" else ("(g r)" if group > 1 else "g") + comma
