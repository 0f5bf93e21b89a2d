"""Models of transformers with gossamer: errors in bfloat16, and the time of a training step.

    python benchmarks/transformers_models.py --accuracy --train --out rows.jsonl
    python benchmarks/transformers_models.py --accuracy --train --tiny     # on a CPU, in seconds: does it run

--accuracy  Random models of four layers in the shapes of Llama, Mistral, Gemma 3 and gpt-oss, in bfloat16. The error of
            the last hidden states is taken against the same weights in float64 with eager attention, at real tokens,
            relative (Euclidean). gossamer's may be at most twice that of eager attention in bfloat16.
--train     A step of a Mistral-shaped model (window 4096, H 32, G 8, D 128) over 131,072 tokens with gradient
            checkpointing, forward and backward, beside `sdpa` and `flex_attention` in turns. A peer that runs out of
            memory, or fails, has a row that says so. Losses and gradient norms are compared.

Rows are lines of JSON, on stdout and added to --out. The exit status is 1 if gossamer is wrong or fails.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import gossamer
from gossamer.integrations.transformers import explain, register

LIMIT = 2.0  # times eager's error
PEERS = ("gossamer", "flex_attention", "sdpa")
FAR = 0.02  # losses and gradient norms of two implementations in bfloat16 that compute the same


class Rows:
    """Writes rows where they are asked for."""

    def __init__(self, out: Path | None, device: torch.device) -> None:
        self.out = out
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.about = {
            "device": name, "torch": torch.__version__, "transformers": hf.__version__,
            "gossamer": gossamer.__version__,
        }  # fmt: skip

    def write(self, **row: Any) -> None:
        line = json.dumps(row | self.about)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")


def shapes(tiny: bool) -> dict[str, Any]:
    """Configurations of four layers: heads as in the published models, fewer of them."""
    size = {"hidden_size": 64, "intermediate_size": 96} if tiny else {"hidden_size": 1024, "intermediate_size": 2816}
    common = {"vocab_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 131072, "pad_token_id": 0, **size}

    def heads(H: int, G: int, D: int) -> dict[str, int]:
        return {"num_attention_heads": H, "num_key_value_heads": G, "head_dim": 16 if tiny else D}

    kinds = ["sliding_attention", "full_attention"] * 2
    window = 48 if tiny else 1024
    gemma3 = hf.Gemma3TextConfig(**common, **heads(4, 2, 256), sliding_window=window, layer_types=kinds)
    gemma3.query_pre_attn_scalar = gemma3.head_dim
    # Every expert computes every token: a choice that flips in bfloat16 would hide what attention does.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4}
    sinks = {"sliding_window": 32 if tiny else 128, "layer_types": kinds}
    return {
        "llama": hf.LlamaConfig(**common, **heads(8, 2, 128)),
        "mistral": hf.MistralConfig(**common, **heads(8, 2, 128), sliding_window=window),
        "gemma3": gemma3,
        "gpt_oss": hf.GptOssConfig(**common, **heads(16, 2, 64), **sinks, **experts),
    }


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    with torch.device(device):
        model = hf.AutoModel.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif "q_proj" in name or "k_proj" in name:
                parameter.mul_(2)  # scores of a spread over 1, or every mask would look alike
    return model.eval()


def inputs(form: str, N: int, device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 1024, (2, N), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones(2, N, dtype=torch.long, device=device)
    if form == "left":
        mask[0, : N // 3] = 0
    if form == "right":
        mask[1, -N // 4 :] = 0
    if form == "packed":
        return {"input_ids": ids, "position_ids": (torch.arange(N, device=device) % (2 * N // 5))[None]}
    return {"input_ids": ids} if form == "plain" else {"input_ids": ids, "attention_mask": mask}


def accuracy(rows: Rows, device: torch.device, tiny: bool) -> bool:
    N, right = 160 if tiny else 2560, True
    for family, config in shapes(tiny).items():
        model = random_model(config, device, torch.bfloat16)
        exact = copy.deepcopy(model).double()
        if family == "gpt_oss":
            exact.set_experts_implementation("eager")  # the grouped product has no float64
        for form in ("plain", "left", "right", "packed") if family == "llama" else ("plain",):
            given = inputs(form, N, device)
            real = given.get("attention_mask", torch.ones_like(given["input_ids"]))[..., None].bool()

            def hidden(model: Any, implementation: str, given: Any = given, real: Any = real) -> torch.Tensor:
                model.set_attn_implementation(implementation)
                with torch.no_grad():
                    out = model(**given, use_cache=False).last_hidden_state.double()
                return torch.where(real, out, 0.0)

            # In float64 eager attention makes NaN of a row that sees nothing, which padding on the left has.
            wanted = hidden(exact, "sdpa" if form == "left" else "eager")
            errors = {
                name: float((hidden(model, name) - wanted).norm() / wanted.norm()) for name in ("eager", "gossamer")
            }
            ratio = errors["gossamer"] / errors["eager"]
            right &= ratio <= LIMIT
            layers = explain(model, given | {"use_cache": False})
            rows.write(
                row="accuracy", family=family, form=form, tokens=[2, N], errors=errors, ratio=ratio, ok=ratio <= LIMIT,
                implementations=sorted({layer.implementation for layer in layers}),
                densities=[round(layer.density, 4) for layer in layers],
            )  # fmt: skip
        del model, exact
        release(device)
    return right


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(step: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of a step, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def train(rows: Rows, device: torch.device, tiny: bool, tokens: int, layers: int, rounds: int, limit: float) -> bool:
    size = (
        {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        if tiny
        else {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    )
    config = hf.MistralConfig(
        vocab_size=1024, num_hidden_layers=layers, max_position_embeddings=2 * tokens, **size,
        head_dim=32 if tiny else 128, sliding_window=64 if tiny else 4096, attention_dropout=0.0,
    )  # fmt: skip
    model = random_model(config, device, torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(1, 1024, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        # A weight for each feature: the mean square of normalised states is 1, whatever they are.
        out = model(ids, use_cache=False).last_hidden_state
        loss = (out * weigh).mean(dtype=torch.float32)
        loss.backward()
        projection = model.layers[0].self_attn.q_proj.weight
        return float(loss.detach()), float(projection.grad.double().norm())

    weigh = torch.randn(size["hidden_size"], generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    start, times = time.perf_counter(), {name: [] for name in PEERS}  # type: ignore[var-annotated]
    peaks: dict[str, float] = {}
    numbers: dict[str, tuple[float, float]] = {}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):  # the first is not counted: kernels are compiled, and peers may fail
        for name in PEERS if turn % 2 == 0 else PEERS[::-1]:
            late = time.perf_counter() - start + (min(times[name]) if times[name] else 0) > limit
            if name in failed or (late and times[name]):
                continue
            model.set_attn_implementation(name)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                seconds, found = timed(step, device)
            except torch.OutOfMemoryError as error:
                failed[name] = f"out of memory: {str(error).splitlines()[0][:200]}"
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            else:
                numbers[name] = found
                if turn:
                    times[name].append(seconds)
                if device.type == "cuda":
                    peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            if name in failed:
                model.zero_grad(set_to_none=True)
                release(device)
    right = "gossamer" not in failed
    for name in PEERS:
        row: dict[str, Any] = {"row": "train", "implementation": name, "tokens": tokens, "layers": layers}
        if name in failed:
            rows.write(**row, status="failed", reason=failed[name])
            continue
        loss, norm = numbers[name]
        if "gossamer" in numbers:
            mine = numbers["gossamer"]
            near = abs(norm - mine[1]) <= FAR * norm and abs(loss - mine[0]) <= FAR * max(abs(loss), 1e-2)
            row["agrees"] = near
            right &= near
        if name == "gossamer":
            model.set_attn_implementation(name)
            layers_run = explain(model, {"input_ids": ids, "use_cache": False})
            row["computed_by"] = sorted({layer.implementation for layer in layers_run})
            row["pattern"] = layers_run[0].pattern
        median = statistics.median(times[name]) if times[name] else None
        rows.write(
            **row, status="ok", p50_ms=None if median is None else 1e3 * median, repeats=len(times[name]),
            all_ms=[round(1e3 * x, 3) for x in times[name]], peak_gib=peaks.get(name), loss=loss, gradient_norm=norm,
        )  # fmt: skip
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--tokens", type=int, help="of the training step")
    parser.add_argument("--layers", type=int, default=2, help="of the training step's model")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of the training step")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no further turn begins")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not given.accuracy and not given.train:
        parser.error("give --accuracy, --train or both")
    device = torch.device(given.device)
    hf.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    register()
    rows = Rows(given.out, device)
    right = True
    if given.accuracy:
        right &= accuracy(rows, device, given.tiny)
    if given.train:
        tokens = given.tokens or (512 if given.tiny else 131072)
        right &= train(rows, device, given.tiny, tokens, given.layers, given.rounds, given.limit)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
