"""A byte-level language model with entmax heads, each with an alpha of its own that is learned, beside softmax.

    python -m examples.splash_lm --steps 150 --picture weights.png      # from the root of the repository

The text is the source of the Python standard library, as in `examples.language_model`, whose model this is but for the
attention. It prints, over the training, how many keys have a weight; then bits per byte on validation text, and alpha.
`--picture` draws the weights of the first head of the last layer of both (needs matplotlib).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import gossamer
from examples.language_model.data import Text, load_text, training_batch, validation_windows
from examples.language_model.model import Attention, Block, ModelConfig, Transformer, angles
from examples.language_model.train import learning_rate, loss_bits, optimizer, validate

CPU = torch.device("cpu")
VALIDATION_BYTES = 16_384
LINES = 5  # of the training that are printed
PICTURE = 128  # bytes


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


@torch.no_grad()
def weights(model: Transformer, tokens: Tensor) -> tuple[Tensor, float]:
    """The weights (N, N) of the first head of the last layer on tokens (1, N), and its alpha."""
    cos, sin = angles(tokens.shape[1], model.head_size, tokens.device)
    x = model.embedding(tokens)
    *before, last = model.blocks
    for block in before:
        x = block(x, cos, sin)
    assert isinstance(last, Block)
    heads = last.attention
    alpha = heads.alpha[0].item() if isinstance(heads, EntmaxHeads) else 1.0
    projections = heads.attention if isinstance(heads, EntmaxHeads) else heads
    q, k, _ = projections.project(last.attention_norm(x), cos, sin)
    N = tokens.shape[1]
    # Weights times the unit matrix are the weights.
    return gossamer.entmax_attention(q[0, 0], k[0, 0], torch.eye(N), causal=True, alpha=alpha), alpha


def draw(models: dict[str, Transformer], text: Text, path: Path) -> None:
    """Both heads on the first bytes of validation text, side by side; the darkness is the root of a weight."""
    from matplotlib.figure import Figure

    tokens = validation_windows(text, PICTURE, PICTURE)[:1, :PICTURE]
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    for axes, (kind, model) in zip(figure.subplots(1, 2, sharey=True), models.items(), strict=True):
        p, alpha = weights(model, tokens)
        axes.imshow(p.sqrt().numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"{kind}, alpha {alpha:.2f}: {(p > 0).sum(1).double().mean():.1f} keys a query", fontsize=9)
        axes.set_xlabel("key", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("query", fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> dict[str, Trained]:
    """Both trainings, one after the other, and what they reached."""
    parser = argparse.ArgumentParser(
        "python -m examples.splash_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {"steps": 150, "context": 256, "batch": 4, "width": 128, "layers": 2, "heads": 4, "lr": 0.003, "seed": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{value} by default")
    parser.add_argument("--picture", type=Path, help="where to draw the weights of a head; not drawn by default")
    options = parser.parse_args(arguments)
    text = load_text()
    reached, models = {}, {}
    for kind in ("softmax", "entmax"):
        model = make(kind, options.layers, options.width, options.heads, options.seed)
        models[kind], reached[kind] = model, train(kind, model, text, options)
    for kind, result in reached.items():
        print(f"{kind:7} {result.bits_per_byte:.3f} bits per byte on validation text, {result.seconds:.0f} s")
    for layer, heads in enumerate(entmax_heads(model)):
        alphas, keys = (", ".join(f"{x:.2f}" for x in of.tolist()) for of in (heads.alpha, heads.support))
        print(f"layer {layer}: alpha of each head {alphas}; keys with a weight of {options.context // 2} seen: {keys}")
    if options.picture:
        draw(models, text, options.picture)
    return reached


if __name__ == "__main__":
    main()
