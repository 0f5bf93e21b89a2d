"""CuTe DSL kernels for Hopper (compute capability 9.0): see docs/kernels/hopper.md."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper import compiled
from gossamer.kernels.launch import Direction, Operand, Prepared
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
# For an edge that has no kernels in Triton, whose groups of one row are as fast.
SINGLE_ROWS = GatherChoice(1, frozenset({"float16", "bfloat16"}), max_head_dim=128, min_sm=90, spread=True)
# Lists that only the device knows: 64 rows, of queries and of heads that share a list.
UNIONS = (GatherChoice(64, frozenset({"float16", "bfloat16"}), max_head_dim=256, min_sm=90),)


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
        if tuple(int(part) for part in re.findall(r"\d+", version)) < least:
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
        grows=frozenset({"cuda"}),
        tiles=frozenset({(64, 64), (128, 128), (192, 128)}),
        max_head_dim_of=(((192, 128), 96),),
        gathers=GATHERS,
        unions=UNIONS,
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

    def prepare(
        self, problem: Problem, layout: Any, direction: Direction, scoring: Scoring, operands: Mapping[str, Operand]
    ) -> Prepared:
        """`layout` is a BlockLayout or a GatherLayout, whose modules here import torch."""
        name: str = direction
        if isinstance(layout, GatherLayout):
            name = "rows" if layout.block_q == layout.rows.heads == 1 else "gather"
        module = importlib.import_module(f"gossamer.kernels.hopper.launch.{name}")
        prepared: Prepared = getattr(module, direction)(problem, layout, scoring, operands)
        return prepared

    def kept_bytes(self, problem: Problem, layout: BlockLayout) -> int:
        """What the backward of a call keeps of dS at a time, for dQ."""
        from gossamer.kernels.hopper.launch.kept import kept

        found = kept(problem, layout)
        return 0 if found is None else found.bytes

    def kernel(self, name: str, *key: Any) -> Callable[..., None]:
        """One of `hopper.compiled`, read from disk or compiled where there is none."""
        function: Callable[..., None] = getattr(compiled, name)(*key)
        return function


class HopperAlone(Hopper):
    """The same for an edge that has no other kernels on a GPU."""

    capability = replace(Hopper.capability, gathers=(*GATHERS, SINGLE_ROWS))


IMPLEMENTATION = Hopper()
ALONE = HopperAlone()
