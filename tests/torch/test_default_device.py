"""`torch.set_default_device` says where tensors are that name no device: what a call makes is where it needs it.

The default is the meta device here, whose tensors have no data: one that a call made there would raise.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

import gossamer as gs
from gossamer.layouts import BlockLayout
from gossamer.memo import forget_all
from gossamer.testing import inputs
from gossamer.testing.cases import SMALL, Case

SOURCES = Path(gs.__file__).parent
FACTORIES = {function.__name__ for function in _device_constructors()}
# Programs of their own, and modules, whose parameters are where the user wants new ones.
OTHERS = {"bench", "cli", "nn"}


def test_what_makes_a_tensor_names_its_device() -> None:
    unnamed = []
    for path in SOURCES.rglob("*.py"):
        if OTHERS.intersection(path.relative_to(SOURCES).with_suffix("").parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            made = (
                node.func.attr in FACTORIES and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            )
            if made and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                unnamed.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}")
    assert not unnamed


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives under another default device; it is made anew, and under no default after that."""
    forget_all()
    with torch.device("meta"):
        found = call()
    forget_all()
    return found, call()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_attention(case: Case) -> None:
    x = inputs.make(case, "float32", requires_grad=True)

    def call() -> list[Tensor]:
        out = gs.attention(*x.qkv, case.pattern(), **x.options())
        return [out, *torch.autograd.grad(out, x.qkv, x.dout)]

    assert all(torch.equal(*pair) for pair in zip(*elsewhere(call), strict=True))


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]


q, k, v = tensors((2, 4, 70, 8), (2, 2, 90, 8), (2, 2, 90, 6))
one = q[:, :, :1]
qf, kf, vf = tensors((70, 4, 8), (90, 2, 8), (90, 2, 8))
edges_q, edges_k = torch.tensor([0, 20, 70]), torch.tensor([0, 35, 90])
ids = torch.arange(90).div(13, rounding_mode="floor")
qs, ks, vs, scores = tensors((1, 2, 80, 8), (1, 2, 80, 8), (1, 2, 80, 8), (1, 2, 80))

CALLS: dict[str, Callable[[], Any]] = {
    "mask": lambda: gs.attention(q, k, v, torch.ones(70, 90, dtype=torch.bool, device="cpu").tril()),
    "layout": lambda: gs.attention(q, k, v, gs.Causal().layout(70, 90, block_q=32, block_kv=32)),
    "checked layout": lambda: gs.attention(q, k, v, _checked()),
    "one query": lambda: gs.attention(one, k, v),
    "lengths": lambda: gs.attention(q, k, v, gs.Causal(), key_lengths=torch.tensor([90, 30], device="cpu")),
    "starts": lambda: gs.attention(q, k, v, gs.Causal(), key_starts=[3, 8]),
    "offsets": lambda: gs.attention(q, k, v, gs.SlidingWindow(9), q_offset=torch.tensor([20, 5], device="cpu")),
    "documents": lambda: gs.attention(q, k, v, gs.DocumentIds(ids)),
    "blocks": lambda: gs.attention(q, k, v, gs.BlockIndices(torch.zeros(1, 1, 2, 1, dtype=torch.int64, device="cpu"))),
    "indices": lambda: gs.attention(q, k, v, gs.Indices(torch.zeros(1, 1, 70, 4, dtype=torch.int64, device="cpu"))),
    "varlen": lambda: gs.varlen(qf, kf, vf, edges_q, edges_k, pattern=gs.Causal()),
    "chosen blocks": lambda: gs.attention(q, k, v, gs.topk_blocks(q, k, causal=True, topk=2)),
    "entmax": lambda: gs.entmax_attention(q, k, v),
    "entmax, causal": lambda: gs.entmax_attention(q, k, v, causal=True, save="tau"),
    "entmax, window": lambda: gs.entmax_attention(q, k, v, gs.SlidingWindow(9), top_k=3),
    "entmax, documents": lambda: gs.entmax_attention(q, k, v, gs.DocumentIds(ids)),
    "entmax, blocks": lambda: gs.entmax_attention(qs, ks, vs, gs.BigBird(16), alpha=1.0),
    "entmax, graph": lambda: gs.entmax_attention(q, k, v, gs.CSR(np.arange(71), np.arange(70), 90)),
    "keys": lambda: gs.topk_keys(q, k, gs.Causal(), k_keep=3),
    "thresholds": lambda: gs.sparsek(scores, k=3).m,
    "thresholds in time": lambda: gs.sparsek_causal(scores, k=3)[0],
    "gates": lambda: gs.sparsek_attention(qs, ks, vs, scores, k_keep=8, window=5),
}  # fmt: skip


def _checked() -> BlockLayout:
    """One of tensors, whose lists are looked into."""
    return gs.Local(32).layout(70, 90, block_q=32, block_kv=32).to("cpu")


@pytest.mark.parametrize("name", CALLS)
def test_other_calls(name: str) -> None:
    found, wanted = elsewhere(CALLS[name])
    assert found.device.type == "cpu" and torch.equal(found, wanted)


def test_gradients_of_entmax() -> None:
    x, y, z = (one.clone().requires_grad_() for one in (q, k, v))
    alpha = torch.full((4,), 1.4, requires_grad=True)
    for save in ("lists", "tau"):
        for pattern in (gs.Causal(), gs.Document([0] * 50 + [1] * 40), None):

            def call(save: Any = save, pattern: Any = pattern) -> Any:
                out = gs.entmax_attention(x, y, z, pattern, alpha=alpha, save=save)
                return torch.autograd.grad(out, (x, y, z, alpha), torch.ones_like(out))

            assert all(torch.equal(*pair) for pair in zip(*elsewhere(call), strict=True))
