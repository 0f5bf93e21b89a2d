"""Traces: what layers of an engine attended to in each step, without its keys and values, to be run again elsewhere."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gossamer.integrations.vllm.attending import PagedAttention, Step

TENSORS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
NUMBERS = ("num_actual_tokens", "max_seq_len")


class Layers(NamedTuple):
    """Layers that attend alike, to pages of one table."""

    first: str  # the name of one
    number: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    softcap: float | None
    sinks: bool


class Recorder:
    """Adds the steps of some layers to a file, as lines of JSON. Each waits for the device."""

    def __init__(self, path: str, names: list[str], layer: PagedAttention, page_size: int) -> None:
        self.path, self.name, self.page_size = path, names[0], page_size
        layers = Layers(
            names[0], len(names), page_size, layer.num_heads, layer.num_kv_heads, layer.head_size,
            layer.sliding_window, layer.softcap, layer.sinks is not None,
        )  # fmt: skip
        self._write({"layers": layers._asdict()})

    def add(self, step: Step) -> None:
        """Write a step; of the table what its sequences use."""
        numbers: dict[str, Any] = {name: getattr(step, name).tolist() for name in TENSORS}
        used = -(-max(numbers["seq_lens"], default=0) // self.page_size)
        numbers["block_table"] = [row[:used] for row in numbers["block_table"]]
        self._write({"step": self.name, **{name: getattr(step, name) for name in NUMBERS}, **numbers})

    def _write(self, line: dict[str, Any]) -> None:
        with Path(self.path).open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read(path: str | Path, device: torch.device | str = "cpu") -> Iterator[tuple[Layers, Step]]:
    """Each step of a trace, in order, with the layers that it is of; a file that ends with .xz is uncompressed."""
    known: dict[str, Layers] = {}
    with lzma.open(path, "rt") if str(path).endswith(".xz") else Path(path).open() as file:
        for line in file:
            found = json.loads(line)
            if "layers" in found:
                layers = Layers(**found["layers"])
                known[layers.first] = layers
                continue
            told: dict[str, Any] = {name: found[name] for name in NUMBERS}
            told |= {name: torch.tensor(found[name], dtype=torch.int32, device=device) for name in TENSORS}
            yield known[found["step"]], Step(**told)
