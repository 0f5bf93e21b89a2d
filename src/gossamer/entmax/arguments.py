"""The arguments of `entmax_attention` and `topk_keys`, brought to one form and checked in the words of `attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.checks import boolean
from gossamer.entmax.checks import check_alpha, check_alphas_inside, check_positions, number_of_keys
from gossamer.entmax.options import IMPLEMENTATIONS, Options
from gossamer.entmax.visible import (
    LayoutSource,
    ListSource,
    MaskSource,
    PatternSource,
    PositionSource,
    Source,
    VisibleKeys,
)
from gossamer.entmax.ways import by_kernels
from gossamer.layouts import Walk
from gossamer.patterns import Causal, Dense
from gossamer.patterns.compose import And
from gossamer.patterns.handles import pattern_of
from gossamer.torch.arguments import INTEGERS, AttentionOptions, check_mask, describe, number, validate
from gossamer.torch.given_layouts import check_layout, layout_from
from gossamer.torch.planning import check_sizes
from gossamer.torch.request import Request, request_of
from gossamer.torch.scale import with_number
from gossamer.torch.transforms import autocast, refuse_transforms


class Names(NamedTuple):
    """The names of the arguments that are positions, for messages."""

    q: str
    k: str


NAMES = Names("q_positions", "k_positions")


class Given(NamedTuple):
    """A call in one form."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, E)
    alpha: Tensor  # (H,), of any float type
    options: Options
    dims: int  # of the q that was given
    number: float | None = None  # alpha of all heads, where it is given as a number


def given(
    name: str, q: Any, k: Any, v: Any, pattern: Any, alpha: Any, top_k: Any, causal: Any, q_positions: Any,
    k_positions: Any, scale: Any, implementation: Any, name_of_keys: str = "top_k", names: Names = NAMES,
) -> Given:  # fmt: skip
    """The arguments in one form; a compiled function checks values and shapes inside its operator.

    Args:
        name: of the function, for messages.
        name_of_keys: the name of the argument top_k, which may be None by this name alone.
        names: of the positions, for messages.

    Raises:
        ValueError: an argument is of a type that nothing accepts.
        Unsupported: a transform of torch.func, or forward mode, looks at the call.
    """
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        refuse_transforms(name, q, k, v, alpha, scale)
        q, k, v = autocast(q), autocast(k), autocast(v)
    if isinstance(scale, Tensor):
        q, scale = with_number(q, scale)
    request = request_of(q, k, v, pattern, AttentionOptions(scale=scale))
    a = request.arguments
    top_k = number_of_keys(name_of_keys, top_k, optional=name_of_keys == "top_k")
    for label, x in zip(names, (q_positions, k_positions), strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{label} must be a tensor of integers or None; got {describe(x)}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None; got {describe(implementation)}")
    causal = boolean("causal", causal)
    options = Options(request.attended, q_positions, k_positions, top_k, causal, a.scale, implementation)
    alpha = number(alpha)
    call = Given(
        a.q, a.k, a.v, alphas(alpha, a.q), options, a.dims, None if isinstance(alpha, Tensor) else float(alpha)
    )
    if not torch.compiler.is_compiling():
        check(request, call, names)
    return call


def alphas(alpha: Any, q: Tensor) -> Tensor:
    """alpha of each head, (H,), differentiable where it is given so."""
    H = q.shape[1]
    if isinstance(alpha, Tensor):
        if alpha.shape not in ((H,), ()) or not alpha.is_floating_point() or alpha.device != q.device:
            raise ValueError(
                f"alpha must be a number, or a tensor of floating point of shape (H,) = ({H},) or () on {q.device}; "
                f"got {describe(alpha)}"
            )
        return alpha.expand(H)
    check_alpha(alpha, describe)
    return torch.full((H,), float(alpha), dtype=torch.float64, device=q.device)


def check_alphas(alpha: Tensor) -> None:
    """Raise ValueError for numbers of a tensor that leave [1, 2]; one on the meta device has none."""
    inside = (alpha >= 1) & (alpha <= 2)
    if not alpha.is_meta:
        check_alphas_inside(alpha.detach()[~inside].tolist())


def check(request: Request, call: Given, names: Names = NAMES) -> None:
    """Raise ValueError for values and shapes that are wrong."""
    q, k, v, alpha, options, *_ = call
    attended = options.attended
    validate(request.arguments)
    check_sizes(request.arguments, attended.handle)
    if attended.geometry:
        check_layout(layout_from(list(attended.data), attended.geometry).rows, q, k)
    elif attended.data:
        check_mask(attended.data[0], q, k)
    # The host waits for no value where kernels compute: there such a head becomes NaN.
    if call.number is None and not by_kernels(q, k, v, None, options):
        check_alphas(alpha)
    (B, H, Q, _), (_, G, K, _) = q.shape, k.shape
    for label, x, wanted in (
        (names.q, options.q_positions, ((B, H, Q),)),
        (names.k, options.k_positions, ((B, H, K), (B, G, K))),
    ):
        if x is None:
            continue
        if x.dtype not in INTEGERS or x.device != q.device:
            raise ValueError(f"{label} must be integers (int8, uint8, int16, int32 or int64) on {q.device}; "
                             f"got {describe(x)}")  # fmt: skip
        check_positions(label, x, wanted, describe)


def visible_keys(q: Tensor, k: Tensor, options: Options) -> VisibleKeys:
    """The keys that each row may see."""
    (_, H, Q, _), (_, _, K, _) = q.shape, k.shape
    attended, positions = options.attended, options.positions(q, k)
    causal = Causal() if options.causal and positions is None else None
    sizes = Dense._sizes(Q, K)
    sources: list[Source] = []
    if attended.data:
        if attended.geometry:
            walk = layout_from(list(attended.data), attended.geometry).rows
            sources.append(LayoutSource(walk) if isinstance(walk, Walk) else ListSource(walk, H))
        else:
            sources.append(MaskSource(attended.data[0], Q, K))
        if causal is not None:
            sources.append(PatternSource(causal, sizes))
    else:
        pattern = pattern_of(attended.handle)
        if causal is not None:
            pattern = causal if isinstance(pattern, Dense) else And(pattern, causal)
        if not isinstance(pattern, Dense):
            sources.append(PatternSource(pattern, sizes))
    if positions is not None:
        q_positions, k_positions = positions
        sources.append(
            PositionSource(
                q_positions.expand(*q_positions.shape[:-1], Q), k_positions.expand(*k_positions.shape[:-1], K)
            )
        )
    return VisibleKeys(sources, Q, K, q.device)
