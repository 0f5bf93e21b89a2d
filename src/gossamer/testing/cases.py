"""Named cases, declared once: the contract tests, the benchmarks and users read the same list.

Tags: `smoke` (small, one of each kind), `odd` (sizes and edges that break things), `terms` (score terms), `bench`
(large, measured), `foundation` (the README's measurements), `hopper` (beside the fastest kernels for an H200),
`dilated`, `graph` (scattered pairs), `cpu` (measured on a CPU), `unkept` (queries that keep nothing, or keys that no
query keeps).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gossamer.patterns import (
    CSR,
    BigBird,
    BlockMask,
    Causal,
    Dense,
    Dilated,
    Document,
    Local,
    Longformer,
    LongNet,
    Pattern,
    PerBatch,
    PerHead,
    PowerStrided,
    SlidingWindow,
    Strided,
    Tree,
)
from gossamer.testing.graphs import power_law_graph, proximity_graph, random_graph

LOW = ("float16", "bfloat16", "float32")
EVERY = (*LOW, "float64")


@dataclass(frozen=True)
class Case:
    """One problem. q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); `dims` 3 drops B, `dims` 2 drops B and H."""

    name: str
    B: int
    H: int
    G: int
    Q: int
    K: int
    D: int
    E: int
    pattern: Callable[[], Pattern]
    dtypes: tuple[str, ...] = EVERY
    dims: int = 4
    q_offset: int | None = None
    key_lengths: tuple[int, ...] | None = None
    softcap: float | None = None
    sink_logits: bool = False
    alibi_slopes: bool | Literal["each"] = False  # "each": (B, H)
    alibi_distance: Literal["signed", "absolute"] | None = None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


def square(
    name: str,
    N: int,
    pattern: Callable[[], Pattern],
    *tags: str,
    B: int = 1,
    H: int = 2,
    G: int | None = None,
    D: int = 32,
    E: int | None = None,
    K: int | None = None,
    **more: object,
) -> Case:
    """A case with as many keys as queries, as many key heads as query heads and E = D, unless said otherwise."""
    G, E, K = G or H, E or D, K or N
    return Case(name, B, H, G, N, K, D, E, pattern, tags=frozenset(tags), **more)  # type: ignore[arg-type]


def _random_rows(rows: int, keys: int, each: int, seed: int) -> CSR:
    rng = np.random.default_rng(seed)
    columns = [np.sort(rng.choice(keys, n, replace=False)) for n in rng.integers(0, each + 1, rows)]
    return CSR(np.cumsum([0, *map(len, columns)]), np.concatenate(columns), keys)


def _tree(nodes: int) -> Tree:
    rng = np.random.default_rng(5)
    return Tree([int(rng.integers(-1, t)) for t in range(nodes)])


def _with_gaps(N: int) -> CSR:
    """Every third row, a run of rows, every fifth key and a run of keys are of no pair."""
    kept = np.random.default_rng(13).random((N, N)) < 0.6
    kept[::3] = kept[40:72] = kept[:, ::5] = kept[:, 60:95] = False
    rows, columns = np.nonzero(kept)
    return CSR._from_pairs(rows, columns, N, N)


def _half_empty(N: int) -> BlockMask:
    """Every other block row keeps nothing."""
    mask = np.tril(np.ones((-(-N // 16), -(-N // 16)), dtype=bool))
    mask[::2] = False
    return BlockMask(mask, 16)


def _block_mask_by_head(H: int, N: int, block: int) -> BlockMask:
    n = -(-N // block)
    return BlockMask(np.random.default_rng(7).random((H, n, n)) < 0.3, block)


def _documents(B: int, N: int) -> Pattern:
    return Document(np.sort(np.random.default_rng(3).integers(0, 5, (B, N)), axis=1)) & Causal()


def bigbird_matrix(N: int, block: int, p: float | None = None) -> BlockMask:
    """The block matrix of the published BigBird rows: three diagonals, two columns, and a share `p` at random."""
    import torch

    n = N // block
    p = {128: 27 / 1024, 64: 54 / 2048}[block] if p is None else p
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(n, n, dtype=torch.bool, device="cpu")
    i = torch.arange(n, device="cpu")
    for o in (-1, 0, 1):
        mask[i, (i + o).clamp(0, n - 1)] = True
    mask[:, :2] = True
    mask |= torch.rand(n, n, generator=generator, device="cpu") < p
    return BlockMask(mask, block)


SMALL = (
    square("dense", 70, Dense, "smoke", B=2),
    square("causal", 150, Causal, "smoke", B=2, H=4, G=2),
    square("window", 200, lambda: SlidingWindow(50), "smoke", H=4, G=1),
    square("window_both_sides", 130, lambda: SlidingWindow(20, 9), "smoke"),
    square("window_sinks", 190, lambda: SlidingWindow(33, sinks=5), "smoke"),
    square("local_causal", 150, lambda: Local(32) & Causal(), "smoke"),
    square("bigbird", 180, lambda: BigBird(16, random_blocks=2), "smoke"),
    square("longformer", 150, lambda: Longformer(16, (0, 77), dilation=2), "smoke"),
    square("dilated", 160, lambda: Dilated(6, 3, 5), "smoke"),
    square("strided", 170, lambda: Strided(16, 10), "smoke"),
    square("power_strided", 170, lambda: PowerStrided(2, 4), "smoke"),
    square("csr", 150, lambda: _random_rows(150, 150, 9, 1), "smoke", "odd", "unkept"),
    square("tree", 40, lambda: _tree(40), "smoke", K=110, H=4, G=2),
    square("tree_alone", 26, lambda: _tree(26), "odd"),
    square("tree_in_a_cache", 26, lambda: _tree(26), "odd", "unkept", K=110, q_offset=50, B=2),
    square("composed", 140, lambda: (SlidingWindow(16) | BigBird(16)) & ~Local(8), "smoke"),
    square("block_mask_by_head", 150, lambda: _block_mask_by_head(4, 150, 16), "smoke", "unkept", H=4, G=2, B=2),
    square("per_head", 140, lambda: PerHead([SlidingWindow(31), Dilated(8, 0, 4), Causal(), Dense()]), "smoke", H=4),
    square(
        "per_batch", 130, lambda: PerBatch([Longformer(8, (0, 99)), _random_rows(130, 130, 9, 2)]), "odd", "unkept",
        B=2, G=1,
    ),
    square("longnet", 150, lambda: LongNet((16, 48), (1, 3), heads=4), "smoke", H=4, G=2),
    square("documents_by_batch", 130, lambda: _documents(3, 130), "smoke", B=3, H=4, G=2),
    square("one_position", 1, Causal, "odd", H=1, D=1),
    square("one_query", 1, lambda: SlidingWindow(40), "odd", "unkept", K=129, B=2, H=4, G=2),
    square("odd_sizes", 97, lambda: SlidingWindow(31), "odd", D=17, E=23, H=3, G=1),
    square("wide_values", 100, Causal, "odd", D=8, E=72),
    square("head_size_one", 65, Causal, "odd", D=1),
    square("wide_heads", 90, lambda: SlidingWindow(40), "odd", D=264, E=300, G=1),
    square("fewer_queries", 60, Causal, "odd", K=190),
    square("more_queries", 150, Causal, "odd", "unkept", K=70),  # the first 80 rows keep nothing
    square("offset_zero", 60, lambda: SlidingWindow(20), "odd", "unkept", K=150, q_offset=0),
    square("gaps", 140, lambda: _with_gaps(140), "odd", "unkept", B=2, H=4, G=2),
    square("gaps_by_head", 100, lambda: PerHead([_with_gaps(100), SlidingWindow(9)]), "odd", "unkept", B=2, G=1),
    square("offset_negative", 90, Causal, "odd", "unkept", K=90, q_offset=-17),
    square("empty_rows", 130, lambda: _half_empty(130), "odd", "unkept", B=2),
    square("all_empty", 40, lambda: ~Dense(), "odd", "unkept"),
    square("rank_three", 110, lambda: SlidingWindow(30), "odd", dims=3, H=4, G=2),
    square("rank_two", 110, lambda: SlidingWindow(30), "odd", dims=2, H=1),
    square("key_lengths", 120, Causal, "terms", "unkept", B=4, key_lengths=(0, 1, 77, 120)),
    square(
        "key_lengths_empty_rows", 130, lambda: SlidingWindow(30), "terms", "unkept", B=3, key_lengths=(0, 41, 130),
        sink_logits=True,
    ),
    square("softcap", 120, lambda: SlidingWindow(40), "terms", softcap=3.0),
    square("sink_logits", 120, lambda: SlidingWindow(40), "terms", H=4, sink_logits=True),
    square("sink_logits_empty_rows", 100, lambda: _half_empty(100), "terms", "unkept", sink_logits=True),
    square("alibi", 120, Causal, "terms", H=4, G=2, alibi_slopes=True),
    square(
        "alibi_ahead", 120, lambda: SlidingWindow(20, 12), "terms", H=4, G=2, alibi_slopes=True,
        alibi_distance="signed",
    ),
    square(
        "alibi_absolute", 110, lambda: SlidingWindow(30, 25) | CSR.from_pattern(Strided(7, 0), 110, 110), "terms", B=2,
        H=4, G=2, alibi_slopes="each", alibi_distance="absolute",
    ),
    square(
        "all_terms", 110, lambda: SlidingWindow(60) | BigBird(16), "terms", "unkept", B=2, H=4, G=2,
        key_lengths=(110, 64), softcap=5.0, sink_logits=True, alibi_slopes=True,
        alibi_distance="signed",
    ),
)  # fmt: skip

_N = 131072


def large(name: str, pattern: Callable[[], Pattern], *tags: str, N: int = _N, H: int = 8, D: int = 128) -> Case:
    """A case that is measured on a GPU."""
    return square(name, N, pattern, "bench", *tags, H=H, D=D, dtypes=("bfloat16",), devices=frozenset({"cuda"}))


def graph(name: str, N: int, pattern: Callable[[], Pattern], *tags: str, dtypes: tuple[str, ...], D: int = 64) -> Case:
    """A case of scattered pairs that is measured on a GPU."""
    return square(name, N, pattern, "bench", "graph", *tags, H=8, D=D, dtypes=dtypes, devices=frozenset({"cuda"}))


_BOTH = ("bfloat16", "float32")


def on_cpu(
    name: str, N: int, pattern: Callable[[], Pattern], *tags: str, B: int = 1, H: int = 8, G: int | None = None,
    K: int | None = None, D: int = 64, key_lengths: tuple[int, ...] | None = None,
) -> Case:  # fmt: skip
    """A case that is measured on a CPU."""
    return square(
        name, N, pattern, "bench", "cpu", *tags, B=B, H=H, G=G, K=K, D=D, key_lengths=key_lengths, dtypes=_BOTH,
        devices=frozenset({"cpu"}),
    )  # fmt: skip


BENCH = (
    large("window_4096_causal", lambda: SlidingWindow(4096), "foundation", "hopper"),
    large("window_4096_both", lambda: SlidingWindow(4096, 4096), "foundation", "hopper"),
    large("bigbird_matrix_128", lambda: bigbird_matrix(_N, 128), "foundation", "hopper"),
    large("bigbird_64", lambda: BigBird(64), "foundation", "hopper"),
    large("window_512_causal", lambda: SlidingWindow(512), "hopper"),
    large("window_4096_causal_d64", lambda: SlidingWindow(4096), "hopper", H=16, D=64),
    large("bigbird_matrix_64", lambda: bigbird_matrix(_N, 64), "hopper"),
    large("random_matrix_64", lambda: bigbird_matrix(32768, 64, 0.1), "hopper", N=32768, H=16),
    large("causal_32768", Causal, "hopper", N=32768),
    large("causal_32768_h16", Causal, "hopper", N=32768, H=16),
    large("dilated_16_256", lambda: Dilated(255, 0, 16), "dilated"),
    large("plain_256", lambda: SlidingWindow(255), "dilated"),
    large("dilated_8_1024", lambda: Dilated(1023, 0, 8), "dilated"),
    large("plain_1024", lambda: SlidingWindow(1023), "dilated"),
    graph("graph_random_64", _N, lambda: random_graph(_N, 64), dtypes=_BOTH),
    graph("graph_power_law", 169343, lambda: power_law_graph(169343, 1166243), dtypes=_BOTH),
    graph("graph_proximity", _N, lambda: proximity_graph((6, 6, 5), 2.5), dtypes=_BOTH),
    graph("power_strided_131072", _N, lambda: PowerStrided(2), dtypes=("bfloat16",), D=128),
    graph("power_strided_1048576", 2**20, lambda: PowerStrided(2), dtypes=("bfloat16",)),
    on_cpu("window_256_cpu", 8192, lambda: SlidingWindow(256), "foundation", H=4),
    on_cpu("window_256_cpu_131072", _N, lambda: SlidingWindow(256), "foundation", H=4),
    *(on_cpu(f"causal_{N}_cpu", N, Causal) for N in (512, 2048, 8192)),
    *(on_cpu(f"dense_{N}_cpu", N, Dense) for N in (512, 2048, 8192)),
    on_cpu("bigbird_64_cpu", 8192, lambda: BigBird(64)),
    on_cpu("window_63_cpu", 512, lambda: SlidingWindow(63), B=4),
    on_cpu("key_lengths_cpu", 2048, Dense, key_lengths=(64,)),
    on_cpu("one_query_cpu", 1, Causal, K=4096, H=32, G=8, D=128),
    on_cpu("one_query_window_cpu", 1, lambda: SlidingWindow(255), K=4096, H=32, G=8, D=128),
    on_cpu("graph_50k_cpu", 5000, lambda: random_graph(5000, 10), "graph", H=4, D=32),
    on_cpu("graph_200k_cpu", 20000, lambda: random_graph(20000, 10), "graph", H=4, D=32),
    on_cpu("graph_power_law_cpu", 169343, lambda: power_law_graph(169343, 1166243), "graph", H=4),
)  # fmt: skip

CASES = SMALL + BENCH


def case(name: str) -> Case:
    """The case called `name`."""
    for candidate in CASES:
        if candidate.name == name:
            return candidate
    raise ValueError(f"case {name!r} is not one of {', '.join(c.name for c in CASES)}")


def tagged(*tags: str) -> list[Case]:
    """The cases that carry any of the tags."""
    return [c for c in CASES if c.tags & set(tags)]
