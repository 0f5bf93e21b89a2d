"""What an operation does about torch.func, forward mode and autocast, which change what its tensors are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import cast_type


def refuse_transforms(name: str, *tensors: Any) -> None:
    """Raise `Unsupported` inside torch.func and for tangents of forward mode."""
    for x in (x for x in tensors if isinstance(x, Tensor)):
        if not torch.compiler.is_compiling() and _C._functorch.is_functorch_wrapped_tensor(x):
            raise Unsupported(
                f"{name} has no rule inside torch.func (grad, jvp, vmap); backward() and autograd.grad work, and a "
                f"mapped dimension can be batch elements"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported(f"{name} has no forward-mode derivative (jvp); backward() and autograd.grad work")


def autocast(x: Tensor) -> Tensor:
    """x in the type of autocast where it is on, as `attention` takes q, k and v; float64 stays."""
    return x.to(cast_type(x) or x.dtype)


def uncast(device: torch.device) -> AbstractContextManager[Any]:
    """Without autocast: what is computed inside has its type already."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
