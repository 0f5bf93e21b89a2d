"""Peak resident memory of one call in its own process: `python -m gossamer.bench.memory CASE DTYPE NAME DIRECTION`.

Prints one JSON object: rss (of the whole process), beyond (inputs, outputs and gradients), counted (their bytes).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys

import torch

from gossamer.bench.measure import peak_bytes, reset_peak
from gossamer.bench.peer import Refusal, backward_call
from gossamer.bench.peers import PEERS
from gossamer.bench.run import OURS, forward_call, ours, tensor_bytes
from gossamer.bench.workload import Workload, find, make_inputs

WARM_UPS = ("dense", "csr")  # small cases, one of which most implementations take


def main(case: str, dtype: str, name: str, direction: str, implementation: str | None = None) -> None:
    """Measures one call on the CPU."""
    cpu = torch.device("cpu")
    inputs = make_inputs(Workload(find(case, "cpu").case, dtype), cpu)
    assert inputs.dout is not None
    peers = {peer.name: peer for peer in PEERS} | {OURS: ours(implementation)}
    # The rate is only used to refuse slow calls, and this one was made before.
    peer = peers[name]
    for small in WARM_UPS:  # what is imported and set up once is not the call's
        warm = make_inputs(find(small, "cpu"), cpu)
        with contextlib.suppress(Refusal):
            backward_call(peer.prepare(warm, math.inf), warm)()
            break
    base = reset_peak(cpu)
    prepared = peer.prepare(inputs, math.inf)
    if direction == "backward":
        made = [*backward_call(prepared, inputs)(), inputs.dout]  # the output is as large as its gradient
        given = [inputs.q, inputs.k, inputs.v, inputs.dout]
    else:
        made = [*forward_call(prepared, inputs)()]
        given = [inputs.q, inputs.k, inputs.v]
    peak = peak_bytes(cpu)
    beyond = peak - base - tensor_bytes(made)
    print(json.dumps({"rss": peak, "beyond": beyond, "counted": tensor_bytes(made) + tensor_bytes(given)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
