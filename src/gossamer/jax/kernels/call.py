"""Both directions of a call by kernels, on arrays (B, positions, heads, size)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from gossamer.jax import compat
from gossamer.jax.kernels import bind
from gossamer.jax.kernels.recipes import Directed, Recipe
from gossamer.jax.tiling import Vectors

Lists = Mapping[str, Array]


def forward(recipe: Recipe, lists: Lists, q: Array, k: Array, v: Array, vectors: Vectors) -> tuple[Array, Array]:
    """out (B, Q, H, E) and lse (B, Q, H). `lists`: of the forward."""
    found = _run(recipe.directed["forward"], lists, {"q": q, "k": k, "v": v}, vectors)
    B, Q, H, _ = q.shape
    return found["out"].reshape(B, Q, H, v.shape[3]), found["lse"].reshape(B, Q, H)


def backward(
    recipe: Recipe, lists: Lists, q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, dlse: Array,
    vectors: Vectors,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk and dv. `lists`: of the backward."""
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    found = _run(recipe.directed["backward"], lists, given, vectors)
    return found["dq"].reshape(q.shape), found["dk"].reshape(k.shape), found["dv"].reshape(v.shape)


def _run(directed: Directed, lists: Lists, given: dict[str, Any], vectors: Vectors) -> dict[str, Array]:
    """What a launch writes, as varying over manual axes of a mesh as all that it reads."""
    given |= {name: x for name, x in vectors._asdict().items() if name in directed.operands}
    found = bind.run(directed.launch, directed.operands, lists, given)
    results = {name: found[name] for name in directed.launch.results}
    return compat.varying_with(results, list(given.values()))
