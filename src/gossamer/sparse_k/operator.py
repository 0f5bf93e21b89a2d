"""SparseK (Lou, Jia, Zheng, Tu, arXiv 2406.16747): a differentiable top-k, of a row and of each of its prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.checks import whole
from gossamer.kernels.packages import has_triton
from gossamer.sparse_k.thresholds import causal_thresholds, last_largest, threshold
from gossamer.torch.arguments import describe
from gossamer.torch.key import plain
from gossamer.torch.transforms import refuse_transforms


class SparseK(NamedTuple):
    """The result of `sparsek`."""

    m: Tensor  # the gates in [0, 1], of u's shape
    tau: Tensor  # the threshold of each row: u's shape without `dim`


class CausalSparseK(NamedTuple):
    """The result of `sparsek_causal`: both (..., N)."""

    tau: Tensor  # the threshold of each step
    last: Tensor  # int32: the last step at which each key is live


def sparsek(u: Tensor, k: int, dim: int = -1) -> SparseK:
    """SparseK: the projection of scores onto {0 <= m <= 1, sum m = k}, a differentiable top-k.

    m = clip(u - tau, 0, 1) with the least tau for which sum m <= k. If the k-th largest score exceeds the next by at
    least 1, m is the hard top-k; k = 1 is sparsemax. Computed exactly, from the sorted breakpoints {u, u - 1} with sums
    in integers, and rounded once.

    If a row has at most k entries over -inf, these have m = 1, and tau is -inf. Entries of -inf have m = 0.

    The gradient is the exact Jacobian: over the interior I = {0 < m < 1}, dm_j = du_j - mean_I(du) and dtau =
    mean_I(du); it is 0 elsewhere. Where I is empty tau is the largest score that is not kept, and has its gradient. It
    may be differentiated again.

    Args:
        u: scores, float32 or float64; (..., N) for the last dimension. NaN gives NaN in its row; where more than k
            entries are +inf, they have m NaN.
        k: how much is kept, at least 1.
        dim: the dimension of a row.

    Returns:
        m of u's shape, and tau of that shape without `dim`.

    Raises:
        ValueError: an argument is none of these. Scores of 16 bits tie, and are refused: compute them in float32.
            `Unsupported` for forward mode and torch.func.

    Examples:
        >>> m, tau = gs.sparsek(torch.tensor([3.0, 0.5, 0.25, -1.0]), k=2)
        >>> m, tau
        (tensor([1.0000, 0.6250, 0.3750, 0.0000]), tensor(-0.1250))
        >>> gs.sparsek(torch.tensor([0.1, -float("inf"), 5.0]), k=2).m
        tensor([1., 0., 1.])
    """
    _check_scores(u)
    k, axis = _kept(k), whole(dim)
    if axis is None or not -u.ndim <= axis < u.ndim:
        raise ValueError(f"dim must be a dimension of u, in [{-u.ndim}, {u.ndim}); got {describe(dim)}")
    rows, k = u.movedim(axis, -1).contiguous(), min(k, u.shape[axis])
    if _eager(u):
        m, tau = _Row.apply(rows, k) if _differentiable(u) else row_of(rows, k)
    else:
        refuse_transforms("sparsek", u)
        m, tau = torch.ops.gossamer.sparsek(rows, k)
    return SparseK(m.movedim(-1, axis), tau)


def sparsek_causal(u: Tensor, k: int) -> CausalSparseK:
    """The threshold of SparseK at each step, over the keys up to it, and until when each key lives.

    tau[t] is that of `sparsek(u[..., : t + 1], k)`. Key j is live at step t if u[j] > tau[t]. tau never falls, so a key
    that is not live never becomes live again: a decoder may drop it. The gradient is that of `sparsek`: dtau[t] is the
    mean of du over the interior keys of t, 0 < u[j] - tau[t] < 1.

    O(N log N) operations of torch and memory of O(N), whatever the scores are; thresholds are exact, and rounded once.

    Args:
        u: scores of keys, (..., N), float32 or float64; a key of -inf is never kept. After a NaN all tau are NaN.
        k: how much is kept at each step, at least 1.

    Returns:
        tau (..., N): -inf at steps with at most k keys over -inf, all of which have m = 1. Compute m as
        `clip(u - tau, 0, 1)` where u is over -inf.
        last (..., N) int32: the last step at which u[j] > tau; j - 1 for a key that is never live. Key j is live in the
        steps j, ..., last[j]. `last` is undefined for keys that are live when a NaN comes.

    Raises:
        ValueError: an argument is none of these; `Unsupported` for forward mode and torch.func.

    Examples:
        >>> u = torch.tensor([0.5, 2.0, 0.0, 1.0, 4.0])
        >>> tau, last = gs.sparsek_causal(u, k=2)
        >>> tau
        tensor([   -inf,    -inf, -0.2500,  0.2500,  1.0000])
        >>> last  # the first and the fourth key are live up to step 3, the third up to its own
        tensor([3, 4, 2, 3, 4], dtype=torch.int32)
    """
    _check_scores(u)
    k = _kept(k)
    k = min(k, u.shape[-1])
    if _eager(u):
        rows = u.contiguous()
        return CausalSparseK(*(_Causal.apply(rows, k) if _differentiable(u) else causal_of(rows, k)))
    refuse_transforms("sparsek_causal", u)
    return CausalSparseK(*torch.ops.gossamer.sparsek_causal(u.contiguous(), k))


def last_topk(u: Tensor, k: int) -> Tensor:
    """The last step at which each key is among the k largest of the keys up to it: the hard top-k, step by step.

    Of equal keys the earlier is kept, so that a key which has left never returns, and a later equal one displaces
    none. Key j is kept in the steps j, ..., last[j].

    Args:
        u: scores of keys, (..., N), float32 or float64; a key of -inf or NaN is never kept.
        k: how many are kept at each step, at least 1.

    Returns:
        (..., N) int32: j - 1 of a key that is never kept, N - 1 of those that are kept in the end. Not differentiable.

    Raises:
        ValueError: an argument is none of these.

    Examples:
        >>> gs.last_topk(torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0]), k=2)
        tensor([1, 4, 3, 2, 4], dtype=torch.int32)
    """
    _check_scores(u)
    k = min(_kept(k), u.shape[-1])
    u = u.detach().contiguous()
    return largest_of(u, k) if _eager(u) else torch.ops.gossamer.last_topk(u, k)


def row_of(u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """m and tau of `sparsek`, of the last dimension."""
    if not u.numel():
        return torch.empty_like(u), torch.full(u.shape[:-1], -torch.inf, dtype=u.dtype, device=u.device)
    rows = u.reshape(-1, u.shape[-1])
    root = threshold(rows, k)
    m = torch.where(root.flat, (rows > -torch.inf).double(), (rows - root.near - root.step).clamp(0, 1))
    tau = torch.where(root.flat, -torch.inf, root.near + root.step)
    wrong = rows.isnan().any(-1, keepdim=True)
    m, tau = (torch.where(wrong, torch.nan, x).to(u.dtype) for x in (m, tau))
    return m.reshape(u.shape), tau.reshape(u.shape[:-1])


def _sparsek_backward(ctx: Any, dm: Tensor | None, dtau: Tensor | None) -> tuple[Tensor, None]:
    u, m, tau = ctx.saved_tensors
    return row_gradient(u, m, tau, dm, dtau), None


def row_gradient(u: Tensor, m: Tensor, tau: Tensor, dm: Tensor | None, dtau: Tensor | None) -> Tensor:
    """du of gates and of the threshold of a row; None is a gradient of zero."""
    dm = torch.zeros_like(m) if dm is None else dm
    dtau = (torch.zeros_like(tau) if dtau is None else dtau)[..., None].double()
    interior = (m > 0) & (m < 1)
    count = interior.sum(-1, keepdim=True)
    dm = torch.where(interior, dm, 0).double()
    du = torch.where(interior, dm + (dtau - dm.sum(-1, keepdim=True)) / count.clamp(min=1), 0)
    # With nothing inside, tau is the largest score that is not kept.
    next_ones = (u == tau[..., None]) & (u > -torch.inf) & (count == 0)
    du = du + torch.where(next_ones, dtau / next_ones.sum(-1, keepdim=True).clamp(min=1), 0)
    return du.to(u.dtype)


def causal_of(u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """tau and last of `sparsek_causal`."""
    if not u.numel():
        return torch.empty_like(u), torch.empty_like(u, dtype=torch.int32)
    rows = u.reshape(-1, u.shape[-1])
    if (kernels := _kernels(u)) is not None:
        with torch.cuda.device_of(u):
            tau = kernels.thresholds(kernels.prefixes(rows, k))
    else:
        tau = causal_thresholds(rows, k).to(u.dtype)
    last = _last_live(rows, tau)
    return _nan_from_first(rows, tau).reshape(u.shape), last.reshape(u.shape)


def kept_of(u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """tau of `sparsek_causal`, and `last_topk`, of one sort."""
    if not u.numel():
        return causal_of(u, k)
    rows = u.reshape(-1, u.shape[-1])
    if (kernels := _kernels(u)) is not None:
        with torch.cuda.device_of(u):
            tau, last = kernels.kept(kernels.prefixes(rows, k))
    else:
        tau, last = causal_thresholds(rows, k).to(u.dtype), last_largest(rows, k).int()
    return _nan_from_first(rows, tau).reshape(u.shape), last.reshape(u.shape)


def _kernels(u: Tensor) -> Any:
    """The module of kernels that compute thresholds of float32 on a GPU, or None."""
    if not has_triton():
        return None
    from gossamer.sparse_k.thresholds_triton import launch

    return launch if launch.available(u) else None


def has_kernels(u: Tensor) -> bool:
    """Whether kernels compute the thresholds of prefixes of u."""
    return _kernels(u) is not None


def _nan_from_first(rows: Tensor, tau: Tensor) -> Tensor:
    """tau with NaN from the step of the first score of NaN on, in place."""
    return tau.masked_fill_(rows.isnan().cummax(-1).values, torch.nan)


def _sparsek_causal_backward(ctx: Any, dtau: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    u, tau, last = ctx.saved_tensors
    return threshold_gradient(u, tau, last, dtau), None


def threshold_gradient(
    u: Tensor, tau: Tensor, last: Tensor | None, dtau: Tensor, by_kernels: Callable[..., Tensor] | None = None
) -> Tensor:  # fmt: skip
    """The gradient of thresholds: the steps at which a key is inside, and at which it equals tau, are ranges.

    Args:
        by_kernels: of u, tau and dtau, where kernels compute it; None: the operator.
    """
    if not u.numel():
        return dtau * u
    # A second derivative goes through operations of torch.
    once = not torch.is_grad_enabled() and dtau.dtype == torch.float32
    if once and has_kernels(u):
        gradient: Tensor = (by_kernels or torch.ops.gossamer.thresholds_backward)(u, tau, dtau)
        return gradient
    u, tau = (x.reshape(-1, x.shape[-1]).contiguous() for x in (u, tau))
    last = _last_live(u, tau) if last is None else last.reshape(u.shape)
    step = torch.arange(u.shape[-1], device=u.device)
    first = torch.maximum(torch.searchsorted(tau.double(), u.double() - 1, right=True), step)
    end = last.long() + 1
    inside = Steps(torch.minimum(first, end), end)
    equal = torch.maximum(torch.searchsorted(tau, u, right=True), end)
    next_one = Steps(end, torch.where(u > -torch.inf, equal, end))

    steps = dtau.reshape(u.shape).double()
    # Where tau is -inf dtau reaches no key. It may be NaN, so that the sums must leave it out.
    count, equals = inside.keys(), next_one.keys()
    du = inside.sums(torch.where(count > 0, steps / count.clamp(min=1), 0))
    du = du + next_one.sums(torch.where((count == 0) & (equals > 0), steps / equals.clamp(min=1), 0))
    return du.to(dtau.dtype).reshape(dtau.shape)


def gradient_by_kernels(u: Tensor, tau: Tensor, dtau: Tensor) -> Tensor:
    """`thresholds_backward`."""
    rows = tuple(x.reshape(-1, x.shape[-1]).contiguous() for x in (u, tau, dtau))
    with torch.cuda.device_of(u):
        gradient: Tensor = _kernels(u).thresholds_backward(*rows)
    return gradient.reshape(u.shape)


class Steps(NamedTuple):
    """A range of steps [first, end) for each key: (R, N) int64."""

    first: Tensor
    end: Tensor

    def keys(self) -> Tensor:
        """The number of keys of each step; sums of integers are the same in any order."""
        change = self.first.new_zeros((self.first.shape[0], self.first.shape[1] + 1))
        one = torch.ones_like(self.first)
        return change.scatter_add(1, self.first, one).scatter_add(1, self.end, -one).cumsum(1)[:, :-1]

    def sums(self, x: Tensor) -> Tensor:
        """The sum of x (R, N) over the steps of each key."""
        before = F.pad(x.cumsum(1), (1, 0))
        return before.gather(1, self.end) - before.gather(1, self.first)


def largest_of(u: Tensor, k: int) -> Tensor:
    """`last_topk`."""
    if not u.numel():
        return torch.empty_like(u, dtype=torch.int32)
    rows = u.reshape(-1, u.shape[-1])
    if (kernels := _kernels(u)) is not None:
        with torch.cuda.device_of(u):
            last: Tensor = kernels.last_largest(kernels.prefixes(rows, k))
        return last.reshape(u.shape)
    return last_largest(rows, k).int().reshape(u.shape)


def _last_live(u: Tensor, tau: Tensor) -> Tensor:
    """The last step at which u[j] > tau, at least j - 1: (R, N) int32."""
    step = torch.arange(u.shape[-1], device=u.device)
    return (torch.maximum(torch.searchsorted(tau, u.contiguous()), step) - 1).int()


def _check_scores(u: Any) -> None:
    right = isinstance(u, Tensor) and not u.is_nested and u.layout == torch.strided
    if not right or u.dtype not in (torch.float32, torch.float64) or u.ndim < 1:
        raise ValueError(
            "u must be a tensor (..., N) of float32 or float64, of at least one dimension (scores of 16 bits tie: give "
            f"u.float(), made from scores of float32); got {describe(u)}"
        )


def _kept(k: Any) -> int:
    number = whole(k)
    if number is None or number < 1:
        raise ValueError(f"k must be an integer of at least 1; got {describe(k)}")
    return number


def _eager(u: Tensor) -> bool:
    return not torch.compiler.is_compiling() and plain(u)


def _differentiable(u: Tensor) -> bool:
    return u.requires_grad and torch.is_grad_enabled()


class _Row(torch.autograd.Function):
    """`sparsek` of rows."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, k: int) -> tuple[Tensor, Tensor]:
        m, tau = row_of(u, k)
        ctx.save_for_backward(u, m, tau)
        ctx.set_materialize_grads(False)
        return m, tau

    backward = staticmethod(_sparsek_backward)


class _Causal(torch.autograd.Function):
    """`sparsek_causal` of rows."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tau, last = causal_of(u, k)
        ctx.save_for_backward(u, tau, last)
        ctx.mark_non_differentiable(last)
        return tau, last

    backward = staticmethod(_sparsek_causal_backward)


# Operators, so that torch.compile does not trace the log2(N) levels of the causal ones, which takes long.
library = torch.library.Library("gossamer", "FRAGMENT")
library.define("sparsek(Tensor u, SymInt k) -> (Tensor m, Tensor tau)")
library.define("sparsek_causal(Tensor u, SymInt k) -> (Tensor tau, Tensor last)")
library.define("sparsek_kept(Tensor u, SymInt k) -> (Tensor tau, Tensor last)")
library.define("last_topk(Tensor u, SymInt k) -> Tensor")
library.define("thresholds_backward(Tensor u, Tensor tau, Tensor dtau) -> Tensor")
library.impl("sparsek", row_of, "CompositeExplicitAutograd")
library.impl("sparsek_causal", causal_of, "CompositeExplicitAutograd")
library.impl("sparsek_kept", kept_of, "CompositeExplicitAutograd")
library.impl("last_topk", largest_of, "CompositeExplicitAutograd")
library.impl("thresholds_backward", gradient_by_kernels, "CompositeExplicitAutograd")


@torch.library.register_fake("gossamer::sparsek", lib=library)
def _sparsek_fake(u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(u.shape[:-1])


@torch.library.register_fake("gossamer::sparsek_kept", lib=library)
@torch.library.register_fake("gossamer::sparsek_causal", lib=library)
def _sparsek_causal_fake(u: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), u.new_empty(u.shape, dtype=torch.int32)


@torch.library.register_fake("gossamer::thresholds_backward", lib=library)
def _thresholds_backward_fake(u: Tensor, tau: Tensor, dtau: Tensor) -> Tensor:
    return u.new_empty(u.shape)


@torch.library.register_fake("gossamer::last_topk", lib=library)
def _last_topk_fake(u: Tensor, k: int) -> Tensor:
    return u.new_empty(u.shape, dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output)


def _save_scores(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    u, _ = inputs
    tau, _ = output
    ctx.save_for_backward(u, tau)


def _sparsek_kept_backward(ctx: Any, dtau: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    u, tau = ctx.saved_tensors
    return threshold_gradient(u, tau, None, dtau), None


torch.library.register_autograd("gossamer::sparsek", _sparsek_backward, setup_context=_save, lib=library)
torch.library.register_autograd("gossamer::sparsek_causal", _sparsek_causal_backward, setup_context=_save, lib=library)
torch.library.register_autograd(
    "gossamer::sparsek_kept", _sparsek_kept_backward, setup_context=_save_scores, lib=library
)
