"""Rows of neighbour attention and of its gradients: of c particles, each with a list of M others.

`xp` is jax.numpy or torch. Lists are symmetric: the queries whose lists have a particle are in its own
list. So gradients are sums over that list, in its order, and no number is added to from several sides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gossamer.particles.geometry import nearest, squares, times_all


class Attending(NamedTuple):
    """The numbers of a call, of Python or arguments of a program of JAX; lengths are in the unit of the cells."""

    scale: Any  # of q k^T; None: no such term
    spread: Any  # 2 h^2 of the Gaussian of the distance; None: no such term
    box: Any  # `Sizes`
    pull: tuple[Any, ...] = ()  # the factors of sums of dS times steps in the gradients of positions


class Features(NamedTuple):
    """The features of c particles, a row each, or of the M neighbours of each."""

    x: list[Any]  # one array an axis: (c,) or (c, M)
    q: Any  # (..., H, D)
    k: Any
    v: Any  # (..., H, E)


class RowTerms(NamedTuple):
    """The terms of rows that gradients need beside features."""

    lse: Any  # (..., H)
    delta: Any  # (..., H): rowsum(dout * out) - dlse
    dout: Any  # (..., H, E)


class NeighborRows(NamedTuple):
    out: Any  # (c, H, E)
    lse: Any  # (c, H)


class NeighborGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    x: Any  # (c, d)


def rows(call: Attending, mine: Features, theirs: Features, keep: Any, xp: Any) -> NeighborRows:
    """Attention of rows that keep at least one entry of their list, (c, M)."""
    S = _scores(call, mine.q, theirs.k, _squares(call, mine, theirs, xp), "chd,cmhd->chm", xp)
    S = xp.where(keep[:, None], S, -float("inf"))
    m = xp.amax(S, -1)
    P = xp.exp(S - m[..., None])
    total = P.sum(-1)
    out = xp.einsum("chm,cmhe->che", P, theirs.v) / total[..., None]
    return NeighborRows(out, m + xp.log(total))


def row_gradients(
    call: Attending, mine: Features, theirs: Features, my: RowTerms, their: RowTerms, keep: Any, xp: Any
) -> NeighborGradients:
    """The gradients of particles as queries (i j) and as keys (j i) of those in their lists."""
    s, keep = _squares(call, mine, theirs, xp), keep[:, None]
    S, Sk = (
        _scores(call, mine.q, theirs.k, s, "chd,cmhd->chm", xp),
        _scores(call, mine.k, theirs.q, s, "chd,cmhd->chm", xp),
    )
    P = xp.where(keep, xp.exp(S - my.lse[..., None]), 0)
    Pk = xp.where(keep, xp.exp(Sk - their.lse.swapaxes(-1, -2)), 0)
    dS = P * (xp.einsum("che,cmhe->chm", my.dout, theirs.v) - my.delta[..., None])
    dSk = Pk * (xp.einsum("che,cmhe->chm", mine.v, their.dout) - their.delta.swapaxes(-1, -2))
    scale = 0.0 if call.scale is None else call.scale
    dq = scale * xp.einsum("chm,cmhd->chd", dS, theirs.k)
    dk = scale * xp.einsum("chm,cmhd->chd", dSk, theirs.q)
    dv = xp.einsum("chm,cmhe->che", Pk, their.dout)
    if call.spread is None:  # no score depends on positions: dx is 0, also where a cut list makes the rest NaN
        return NeighborGradients(dq, dk, dv, xp.zeros_like(xp.stack(mine.x, -1)))
    both = (dS + dSk).sum(1)
    dx = times_all(xp.stack([(both * step).sum(-1) for step in _steps(call, mine, theirs, xp)], -1), call.pull)
    return NeighborGradients(dq, dk, dv, dx)


def _steps(call: Attending, mine: Features, theirs: Features, xp: Any) -> list[Any]:
    pairs = zip(theirs.x, mine.x, call.box, strict=True)
    return [nearest(other, one[:, None], size, xp) for other, one, size in pairs]


def _squares(call: Attending, mine: Features, theirs: Features, xp: Any) -> Any:
    return squares(_steps(call, mine, theirs, xp))


def _scores(call: Attending, q: Any, k: Any, s: Any, product: str, xp: Any) -> Any:
    S = 0 * s[:, None] if call.spread is None else -s[:, None] / call.spread
    if call.scale is None:
        return S + 0 * q[:, :, :1].sum(-1)[..., None]
    return S + call.scale * xp.einsum(product, q, k)
