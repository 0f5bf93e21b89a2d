"""A byte-level language model with entmax heads, each with an alpha of its own that is learned, beside softmax.

    python -m examples.splash_lm --steps 150      # from the root of the repository

The text is the source of the Python standard library, as in `examples.language_model`, whose model this is but for the
attention. It prints, over the training, how many keys have a weight; then bits per byte on validation text, and alpha.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gossamer
from examples.language_model.data import Text, load_text, training_batch, validation_windows
from examples.language_model.model import Attention, Block, ModelConfig, Transformer
from examples.language_model.train import learning_rate, loss_bits, optimizer, validate

CPU = torch.device("cpu")
VALIDATION_BYTES = 16_384
LINES = 5  # of the training that are printed


class EntmaxHeads(nn.Module):
    """The attention of a block by alpha-entmax, with alpha = 1 + sigmoid(logit) of each head, 1.5 at first."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.logits = nn.Parameter(torch.zeros(attention.heads))
        self.support = torch.zeros(attention.heads)  # the mean number of keys with a weight in the last call

    @property
    def alpha(self) -> Tensor:
        """(heads,), in (1, 2)."""
        return 1 + torch.sigmoid(self.logits)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.attention.project(x, cos, sin)
        out, aux = gossamer.entmax_attention(q, k, v, causal=True, alpha=self.alpha, return_aux=True)
        self.support = aux.support.float().mean((0, 2))
        return self.attention.out(out.transpose(1, 2).flatten(2))


def entmax_heads(model: Transformer) -> list[EntmaxHeads]:
    """The entmax attentions of a model, one for each layer; none in one by softmax."""
    return [module for module in model.modules() if isinstance(module, EntmaxHeads)]


def make(kind: str, layers: int, width: int, heads: int, seed: int) -> Transformer:
    """A model by "softmax" or "entmax", of the same weights for one seed."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig("dense", layers, width, heads))
    for block in model.blocks if kind == "entmax" else ():
        assert isinstance(block, Block)
        block.attention = EntmaxHeads(block.attention)  # type: ignore[assignment]
    return model


@dataclass(frozen=True)
class Trained:
    """What a training reached."""

    bits_per_byte: float  # on validation text
    seconds: float
    supports: list[list[float]]  # of each printed step, the mean number of keys with a weight in each layer


def train(kind: str, model: Transformer, text: Text, options: argparse.Namespace) -> Trained:
    """Trains in place, and prints a few lines."""
    generator = torch.Generator().manual_seed(options.seed)
    adam, started, supports = optimizer(model, options.lr), time.perf_counter(), []
    for step in range(options.steps):
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        tokens, targets = training_batch(text, options.batch, options.context, generator)
        loss = loss_bits(model, tokens, targets)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if (step + 1) % max(1, options.steps // LINES) == 0:
            means = [heads.support.mean().item() for heads in entmax_heads(model)]
            supports.append(means)
            keys = f"; keys with a weight, by layer: {', '.join(f'{x:.1f}' for x in means)}" if means else ""
            print(f"{kind:7} step {step + 1:4}  {loss.item():.3f} bits per byte{keys}", flush=True)
    seconds = time.perf_counter() - started
    windows = validation_windows(text, options.context, VALIDATION_BYTES)
    return Trained(validate(model, windows, CPU), seconds, supports)


def main(arguments: Sequence[str] | None = None) -> dict[str, Trained]:
    """Both trainings, one after the other, and what they reached."""
    parser = argparse.ArgumentParser(
        "python -m examples.splash_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"steps": 150, "context": 256, "batch": 4, "width": 128, "layers": 2, "heads": 4, "lr": 0.003, "seed": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value} by default")
    options = parser.parse_args(arguments)
    text = load_text()
    reached = {}
    for kind in ("softmax", "entmax"):
        model = make(kind, options.layers, options.width, options.heads, options.seed)
        reached[kind] = train(kind, model, text, options)
    for kind, result in reached.items():
        print(f"{kind:7} {result.bits_per_byte:.3f} bits per byte on validation text, {result.seconds:.0f} s")
    for layer, heads in enumerate(entmax_heads(model)):
        alphas, keys = (", ".join(f"{x:.2f}" for x in of.tolist()) for of in (heads.alpha, heads.support))
        print(f"layer {layer}: alpha of each head {alphas}; keys with a weight of {options.context // 2} seen: {keys}")
    return reached


if __name__ == "__main__":
    main()
