"""Other libraries on the sums of `particles.py`, where they are installed: rows as lines of JSON.

    python benchmarks/particle_peers.py --particles 64000

jax-md: a list of `jax_md.partition`, made before it is timed, and the sum over it in XLA; of the package the modules of
lists alone are imported. KeOps: a fused sum over all pairs from torch, by tiles that no cut-off leaves out. What is not
installed, or does not compile, is a row with the reason. OpenMM computes energies and forces of systems of its own, and
no sum that is one of these.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from particle_clouds import NEIGHBORS, Exact, cloud, timed, waited

from gossamer import particles as gp


def jax_md(x: jax.Array, radius: float, h: float, exact: Exact) -> dict[str, Any]:
    spec = importlib.util.find_spec("jax_md")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("jax-md is not installed")
    package = ModuleType("jax_md")  # whose own __init__ imports flax
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["jax_md"] = package
    from jax_md import partition, space

    displacement, _ = space.periodic(1.0)
    lists = partition.neighbor_list(
        displacement, 1.0, radius, dr_threshold=0.0, format=partition.NeighborListFormat.Dense
    ).allocate(x)
    N, shown = len(x), jax.vmap(jax.vmap(displacement, (None, 0)))

    @jax.jit
    def density(x: jax.Array, idx: jax.Array) -> jax.Array:
        s = (shown(x, x[jnp.minimum(idx, N - 1)]) ** 2).sum(-1)
        return 1 + jnp.where((idx < N) & (s <= radius**2), jnp.exp(-s / (2 * h * h)), 0).sum(1)

    update = jax.jit(lambda x, lists: lists.update(x).idx)
    return {
        "capacity": int(lists.idx.shape[1]),
        "error": exact.density_error(density(x, lists.idx), h),
        "ms": timed(lambda: density(x, lists.idx)),
        "waited_ms": waited(lambda: density(x, lists.idx)),
        "update_ms": timed(lambda: update(x + 0.1 * radius, lists)),
    }


def keops(x: jax.Array, radius: float, h: float, exact: Exact) -> dict[str, Any]:
    if importlib.util.find_spec("pykeops") is None:
        raise ImportError("pykeops is not installed")
    import torch
    from pykeops.torch import LazyTensor

    from gossamer.bench.measure import time_call

    places = torch.as_tensor(np.array(x), device="cuda")
    a, b = LazyTensor(places[:, None]), LazyTensor(places[None])
    d = a - b
    s = ((d - d.round()) ** 2).sum(-1)
    w = (s * (-1 / (2 * h * h))).exp() * (radius**2 - s).step()
    out = w.sum(1)
    return {
        "error": exact.density_error(jnp.asarray(out.cpu().numpy())[:, 0], h),
        "ms": time_call(lambda: w.sum(1), places.device).p50,
    }


CALLS: dict[str, Callable[..., dict[str, Any]]] = {"jax-md": jax_md, "KeOps, all pairs": keops}


def row_of(name: str, N: int) -> dict[str, Any]:
    return {"particles": N, "kind": "uniform", "case": "density", "implementation": name}


def apart(name: str, N: int) -> None:
    """The row of a library in a process of its own, which it may end. KeOps computes with torch, and JAX on the CPU."""
    environment = {**os.environ, **({} if name == "jax-md" else {"JAX_PLATFORMS": "cpu"})}
    command = [sys.executable, __file__, "--particles", str(N), "--only", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    ended = {"status": "refused", "reason": f"its process ended with {done.returncode}"}
    print(rows.pop() if rows else json.dumps(row_of(name, N) | ended), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=64_000)
    parser.add_argument("--only", help="one library, in this process: by default each has one of its own")
    given = parser.parse_args()
    if given.only is None:
        for name in CALLS:
            apart(name, given.particles)
        return
    N = given.particles
    x = cloud(N, "uniform")
    radius = (NEIGHBORS / N * 3 / (4 * np.pi)) ** (1 / 3)
    x, h = x[gp.Cells.build(x, radius, 1.0).order], radius / 3
    exact = Exact(x, radius)
    row = row_of(given.only, N)
    try:
        row |= CALLS[given.only](x, radius, h, exact)
        row["interactions_per_second"] = N * NEIGHBORS / row["ms"] * 1e3
    except Exception as error:  # of a peer: the other has its row
        row |= {"status": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
