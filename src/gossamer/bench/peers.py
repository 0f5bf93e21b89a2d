"""The implementations that a case is compared with: each prepares a call, or refuses with its reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import gossamer
from gossamer.bench.flex import block_mask
from gossamer.bench.measure import time_call
from gossamer.bench.peer import (
    Attend,
    Gradients,
    Peer,
    Prepared,
    Refusal,
    first_line,
    needs_cuda,
    needs_module,
    needs_plain,
)
from gossamer.bench.plain_peers import PLAIN_PEERS
from gossamer.testing.inputs import Inputs

MASK_BYTES = 2 * 2**30  # the largest dense boolean mask that is built
# By default FlexAttention's Triton kernel keeps what is looked up in shared memory for several steps, which is too
# much; of the tiles that then fit, this was the fastest on a graph.
LOOKED_UP = {"num_stages": 1, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4}
SLOWEST_S = {"cuda": 0.5, "cpu": 2.0}  # of one dense call, estimated from the matrix-product rate


def _is_causal(inputs: Inputs) -> bool:
    """Whether no query sees a later key, on the rows and keys at the far corner."""
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    rows = np.unique(np.linspace(0, Q - 1, min(Q, 64)).astype(np.int64)) + inputs.terms.q_offset
    keys = np.unique(np.concatenate((rows + 1, rows + 2, np.linspace(0, K - 1, min(K, 1024)).astype(np.int64))))
    keys = keys[(keys >= 0) & (keys < K)]
    later = keys[None, :] > rows[:, None]
    return not (inputs.pattern.keep(rows[:, None], keys[None, :], Q, K, inputs.terms.q_offset) & later).any()


def _sdpa_dense(inputs: Inputs, matmul_tflops: float) -> Prepared:
    needs_plain(inputs)
    B, H, Q, D = inputs.q.shape
    K, E = inputs.k.shape[2], inputs.v.shape[3]
    causal = _is_causal(inputs) and inputs.terms.q_offset < K - 1  # else no key is later
    if causal and (Q != K or inputs.terms.q_offset):
        raise Refusal(f"is_causal begins at the first key; Q={Q}, K={K}, q_offset={inputs.terms.q_offset} does not")
    seconds = B * H * Q * K * 2 * (D + E) * (0.5 if causal else 1.0) / (matmul_tflops * 1e12)
    if seconds > SLOWEST_S[inputs.q.device.type]:
        raise Refusal(f"dense attention would take about {seconds:.1f} s a call")
    gqa = inputs.k.shape[1] != H

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=inputs.terms.scale, enable_gqa=gqa)

    computes = gossamer.Causal() if causal else gossamer.Dense()
    if not inputs.q.is_cuda:
        return Prepared(attend, computes=computes, note="dense")
    backend = _fastest_backend(attend, inputs)

    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(backend):
            return attend(q, k, v)

    return Prepared(chosen, computes=computes, note=f"dense, {backend.name}")


def _fastest_backend(attend: Attend, inputs: Inputs) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    times: dict[Any, float] = {}
    refused = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        if times and backend == SDPBackend.EFFICIENT_ATTENTION:
            continue  # which serves what the others do not take
        try:
            with sdpa_kernel(backend), torch.no_grad():
                call = partial(attend, inputs.q, inputs.k, inputs.v)
                times[backend] = time_call(call, inputs.q.device, budget_s=0.02, least=1).p50
        except RuntimeError as error:
            refused.append(f"{backend.name}: {first_line(error)}")
    if not times:
        raise Refusal("; ".join(refused))
    return min(times, key=lambda backend: times[backend])


def _sdpa_mask(inputs: Inputs, matmul_tflops: float) -> Prepared:
    needs_plain(inputs)
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    size = inputs.pattern.lead[0] * inputs.pattern.lead[1] * Q * K
    if size > MASK_BYTES:
        raise Refusal(f"its boolean mask would take {size / 2**30:.0f} GiB")
    mask = torch.from_numpy(inputs.pattern.materialize(Q, K, inputs.terms.q_offset)).to(inputs.q.device)
    gqa = inputs.q.shape[1] != inputs.k.shape[1]
    return Prepared(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=inputs.terms.scale, enable_gqa=gqa
        )
    )


def _flex(options: dict[str, Any], needed: str | None) -> Callable[[Inputs, float], Prepared]:
    def prepare(inputs: Inputs, matmul_tflops: float) -> Prepared:
        needs_cuda(inputs)  # on a CPU it has no backward
        needs_plain(inputs)
        if needed:
            needs_module(needed)
        flex = needs_module("torch.nn.attention.flex_attention")
        # Compiled backward graphs may otherwise free what a repeated backward still needs.
        needs_module("torch._functorch.config").donated_buffer = False
        # Every case compiles the same function anew: by default it is not compiled any more after eight.
        needs_module("torch._dynamo.config").recompile_limit = 256
        try:
            mask, looked_up = block_mask(inputs)
        except ValueError as error:
            raise Refusal(str(error)) from None
        chosen = options or (LOOKED_UP if looked_up else None)
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        gqa = inputs.q.shape[1] != inputs.k.shape[1]
        return Prepared(
            lambda q, k, v: compiled(
                q, k, v, block_mask=mask, scale=inputs.terms.scale, enable_gqa=gqa, kernel_options=chosen
            )
        )

    return prepare


def _fa4(inputs: Inputs, matmul_tflops: float) -> Prepared:
    needs_cuda(inputs)
    needs_plain(inputs)
    window: tuple[int | None, int | None]
    match inputs.pattern:
        case gossamer.Dense():
            causal, window = False, (None, None)
        case gossamer.Causal():
            causal, window = True, (None, None)
        case gossamer.SlidingWindow(left=left, right=right, sinks=0):
            causal, window = False, (left, right)
        case _:
            raise Refusal("takes causal attention and windows alone")
    function = needs_module("flash_attn.cute.interface").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_inside = (x.transpose(1, 2) for x in (q, k, v))
        out = function(*heads_inside, softmax_scale=inputs.terms.scale, causal=causal, window_size=window)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Prepared(attend)


def _plain_window(inputs: Inputs, matmul_tflops: float) -> Prepared:
    """Ours: the window of as many keys a row without dilation, which dilation is measured against."""
    if not isinstance(inputs.pattern, gossamer.Dilated):
        raise Refusal("takes dilated windows alone")
    window = gossamer.SlidingWindow(inputs.pattern.left, inputs.pattern.right)
    scale, q_offset = inputs.terms.scale, inputs.terms.q_offset
    return Prepared(
        lambda q, k, v: gossamer.attention(q, k, v, window, scale=scale, q_offset=q_offset), computes=window
    )


def _cudnn(inputs: Inputs, matmul_tflops: float) -> Prepared:
    needs_cuda(inputs)
    needs_plain(inputs)
    pattern = inputs.pattern
    causal = isinstance(pattern, gossamer.BigBird) and pattern.causal
    if not isinstance(pattern, gossamer.BlockMask | gossamer.BigBird) or causal or pattern.lead != (1, 1):
        raise Refusal("takes one block matrix alone")
    block = pattern.block
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    if block not in (64, 128) or Q % block or K % block:
        raise Refusal(f"takes whole blocks of 64 or 128, got {block} for Q={Q}, K={K}")
    module = needs_module("cudnn.block_sparse_attention")
    matrix = torch.from_numpy(block_matrix(inputs, block)).to(inputs.q.device)
    B, H = inputs.q.shape[:2]
    counts = matrix.sum(1, dtype=torch.int32)
    indices = matrix.int().argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())].int()
    lists = {
        "q2k_block_index": indices.expand(B, H, -1, -1).contiguous(),
        "q2k_block_nums": counts.expand(B, H, -1).contiguous(),
        "sparse_block_size": block,
        "softmax_scale": inputs.terms.scale,
    }

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return module.block_sparse_attention_forward(q, k, v, **lists)

    def gradients(given: Inputs) -> Gradients:
        done = forward(given.q, given.k, given.v)
        out, lse = done["o_tensor"], done["lse_tensor"]

        def call() -> tuple[Tensor, ...]:
            back = module.block_sparse_attention_backward(given.dout, given.q, given.k, given.v, out, lse, **lists)
            return back["dq_tensor"], back["dk_tensor"], back["dv_tensor"]

        return call

    return Prepared(lambda q, k, v: forward(q, k, v)["o_tensor"], gradients)


def block_matrix(inputs: Inputs, block: int) -> np.ndarray:
    """The boolean block matrix (nq, nk) of a pattern made of whole blocks: `keep` at each block's first pair."""
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    i = np.arange(0, Q, block)[:, None] + inputs.terms.q_offset
    return inputs.pattern.keep(i, np.arange(0, K, block)[None, :], Q, K, inputs.terms.q_offset)


PEERS = (
    Peer("SDPA dense", _sdpa_dense),
    Peer("SDPA mask", _sdpa_mask),
    Peer("FlexAttention Triton", _flex({}, None), compiles=True),
    Peer("FlexAttention FLASH", _flex({"BACKEND": "FLASH"}, "flash_attn.cute"), compiles=True),
    Peer("FA4", _fa4, compiles=True),
    Peer("plain window", _plain_window),
    Peer("cuDNN block sparse", _cudnn, compiles=True),
    *PLAIN_PEERS,
)
