"""Attention between neighbours: `neighbor_attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

from gossamer.particles.attend import Attending
from gossamer.particles.edges import call_of, edge_of
from gossamer.particles.geometry import factors_of
from gossamer.particles.laws import positive
from gossamer.particles.neighbors import Neighbors

KERNELS = ("dot", "gaussian", "dot+gaussian")
NARROW = 2.0**-60  # the least bandwidth, in radii: squares of smaller ones, and what is divided by them, leave float32
TYPES = ("float16", "bfloat16", "float32", "float64")


def neighbor_attention(
    q: Any, k: Any, v: Any, neighbors: Neighbors, *, kernel: str = "dot", bandwidth: float | None = None,
    scale: Any = None, return_residual: bool = False,
) -> Any:  # fmt: skip
    """Attention of every particle over its neighbours: softmax of the scores over exactly those within the radius.

    Scores are scale q.k ("dot"), -r^2 / (2 bandwidth^2) of the distance r ("gaussian"), or their sum ("dot+gaussian").
    Gradients reach q, k, v and, of a Gaussian, through `neighbors` the positions. Rows of lists that are cut are NaN.

    Args:
        q, k: (N, D) or (N, H, D); None for "gaussian".
        v: (N, E) or (N, H, E).
        neighbors: of N particles.
        kernel: "dot", "gaussian" or "dot+gaussian".
        bandwidth: of the Gaussian, positive.
        scale: of the products, by default D**-0.5: a positive number, or an array without dimensions, which may be
            traced or ask for a gradient: q is multiplied by it, in 16 bits with one more rounding.
        return_residual: return (out, lse), lse the logarithm of the sum of exponentials of the scores: of "gaussian"
            that of the density.

    Returns:
        out as v, or (out, lse (N,) or (N, H) float32)

    Raises:
        TypeError, ValueError: an argument is wrong; `gossamer.Unsupported` where a gradient is differentiated again.

    Examples:
        >>> x, q, k, v = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(300, 3)] + 3 * [(300, 4, 8)]))
        >>> neighbors = gp.Neighbors.allocate(x, radius=0.5)
        >>> gp.neighbor_attention(q, k, v, neighbors, kernel="dot+gaussian", bandwidth=0.2).shape
        (300, 4, 8)
        >>> gp.neighbor_attention(None, None, v, neighbors, kernel="gaussian", bandwidth=0.2).shape
        (300, 4, 8)
    """
    if not isinstance(neighbors, Neighbors):
        raise TypeError(f"neighbors must be Neighbors; got {type(neighbors).__qualname__}")
    edge, cells, groups = edge_of(v), neighbors.cells, neighbors.groups
    facts = cells.radius, cells.box, neighbors.places.shape, None if groups is None else groups.columns.shape
    key = edge.key_of("neighbor_attention", (q, k, v, cells.x), (kernel, bandwidth, scale), *facts)
    call = call_of(key, lambda: _Checked.of(edge, q, k, v, neighbors, kernel, bandwidth, scale))
    out, lse = call.run(edge, q, k, v, neighbors)
    return (out, lse) if return_residual else out


class _Checked(NamedTuple):
    """What a call has been checked for."""

    attending: Attending
    flat: bool  # no heads
    products: bool
    learned: Any  # a scale whose number is not known: it is multiplied into q

    @classmethod
    def of(
        cls, edge: Any, q: Any, k: Any, v: Any, neighbors: Neighbors, kernel: Any, bandwidth: Any, scale: Any
    ) -> _Checked:
        cells, N, flat = neighbors.cells, neighbors.cells.num_particles, len(v.shape) == 2
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {KERNELS}; got {kernel!r}")
        if edge is not edge_of(cells.x):
            raise TypeError("v and the neighbors' positions must be of one framework")
        if (bandwidth is None) != (kernel == "dot"):
            raise ValueError(
                f"bandwidth is needed with a Gaussian and has no use without; got {bandwidth} for {kernel!r}"
            )
        heads = v[:, None] if flat else v
        if len(heads.shape) != 3 or heads.shape[0] != N:
            raise ValueError(f"v must be ({N}, E) or ({N}, H, E); got {tuple(heads.shape)}")
        if not edge.is_real(v):
            raise ValueError(f"v must be of real numbers; got {v.dtype}")
        learned, products = None, kernel != "gaussian"
        if not products:
            if q is not None or k is not None or scale is not None:
                raise ValueError('q, k and scale must be None for kernel "gaussian", which has no products')
        elif q is None or k is None:
            raise ValueError(f"q and k are needed for kernel {kernel!r}")
        else:
            _check_products(_with_heads(q, flat), _with_heads(k, flat), heads, flat)
            *_, D = q.shape
            learned = scale if edge.is_learned(scale) else None
            scale = D**-0.5 if scale is None else 1.0 if learned is not None else positive("scale", scale)
        spread, pull = None, tuple[float, ...]()
        if bandwidth is not None:
            bandwidth = positive("bandwidth", bandwidth) * cells.unit
            if bandwidth < NARROW:
                raise ValueError(
                    f"bandwidth must be at least {NARROW:.2g} times the radius, {cells.radius}; "
                    f"got {bandwidth / cells.unit}"
                )
            spread, pull = 2 * bandwidth * bandwidth, factors_of(cells.unit / bandwidth / bandwidth)
        return cls(Attending(scale, spread, cells.sizes, pull), flat, products, learned)

    def run(self, edge: Any, q: Any, k: Any, v: Any, neighbors: Neighbors) -> tuple[Any, Any]:
        """out and lse."""
        v = _with_heads(v, self.flat)
        q, k = (_with_heads(one, self.flat) for one in (q, k)) if self.products else (v[:, :, :0],) * 2
        attending = self.attending
        if self.learned is not None:
            q, scale = edge.with_number(q, self.learned)
            attending = attending._replace(scale=positive("scale", scale))
        out, lse = edge.attend(attending, neighbors, q, k, v)
        return (out[:, 0], lse[:, 0]) if self.flat else (out, lse)


def _with_heads(x: Any, flat: bool) -> Any:
    return x[:, None] if flat and len(x.shape) == 2 else x


def _check_products(q: Any, k: Any, v: Any, flat: bool) -> None:
    N, H, _ = v.shape
    if q.shape != k.shape or len(q.shape) != 3 or tuple(q.shape[:2]) != (N, H):
        wanted = f"({N}, D)" if flat else f"({N}, {H}, D)"
        raise ValueError(f"q and k must be {wanted}, as v has heads; got {tuple(q.shape)} and {tuple(k.shape)}")
    types = {str(one.dtype).removeprefix("torch.") for one in (q, k, v)}
    if len(types) > 1 or not types <= set(TYPES):
        raise ValueError(f"q, k and v must be of one type of {', '.join(TYPES)}; got {', '.join(sorted(types))}")
    *_, D = q.shape
    if not D:
        raise ValueError("q and k must have features; got none")
