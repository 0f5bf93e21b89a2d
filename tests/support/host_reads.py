"""What a compiled graph reads back to the host, and modes in which nothing may be read or waited for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

import gossamer.torch.operators  # noqa: F401  # registers them

READS = {
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.unique_dim.default,
    torch.ops.aten.masked_select.default,
}  # fmt: skip
ATTENTION = (torch.ops.gossamer.forward.default, torch.ops.gossamer.backward.default)
PYTHON = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.__array__, Tensor.__contains__,
}  # fmt: skip


def host_reads(graph: fx.GraphModule) -> list[str]:
    """The nodes of a graph of ATen whose values go to the host."""
    found = [str(node) for node in graph.graph.nodes if node.target in READS]
    for node in graph.graph.nodes:
        if node.target in ATTENTION:  # which reads an offset without dimensions when it runs
            schema = node.target._schema.arguments
            named = dict(zip([x.name for x in schema], node.args, strict=False)) | node.kwargs
            found += [str(node)] if named.get("q_offset_tensor") is not None else []
        moved = node.target is torch.ops.aten._to_copy.default and node.kwargs.get("device") is not None
        found += [str(node)] if moved and node.kwargs["device"] != node.args[0].meta["val"].device else []
    return found


class Graphs:
    """A backend of torch.compile that runs graphs of ATen as they are, counts them, and knows what they read.

    `layouts` are the arrays of the layout of each call of attention, as nodes of the graph.
    """

    def __init__(self) -> None:
        self.compiled, self.reads, self.layouts = 0, list[str](), list[Any]()

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        self.compiled += 1
        return aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)(module, inputs)

    def _keep(self, module: fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        self.reads += host_reads(module)
        self.layouts += [tuple(node.args[3]) for node in module.graph.nodes if node.target in ATTENTION[:1]]
        return make_boxed_func(module.forward)


def waiting_raises(yes: bool = True) -> None:
    """Operations that wait for a GPU raise from here on, or no longer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error" if yes else "default")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Operations that wait for a GPU raise."""
    waiting_raises()
    try:
        yield
    finally:
        waiting_raises(False)


class NothingRead(TorchFunctionMode):
    """Code of Python in which no tensor is read on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in PYTHON, f"{func} reads a tensor"
        return func(*args, **(kwargs or {}))
