"""CuTe DSL kernels for Hopper (compute capability 9.0): see docs/kernels/hopper.md."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from functools import cache, cached_property
from typing import Any

from gossamer.kernels.contract import Terms
from gossamer.layouts.block import BlockLayout
from gossamer.layouts.gather import GatherLayout
from gossamer.plan.capability import Capability, GatherChoice
from gossamer.plan.problem import Problem

NEEDED = {"nvidia-cutlass-dsl": (4, 8), "apache-tvm-ffi": (0, 1)}
INSTALL = "in a checkout of gossamer: pip install '.[hopper]'"

GATHERS = (
    GatherChoice(64, frozenset({"float16", "bfloat16"}), max_head_dim=128, min_sm=90, reuse=2.0),
    GatherChoice(64, frozenset({"float32"}), max_head_dim=64, min_sm=90, reuse=2.0, backward=False),
)


@cache
def missing_packages() -> list[str]:
    """What of the compiler is not installed, or too old for the kernels (vLLM pins an older one)."""
    found = []
    for name, least in NEEDED.items():
        wanted = f"needs the package {name} {'.'.join(map(str, least))} or later ({INSTALL})"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{wanted}, which is not installed")
            continue
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < least:
            found.append(f"{wanted}, got {version}")
    return found


class Hopper:
    """Block-sparse attention for sm_90a. The compiler is imported with the first call that needs it."""

    name = "hopper"
    layout = "block"
    capability = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        max_head_dim=256,
        min_sm=90,
        max_sm=90,
        max_grid=2**16 - 1,  # small kernels before and after have a grid row for each
        alignment=16,
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits"}),
        max_softcap=1024.0,  # a capped score is off by up to 2**-22 of the cap: less than P in 16 bits
        float32_results=False,
        grows=True,
        tiles=frozenset({(64, 64), (128, 128), (192, 128)}),
        max_head_dim_of=(((192, 128), 96),),
        gathers=GATHERS,
    )

    def unavailable(self) -> list[str]:
        """Why nothing can run here."""
        import torch

        if not torch.cuda.is_available():
            return ["torch finds no CUDA device"]
        major, minor = torch.cuda.get_device_capability()
        if major != 9:
            return [f"the kernels use instructions of compute capability 9.0 alone, this device has {major}.{minor}"]
        return missing_packages()  # last: where no kernel could run, nothing is to be installed

    @cached_property
    def launch(self) -> Any:
        """What calls the kernels, and imports torch."""
        return importlib.import_module("gossamer.kernels.hopper.launch.forward")

    @cached_property
    def launch_backward(self) -> Any:
        """As `launch`, for the backward."""
        return importlib.import_module("gossamer.kernels.hopper.launch.backward")

    @cached_property
    def launch_gather(self) -> Any:
        """As `launch`, of both directions over gathered columns."""
        return importlib.import_module("gossamer.kernels.hopper.launch.gather")

    def tile(self, problem: Problem) -> tuple[int, int]:
        """(block_q, block_kv): three warpgroups of 64 query rows for small heads, where the accumulators are small.

        For few queries one warpgroup, in two blocks of a multiprocessor, leaves less of a tile empty.
        """
        if self._few(problem):
            return 64, 64
        return (192 if max(problem.D, problem.E) <= 64 else 128), 128

    def _few(self, problem: Problem) -> bool:
        few = 128 if max(problem.D, problem.E) <= 64 else 64
        return few >= problem.Q and not problem.backward

    def tile_choices(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        return () if self._few(problem) else ((64, 64),)

    def forward(
        self,
        problem: Problem,
        q: Any,
        k: Any,
        v: Any,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Any, Any] | None = None,
    ) -> tuple[Any, Any]:
        """(out, lse), written into the tensors of `into` where given."""
        if isinstance(layout, GatherLayout):
            return self.launch_gather.forward(problem, q, k, v, layout, terms, into=into)
        return self.launch.forward(problem, q, k, v, layout, terms, into=into)

    def backward(
        self,
        problem: Problem,
        dout: Any,
        dlse: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Any, Any, Any] | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """(dq, dk, dv, dsink_logits or None), the first three written into the tensors of `into` where given."""
        if isinstance(layout, GatherLayout):
            return self.launch_gather.backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, into=into)
        return self.launch_backward.backward(problem, dout, dlse, q, k, v, out, lse, layout, terms, into=into)

    def bound_forward(
        self,
        problem: Problem,
        q: Any,
        k: Any,
        v: Any,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Any, Any] | None = None,
    ) -> Any:
        """See `kernels.contract.Binding`."""
        if isinstance(layout, GatherLayout):
            return self.launch_gather.bound_forward(problem, q, k, v, layout, terms, into)
        return self.launch.bound_forward(problem, q, k, v, layout, terms, into)

    def bound_backward(
        self,
        problem: Problem,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        layout: BlockLayout | GatherLayout,
        terms: Terms,
        into: tuple[Any, Any, Any] | None = None,
    ) -> Any:
        """As `bound_forward`, for the backward; not over gathered columns into given gradients."""
        if isinstance(layout, GatherLayout):
            if into is not None:
                return None
            return self.launch_gather.bound_backward(problem, dout, q, k, v, out, lse, layout, terms)
        return self.launch_backward.bound_backward(problem, dout, q, k, v, out, lse, layout, terms, into)


IMPLEMENTATION = Hopper()
