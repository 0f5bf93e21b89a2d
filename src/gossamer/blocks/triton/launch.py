"""Key blocks by their scores: pooled, scored and chosen, a part of the blocks of queries at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.blocks.triton.choose_kernel import ChoiceForm, ChoiceNumbers, choose_kernel
from gossamer.blocks.triton.score_kernels import (
    BoundForm,
    BoundNumbers,
    MeanForm,
    MeanNumbers,
    ScoreForm,
    ScoreNumbers,
    TensorStrides,
    bound_kernel,
    extremes_kernel,
    mean_kernel,
    mean_score_kernel,
)
from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import power

MOST_BLOCKS = 2**14  # blocks of keys, whose scores for a list one program holds
MOST_LISTED = 2**11  # blocks of a list, which a program sorts
MOST_SCORES = 2**26  # scores that are held at once
TILE = 64  # edge of a tile of scores of means
PRECISION = "ieee"  # of their products
PART = 16  # numbers of a head that are loaded at a time
COLUMNS = 128  # blocks of keys of a program that makes bounds in 16 bits, for heads up to 128; else half of it
RUN = 32  # blocks of queries of a program that makes bounds


def choose_blocks(
    q: Tensor, k: Tensor, block: int, n: int, scale: float, group: bool, bound: bool, causal: bool, local: int,
    first: int, top_p: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`indices` (B, heads, T, n) and `covered` (B, heads, T) of `topk_blocks`.

    Args:
        q, k: (B, H, Q, D) and (B, G, K, D) of float16, bfloat16 or float32, of any strides.
    """
    (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
    T, C, heads = -(-Q // block), -(-K // block), G if group else H
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    indices = torch.empty((B, heads, T, n), dtype=torch.int32, device=q.device)
    covered = torch.empty((B, heads, T), **wide)
    step = max(1, min(T, MOST_SCORES // (B * heads * C)))
    scores = torch.empty(B * heads * step * C, **wide)
    # More than n blocks may be sorted: to find a threshold that exactly n reach takes more steps.
    columns, held = power(C, 32), power(2 * n if n <= 128 else n, 16)
    keys = torch.empty(B * heads * step * held, dtype=torch.int64, device=q.device)
    sizes = block, D, power(D, 16)
    at_q, at_k = TensorStrides(*q.stride()), TensorStrides(*k.stride())
    if bound:
        least, most = (torch.empty((B, G, C, D), dtype=q.dtype, device=q.device) for _ in range(2))
        launch(extremes_kernel, (B * G * C,), k, least, most, at_k, K, C, G, *sizes, num_warps=4)
        if scale < 0:
            least, most = most, least
    else:
        q_means, k_means = torch.empty((B, heads, T, D), **wide), torch.empty((B, G, C, D), **wide)
        launch(
            mean_kernel, (B * heads * T + B * G * C,), q, k, q_means, k_means, at_q, at_k,
            MeanNumbers(Q, K, T, C, heads), G, B * heads * T, FORM=MeanForm(H // heads, *sizes), num_warps=4,
        )  # fmt: skip
    whole = q.dtype != torch.float32
    tile = COLUMNS if whole and D <= 128 else COLUMNS // 2
    for t0 in range(0, T, step):
        t1 = min(t0 + step, T)
        if bound:
            grid = B * heads * -(-(t1 - t0) // RUN), -(-C // tile)
            launch(
                bound_kernel, grid, q, least, most, scores, at_q, BoundNumbers(Q, K, C, t0, t1, heads, G, RUN), scale,
                FORM=BoundForm(H // heads, causal, whole, *sizes, PART, tile), num_warps=block // 16,
            )  # fmt: skip
        else:
            grid = B * heads * -(-(t1 - t0) // TILE), -(-C // TILE)
            launch(
                mean_score_kernel, grid, q_means, k_means, scores, ScoreNumbers(Q, K, T, C, t0, t1, heads), G, scale,
                FORM=ScoreForm(causal, *sizes, PART, TILE, TILE, PRECISION), num_warps=4,
            )  # fmt: skip
        launch(
            choose_kernel, (B * heads * (t1 - t0),), scores, keys, indices, covered,
            ChoiceNumbers(Q, K, T, C, t0, t1 - t0, local, first), n, 1.0 if top_p is None else top_p,
            FORM=ChoiceForm(causal, top_p is not None and top_p < 1, block, columns, held),
            num_warps=min(16, max(1, columns // 512, held // 128)),
        )  # fmt: skip
    return indices, covered
