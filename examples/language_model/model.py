"""The demo's byte-level transformer: pre-norm blocks, rotary positions, and one of two attentions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer

VOCABULARY = 256  # bytes
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; `heads` is even for the sparse model: half of the heads take each pattern."""

    attention: Literal["sparse", "dense"]
    layers: int
    width: int
    heads: int


def demo_pattern(heads: int) -> gossamer.Pattern:
    """Half the heads see the last 64 positions, the other half every eighth of the last 248: 32 keys a row."""
    half = heads // 2
    return gossamer.PerHead([gossamer.SlidingWindow(63)] * (heads - half) + [gossamer.Dilated(31, 0, 8)] * half)


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: gossamer.Pattern | None) -> Tensor:
    """Causal attention, (B, H, N, D) each: over `pattern`, or over every earlier position when it is None.

    The dense model calls torch's own attention, as its user would: it is what the sparse one is measured against.
    """
    if pattern is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return gossamer.attention(q, k, v, pattern)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of x (B, H, N, D) by angles (N, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def angles(positions: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, D / 2) of the rotary embedding, float32."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, pattern: gossamer.Pattern | None) -> None:
        super().__init__()
        self.heads = heads
        self.pattern = pattern
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, N, D), positions applied, from x (B, N, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = attend(*self.project(x, cos, sin), self.pattern)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, pattern: gossamer.Pattern | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, pattern)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Next-byte logits (B, N, 256) from bytes (B, N)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pattern = demo_pattern(config.heads) if config.attention == "sparse" else None
        self.head_size = config.width // config.heads
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, self.pattern) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # The layers that write to the residual stream start smaller, so that its variance does not grow.
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 * ((2 * config.layers) ** -0.5 if residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = angles(tokens.shape[1], self.head_size, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def attention_calls(self, tokens: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(q, k, v, output) of every layer's attention on tokens (B, N), for the check against the oracle."""
        cos, sin = angles(tokens.shape[1], self.head_size, tokens.device)
        x, calls = self.embedding(tokens), []
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.attention.project(block.attention_norm(x), cos, sin)
            calls.append((q, k, v, attend(q, k, v, self.pattern)))
            x = block(x, cos, sin)
        return calls
