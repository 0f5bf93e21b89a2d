"""Calls that were launched before, bound to all that their repetitions have in common: see `kernels.contract.Binding`.

The forward kernels over tiles and those that gather begin with the same ten tensors, and their merging with four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.devices import Workspace, elsewhere, empty_from, template
from gossamer.kernels.relaunch import Bound, bound, fresh
from gossamer.kernels.triton.arguments import operand
from gossamer.kernels.triton.block import launch as block
from gossamer.kernels.triton.block.forward import forward_kernel
from gossamer.kernels.triton.block.schedule import schedule_of
from gossamer.kernels.triton.gather import launch as gather
from gossamer.kernels.triton.gather.schedule import launch_of
from gossamer.kernels.triton.merge import merge_kernel, merged
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.problem import Problem

Forward = Callable[..., tuple[Tensor, Tensor]]
GIVEN, MERGED = 10, 4  # tensors that come first among the arguments of a forward kernel, and of the merging


def bound_forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout | GatherLayout, terms: Terms, into: Any,
    general: Forward,
) -> Forward | None:  # fmt: skip
    """What computes (out, lse) of calls like this one; `general` computes those on another device, as `forward` does.

    `into` as in `kernels.contract.Binding`.
    """
    if any(operand(x) is not x for x in (q, k, v)):
        return None
    shapes = (p.B, p.H, p.Q, p.E), (p.B, p.H, p.Q)
    out: Any = fresh(q.dtype, shapes[0]) if into is None else into[0]
    lse: Any = fresh(torch.float32, shapes[1]) if into is None else into[1]
    if isinstance(layout, GatherLayout):
        plan: Any = launch_of(p, layout, "forward", None, None)
        kernel = gather.forward_kernel_of(layout)
    else:
        plan = schedule_of(layout, False, p.B, p.H, p.H // p.G, None)
        kernel = forward_kernel
    cut, part_shapes = plan.cut, [plan.cut.shape(size) for size in (p.E, 2)]
    parts: Any = tuple(fresh(torch.float32, shape) for shape in part_shapes) if cut.slots else (lse, lse)
    if isinstance(layout, GatherLayout):
        key, tensors, floats = gather.forward_arguments(q, k, v, out, lse, parts, terms)
    else:
        launched, _ = block.forward_launch(p, q, k, v, out, lse, parts, layout, terms, plan, None)
        key, tensors, floats, options = launched
        key = (key, *options.values())
        if options["TMA"]:
            return None
    found = bound(plan.known, kernel, key, tensors, floats, GIVEN)
    merge = bound(cut.known, merge_kernel, p.E, merged(out, lse, parts), {}, MERGED) if cut.slots else None
    if found is None or (cut.slots and merge is None):
        return None
    likes = template(q, shapes[0]), template(q, shapes[1], torch.float32)
    return _forward(found, merge, likes, Workspace(q, *part_shapes), terms.having(None, None, None), general)


def _forward(
    found: Bound, merge: Bound | None, likes: tuple[Tensor, Tensor], workspace: Workspace, plain: Terms,
    general: Forward,
) -> Forward:  # fmt: skip
    run, rest = found

    def call(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, sinks: Tensor | None = None,
        slopes: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if elsewhere(q):
            return general(q, k, v, plain.having(lengths, sinks, slopes), into)
        results = into or (empty_from(likes[0]), empty_from(likes[1]))
        out, lse = results[0].data_ptr(), results[1].data_ptr()
        given = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out, lse,
            lse if lengths is None else lengths.data_ptr(),  # what a kernel does not read is the address of lse
            lse if sinks is None else sinks.data_ptr(),
            lse if slopes is None else slopes.data_ptr(),
        )  # fmt: skip
        if merge is None:
            run(*given, lse, lse, *rest)
            return results
        room, held = workspace.take()
        parts = held[0].data_ptr(), held[1].data_ptr()
        run(*given, *parts, *rest)
        merge[0](out, lse, *parts, *merge[1])
        if room is not None:
            workspace.leave(room)
        return results

    return call
