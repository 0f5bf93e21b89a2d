"""Calls that were launched before, bound to all that their repetitions have in common: see `kernels.contract.Binding`.

The forward kernels over tiles and those that gather begin with the same ten tensors, and their merging with four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.devices import elsewhere, empty_from, template
from gossamer.kernels.relaunch import Bound, bound
from gossamer.kernels.triton.arguments import operand
from gossamer.kernels.triton.block import launch as block
from gossamer.kernels.triton.block.forward import forward_kernel
from gossamer.kernels.triton.gather import launch as gather
from gossamer.kernels.triton.gather.schedule import launch_of
from gossamer.kernels.triton.merge import merge_kernel, merged
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
GIVEN, MERGED = 10, 4  # tensors that come first among the arguments of a forward kernel, and of the merging


def bound_forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout | GatherLayout, terms: Terms, general: Forward
) -> Forward | None:
    """What computes (out, lse) of calls like this one; `general` computes those on another device."""
    if any(operand(x) is not x for x in (q, k, v)):
        return None
    out_like, lse_like = template(q, (p.B, p.H, p.Q, p.E)), template(q, (p.B, p.H, p.Q), torch.float32)
    out, lse = empty_from(out_like), empty_from(lse_like)
    if isinstance(layout, GatherLayout):
        plan: Any = launch_of(p, layout, "forward", None, None)
        kernel, slots, block_rows = gather.forward_kernel_of(layout), plan.work.slots, plan.block_rows
    else:
        plan = block.schedule(layout, False, p.B, p.H, p.H // p.G, None)
        kernel, slots, block_rows = forward_kernel, plan.slots, layout.block_q
    likes = [template(q, (plan.copies, slots, block_rows, size), torch.float32) for size in (p.E, 2)] if slots else []
    parts = (empty_from(likes[0]), empty_from(likes[1])) if slots else (lse, lse)
    if isinstance(layout, GatherLayout):
        key, tensors, floats = gather.forward_arguments(q, k, v, out, lse, parts, terms)
        merge_key: Any = None
    else:
        launched, _ = block.forward_launch(p, q, k, v, out, lse, parts, layout, terms, plan, None)
        key, tensors, floats, options = launched
        key, merge_key = (key, *options.values()), p.E
        if options["TMA"]:
            return None
    found = bound(plan.known, kernel, key, tensors, floats, GIVEN)
    merge = bound(plan.known, merge_kernel, merge_key, merged(out, lse, parts), {}, MERGED) if slots else None
    if found is None or (slots and merge is None):
        return None
    return _forward(found, merge, out_like, lse_like, likes, general)


def _forward(
    found: Bound, merge: Bound | None, out_like: Tensor, lse_like: Tensor, likes: list[Tensor], general: Forward
) -> Forward:
    run, rest = found

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if elsewhere(q):
            return general(q, k, v)
        given = q.data_ptr(), k.data_ptr(), v.data_ptr()
        results = empty_from(out_like), empty_from(lse_like)
        out, lse = results[0].data_ptr(), results[1].data_ptr()
        if merge is None:  # what a kernel does not read is the address of lse
            run(*given, out, lse, lse, lse, lse, lse, lse, *rest)
            return results
        held = empty_from(likes[0]), empty_from(likes[1])
        parts = held[0].data_ptr(), held[1].data_ptr()
        run(*given, out, lse, lse, lse, lse, *parts, *rest)
        merge[0](out, lse, *parts, *merge[1])
        return results

    return call
