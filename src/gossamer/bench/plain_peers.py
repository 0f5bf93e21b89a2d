"""Attention as users write it without a kernel of their own: materialised scores, SDPA on a slice of the keys,
torch.sparse, and the softmax by scatters, in torch alone and by PyG.

The sparse ones take graphs (`CSR`), compute in float32, and are written head by head, as their operations are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gossamer
from gossamer.bench.peer import Gradients, Peer, Prepared, Refusal, needs_module, needs_plain
from gossamer.testing.inputs import Inputs

SCORE_BYTES = 8 * 2**30  # the largest materialised scores
EDGE_BYTES = {"cuda": 52 * 2**30, "cpu": 4 * 2**30}  # the largest gathered features
PYG = "torch_geometric.utils"


def _naive(inputs: Inputs, matmul_tflops: float) -> Prepared:
    needs_plain(inputs)
    B, H, Q, _ = inputs.q.shape
    K, group = inputs.k.shape[2], inputs.q.shape[1] // inputs.k.shape[1]
    size = B * H * Q * K * inputs.q.element_size()
    if size > SCORE_BYTES or Q * K > 2**31:
        raise Refusal(f"its scores would take {size / 2**30:.0f} GiB")
    missing = None
    if not isinstance(inputs.pattern, gossamer.Dense):
        missing = ~torch.from_numpy(inputs.pattern.materialize(Q, K, inputs.terms.q_offset)).to(inputs.q.device)
        if not bool((~missing).any(-1).all()):
            raise Refusal("a row that keeps nothing becomes NaN")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = inputs.terms.scale * q @ k.mT
        if missing is not None:
            scores = scores.masked_fill(missing, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return Prepared(attend)


def _graph(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(crow, row, column) of a graph, int64 on the inputs' device."""
    needs_plain(inputs)
    if not isinstance(inputs.pattern, gossamer.CSR):
        raise Refusal("takes graphs (CSR) alone")
    crow, column = (
        torch.from_numpy(x.astype("int64")).to(inputs.q.device) for x in (inputs.pattern.indptr, inputs.pattern.indices)
    )
    row = torch.repeat_interleave(torch.arange(len(crow) - 1, device=crow.device), crow.diff())
    return crow, row, column


def _torch_sparse(inputs: Inputs, matmul_tflops: float) -> Prepared:
    crow, row, column = _graph(inputs)
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    group = inputs.q.shape[1] // inputs.k.shape[1]
    zeros = torch.zeros(len(column), device=crow.device)
    structure = torch.sparse_csr_tensor(crow, column, zeros, (Q, K), check_invariants=False)

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = torch.sparse.sampled_addmm(structure, q, k.mT, beta=0.0, alpha=inputs.terms.scale).values()
        top = score.new_full((Q,), -torch.inf).scatter_reduce_(0, row, score, "amax")
        weight = torch.exp(score - top[row])
        weight = weight / weight.new_zeros(Q).index_add_(0, row, weight)[row]
        return torch.sparse_csr_tensor(crow, column, weight, (Q, K), check_invariants=False) @ v

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        results = [
            torch.stack([head(q[b, h].float(), k[b, h // group].float(), v[b, h // group].float())
                         for h in range(q.shape[1])])
            for b in range(q.shape[0])
        ]  # fmt: skip
        return torch.stack(results).to(q.dtype)

    def gradients(given: Inputs) -> Gradients:
        raise Refusal("has no backward as written: a sparse matrix made of computed values passes no gradient")

    return Prepared(attend, gradients, note="float32", captured=False)


def _slice(inputs: Inputs, matmul_tflops: float) -> Prepared:
    """SDPA over the only keys that anybody sees: one length for all, or the window of one query."""
    pattern, Q, K = inputs.pattern, inputs.q.shape[2], inputs.k.shape[2]
    lengths = inputs.terms.key_lengths
    needs_plain(inputs._replace(terms=inputs.terms._replace(key_lengths=None)))
    start, stop = 0, K
    if lengths is not None and isinstance(pattern, gossamer.Dense):
        stop, *others = sorted(set(lengths.tolist()))
        if others:
            raise Refusal("takes one length for all")
    elif lengths is None and Q == 1 and isinstance(pattern, gossamer.SlidingWindow) and not pattern.sinks:
        position = inputs.terms.q_offset
        start = 0 if pattern.left is None else max(0, position - pattern.left)
        stop = K if pattern.right is None else min(K, position + pattern.right + 1)
    else:
        raise Refusal("takes one length of keys for all, or the window of one query")
    gqa = inputs.q.shape[1] != inputs.k.shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k[:, :, start:stop], v[:, :, start:stop]
        return F.scaled_dot_product_attention(q, k, v, scale=inputs.terms.scale, enable_gqa=gqa)

    return Prepared(attend)


def _scatter(inputs: Inputs, matmul_tflops: float) -> Prepared:
    _, row, column = _graph(inputs)
    Q = inputs.q.shape[2]

    def softmax(score: Tensor) -> Tensor:
        edge_rows = row[:, None].expand_as(score)
        with torch.no_grad():
            top = score.new_full((Q, score.shape[1]), -torch.inf).scatter_reduce_(0, edge_rows, score, "amax")
        weight = torch.exp(score - top[row])
        return weight / weight.new_zeros(top.shape).index_add(0, row, weight)[row]

    return _edge_by_edge(inputs, row, column, softmax)


def _pyg(inputs: Inputs, matmul_tflops: float) -> Prepared:
    softmax: Any = needs_module(PYG).softmax
    _, row, column = _graph(inputs)
    return _edge_by_edge(inputs, row, column, lambda score: softmax(score, row, num_nodes=inputs.q.shape[2]))


def _edge_by_edge(
    inputs: Inputs, row: Tensor, column: Tensor, softmax: Callable[[Tensor], Tensor]
) -> Prepared:  # fmt: skip
    """Features gathered for each edge, as graph libraries do; `softmax` takes scores (edges, H), by the edges' rows."""
    B, H, Q, _ = inputs.q.shape
    group = H // inputs.k.shape[1]
    size = len(column) * H * (2 * inputs.q.shape[3] + inputs.v.shape[3]) * 4
    if B > 1 or size > EDGE_BYTES[inputs.q.device.type]:
        raise Refusal(f"its gathered features would take {size / 2**30:.0f} GiB" if B == 1 else "takes one graph")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1).float() for x in (q, k, v))  # (nodes, heads, features)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = (q[row] * k[column]).sum(-1) * inputs.terms.scale
        weight = softmax(score)
        out = v.new_zeros(Q, H, v.shape[2]).index_add(0, row, weight[..., None] * v[column])
        return out.transpose(0, 1)[None].to(inputs.q.dtype)

    return Prepared(attend, note="float32", captured=False)


NAIVE, TORCH_SPARSE = Peer("materialised", _naive), Peer("torch.sparse", _torch_sparse)
PLAIN_PEERS = (
    NAIVE, Peer("SDPA slice", _slice), Peer("scatter softmax", _scatter), TORCH_SPARSE,
    Peer("PyG scatter softmax", _pyg, imports=PYG),
)  # fmt: skip
