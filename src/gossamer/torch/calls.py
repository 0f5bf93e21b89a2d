"""Calls by their keys: who computes a call, and the functions that its launches are bound to.

All that is checked, planned, laid out and compiled for a call follows from its key, and is done once. A repeated call
is one look-up and one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.checks import raise_first
from gossamer.kernels.contract import Implementation
from gossamer.kernels.launch import (
    INPUTS,
    NO_VECTORS,
    RESULTS,
    VECTORS,
    Direction,
    Operand,
    Prepared,
    Vectors,
    compact,
    operand_of,
    with_own,
)
from gossamer.kernels.parts import PartitionedCall
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.memo import Memo
from gossamer.patterns.handles import pattern_of, token_of
from gossamer.plan.arguments import offset_check
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import Arguments, check_mask, four_dimensional, is_empty, options_of, unbatched, validate
from gossamer.torch.bind import bind
from gossamer.torch.given_layouts import check_layout, layout_from
from gossamer.torch.key import Key, alignment, plain
from gossamer.torch.mask_layouts import dense_of
from gossamer.torch.memory import hold_for_graphs, outlasting
from gossamer.torch.parts import TorchEdge
from gossamer.torch.planning import (
    DataLayout,
    check_distances,
    check_rows,
    check_sizes,
    data_layout,
    layout_bytes,
    log_choice,
    plan_for,
    scoring_of,
    select_layout,
)
from gossamer.torch.recording import record
from gossamer.torch.request import Request, ResolvedPattern

MOST_BACKWARDS = 8  # kept for a call: one for each set of strides of saved tensors and gradients

Bound = Callable[..., tuple[Tensor, ...]]

known: Memo[Any] = Memo()  # calls, by their keys


def call_of(request: Request, key: Key | None = None) -> Call:
    """The `Call` (or `Unbatched`) that computes a request: from the memo, or new and then kept there.

    Args:
        key: that of the arguments as they were given, looked up already without success; None: `request.key`.
    """
    as_given = key is not None  # the call then takes the user's own tensors, else views of four dimensions
    if key is None:
        key = request.key
        found = known.get(key)
        if found is not None:
            return found
    a, attended = request.arguments, request.attended
    kind = MadeCall if a.made and a.counted else DataCall if attended.data else Call
    call = (EmptyCall if is_empty(a) else kind)(request)
    turned = as_given and (a.bshd or a.dims != 4)
    known.put(key, Unbatched(call, a.dims, a.bshd) if turned else call, call.bytes)
    return call


class Unbatched(NamedTuple):
    """A call whose q, k and v have two or three dimensions, or are (B, positions, heads, size)."""

    call: Any
    dims: int
    bshd: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), with as many dimensions as q has."""
        out, lse = self.call(*four_dimensional(q, k, v, self.bshd), *more)
        return unbatched(out, lse, self.dims, self.bshd)


def read_q_offset(request: Request) -> Request:
    """The request with an int as `q_offset`: of a tensor the value is read, which waits for a GPU.

    Raises:
        ValueError: it is no position.
    """
    a = request.arguments
    if a.q_offset_tensor is None:
        return request
    validate(a)
    q_offset = int(a.q_offset_tensor)
    raise_first([offset_check(q_offset, a.q.shape[2], a.k.shape[2])], lambda given: f"a tensor of {given}")
    return request._replace(arguments=a._replace(q_offset=q_offset, q_offset_tensor=None))


def vectors_and_data(more: Sequence[Any]) -> tuple[Vectors, tuple[Any, ...]]:
    """(vectors, data) of the tensors behind q, k and v; without any, every vector is None and data is ()."""
    if not more:
        return NO_VECTORS, ()
    lengths, sinks, slopes, *data = more
    return Vectors(lengths, sinks, slopes), tuple(data)


class Call:
    """Runs every call of one key: its plan, its bound forward and backward. A pattern says what is attended.

    Of the tensors of a call, `more` are key_lengths, sink_logits and alibi_slopes, or nothing where calls of the key
    have none of them.

    Raises:
        ValueError: an argument is wrong; `Unsupported` where nothing computes the call.
    """

    def __init__(self, request: Request) -> None:
        a, attended = request.arguments, request.attended
        self.plan = plan_for(a, attended.geometry, request.keys)
        self.scoring = scoring_of(a, self.plan.problem.K)
        if self.plan.problem.score_terms:
            check_rows(self.plan.problem, self.scoring, attended.handle)
            check_distances(a, self.scoring, attended.handle)
        check_sizes(a, attended.handle)
        self.differentiable, self.device = a.backward, a.q.device
        self.attended = attended._replace(data=(), alive=None, made_from=None, again=None)
        # A call that is kept must keep no tensor of the user alive.
        self.options = a._replace(q=None, k=None, v=None, key_lengths=None, sink_logits=None, alibi_slopes=None)  # type: ignore[arg-type]
        self.bytes = 0
        self._vectors = VECTORS if request.more else ()
        self._start(request)

    def _start(self, request: Request) -> None:
        """Bind the forward, and prepare the memo of backwards."""
        # The token keeps the handle alive: an equal pattern that the next call makes has the same handle and key.
        self._alive = token_of(self.attended.handle)
        self._backwards: Memo[Bound] = Memo(MOST_BACKWARDS)
        self.forward: Bound = self._bound("forward", request.operands)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, ...]:
        """(out, lse); with the gradient where calls of the key have one."""
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        return _apply(self, q, k, v, *more) if self.differentiable else self.forward(q, k, v, *more)

    def gradients(self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """(dq, dk, dv), and dsink_logits where there are sinks. `saved` are q, k, v, out, lse and `more`."""
        q, k, v, out, lse, *more = saved
        dout = torch.zeros_like(out) if dout is None else dout
        if plain(dout, dlse, q, k, v, *more):
            return self.backward(dout, dlse, q, k, v, out, lse, *more)
        vectors, data = vectors_and_data(more)
        a = self.options._replace(q=q, k=k, v=v, **vectors._asdict())
        return gradients_by_operator(a, self.attended._replace(data=self._arrays(data)), dout, dlse, out, lse)

    def _arrays(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The arrays of a layout, or a mask, of the data that a call is given."""
        return data

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *more: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(dq, dk, dv), and dsink_logits where there are sinks; never through the operator, unlike `gradients`."""
        return self._backward(self._backwards, None, dout, dlse, q, k, v, out, lse, *more)

    def _backward(
        self, kept: Memo[Bound], given: DataLayout | None, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, out: Tensor, lse: Tensor, *vectors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        key = given and self, *strides_of(dout, dlse, q, k, v, out, lse, *vectors)
        run = kept.get(key)
        if run is None:
            run = kept.put(key, self._bound("backward", operands_of(dout, dlse, q, k, v, out, lse, *vectors), given))
        if q.is_cuda and self._outlasts(given) and is_current_stream_capturing():
            hold_for_graphs(run)
        return run(dout, dlse, q, k, v, out, lse, *vectors)

    def _bound(self, direction: Direction, operands: dict[str, Operand], given: DataLayout | None = None) -> Bound:
        """The function of a launch, for tensors that lie as the operands do."""
        own = results_in_bshd(direction, operands) if self.options.bshd else {}
        make = partial(self._prepared, direction, operands | own, given)
        prepared = outlasting(self.device, make) if self.device.type == "cuda" and self._outlasts(given) else make()
        return self._function(direction, prepared, own)

    def _function(
        self, direction: Direction, prepared: Prepared, own: dict[str, Operand], made: bool = False
    ) -> Bound:  # fmt: skip
        """The function of what was prepared; `made` as in `bind`."""
        results, sinks = prepared.launch.results, "sink_logits" in prepared.launch.arguments
        wanted = (*RESULTS[direction], *("dsink_logits",) * (direction == "backward" and sinks))
        assert results == wanted, f"a launch must give {wanted}, not {results}"
        parameters = (*INPUTS[direction], *self._vectors)
        return bind(with_own(prepared, own) if own else prepared, self.device, parameters, made)

    def _outlasts(self, given: DataLayout | None) -> bool:
        """Whether later calls may use a launch: not if its data lie in buffers that a compiled graph uses again."""
        return given is None or self.options.counted

    def _prepared(self, direction: Direction, operands: dict[str, Operand], given: DataLayout | None) -> Prepared:
        plan = self.plan if direction == "forward" else self.plan.gradient
        handle, q_offset = self.attended.handle, self.scoring.q_offset
        if given is None and plan.partition(handle, q_offset):
            edge = TorchEdge(self.options.implementation, self.device)
            of_parts = PartitionedCall(plan, edge, pattern_of(handle), self.scoring, operands)
            prepared = of_parts.forward() if direction == "forward" else of_parts.backward()
            self.bytes += sum(map(layout_bytes, of_parts.layouts))
            return prepared
        if given is None:
            implementation, layout = select_layout(plan, pattern_of(handle), q_offset, self.device)
            self.bytes += layout_bytes(layout)
        else:
            implementation, layout = given.selected
            log_choice(implementation.name, plan)
        return implementation.prepare(plan.problem, layout, direction, self.scoring, operands)


def strides_of(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *vectors: Tensor | None,
) -> Key:  # fmt: skip
    """What tells backwards of a call apart: hooks on saved tensors (offloading, say) may change their strides."""
    return (
        dout.stride(), dlse is not None and dlse.stride(), q.stride(), k.stride(), v.stride(), out.stride(),
        lse.stride(), alignment(dout, q, k, v, out, lse),
        *[x is not None and (x.stride(), alignment(x)) for x in (dlse, *vectors)],
    )  # fmt: skip


def operands_of(*tensors: Tensor | None) -> dict[str, Operand]:
    """What a launch is told of the tensors of a backward, the vectors behind them, by name."""
    names = (*INPUTS["backward"], *VECTORS)
    return {n: operand_of(x) for n, x in zip(names, tensors, strict=False) if x is not None}


class DataCall(Call):
    """A call whose pairs tensors tell: `more` ends with the arrays of a layout, or with a mask."""

    def _start(self, request: Request) -> None:
        self._operands, self._again = request.operands, request.attended.again

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(out, lse), without a gradient."""
        vectors, data = vectors_and_data(more)
        given = self._data_layout(self.plan, q, k, data)
        run = given.bound.get(self)
        if run is None:
            run = given.bound.put(self, self._bound("forward", self._operands, given))
        if q.is_cuda and self._outlasts(given) and is_current_stream_capturing():
            hold_for_graphs(run)
        return run(q, k, v, *vectors)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *more: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        vectors, data = vectors_and_data(more)
        given = self._data_layout(self.plan.gradient, q, k, data)
        return self._backward(given.bound, given, dout, dlse, q, k, v, out, lse, *vectors)

    def _arrays(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return data if self._again is None else self._again.parts(data)

    def _data_layout(self, plan: Plan, q: Tensor, k: Tensor, data: tuple[Tensor, ...]) -> DataLayout:
        a = self.options
        return data_layout(plan, q, k, data, self.attended.geometry, counted=a.counted, made=a.made, again=self._again)


class MadeCall(DataCall):
    """A call whose layout was made for it alone: work items follow from its arrays as they did the first time."""

    def _start(self, request: Request) -> None:
        super()._start(request)
        self._forward: Bound | None = None
        self._backwards = Memo(MOST_BACKWARDS)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(out, lse), without a gradient."""
        run = self._forward
        if run is None:
            _, data = vectors_and_data(more)
            run = self._remade("forward", self._operands, data)
            if run is None:
                return super().forward(q, k, v, *more)
            self._forward = run
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(run)
        return run(q, k, v, *more)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *more: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        vectors, data = vectors_and_data(more)
        of_data = *[x.stride() for x in data], alignment(*data)
        key = *strides_of(dout, dlse, q, k, v, out, lse, *vectors), *of_data
        run = self._backwards.get(key)
        if run is None:
            run = self._remade("backward", operands_of(dout, dlse, q, k, v, out, lse, *vectors), data)
            if run is None:
                return super().backward(dout, dlse, q, k, v, out, lse, *more)
            self._backwards.put(key, run)
        if q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(run)
        return run(dout, dlse, q, k, v, out, lse, *more)

    def _remade(self, direction: Direction, operands: dict[str, Operand], data: tuple[Tensor, ...]) -> Bound | None:
        """The function of a launch and of what it reads, which it makes of a layout's arrays; None where it cannot."""
        plan = self.plan if direction == "forward" else self.plan.gradient
        own = results_in_bshd(direction, operands) if self.options.bshd else {}
        implementation, geometry = cast(Implementation, plan.implementations[0]), self.attended.geometry
        prepared: list[Prepared] = []
        log_choice(implementation.name, plan)

        def make() -> list[Any]:
            layout: Any = layout_from([*self._arrays(data)], geometry)
            layout = dense_of(layout.rows) if implementation.layout == "dense" else layout
            prepared.append(implementation.prepare(plan.problem, layout, direction, self.scoring, operands | own))
            return list(prepared[0].layout.values())

        again = record(make, data, self.device).again
        if again is None:
            return None
        run, first = self._function(direction, prepared[0], own, made=True), len(INPUTS[direction]) + len(VECTORS)
        if all(isinstance(x, Tensor) for x in prepared[0].layout.values()):
            return lambda *given: run(*given[:first], *again(*given[first:]))
        at = INPUTS[direction].index("q")  # one function of the layout, which keeps what it reads there with the layout

        def of_object(*given: Any) -> tuple[Tensor, ...]:
            return run(*given[:first], self._data_layout(plan, given[at], given[at + 1], given[first:]).selected.layout)

        return of_object


class EmptyCall(Call):
    """A call of tensors without elements, B, H, Q or K of 0: there is no pair, and nothing is launched for it.

    It is checked as every call is, and a named implementation refuses it for the same reasons.
    """

    def _start(self, request: Request) -> None:
        handle = self.attended.handle
        self._alive = None if request.attended.data else token_of(handle)  # type: ignore[assignment]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """(out, lse) of no pairs: out is 0, lse is -inf or the sink of the head."""
        vectors, data = vectors_and_data(more)
        if self.attended.geometry:
            if not self.options.made:
                check_layout(layout_from(list(data), self.attended.geometry).rows, q, k)
        elif data:
            (mask,) = data
            check_mask(mask, q, k)
        sinks, shape = vectors.sink_logits, q.shape[:3]
        lse = q.new_full(shape, -math.inf, dtype=compute_dtype(q.dtype))
        return self._zeros(q, v.shape[3]), lse if sinks is None else lse.copy_(sinks[:, None])

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *more: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        vectors, _ = vectors_and_data(more)
        sinks = vectors.sink_logits
        dsink = () if sinks is None else (sinks.new_zeros(sinks.shape) if dlse is None else dlse.sum((0, 2)),)
        return *(self._zeros(x, x.shape[3]) for x in (q, k, v)), *dsink

    def _zeros(self, like: Tensor, size: int) -> Tensor:
        B, heads, N, _ = like.shape
        return (
            like.new_zeros((B, N, heads, size)).transpose(1, 2)
            if self.options.bshd
            else like.new_zeros((B, heads, N, size))
        )


def gradients_by_operator(
    a: Arguments, attended: ResolvedPattern, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), and dsink_logits where there are sinks, by the registered operator: modes and tracers see it."""
    backward, t = torch.ops.gossamer.backward.default, attended
    *gradients, dsink = backward(
        dout, dlse, a.q, a.k, a.v, out, lse, list(t.data), list(t.geometry), t.handle, *options_of(a)
    )
    return (*gradients, dsink) if a.sink_logits is not None else tuple(gradients)


def results_in_bshd(direction: Direction, operands: Mapping[str, Operand]) -> dict[str, Operand]:
    """The results of a direction as they lie in memory of (B, positions, heads, size), by name."""
    q, k, v = (operands[name] for name in ("q", "k", "v"))
    (*rows, _), (*_, columns) = q.shape, v.shape
    of = {"out": (*rows, columns)} if direction == "forward" else {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    found = {}
    for name, (B, heads, N, size) in of.items():
        batch, row, head, one = compact((B, N, heads, size))
        found[name] = Operand(q.dtype, (B, heads, N, size), (batch, head, row, one))
    return found


class Differentiated(Protocol):
    """The forward and the gradients of a call, as `Attention` asks for them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, ...]:
        """(out, lse), without a gradient."""

    def gradients(self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """(dq, dk, dv), and dsink_logits where there are sinks."""


class Attention(torch.autograd.Function):
    """The autograd function of a call. It copies lengths; lse has a gradient, a double backward raises."""

    @staticmethod
    def forward(
        ctx: Any, call: Differentiated, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None
    ) -> tuple[Tensor, ...]:
        out, lse = call.forward(q, k, v, *more)
        lengths, *rest = more or (None,)
        if lengths is not None:
            # A step may write the next lengths before it asks for gradients: they are those of what was computed.
            more = (lengths.clone(), *rest)
        ctx.save_for_backward(q, k, v, out, lse, *more)
        ctx.call = call  # it keeps the pattern's handle, which must live until the backward
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q, k, v, _, _, *more = saved
        vectors, data = vectors_and_data(more)
        if torch.is_grad_enabled():  # create_graph
            compute = partial(ctx.call.gradients, saved)
            dq, dk, dv, *dsink = _Gradients.apply(compute, dout, dlse, q, k, v, vectors.sink_logits)
        else:
            dq, dk, dv, *dsink = ctx.call.gradients(saved, dout, dlse)
        if not more:
            return None, dq, dk, dv
        (dsinks,) = dsink or (None,)
        return (None, dq, dk, dv, *Vectors(sink_logits=dsinks), *(None,) * len(data))


class _Gradients(torch.autograd.Function):
    """The gradients under create_graph=True: they lead to the inputs, so that a double backward raises."""

    @staticmethod
    def forward(ctx: Any, compute: Any, dout: Tensor | None, dlse: Tensor | None, *inputs: Tensor | None) -> Any:
        return compute(dout, dlse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> NoReturn:
        raise Unsupported("attention can be differentiated once: its gradients have no gradient (double backward)")


# `Function.apply` without its search for functorch's tensors, of which `plain` has found none.
_apply = super(torch.autograd.Function, Attention).apply
