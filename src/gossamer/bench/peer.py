"""A peer: a named implementation that prepares a call of a case, or refuses with its reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.testing.inputs import Inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Gradients = Callable[[], tuple[Tensor, ...]]


class Refusal(Exception):
    """The peer is missing here or does not take the case; the message is its reason."""


@dataclass
class Prepared:
    """`attend(q, k, v)` gives the output; `gradients(dout)` the backward alone, or None for autograd's."""

    attend: Attend
    gradients: Callable[[Inputs], Gradients] | None = None
    computes: Any = None  # the pattern it computes when that is not the case's (dense peers)
    note: str = ""
    captured: bool = True  # a CUDA graph can hold it: it never waits for the device
    plain: Attend | None = None  # the call as a user writes it, where `attend` chooses something first


@dataclass(frozen=True)
class Peer:
    """A named comparison; `prepare(inputs, matmul_tflops)` raises Refusal."""

    name: str
    prepare: Callable[[Inputs, float], Prepared]
    compiles: bool = False  # its first calls take seconds: they are made before anything is timed
    imports: str = ""  # a module that takes seconds to import, likewise
    chosen: Callable[[Inputs], tuple[str, str]] | None = None  # its implementations, forward and backward


def backward_call(prepared: Prepared, inputs: Inputs) -> Gradients:
    """The backward alone, as a call that can be repeated: the forward runs once, here."""
    if prepared.gradients is not None:
        return prepared.gradients(inputs)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = prepared.attend(leaves[0], leaves[1], leaves[2])
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def needs_plain(inputs: Inputs) -> None:
    """Refuses score terms."""
    t = inputs.terms
    extra = [name for name in ("softcap", "key_lengths", "sink_logits", "alibi_slopes") if getattr(t, name) is not None]
    if extra:
        raise Refusal(f"not asked for {', '.join(extra)}")


def needs_cuda(inputs: Inputs) -> None:
    """Refuses a CPU."""
    if not inputs.q.is_cuda:
        raise Refusal("needs a GPU")


def needs_module(module: str) -> Any:
    """The module, or a refusal with the reason why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package for another GPU or torch raises more than ImportError
        raise Refusal(f"{module} cannot be imported ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
