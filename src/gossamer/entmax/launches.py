"""The launches of kernels, each described once and bound to a function of the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.entmax.options import Options
from gossamer.entmax.ways import interval_pattern
from gossamer.kernels.launch import Builder, Prepared, operand_of
from gossamer.memo import Memo
from gossamer.torch.bind import bind
from gossamer.torch.key import alignment, facts
from gossamer.torch.memory import hold_for_graphs, outlasting

if TYPE_CHECKING:
    from gossamer.entmax.launch.calls import KernelCall

Bound = Callable[..., tuple[Tensor, ...]]

STATS = "lam", "support", "certified"  # what a forward can tell of rows

launches: Memo[Bound] = Memo()


class Launch(NamedTuple):
    """What is computed: see `launch.forward.prepare` and `launch.backward.prepare`."""

    wanted: Literal["out", "keys", "gradients"]
    same: float | None  # alpha - 1 of all heads, where it was given as a number
    scale: float
    options: Options  # without tensors
    keep_lists: bool = False
    stats: tuple[str, ...] = ()  # the first of STATS
    with_alpha: bool = False


def bound(launch: Launch, given: dict[str, Tensor]) -> Bound:
    """The function that runs a launch on tensors that lie as those that are `given`, in their order."""
    tensors = given.values()
    key = launch, *given, facts(*tensors), alignment(*tensors)
    run = launches.get(key)
    if run is None:
        device = given["q"].device
        make = partial(_prepared, launch, given, device)
        prepared = outlasting(device, make) if device.type == "cuda" else make()
        run = launches.put(key, bind(prepared, device, tuple(given)))
    if given["q"].is_cuda and is_current_stream_capturing():
        hold_for_graphs(run)
    return run


def _prepared(launch: Launch, given: dict[str, Tensor], device: torch.device) -> Prepared:
    from gossamer.entmax.launch import backward, forward

    c = described(launch, given, device)
    if launch.wanted == "gradients":
        return backward.prepare(c, launch.with_alpha)
    return forward.prepare(c, launch.wanted, launch.keep_lists, launch.stats)


def described(launch: Launch, given: dict[str, Tensor], device: torch.device) -> KernelCall:
    """The call as kernels take it, without any launch."""
    from gossamer.entmax.launch.calls import BOUNDS, Facts, KernelCall

    options, Q, K = launch.options, given["q"].shape[2], given["k"].shape[2]
    run = interval_pattern(options, "q_positions" in given, Q, K)
    assert run is not None
    b = Builder({name: operand_of(x) for name, x in given.items()})
    if run.intervals is not None:
        lo, hi = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device) for x in run.intervals)
        b.layout(lo=lo, hi=hi)
    return KernelCall(b, Facts(device, launch.same, launch.scale, options.top_k, BOUNDS.index(run.kind), K - Q))


def tensors_of(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, options: Options
) -> dict[str, Tensor]:  # fmt: skip
    """What a launch is given of a call: q, k, v, and what says which keys rows may see.

    Args:
        alpha: (H,), None where it was given as a number. Rows of a head whose alpha is outside [1, 2] become NaN.
    """
    given = {"q": q, "k": k, "v": v}
    if alpha is not None:
        steepness = (alpha.detach().double() - 1).float()
        given["steepness"] = steepness.where((steepness >= 0) & (steepness <= 1), torch.nan)
    positions = options.positions(q, k)
    if positions is not None:
        (B, H, Q, _), K = q.shape, k.shape[2]
        given["q_positions"] = positions.q.to(torch.int64).expand(B, H, Q)
        given["k_positions"] = positions.k.to(torch.int64).expand(B, H, K)
    return given
