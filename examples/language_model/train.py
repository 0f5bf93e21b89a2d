"""Trains one of the demo's models in a process of its own and reports as it goes: one line of JSON an event.

Run as `python -m examples.language_model.train SETTINGS`, where SETTINGS is `Settings.to_json()`.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.language_model.data import Text, load_text, training_batch, validation_windows
from examples.language_model.model import ModelConfig, Transformer, attend, demo_pattern
from examples.language_model.settings import Settings
from gossamer.bench.check import compare, draw_samples
from gossamer.bench.measure import peak_bytes, reset_peak, time_call
from gossamer.kernels.contract import Terms
from gossamer.testing.inputs import Inputs

WARM_UP = 0.1  # share of the steps
CURVE_POINTS = 10  # validations on the way
CURVE_BYTES, FINAL_BYTES = 2**15, 2**17  # of validation text; at least two windows, no more than was trained on
VALIDATION_TOKENS = 4096  # at a time
LENGTHS = {"cpu": (512, 1024, 2048, 4096, 8192), "cuda": (8192, 16384, 32768, 65536, 131072)}
CHECKED_ROWS = 512


def emit(event: str, **values: Any) -> None:
    """Writes one event to standard output."""
    print(json.dumps({"event": event, **values}), flush=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up to `peak`, then linear decay to zero after the last step."""
    warm_up = max(1, round(WARM_UP * steps))
    return peak * min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up + 1))


def validation_bytes(s: Settings, most: int) -> int:
    """How much text to validate on."""
    return max(2 * s.context, min(most, s.steps * s.batch * s.context))


def precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On a GPU matrix products and attention run in bfloat16 over float32 weights; on a CPU all is float32."""
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def loss_bits(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in bits per byte."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / math.log(2)


@torch.no_grad()
def validate(model: Transformer, windows: Tensor, device: torch.device) -> float:
    """Bits per byte on validation windows (n, context + 1)."""
    total = 0.0
    for part in windows.split(max(1, VALIDATION_TOKENS // (windows.shape[1] - 1))):
        part = part.to(device)
        with precision(device):
            total += loss_bits(model, part[:, :-1], part[:, 1:]).item() * len(part)
    return total / len(windows)


def optimizer(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, without weight decay on the norms."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train(model: Transformer, text: Text, s: Settings, device: torch.device) -> list[float]:
    """Trains in place, emitting every step; returns the seconds of each step."""
    curve = validation_windows(text, s.context, validation_bytes(s, CURVE_BYTES))
    generator = torch.Generator().manual_seed(s.seed)
    adam = optimizer(model, s.lr)
    every = max(1, s.steps // CURVE_POINTS)
    seconds = []
    for step in range(s.steps):
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, s.steps, s.lr)
        tokens, targets = (part.to(device) for part in training_batch(text, s.batch, s.context, generator))
        start = time.perf_counter()
        with precision(device):
            loss = loss_bits(model, tokens, targets)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        bits = loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(bits):
            raise RuntimeError(f"the loss is {bits} after step {step}: try a smaller --lr than {s.lr}")
        emit("step", step=step + 1, bits_per_byte=bits, tokens_per_s=s.batch * s.context / seconds[-1])
        if (step + 1) % every == 0:
            emit("validation", step=step + 1, bits_per_byte=validate(model, curve, device))
    return seconds


@torch.no_grad()
def check_attention(model: Transformer, text: Text, s: Settings, device: torch.device) -> dict[str, Any]:
    """Sparse outputs of the trained weights on validation text against float64 attention over the pattern."""
    tokens = validation_windows(text, s.context, s.context)[:1, :-1].to(device)
    with precision(device):
        calls = model.attention_calls(tokens)
    wrong: list[str] = []
    worst, rows = 0.0, 0
    for layer, (q, k, v, out) in enumerate(calls):
        if device.type == "cuda":
            q, k, v = (x.to(out.dtype) for x in (q, k, v))
        inputs = Inputs(demo_pattern(s.heads), q, k, v, Terms(scale=q.shape[-1] ** -0.5, q_offset=0))
        samples = draw_samples(inputs, heads=s.heads, rows=min(CHECKED_ROWS, s.context), seed=s.seed)
        error, reasons = compare(samples, {"out": out}, group=1)
        worst, wrong = max(worst, error), wrong + [f"layer {layer}: {reason}" for reason in reasons]
        rows += sum(len(sample.rows) for sample in samples)
    return {"rows": rows, "layers": len(calls), "error_over_limit": worst, "wrong": wrong}


def sweep(s: Settings, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time and peak memory of this model's attention, forward and backward, against the length."""
    pattern = demo_pattern(s.heads) if s.attention == "sparse" else None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = LENGTHS[device.type]
    for length in (n for n in lengths if n <= max(16 * s.context, lengths[1])):
        base = reset_peak(device)
        shape = (1, s.heads, length, s.width // s.heads)
        q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def step(leaves: list[Tensor] = leaves, dout: Tensor = dout) -> object:
            return torch.autograd.grad(attend(leaves[0], leaves[1], leaves[2], pattern), leaves, dout)

        step()
        peak = peak_bytes(device) - base
        timing = time_call(step, device, budget_s=0.3, least=2)
        yield {"length": length, "ms": timing.p50, "peak_bytes": peak}


def main(argument: str) -> None:
    """Trains, validates, checks and times one model, emitting every event."""
    s = Settings.from_json(argument)
    device = torch.device(s.device)
    text = load_text()
    torch.manual_seed(s.seed)
    model = Transformer(ModelConfig(s.attention, s.layers, s.width, s.heads)).to(device)
    emit(
        "start",
        parameters=sum(p.numel() for p in model.parameters()),
        train_bytes=len(text.train),
        train_files=text.train_files,
        validation_bytes=len(text.validation),
        validation_files=text.validation_files,
    )
    base = reset_peak(device)
    seconds = train(model, text, s, device)
    peak = peak_bytes(device)
    windows = validation_windows(text, s.context, validation_bytes(s, FINAL_BYTES))
    bits = validate(model, windows, device)
    if s.attention == "sparse":
        emit("check", **check_attention(model, text, s, device))
    for row in sweep(s, device):
        emit("length", **row)
    steady = seconds[len(seconds) // 5 :]  # the first steps compile and warm up
    emit(
        "result",
        bits_per_byte=bits,
        validation_bytes=windows[:, 1:].numel(),
        tokens_per_s=s.batch * s.context / statistics.median(steady),
        train_s=sum(seconds),
        peak_bytes=peak,
        peak_training_bytes=peak - base,
    )


if __name__ == "__main__":
    main(sys.argv[1])
