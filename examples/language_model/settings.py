"""What one training process is told, and the defaults on a CPU and on a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Settings:
    """Sizes and schedule of one model's training; both models of a run differ in `attention` alone."""

    attention: Literal["sparse", "dense"]
    device: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))

    def check(self) -> None:
        """Raises ValueError for sizes that make no model."""
        for name in ("layers", "width", "heads", "context", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % 2:
            raise ValueError(f"--heads must be even (half of them take each pattern), got {self.heads}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width must be a multiple of twice --heads (positions rotate pairs of a head's features), "
                f"got width {self.width} with {self.heads} heads"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must lie between 0 and 2**63 - 1, got {self.seed}")
        if not 0 < self.lr < 1:
            raise ValueError(f"--lr must lie between 0 and 1, got {self.lr}")
        if self.context > MOST_CONTEXT:
            raise ValueError(f"--context is at most {MOST_CONTEXT} (the validation text is short), got {self.context}")


MOST_CONTEXT = 262_144

HELP = {
    "steps": "training steps", "context": "bytes of a window", "width": "features", "layers": "layers",
    "heads": "attention heads, an even number", "batch": "windows of a step", "lr": "peak learning rate",
    "seed": "of the weights and of the batches",
}  # fmt: skip
CPU_DEFAULTS: dict[str, Any] = {
    "layers": 2, "width": 128, "heads": 4, "context": 512, "batch": 4, "steps": 500, "lr": 3e-3, "seed": 0,
}  # fmt: skip
GPU_DEFAULTS: dict[str, Any] = {
    "layers": 4, "width": 512, "heads": 8, "context": 32_768, "batch": 1, "steps": 300, "lr": 2e-3, "seed": 0,
}  # fmt: skip


def settings(attention: Literal["sparse", "dense"], device: str, **given: Any) -> Settings:
    """The defaults of `device` ("cpu" or "cuda...") with the values that are not None in `given` instead."""
    values = CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS
    unknown = given.keys() - {field.name for field in fields(Settings)}
    assert not unknown, unknown
    chosen = values | {name: value for name, value in given.items() if value is not None}
    made = Settings(attention=attention, device=device, **chosen)
    made.check()
    return made
