"""`explain` of a model: what each layer's attention runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.integrations.transformers.attending import LayerCall, listeners
from gossamer.integrations.transformers.device import ONCE
from gossamer.torch.arguments import describe
from gossamer.torch.explain import Explanation
from gossamer.torch.explain import explain as explain_call


@dataclass(frozen=True)
class Layer:
    """One call of a layer's attention."""

    name: str  # of the module in the model
    pattern: str
    q_offset: int | Tensor | None  # None where the last query is at the last key; of a static cache a tensor
    call: Explanation  # all that `gossamer.explain` says of it
    planned: str = ONCE  # for every forward, or in each one "on the device" or "on the host"

    @property
    def implementation(self) -> str:
        """The implementation that computes it."""
        return self.call.implementation

    @property
    def density(self) -> float:
        """Kept pairs over Q x K."""
        return self.call.density


@dataclass(frozen=True)
class Report:
    """The calls of one forward, in order; printed, a table of them."""

    layers: tuple[Layer, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, at: int) -> Layer:
        return self.layers[at]

    def rows(self) -> list[tuple[str, ...]]:
        """The table, a row for each call."""
        lines: list[tuple[str, ...]] = []
        for layer in self.layers:
            p = layer.call.problem
            sizes = f"B={p.B} H={p.H} G={p.G} Q={p.Q} K={p.K} D={p.D}"
            lines.append(
                (layer.name, layer.implementation, f"{layer.density:.2%}", sizes, layer.planned, layer.pattern)
            )
        return lines

    def __str__(self) -> str:
        rows = [("layer", "computed by", "density", "sizes", "planned", "pattern"), *self.rows()]
        widths = [max(len(row[at]) for row in rows) for at in range(6)]
        return "\n".join("  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows)

    __repr__ = __str__


def explain(model: torch.nn.Module, inputs: Tensor | Mapping[str, Any]) -> Report:
    """The pattern, implementation and density of each layer of a model for these inputs.

    The model runs once, without gradients.

    Args:
        model: a model of transformers whose implementation `register` named.
        inputs: the token ids (B, N), or the keyword arguments of the model, for example what a tokenizer returns.

    Raises:
        ValueError: no layer of the model asked gossamer, or `inputs` are neither.
    """
    if not isinstance(inputs, (Tensor, Mapping)):
        raise ValueError(f"inputs must be a tensor or a dictionary of the model's arguments; got {describe(inputs)}")
    names = {id(module): name for name, module in model.named_modules()}
    layers: list[Layer] = []

    def listener(call: LayerCall) -> None:
        shown = f"a mask of {tuple(call.pattern.shape)}" if isinstance(call.pattern, Tensor) else repr(call.pattern)
        shown += "".join(f", {name}" for name in ("key_starts", "key_lengths") if call.options.get(name) is not None)
        explanation = explain_call(*call.tensors, call.pattern, **call.options)
        name = names.get(id(call.module), type(call.module).__name__)
        layers.append(Layer(name, shown, call.options.get("q_offset"), explanation, call.planned))

    with torch.no_grad(), _listening(listener):
        model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    if not layers:
        used = getattr(getattr(model, "config", None), "_attn_implementation", None)
        raise ValueError(
            "model must compute its attention with gossamer: register(), then "
            f'model.set_attn_implementation("gossamer"); its implementation is {used!r}'
        )
    return Report(tuple(layers))


@contextmanager
def _listening(listener: Any) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)
