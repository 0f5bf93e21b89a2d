"""One case of a sweep, measured lightly: forward alone, a few rows checked, device time by a replayed CUDA graph.

The break-even beside dense attention, materialised scores and, for graphs, torch.sparse; the ladder beside its lower
rungs. A dense peer does the same work for every pattern of a size, so it is measured once a size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gossamer
from gossamer.bench.check import Sample, compare, draw_samples
from gossamer.bench.latency import call_ms, graph_ms
from gossamer.bench.measure import time_call
from gossamer.bench.peer import Peer, Prepared, Refusal, first_line
from gossamer.bench.plain_peers import NAIVE, TORCH_SPARSE
from gossamer.bench.rows import Row
from gossamer.bench.run import OURS, Session, make_row, ours
from gossamer.bench.workload import Workload, chosen, make_inputs
from gossamer.testing.inputs import Inputs

# Positions up to which the time of a call on the host is told: longer ones fill the queue of launches. Of a call that
# waits for the device there is none.
HOST_POSITIONS = 4096
SAMPLED_ROWS = 14


@dataclass
class Sweep:
    """The rows that the cases of a sweep share: those of peers that do not depend on the pattern, by name and size."""

    session: Session
    kept: dict[tuple[object, ...], Row] = field(default_factory=dict)


def run_point(sweep: Sweep, work: Workload) -> list[Row]:
    """gossamer's row of a case, and those of the peers of its sweep."""
    inputs = make_inputs(work, sweep.session.device)
    samples = draw_samples(inputs, heads=1, rows=SAMPLED_ROWS, keys=0)
    rows = [_measured(sweep, work, inputs, samples, ours(sweep.session.implementation))]
    causal = isinstance(inputs.pattern, gossamer.SlidingWindow | gossamer.Dilated | gossamer.Tree)
    if "ladder" in work.tags:
        peers = [(NAIVE, False), (FUSED, False)] if isinstance(inputs.pattern, gossamer.Dense) else []
    else:
        peers = [(DENSE_CAUSAL if causal else DENSE, True), (NAIVE, True)]
        peers += [(TORCH_SPARSE, False)] if isinstance(inputs.pattern, gossamer.CSR) else []
    for peer, shared in peers:
        key = (peer.name, *work.shape.values(), work.dtype)
        if shared and key in sweep.kept:
            continue
        row = _measured(sweep, work, inputs, samples, peer)
        if shared:
            sweep.kept[key] = row
        rows.append(row)
    return rows


def _measured(sweep: Sweep, work: Workload, inputs: Inputs, samples: list[Sample], peer: Peer) -> Row:
    session, is_peer = sweep.session, peer.name != OURS
    session.progress(f"{work.name}: {peer.name}")
    row = make_row(session, work, peer.name, "forward", is_peer)
    try:
        if not is_peer:
            row.implementation = f"{OURS} {chosen(inputs, session.implementation, gradients=False)[0]}"
        prepared = peer.prepare(inputs, session.rate(inputs.q.dtype))
        if prepared.note:
            row.implementation = f"{peer.name} ({prepared.note})"
        if prepared.computes is not None:
            known = inputs._replace(pattern=prepared.computes, dout=None)
            samples = draw_samples(known, heads=1, rows=SAMPLED_ROWS, keys=0)
        _fill(session, row, inputs, samples, prepared)
    except (Refusal, gossamer.Unsupported) as refusal:
        row.fail("refused" if is_peer else "failed", str(refusal))
    except Exception as error:  # of the peer's code or ours: the other rows still count
        row.fail("refused" if is_peer else "failed", first_line(error))
    return row


@torch.no_grad()
def _fill(session: Session, row: Row, inputs: Inputs, samples: list[Sample], prepared: Prepared) -> None:
    def call() -> Tensor:
        return prepared.attend(inputs.q, inputs.k, inputs.v)

    out = call()
    row.check, wrong = compare(samples, {"out": out}, group=inputs.q.shape[1] // inputs.k.shape[1])
    row.relative_error = _relative_error(samples, out)
    if wrong:
        row.fail("failed", "; ".join(wrong))
        return
    row.set_timing(
        time_call(call, session.device, budget_s=session.budget_s, most=20, least=2), session.rate(inputs.q.dtype)
    )
    row.device_ms = graph_ms(call) if prepared.captured else row.p50_ms
    if prepared.captured and inputs.q.shape[2] <= HOST_POSITIONS:
        plain = prepared.plain or prepared.attend
        row.call_ms = call_ms(lambda: plain(inputs.q, inputs.k, inputs.v))


def _relative_error(samples: list[Sample], out: Tensor) -> float:
    """The Euclidean error of all sampled rows over their size."""
    error = size = 0.0
    for sample in samples:
        exact = sample.exact["out"]
        actual = out[(*sample.index, sample.rows)].double()
        error += float((actual - exact).square().sum())
        size += float(exact.square().sum())
    return math.sqrt(error / max(size, 1e-300))


def _dense(causal: bool) -> Peer:
    def prepare(inputs: Inputs, matmul_tflops: float) -> Prepared:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=inputs.terms.scale)

        times: dict[SDPBackend, float] = {}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend), torch.no_grad():
                    times[backend] = graph_ms(lambda: attend(inputs.q, inputs.k, inputs.v), replays=1)
            except RuntimeError:
                torch.cuda.synchronize()
        if not times:
            raise Refusal("no fused backend takes these sizes")
        best = min(times, key=lambda backend: times[backend])

        def chosen_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(best):
                return attend(q, k, v)

        pattern = gossamer.Causal() if causal else gossamer.Dense()
        note = best.name.removesuffix("_ATTENTION").lower()
        return Prepared(chosen_backend, computes=pattern, note=note, plain=attend)

    return Peer("SDPA causal" if causal else "SDPA dense", prepare)


def _fused(inputs: Inputs, matmul_tflops: float) -> Prepared:
    """Fused, without tensor cores: memory-efficient SDPA in float32."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=inputs.terms.scale)

    return Prepared(attend, note="float32")


DENSE, DENSE_CAUSAL, FUSED = _dense(False), _dense(True), Peer("fused", _fused)
