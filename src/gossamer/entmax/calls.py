"""Calls by their keys: what is checked, chosen and laid out for a call follows from its key, and is done once.

A repeated call is one look-up and one run. Calls that have no key, which are not plain and eager or whose keys are seen
by a structure, a layout or a sparse matrix, are made anew each time.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import _C, Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.entmax.arguments import Given, check_alphas, visible_keys
from gossamer.entmax.backward import EntmaxGradients, list_gradients, normaliser_gradients
from gossamer.entmax.chunks import Chunk, Operands, chunks, heads_of_a_unit
from gossamer.entmax.forward import forward
from gossamer.entmax.launches import STATS, Bound, Launch, bound, tensors_of
from gossamer.entmax.lists import PairLists, RowLists
from gossamer.entmax.options import Options
from gossamer.entmax.ways import by_kernels
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.memo import Memo
from gossamer.patterns import Pattern
from gossamer.patterns.handles import token_of
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import four_dimensional, of_batch
from gossamer.torch.key import SIMPLE, Key, alignment, differentiable, facts, plain
from gossamer.torch.request import DENSE
from gossamer.torch.transforms import uncast

# Lists are saved up to so many keys a row in the mean; larger supports are saved as normalisers.
MEAN_LISTED = 256
NAMES_OF_LISTS = "list_keys", "list_weights", "list_counts"
# Chunks are kept up to so many bytes; of larger calls they are little beside the arithmetic.
CHUNK_BYTES = 2**20
MOST_BACKWARDS = 8  # of a call, whose tensors lie differently

known: Memo[Any] = Memo()  # calls, by their keys
autocast_enabled = _C._is_any_autocast_enabled  # of a call that has no key, or of a backward


class Told(NamedTuple):
    """What is told of rows (B, H, Q)."""

    normaliser: Tensor
    support: Tensor
    certified: Tensor


class Results(NamedTuple):
    """out (B, H, Q, E) in q's dtype, and what is told of its rows; kernels leave out what is not asked for."""

    out: Tensor
    told: Told | None


class Forward(NamedTuple):
    """The results of a forward, and what its backward reads: lists of supports, and normalisers of rows without one."""

    results: Results
    lists: PairLists | RowLists | None
    normaliser: Tensor | None  # (B, H, Q) or (B H Q,)


class EntmaxOptions(NamedTuple):
    """The arguments of a call as a user gives them, but for q, k, v and what says how results are wanted."""

    pattern: Any
    alpha: Any
    top_k: Any
    causal: Any
    q_positions: Any
    k_positions: Any
    scale: Any
    implementation: Any


def key_of(q: Any, k: Any, v: Any, asked: EntmaxOptions, *more: Any) -> Key | None:
    """What tells calls apart; None for one that has no key: see `torch.key.key_of`. `more` are numbers and names."""
    pattern, alpha, top_k, causal, q_positions, k_positions, scale, implementation = asked
    mask = handle = None
    if isinstance(pattern, Tensor):
        mask = pattern
    elif pattern is None or isinstance(pattern, Pattern):
        handle = (DENSE if pattern is None else pattern).handle
    else:
        return None
    of_alpha, number = (alpha, None) if isinstance(alpha, Tensor) else (None, alpha)
    numbers = (number, top_k, causal, scale, implementation, *more)
    types = tuple(map(type, numbers))
    if q is None or k is None or v is None or not SIMPLE.issuperset(types):
        return None
    tensors = q, k, v, of_alpha, q_positions, k_positions, mask
    if not plain(*tensors):
        return None
    told = facts(*tensors)
    if told is None:
        return None
    aligned = alignment(*[x for x in tensors if x is not None]) if q.is_cuda else True
    return handle, numbers, types, told, differentiable(q, k, v, of_alpha), aligned


class RowsCall:
    """What all calls of a key share: their options, who computes them, and which keys their rows see.

    Args:
        call: the first one; nothing of its tensors is kept.
        given: its q, k and v as a user gave them, if later calls are to be run; else None.
    """

    def __init__(self, call: Given, given: tuple[Tensor, Tensor, Tensor] | None) -> None:
        q, k, v, alpha, options, self.dims, self.number = call
        self.as_given = given is not None and given[0] is q and given[1] is k and given[2] is v
        D, attended = q.shape[3], options.attended
        self.kernels = by_kernels(q, k, v, self.number, options)
        self.empty = 0 in q.shape or 0 in k.shape
        self.scale = D**-0.5 if options.scale is None else float(options.scale)
        self.same = None if self.number is None else self.number - 1
        self.wide = compute_dtype(q.dtype)
        # Equal patterns share a handle as long as its token is there.
        self._alive = attended.alive if attended.data else token_of(attended.handle)
        self.options = options._replace(
            attended=attended._replace(data=(), alive=None), q_positions=None, k_positions=None
        )
        self.alpha: Tensor | None = None if self.number is None else alpha
        self.bytes = 0
        self._kept: tuple[int, tuple[Chunk, ...]] | None = None
        self.bare = all(x is None for x in options.tensors)  # whether no tensor says which keys a row may see
        if given is not None:
            self._alive = None if attended.data else self._alive
            if self.bare and not (self.kernels or self.empty) and q.device.type == "cpu":
                with torch.inference_mode(False):
                    self._keep(q, k, options)

    def _keep(self, q: Tensor, k: Tensor, options: Options) -> None:
        """Keep the chunks, where they are small."""
        R, every = self._seen(q, k, options)
        kept = []
        for chunk in every:
            kept.append(chunk)
            self.bytes += chunk.bytes
            if self.bytes > CHUNK_BYTES:
                self.bytes = 0
                return
        self._kept = R, tuple(kept)

    def _seen(self, q: Tensor, k: Tensor, options: Options) -> tuple[int, Any]:
        """(heads of a unit, chunks)."""
        (B, H, Q, _), G = q.shape, k.shape[1]
        visible = visible_keys(q, k, options)
        return heads_of_a_unit(visible, H, G), chunks(visible, B, H, G, Q)

    def as_computed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a later call as the first one had them: in four dimensions, of as many batch elements."""
        if self.dims != 4:
            q, k, v = four_dimensional(q, k, v)
        B = q.shape[0]
        return (q, k, v) if k.shape[0] == v.shape[0] == B else (q, of_batch(k, B), of_batch(v, B))

    def alphas(self, q: Tensor, alpha: Tensor) -> Tensor:
        """The alpha of each head in a later call, whose values are checked as in the first one."""
        alpha = alpha.expand(q.shape[1])
        if not self.kernels:
            check_alphas(alpha)
        return alpha

    def options_of(self, tensors: tuple[Tensor | None, ...]) -> Options:
        """The options of a call."""
        return self.options if self.bare else self.options.over(tensors)

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, tensors: tuple[Tensor | None, ...]
    ) -> Operands:
        """The tensors of a call as it is computed."""
        alpha = self.alpha if alpha is None else alpha
        assert alpha is not None
        R, every = self._kept or self._seen(q, k, self.options_of(tensors))
        (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
        a, same = alpha.detach().double() - 1, self.same
        if same is None:
            least, most = (float(x) for x in torch.aminmax(a))
            same = least if least == most else None
        wide_k, wide_v = (x.to(self.wide).reshape(B * G, K, x.shape[3]).contiguous() for x in (k, v))
        return Operands(
            (q.to(self.wide) * self.scale).reshape(B * H // R, R, Q, D), wide_k, wide_v,
            a.expand(B, H).reshape(B * H // R, R), same, H, H // G // R, self.options.top_k, every,
        )  # fmt: skip


class EntmaxCall(RowsCall):
    """Runs every call of one key of `entmax_attention`.

    `tensors` are those of a call that say which keys a row may see, in the order of `Options.tensors`.

    Args:
        listed: whether the backward is to read lists.
        with_aux: whether more than out is wanted; kernels leave it out otherwise.
    """

    def __init__(
        self, call: Given, given: tuple[Tensor, Tensor, Tensor] | None, listed: bool, with_aux: bool
    ) -> None:  # fmt: skip
        super().__init__(call, given)
        self.differentiable = differentiable(call.q, call.k, call.v, call.alpha)
        self.listed = self.differentiable and listed
        self.told = with_aux
        # The backward reads normalisers of rows without a list, of which `top_k` leaves none.
        needed = STATS[:1] if self.differentiable and call.options.top_k is None else ()
        self.stats = STATS if with_aux else needed
        self._forward: Bound | None = None
        self._backwards: Memo[Bound] = Memo(MOST_BACKWARDS)

    def __call__(
        self, apply: Any, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, *tensors: Tensor | None
    ) -> Results:
        """The results, with their gradient where calls of the key have one.

        Args:
            apply: that of `EntmaxAttention`.
            alpha: None for that of the key.
        """
        if self.differentiable:
            out, *told = apply(self, q, k, v, alpha, *tensors)
            return Results(out, Told(*told) if told else None)
        return self.forward(q, k, v, alpha, *tensors).results

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, *tensors: Tensor | None
    ) -> Forward:  # fmt: skip
        """The forward, and the lists of supports if they are wanted and small enough."""
        if self.empty:
            return empty_results(q, v)
        if self.kernels:  # which autocast does not reach
            return self._forward_by_kernels(q, k, v, alpha, tensors)
        B, H, Q, _ = q.shape
        with uncast(q.device) if autocast_enabled() else nullcontext():
            o = self.operands(q, k, v, alpha, tensors)
            computed = forward(o, MEAN_LISTED * B * H * Q if self.listed else 0)
        rows = (x.view(B, H, Q) for x in (computed.normaliser, computed.support, computed.certified))
        # No view to autograd: what a custom function gives as a view cannot be written to in place.
        out = torch.ops.aten._unsafe_view(computed.out, (B, H, Q, v.shape[3]))
        # Lists of torch hold every row.
        told, lists = Told(*rows), computed.lists
        return Forward(Results(out.to(q.dtype), told), lists, told.normaliser if lists is None else None)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, tensors: tuple[Tensor | None, ...],
        saved: PairLists | RowLists | None, normaliser: Tensor | None, wants_alpha: bool, dout: Tensor,
    ) -> EntmaxGradients:  # fmt: skip
        """The gradients, from lists of supports or from the normalisers (B, H, Q): one of both is given."""
        if self.empty:
            dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
            return EntmaxGradients(dq, dk, dv, torch.zeros_like(alpha) if wants_alpha and alpha is not None else None)
        if self.kernels:
            assert not isinstance(saved, PairLists)
            return self._gradients_by_kernels(q, k, v, alpha, tensors, saved, normaliser, wants_alpha, dout)
        with uncast(q.device) if autocast_enabled() else nullcontext():
            o = self.operands(q, k, v, alpha, tensors)
            dout = dout.to(o.q.dtype).reshape(-1, dout.shape[3])
            if isinstance(saved, PairLists):
                dq, dk, dv, dalpha = list_gradients(o, saved, dout, wants_alpha)
            else:
                assert normaliser is not None
                dq, dk, dv, dalpha = normaliser_gradients(o, normaliser.reshape(-1), dout, wants_alpha)
        return EntmaxGradients(
            (dq * self.scale).view(q.shape).to(q.dtype), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype),
            None if dalpha is None or alpha is None else dalpha.to(alpha.dtype),
        )  # fmt: skip

    def _forward_by_kernels(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, tensors: tuple[Tensor | None, ...]
    ) -> Forward:
        given = tensors_of(q, k, v, alpha, self.options_of(tensors))
        run = self._forward
        if run is None or (q.is_cuda and is_current_stream_capturing()):
            launch = Launch("out", self.same, self.scale, self.options, self.listed, self.stats)
            run = self._forward = bound(launch, given)
        out, *more = run(*given.values())
        lists = RowLists(*more[-3:]) if self.listed else None
        lam = more[0] if self.stats else None
        if not self.told:
            return Forward(Results(out, None), lists, lam)
        rows = more[0], more[1], more[2].view(torch.bool)
        return Forward(Results(out, Told(*(torch.ops.aten._unsafe_view(x, q.shape[:3]) for x in rows))), lists, lam)

    def _gradients_by_kernels(
        self, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, tensors: tuple[Tensor | None, ...],
        lists: RowLists | None, normaliser: Tensor | None, wants_alpha: bool, dout: Tensor,
    ) -> EntmaxGradients:  # fmt: skip
        """The gradients by the kernels; where no lists are saved, these are made again."""
        given = tensors_of(q, k, v, alpha, self.options_of(tensors))
        given["dout"] = dout if dout.dtype == q.dtype else dout.to(q.dtype)
        if normaliser is not None:
            given["lam"] = normaliser if normaliser.ndim == 1 else normaliser.reshape(-1)
        if lists is not None:
            given |= zip(NAMES_OF_LISTS, lists, strict=True)
        wants_alpha, x = wants_alpha and alpha is not None, given.values()
        # Hooks on saved tensors (offloading, say) may return them with other strides than in the forward.
        key = wants_alpha, *given, *map(Tensor.stride, x), alignment(*x)
        run = self._backwards.get(key)
        if run is None or (q.is_cuda and is_current_stream_capturing()):
            launch = Launch("gradients", self.same, self.scale, self.options, with_alpha=wants_alpha)
            run = self._backwards.put(key, bound(launch, given))
        dq, dk, dv, *of_alpha = run(*x)
        dalpha = None
        if alpha is not None and wants_alpha:
            (of_rows,) = of_alpha
            dalpha = of_rows.sum((0, 2), dtype=torch.float64).to(alpha.dtype)
        return EntmaxGradients(dq, dk, dv, dalpha)


def empty_results(q: Tensor, v: Tensor) -> Forward:
    """The results where there is no pair of a query and a key: rows that see nothing, and no lists."""
    (B, H, Q, _), wide = q.shape, compute_dtype(q.dtype)
    normaliser = torch.full((B, H, Q), torch.inf, dtype=wide, device=q.device)
    support = torch.zeros((B, H, Q), dtype=torch.int32, device=q.device)
    told = Told(normaliser, support, support == 0)
    return Forward(Results(q.new_zeros((B, H, Q, v.shape[3])), told), None, normaliser)


class EntmaxAttention(torch.autograd.Function):
    """Saves q, k, v, alpha, and the supports or the normalisers; double backward is refused."""

    @staticmethod
    def forward(
        ctx: Any, call: EntmaxCall, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        (out, told), lists, normaliser = call.forward(q, k, v, alpha, *tensors)
        saved_lists = () if lists is None else tuple(lists)
        # Saved with the others, what says which keys a row may see must not be written to before the backward.
        ctx.save_for_backward(q, k, v, alpha, normaliser, *tensors, *saved_lists)
        ctx.call, ctx.kind, ctx.others = call, type(lists), len(tensors)
        ctx.set_materialize_grads(False)
        if told is None or not call.told:
            return (out,)
        ctx.mark_non_differentiable(*told)
        return out, *told

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *constant: None) -> tuple[Tensor | None, ...]:
        others = (None,) * ctx.others
        if dout is None:
            return (None,) * 5 + others
        q, k, v, alpha, normaliser, *rest = ctx.saved_tensors
        tensors, saved = tuple(rest[: ctx.others]), rest[ctx.others :]
        lists = ctx.kind(*saved) if saved else None
        given = q, k, v, alpha, tensors, lists, normaliser, ctx.needs_input_grad[4]
        if torch.is_grad_enabled():  # create_graph
            found = _Gradients.apply(partial(ctx.call.gradients, *given), dout, q, k, v, alpha)
        else:
            found = ctx.call.gradients(*given, dout)
        return (None, *found, *others)


class _Gradients(torch.autograd.Function):
    """The gradients where a graph of them is asked for; it leads to the inputs, so that its use raises, not gives 0."""

    @staticmethod
    def forward(ctx: Any, compute: Any, dout: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(compute(dout))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise Unsupported(
            "entmax_attention can be differentiated once: its gradients have no gradient (double backward)"
        )


# `Function.apply` without its search for functorch's tensors, of which `plain` has found none.
apply_plain = super(torch.autograd.Function, EntmaxAttention).apply
