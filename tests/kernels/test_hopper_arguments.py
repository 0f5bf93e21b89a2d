"""What each step of a Hopper launch passes is what its kernel is compiled for: order, types, shapes and strides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.hopper.device.parameters import parameters
from gossamer.kernels.launch import ALIGNMENT, BYTES, Constant, Operand, Prepared, View, compact, operand_of
from gossamer.layouts import from_dense
from gossamer.layouts.device import key_list_layout
from gossamer.layouts.gather import build_gather, queries_of
from gossamer.patterns import BlockMask, Causal
from gossamer.plan.problem import Problem
from gossamer.torch import device_arrays

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
NUMBERS = {"Float32": float, "Int32": int}
TYPES = {"Float32": "float32", "Int32": "int32", "Float16": "float16", "BFloat16": "bfloat16"}
# Parameters of kernels whose arrays have another name in a launch; those of a sum of parts are any.
NAMED = {"work": "items", "lengths": "key_lengths", "sinks": "sink_logits", "result": "d", "parts": "part"}
B, H, G, Q, K = 2, 4, 2, 300, 400
MASK = np.random.default_rng(0).random((1, H, Q, K)) < 0.2
BLOCKS = {
    "128 x 128": Causal().layout(Q, K, block_q=128, block_kv=128),
    "192 x 128": Causal().layout(Q, K, block_q=192, block_kv=128),
    "64 x 64": from_dense(MASK, block_q=64, block_kv=64),
    "one query": Causal().layout(1, K, block_q=64, block_kv=64),
}  # fmt: skip
GATHERED = build_gather(BlockMask(MASK, 1), Q, K, block_q=64)
LISTED = key_list_layout(
    torch.arange(Q * 20).reshape(1, 1, Q, 20) % K, None, None, None, Q, K, block_q=queries_of(H // G), heads=H // G,
    xp=device_arrays, transpose=False,
)  # fmt: skip


def known(prepared: Prepared, operands: Mapping[str, Operand], name: str) -> Operand:
    """What is known of an array of a launch."""
    launch = prepared.launch
    if name in operands:
        return operands[name]
    if name in prepared.layout:
        return operand_of(prepared.layout[name])
    if name in launch.arrays:
        array = launch.arrays[name]
        return Operand(array.dtype, array.shape, compact(array.shape))
    if name == "lengths":  # what an edge makes of others
        return Operand("int32", operands["key_lengths"].shape, (1,))
    view = launch.views[name]
    assert isinstance(view, View)
    aligned = known(prepared, operands, view.of).aligned and view.offset * BYTES[view.dtype] % ALIGNMENT == 0
    return Operand(view.dtype, view.shape, view.strides, aligned)


def stands_for(name: str, parameter: str) -> bool:
    """Whether an array of a launch is, or is made of, what a parameter of a kernel is named after."""
    name = name.removeprefix("rows_").removeprefix("columns_")
    return name.startswith((parameter, f"no_{parameter}", NAMED.get(parameter, parameter))) or name == "no_sums"


def check(kind: str, key: tuple[Any, ...], entry: Any, given: tuple[Any, ...], of: Any) -> None:
    """Compare the arguments of a step with those that an entry compiles its kernel for."""
    kernel, wanted = entry.kernel, entry.arguments
    *names, last = inspect.signature(kernel).parameters
    assert last == "stream" and len(names) == len(wanted) == len(given)
    arrays = {p.name: p for p in parameters(kind, *key)}
    assert list(arrays) == names[: len(arrays)]
    sizes: dict[Any, int] = {}  # one symbol is one size
    for name, want, found in zip(names, wanted, given, strict=True):
        if isinstance(found, Constant):
            assert type(found.value) is NUMBERS.get(type(want).__name__, type(None)), name
            continue
        x = of(found)
        assert stands_for(found, name), (name, found)
        assert x.dtype == TYPES[want.element_type.__name__] and len(x.shape) == len(want.shape), (name, found, x)
        # What has any strides may be passed as flat memory and numbers; all else is whole.
        assert arrays[name].rank in ((len(want.shape),) if not x.contiguous else (0, len(want.shape))), (name, found)
        assert x.aligned or want._assumed_align < ALIGNMENT, (name, found, x)
        for n, stride, size, step in zip(x.shape, x.strides, want.shape, want.stride, strict=True):
            assert n == (size if isinstance(size, int) else sizes.setdefault(id(size), n)), (name, found, x)
            if n > 1:
                fits = stride == step if isinstance(step, int) else stride % step.divisibility == 0
                assert fits, (name, found, x)


def tensors(direction: str, D: int, E: int, kind: torch.dtype, queries: int, shift: int) -> dict[str, Tensor]:
    """Of a call, each as many numbers behind a multiple of 16 bytes."""
    shapes = {"q": (B, H, queries, D), "k": (B, G, K, D), "v": (B, G, K, E)}
    if direction == "backward":
        shapes |= {"dout": (B, H, queries, E), "out": (B, H, queries, E)}
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.zeros(int(np.prod(shape)) + shift, dtype=kind)[shift:].view(shape)
    if direction == "backward":
        made |= {"lse": torch.zeros(B, H, queries), "dlse": torch.zeros(1, H, 1).expand(B, H, queries)}
    return made


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("split", [None, 1])
@pytest.mark.parametrize("terms", [(), ("key_lengths", "sink_logits")], ids=("plain", "terms"))
@pytest.mark.parametrize(("D", "E"), [(64, 64), (7, 33), (96, 80), (192, 130)], ids=str)
@pytest.mark.parametrize("form", [*BLOCKS, "gathered", "gathered float32", "listed"])
def test_steps(form: str, D: int, E: int, terms: tuple[str, ...], split: int | None, shift: int) -> None:
    from gossamer.kernels.hopper.device import entries
    from gossamer.kernels.hopper.launch import backward, forward, gather

    if D > 128 and form in ("192 x 128", "gathered", "gathered float32"):
        pytest.skip("has no such kernel")
    kind = torch.float32 if form == "gathered float32" else torch.bfloat16
    if kind == torch.float32:
        D, E = min(D, 64), min(E, 64)
    layout: Any = BLOCKS[form].to("cpu") if form in BLOCKS else LISTED if form == "listed" else GATHERED.to("cpu")
    queries = 1 if form == "one query" else Q
    given = {"key_lengths": torch.zeros(2 * B, dtype=torch.int64)[::2], "sink_logits": torch.zeros(2 * H)[::2]}
    more = {name: given[name] for name in terms}
    seen = set()
    for direction in ("forward", "backward") if kind != torch.float32 else ("forward",):
        for deterministic in (False, True) if direction == "backward" else (False,):
            p = Problem(
                B, H, G, queries, K, D, E, str(kind)[6:], "cuda", 90, 8, frozenset(terms), deterministic=deterministic
            )
            operands = {n: operand_of(x) for n, x in (tensors(direction, D, E, kind, queries, shift) | more).items()}
            module = {"forward": forward, "backward": backward}[direction] if form in BLOCKS else gather
            for more_options in (
                ({"most_kept": 2**40}, {"most_kept": 0}) if direction == "backward" and form in BLOCKS else ({},)
            ):
                found = getattr(module, direction)(
                    p, layout, Scoring(0.1, 0, 5.0), operands, split=split, **more_options
                )
                for step in found.launch.steps:
                    if step.kernel.implementation == IMPLEMENTATION.name:
                        seen.add(step.kernel.name)
                        entry = getattr(entries, step.kernel.name)(*step.kernel.key)
                        check(
                            step.kernel.name,
                            step.kernel.key,
                            entry,
                            step.arguments,
                            lambda name, found=found, operands=operands: known(found, operands, name),
                        )
    if form in BLOCKS:
        assert {"forward", "preprocess", "query_gradient", "wide" if D > 128 else "backward"} <= seen
        assert ("kept" in seen) == (max(D, E) > 64)
    assert split is None or "sum_parts" in seen or kind == torch.float32 or form == "listed"  # which are not cut


def test_a_block_takes_no_name_that_it_does_not_declare() -> None:
    """A role then reads nothing that its class does not say."""
    from gossamer.kernels.hopper.device.forward.block import ForwardBlock, RowBlock

    assert ForwardBlock(s_q=1, s_o=2).s_o == 2 and ForwardBlock().bounds is None
    with pytest.raises(AttributeError, match="RowBlock declares no s_o"):
        RowBlock(s_q=1, s_o=2)
