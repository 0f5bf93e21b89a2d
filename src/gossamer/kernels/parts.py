"""A call described as several over strided views of its arrays: residue classes, and heads of different patterns.

The views share memory with the arrays of the call, and kernels write into views of its results: nothing is copied or
permuted. Where two parts meet in a row, their results are combined by log-sum-exp; every part's backward reads the
joint out and lse, which makes its gradients shares of the exact ones, and these are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from gossamer.kernels.contract import Implementation, Scoring
from gossamer.kernels.launch import (
    ALIGNMENT,
    BYTES,
    EDGE,
    Builder,
    Direction,
    Kernel,
    Operand,
    Prepared,
    Shape,
    compact,
    compute_dtype,
)
from gossamer.patterns import LongNet, Pattern
from gossamer.plan.partition import Part, Partition, partition_of, problem_of_fold
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem


class Selection(NamedTuple):
    """Who computes one direction of a call, and the layout that it reads."""

    implementation: Implementation
    layout: Any


class Edge(Protocol):
    """The functions that the parts of a call need of the framework that runs them."""

    def plan(self, problem: Problem, backward: bool) -> Plan:
        """The plan of one part."""

    def select(self, plan: Plan, pattern: Pattern, q_offset: int) -> Selection:
        """Who computes it, and the layout."""

    def combine(self, b: Builder, out: str, lse: str, part_out: str, part_lse: str) -> None:
        """Describe how the results of another part over the same rows join out and lse, in place."""


class PartCall(NamedTuple):
    """One part of a call, for one batch element or for all."""

    part: Part
    b: int | None  # of the call's batch elements; None: all of them
    problem: Problem
    q_offset: int
    selected: Selection


def _calls_of_part(part: Part, problem: Problem) -> Iterator[tuple[Part, int | None]]:
    """The calls of a part: one, unless both batch elements and classes are many. Then the fewer pass one by one.

    So do the classes of a diagonal with terms by head: each class has heads of its own.
    """
    classes, h = part.run.classes, part.heads
    own_terms = part.diagonal and not problem.score_terms.isdisjoint({"sink_logits", "alibi_slopes"})
    if classes == 1:
        yield part, None
    elif classes >= problem.B and not own_terms:
        for b in range(problem.B):
            yield part, b
    else:
        for n in range(classes):
            heads = h._replace(start=h.start + n * part.diagonal, key_start=h.key_start + n * part.key_diagonal)
            yield replace(part, heads=heads, run=part.run.select(n, n + 1)), None


class PartitionedCall:
    """The launch of a call in parts. `of` names the arrays of the call as the parts see them."""

    def __init__(
        self, plan: Plan, edge: Edge, pattern: Pattern, scoring: Scoring, operands: Mapping[str, Operand]
    ) -> None:  # fmt: skip
        self.plan, self.problem, self.edge = plan, plan.problem, edge
        self.pattern, self.scoring = pattern, scoring
        self.b = Builder(operands)
        self.layouts: list[Any] = []  # of the parts that were run
        self.of = {name: name for name in operands}
        # Where parts come in 16 bits alone, two of them are combined in that type.
        self.rounded = not plan.implementations[0].capability.float32_results

    def fold(self) -> Partition:
        """The partition of the plan, with the batch elements seen as heads where all lie at one stride.

        Then the classes of every batch element are one call.
        """
        p, b, pattern = self.problem, self.b, self.pattern
        partition = self.plan.partition(pattern.handle, self.scoring.q_offset)
        assert partition is not None
        inputs = [b[name] for name in ("q", "k", "v")]
        if "dq" in b or ("out" in b and "dout" not in b):
            return partition  # results that lie as (B, positions, heads, size)
        if p.B == 1 or "key_lengths" in b or pattern.lead != (1, 1) or isinstance(pattern, LongNet):
            return partition  # a head of LongNet has its own class, a batch element has not
        if any(x.strides[0] != x.shape[1] * x.strides[1] for x in inputs):
            return partition
        folded = problem_of_fold(p)
        split = partition_of(pattern, folded, self.scoring.q_offset, self.plan.tiles, self.plan.gathers)
        if split is None:
            return partition
        for name in ("q", "k", "v", "dout", "out", "dlse", "lse"):
            if name in b:
                known = b[name]
                together = known.strides[0] == known.shape[1] * known.strides[1]
                self.of[name] = self._heads(name if together else b.copied(name))
        for name in ("sink_logits", "alibi_slopes"):
            if name in b:
                if len(b[name].shape) == 2:  # of each batch element, which lie one after the other
                    self.of[name] = b.view(f"{name}_heads", b.contiguous(name), (folded.H,), (1,))
                    continue
                vector = Operand(b[name].dtype, (folded.H,), (1,))
                b.function(Kernel(EDGE, "repeated", (p.B,)), name, returns={f"{name}_heads": vector})
                self.of[name] = f"{name}_heads"
        self.problem = folded
        return split

    def calls(self, partition: Partition, direction: Direction) -> Iterator[PartCall]:
        """The calls of a partition, in order."""
        backward = direction == "backward"
        for part in partition.parts:
            for piece, b in _calls_of_part(part, self.problem):
                h, run = piece.heads, piece.run
                offset = self.scoring.q_offset if piece.dilation == 1 else run.q_offset
                terms = self.problem.score_terms - {"q_offset"}
                if piece.combines or backward:  # a sink counts once, and its gradient is that of the whole call
                    terms -= {"sink_logits"}
                if offset != run.K - run.Q:
                    terms |= {"q_offset"}
                problem = replace(
                    self.problem, B=self.problem.B if b is None else run.classes, H=h.number, G=h.key_number, Q=run.Q,
                    K=run.K, score_terms=terms,
                )  # fmt: skip
                plan = self.edge.plan(problem, backward)
                yield PartCall(piece, b, plan.problem, offset, self.edge.select(plan, piece.pattern, offset))

    def rows(self, name: str, of: str, call: PartCall) -> str:
        """The view of q, out, dout or dq (B, H, Q, size), or of lse (B, H, Q)."""
        h, run = call.part.heads, call.part.run
        return self._view(name, of, call, (h.start, h.number, h.step), call.part.diagonal, run.row, run.Q)

    def keys(self, name: str, of: str, call: PartCall) -> str:
        """The view of k, v or their gradients (B, G, K, size)."""
        h, run = call.part.heads, call.part.run
        heads = h.key_start, h.key_number, h.key_step
        return self._view(name, of, call, heads, call.part.key_diagonal, run.first, run.K)

    def _view(
        self, name: str, of: str, call: PartCall, heads: tuple[int, int, int], shift: bool, first: int, count: int
    ) -> str:
        """(classes, heads, count, ...) of one batch element, or (B, heads, count, ...) of all for one class."""
        known, part = self.b[of], call.part
        batch, head, row, *last = known.strides
        start, many, step = heads
        offset = start * head + first * row
        if call.b is None:
            size, lead = known.shape[0], batch
        else:
            size, lead = part.run.classes, row + (head if shift else 0)
            offset += call.b * batch
        shape, strides = (size, many, count, *known.shape[3:]), (lead, step * head, part.dilation * row, *last)
        return self.b.view(name, of, shape, strides, offset)

    def inputs(self, n: int, call: PartCall) -> dict[str, str]:
        """The arrays of one part, by the names that its launch has for them."""
        b, of, part = self.b, self.of, call.part
        given = {"q": self.rows(f"{n}.q", of["q"], call)}
        given |= {name: self.keys(f"{n}.{name}", of[name], call) for name in ("k", "v")}
        h, run = part.heads, part.run
        for name in ("sink_logits", "alibi_slopes"):
            if name in call.problem.score_terms:
                assert not part.diagonal or run.classes == 1, "a class of a diagonal has heads of its own"
                *batch, step = b[of[name]].strides
                start, each = h.start * step, (b[of[name]].shape[0],) * len(batch)
                if batch and call.b is not None:  # classes of one batch element share its slopes
                    start, batch, each = start + call.b * batch[0], [], ()
                given[name] = b.view(f"{n}.{name}", of[name], (*each, h.number), (*batch, h.step * step), start)
        if part.dilation > 1 and "alibi_slopes" in given:
            slopes = b[given["alibi_slopes"]]
            vector = Operand(slopes.dtype, slopes.shape, compact(slopes.shape))
            kernel = Kernel(EDGE, "scaled", (part.dilation,))
            b.function(kernel, given["alibi_slopes"], returns={f"{n}.slopes": vector})
            given["alibi_slopes"] = f"{n}.slopes"
        if "key_lengths" in call.problem.score_terms:
            name = "key_lengths"
            if call.b is not None:
                (step,) = b[name].strides
                name = b.view(f"{n}.{name}", name, (1,), (step,), call.b * step)
            if part.dilation > 1:
                kernel = Kernel(EDGE, "class_lengths", (run.first, run.classes, part.dilation, self.problem.K))
                vector = Operand("int32", (call.problem.B,), (1,))
                b.function(kernel, name, returns={f"{n}.lengths": vector})
                name = f"{n}.lengths"
            given["key_lengths"] = name
        return given

    def run(self, n: int, call: PartCall, direction: Direction, given: Mapping[str, str]) -> None:
        """Run the launch of one part, whose results are among what is given."""
        scoring = self.scoring._replace(q_offset=call.q_offset)
        operands = {name: self.b[array] for name, array in given.items()}
        implementation, layout = call.selected
        prepared = implementation.prepare(call.problem, layout, direction, scoring, operands)
        self.b.include(prepared, given, f"{n}.own.")
        self.layouts.append(layout)

    def sums(self, name: str, shape: Shape, dtype: str) -> str:
        """Memory for a result of the parts: its own, or rows padded to 16 bytes, or of another type, to be copied."""
        return self.b.result(name, self.problem.dtype, shape, columns=_whole(shape, dtype), made=dtype)

    def folded(self, name: str) -> str:
        """A contiguous array (B, heads, ...) as the parts see it."""
        return name if self.b[name].shape[0] == self.problem.B else self._heads(name)

    def _heads(self, name: str) -> str:
        """A view (1, B * heads, ...) of an array whose batch elements and heads lie at one stride."""
        B, heads, *rest = self.b[name].shape
        return self.b.view(f"{name}_heads", name, (1, B * heads, *rest), self.b[name].strides)

    def target(self, name: str, wanted: str, call: PartCall, more: bool) -> str:
        """The memory that a part writes: the result itself, or memory to be combined with it or to be copied."""
        known, dtype = self.b[wanted], self.problem.dtype
        able = call.selected.implementation.capability.float32_results
        if not more and (known.dtype == dtype or able):
            return wanted
        made = known.dtype if able else dtype
        return self.b.padded(f"{name}_part", made, known.shape, _whole(known.shape, made))

    def _sum_dtype(self, depth: int) -> str:
        """The type in which `depth` parts are combined: float32, unless two that come in 16 bits are all there is."""
        own = self.problem.dtype
        return own if depth == 1 or (depth == 2 and self.rounded) else compute_dtype(own)

    def forward(self) -> Prepared:
        """out (B, H, Q, E) and lse (B, H, Q)."""
        p, b = self.problem, self.b
        partition = self.fold()
        whole_out = self.sums("out", (p.B, p.H, p.Q, p.E), self._sum_dtype(partition.depth))
        whole_lse = b.result("lse", compute_dtype(p.dtype), (p.B, p.H, p.Q))
        out, lse = self.folded(whole_out), self.folded(whole_lse)
        if partition.rows_left:
            b.step(Kernel(EDGE, "empty_rows"), self.of.get("sink_logits"), out, lse)
        for n, call in enumerate(self.calls(partition, "forward")):
            given, more = self.inputs(n, call), call.part.combines > 0
            wanted, wanted_lse = self.rows(f"{n}.out", out, call), self.rows(f"{n}.lse", lse, call)
            given["out"] = self.target(f"{n}.out", wanted, call, more)
            given["lse"] = b.array(f"{n}.lse_part", b[wanted_lse].dtype, b[wanted_lse].shape) if more else wanted_lse
            self.run(n, call, "forward", given)
            if more:
                self.edge.combine(b, wanted, wanted_lse, given["out"], given["lse"])
            elif given["out"] != wanted:
                b.copy(given["out"], wanted)
        return b.done("out", "lse")

    def backward(self) -> Prepared:
        """dq, dk and dv, and dsink_logits where there are sinks."""
        b = self.b
        names: tuple[str, ...] = ("dq", "dk", "dv")
        if "sink_logits" in b.operands:  # of the whole call
            kernel, dlse = Kernel(EDGE, "sink_gradient_of_results"), "dlse" if "dlse" in b.operands else None
            b.function(kernel, "dout", dlse, "out", "lse", "sink_logits", returns={"dsink_logits": None})
            names = (*names, "dsink_logits")
        shapes = {f"d{x}": b.operands[x].shape for x in ("q", "k", "v")}
        partition = self.fold()
        depths = {"dq": partition.depth, "dk": partition.key_depth, "dv": partition.key_depth}
        sums = {x: self.sums(x, shape, self._sum_dtype(depths[x])) for x, shape in shapes.items()}
        left = {"dq": partition.rows_left, "dk": partition.keys_left, "dv": partition.keys_left}
        for x, array in sums.items():
            if left[x]:
                b.step(Kernel(EDGE, "zero"), array)
            sums[x] = self.folded(array)
        for n, call in enumerate(self.calls(partition, "backward")):
            given = self.inputs(n, call)
            given |= {
                x: self.rows(f"{n}.{x}", self.of[x], call) for x in ("dout", "dlse", "out", "lse") if x in b.operands
            }
            adds = {"dq": call.part.combines > 0, "dk": call.part.adds, "dv": call.part.adds}
            wanted = {x: (self.rows if x == "dq" else self.keys)(f"{n}.{x}", array, call) for x, array in sums.items()}
            targets = {x: self.target(f"{n}.{x}", array, call, adds[x]) for x, array in wanted.items()}
            order = ("dout", "dlse", "q", "k", "v", "out", "lse")
            self.run(n, call, "backward", {x: given[x] for x in (*order, *given) if x in given} | targets)
            for x, target in targets.items():
                if adds[x]:
                    b.step(Kernel(EDGE, "add"), target, wanted[x])
                elif target != wanted[x]:
                    b.copy(target, wanted[x])
        return b.done(*names)


def _whole(shape: Shape, dtype: str) -> int:
    """Columns of memory whose rows begin at multiples of ALIGNMENT, as wide stores need them."""
    (*_, columns), step = shape, ALIGNMENT // BYTES[dtype]
    return -(-columns // step) * step
