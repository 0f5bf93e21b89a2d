"""Rows of neighbour attention and of its gradients: of c groups of R particles, which share a list of M others.

By the functions of jax.numpy or torch, `xp`. Lists are symmetric, so what a particle is the key of is found in its own
list: gradients are sums over it, in its order, and nothing is added to from several sides. A list of its own each
particle has with R 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gossamer.particles.geometry import Sizes, nearest, squares


class Attending(NamedTuple):
    """What is known of a call beside its arrays."""

    scale: float | None  # of q k^T; None: no such term
    bandwidth: float | None  # of the Gaussian of the distance; None: no such term
    box: Sizes


class Features(NamedTuple):
    """Of particles, rows or columns of groups."""

    x: list[Any]  # one array an axis: (c, R) or (c, M)
    q: Any  # (c, R or M, H, D)
    k: Any
    v: Any  # (c, R or M, H, E)


class Kept(NamedTuple):
    """What the gradients need beside features."""

    lse: Any  # (c, R or M, H)
    delta: Any  # (c, R or M, H): rowsum(dout * out) - dlse
    dout: Any  # (c, R or M, H, E)


class Rows(NamedTuple):
    out: Any  # (c, R, H, E)
    lse: Any  # (c, R, H)


class Gradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    x: Any  # (c, R, d)


PRODUCT = "crhd,cmhd->chrm"


def rows(call: Attending, mine: Features, theirs: Features, keep: Any, xp: Any) -> Rows:
    """Attention of rows, of which `keep` (c, R, M) says what they keep of the list; NaN of one that keeps none."""
    S = _scores(call, mine.q, theirs.k, _squares(call, mine, theirs, xp), xp)
    S = xp.where(keep[:, None], S, -float("inf"))
    m = xp.amax(S, -1)
    P = xp.exp(S - m[..., None])
    total = P.sum(-1)
    out = xp.einsum("chrm,cmhe->crhe", P / total[..., None], theirs.v)
    return Rows(out, (m + xp.log(total)).swapaxes(1, 2))


def row_gradients(
    call: Attending, mine: Features, theirs: Features, my: Kept, their: Kept, keep: Any, xp: Any
) -> Gradients:
    """The gradients of particles, as queries (r m) and as keys (m r) of those in their lists."""
    s, keep = _squares(call, mine, theirs, xp), keep[:, None]
    S, Sk = _scores(call, mine.q, theirs.k, s, xp), _scores(call, mine.k, theirs.q, s, xp)
    P = xp.where(keep, xp.exp(S - _of_rows(my.lse)), 0)
    Pk = xp.where(keep, xp.exp(Sk - _of_columns(their.lse)), 0)
    dS = P * (xp.einsum(PRODUCT, my.dout, theirs.v) - _of_rows(my.delta))
    dSk = Pk * (xp.einsum(PRODUCT, mine.v, their.dout) - _of_columns(their.delta))
    scale, of_columns = call.scale or 0.0, "chrm,cmhd->crhd"
    dq = scale * xp.einsum(of_columns, dS, theirs.k)
    dk = scale * xp.einsum(of_columns, dSk, theirs.q)
    dv = xp.einsum(of_columns, Pk, their.dout)
    both = (dS + dSk).sum(1) / (call.bandwidth**2 if call.bandwidth else float("inf"))
    dx = xp.stack([(both * step).sum(-1) for step in _steps(call, mine, theirs, xp)], -1)
    return Gradients(dq, dk, dv, dx)


def _of_rows(x: Any) -> Any:
    return x.swapaxes(1, 2)[..., None]


def _of_columns(x: Any) -> Any:
    return x.swapaxes(1, 2)[:, :, None]


def _steps(call: Attending, mine: Features, theirs: Features, xp: Any) -> list[Any]:
    pairs = zip(theirs.x, mine.x, call.box, strict=True)
    return [nearest(other[:, None], one[..., None], size, xp) for other, one, size in pairs]


def _squares(call: Attending, mine: Features, theirs: Features, xp: Any) -> Any:
    return squares(_steps(call, mine, theirs, xp))


def _scores(call: Attending, q: Any, k: Any, s: Any, xp: Any) -> Any:
    S = -s[:, None] / (2 * call.bandwidth**2) if call.bandwidth else 0 * s[:, None]
    if call.scale:
        return S + call.scale * xp.einsum(PRODUCT, q, k)
    _, _, H, _ = q.shape
    return xp.broadcast_to(S, (len(S), H, *S.shape[2:]))
