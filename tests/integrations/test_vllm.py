"""The attention of an engine's layers, without the engine: steps that it recorded, against a definition in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.integrations.vllm import attending
from gossamer.integrations.vllm.attending import PagedAttention, Step, rounded
from gossamer.integrations.vllm.attending_sparsek import PagedSparseK
from gossamer.integrations.vllm.options import options_of
from gossamer.integrations.vllm.trace import Layers, Recorder, read
from gossamer.sparse_k.scored_keys import with_scores
from gossamer.torch import paged
from tests.support.engine_steps import MEMORY, Replay, check, recorded, replayed, to
from tests.support.processes import INTERPRETING, in_interpreter, triton_on_a_cpu

TRACES = ["gemma2", "gpt_oss", "llama_drafts"]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", TRACES)
def test_recorded_steps(name: str, memory: str) -> None:
    """Chunks of prompts, decoding, drafts, shared prefixes; windows, sinks, soft caps; of caches that hold NaN."""
    for replay, found in replayed(name, memory, torch.float32, "cpu"):
        assert len(found) > 40
        check(replay, found)


def test_in_inference_mode() -> None:
    """As an engine on a GPU calls it; its weights and cache may be made before."""
    step = padded(3, 4)
    for inside in (False, True):
        with torch.inference_mode(inside):
            replay = Replay(LAYERS._replace(sinks=True), 4, "slots inside heads", torch.float32, "cpu")
            for x in (replay.cache, replay.rows):
                x.nan_to_num_(0)
        with torch.inference_mode():
            check(replay, [replay.run(step, "cpu")])


def test_traces_hold_what_they_are_of() -> None:
    told = {name: list(dict.fromkeys(layers for layers, _ in recorded(name))) for name in TRACES}
    assert [x.sliding_window for x in told["gpt_oss"]] == [16, None] and all(x.sinks for x in told["gpt_oss"])
    assert all(x.softcap == 50 and x.page_size == 64 for x in told["gemma2"])
    queries = [step.query_start_loc.diff() for _, step in recorded("llama_drafts")]
    assert any(int(x.max()) == 4 and int(x.min()) == 1 for x in queries)
    assert any(bool((step.block_table == 0).any()) for _, step in recorded("gpt_oss")), (
        "pages behind a window are freed"
    )


LAYERS = Layers("a", 3, 16, 4, 2, 32, None, None, False)


def padded(R: int, T: int) -> Step:
    """A step of one sequence, with room for more in a batch whose size a graph was captured for."""
    return Step(
        1, torch.tensor([0] + [1] * R), torch.tensor([20] + [0] * (R - 1)), 20,
        torch.tensor([[2, 1, 0]] + [[0, 0, 0]] * (R - 1)), torch.tensor([19] + [-1] * (T - 1)),
    )  # fmt: skip


def test_a_padded_batch() -> None:
    """Rows of no sequence become 0, and so do those of a run that only asks for memory."""
    replay = Replay(LAYERS, 4, "heads inside slots", torch.float32, "cpu")
    T, step = 4, padded(3, 4)
    replay.cache.nan_to_num_(0)
    replay.rows.nan_to_num_(0)
    found = replay.run(step, "cpu")
    check(replay, [found])
    assert not found.out[1:].any() and found.out[0].any()
    q, k, v = replay.inputs(step)
    out = torch.full_like(q, torch.nan)
    assert replay.layer.forward(None, q, k, v, torch.empty(0), None, out) is out and not out.any() and len(out) == T


def test_layers_of_a_step_share_its_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = attending.device_layout
    monkeypatch.setattr(attending, "device_layout", lambda *given, **more: made.append(0) or make(*given, **more))
    replays = [Replay(LAYERS, 4, "heads inside slots", torch.float32, "cpu") for _ in range(3)]
    window = Replay(LAYERS._replace(sliding_window=8), 4, "heads inside slots", torch.float32, "cpu")
    step = padded(1, 1)
    for replay in (*replays, window, window):
        q, k, v = replay.inputs(step)
        replay.layer.forward(None, q, k, v, replay.cache.nan_to_num_(0), step, torch.empty_like(q))
    assert len(made) == len(step.shared) == 2


def test_few_widths_of_tables() -> None:
    widths = [rounded(n) for n in range(1, 5000)]
    assert all(n <= w <= max(n, 1.25 * n) for n, w in enumerate(widths, 1)) and len(set(widths)) < 50


def layer(**more: Any) -> PagedAttention:
    return PagedAttention(**{"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"alibi_slopes": [0.5] * 4}, "alibi_slopes are not computed"),
        (
            {"kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype must be one of auto, float16, bfloat16 with GOSSAMER; got fp8",
        ),
        ({"attn_type": "encoder_only"}, "attention of type 'encoder_only' is not computed"),
        (
            {"head_size": 512, "batch_invariant": True},
            "head_size must be at most 256 where results are batch invariant",
        ),
        ({"chunk_lookback": 2}, "chunk_lookback=2 of a layer is not computed"),
    ],
)
def test_layers_that_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(gs.Unsupported, match=message):
        layer(**more)


def test_a_quantized_output_is_refused() -> None:
    q = torch.zeros(1, 4, 32)
    with pytest.raises(gs.Unsupported, match="a quantized output"):
        layer().forward(None, q, q, q, q, None, q, output_scale=torch.ones(1))


class Config:
    """An engine's configuration, as far as it is read."""

    def __init__(self, additional_config: Any) -> None:
        self.additional_config = additional_config


def test_options(caplog: pytest.LogCaptureFixture) -> None:
    assert options_of(Config({})) == options_of(Config(None)) == (None, False, None)
    for _ in range(2):
        options = options_of(Config({"gossamer": {"restrict": "window:40,sinks:4", "record": "x"}}))
        assert options == (gs.SlidingWindow(39, sinks=4), False, "x")
    assert [x.getMessage() for x in caplog.records if "approximates" in x.getMessage()] == [
        "gossamer: restrict=window:40,sinks:4: layers see no more than this, which approximates the model"
    ]
    assert layer(restrict=options.restrict, sliding_window=8).pattern == gs.SlidingWindow(7) & options.restrict
    for wrong, message in (
        ({"window": 4}, r"must have restrict, kept_mass, record; got \['window'\]"),
        ({"restrict": "window:0"}, 'restrict must be "window:KEYS"'),
        ({"restrict": 7}, 'restrict must be "window:KEYS"'),
        ({"record": 1}, "record must be the name of a file; got 1"),
        ("window", "must have restrict, kept_mass, record"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of(Config({"gossamer": wrong}))


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    step = padded(2, 3)
    recorder = Recorder(str(file), ["a", "b", "c"], layer(), 16)
    recorder.add(step)
    recorder.add(step)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 3 and lines[1]["block_table"] == [[2, 1], [0, 0]]
    for layers, found in read(file):
        assert layers == LAYERS
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            assert torch.equal(getattr(found, name), getattr(step, name).int())


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from triton_on_a_cpu(monkeypatch, paged, "paged_layout")

    @pytest.mark.parametrize(("name", "first", "invariant"), [("gpt_oss", 3, False), ("llama_drafts", 6, True)])
    def test_steps_by_kernels(on_a_cpu: None, name: str, first: int, invariant: bool) -> None:
        """As on a GPU: what is new is written, and the table read, by kernels, and nothing is made."""
        steps = recorded(name)
        for layers in dict.fromkeys(layers for layers, _ in steps):
            replay = Replay(layers, 40, "heads inside slots", torch.float32, "cpu")
            replay.layer.batch_invariant = invariant
            for x in (replay.cache, replay.rows):  # the steps before are not run
                x.nan_to_num_(0)
            own = [step for of, step in steps if of == layers][first : first + 2]
            with torch.inference_mode():
                found = [replay.run(step, "cpu") for step in own]
            check(replay, found)

    def test_layers_share_a_call(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is looked for once for all steps of a form, and computes each layer over its own cache."""
        looked: list[Any] = []
        look = attending.call_by_table
        count = lambda *given, **named: looked.append(0) or look(*given, **named)  # noqa: E731
        monkeypatch.setattr(attending, "call_by_table", count)
        shared, outs = padded(2, 2), []
        for seed in range(2):
            torch.manual_seed(seed)
            replay = Replay(LAYERS._replace(sinks=True), 4, "heads inside slots", torch.float32, "cpu")
            replay.cache.normal_()
            q, k, v = replay.inputs(shared)
            for step in (shared, padded(2, 2)):
                outs.append(replay.layer.forward(None, q, k, v, replay.cache, step, torch.empty_like(q)))
        assert len(looked) == len(shared.shared) == 1
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3]) and not torch.equal(outs[0], outs[2])

else:

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(__file__, "test_steps_by_kernels", "test_layers_share_a_call")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", TRACES)
def test_recorded_steps_on_a_gpu(name: str, memory: str) -> None:
    for replay, found in replayed(name, memory, torch.bfloat16, "cuda"):
        check(replay, found)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", TRACES)
def test_a_captured_step_is_replayed(name: str) -> None:
    """One graph of writing and attending, padded to four sequences of up to four tokens, over the steps that fit."""
    steps = recorded(name)
    pages = 1 + max(int(step.block_table.max()) for _, step in steps)
    R, T, n = 4, 16, max(step.block_table.shape[1] for _, step in steps)
    for layers in dict.fromkeys(layers for layers, _ in steps):
        fits = [
            step
            for of, step in steps
            if of == layers and len(step.seq_lens) <= R and len(step.slot_mapping) <= T
        ]  # fmt: skip
        assert len(fits) > 20
        eager, captured = (Replay(layers, pages, "heads inside slots", torch.bfloat16, "cuda") for _ in range(2))
        for replay in (eager, captured):  # steps that do not fit are not run: no key may be NaN
            replay.cache.nan_to_num_(0)
        room = Step(
            T, torch.zeros(R + 1, dtype=torch.int32, device="cuda"), torch.zeros(R, dtype=torch.int32, device="cuda"),
            n * layers.page_size, torch.zeros(R, n, dtype=torch.int32, device="cuda"),
            torch.full((T,), -1, device="cuda"),
        )  # fmt: skip
        H, G, D = layers.num_heads, layers.num_kv_heads, layers.head_size
        q, k, v = (torch.zeros(T, heads, D, dtype=torch.bfloat16, device="cuda") for heads in (H, G, G))
        out = torch.empty_like(q)

        def run(replay: Replay, out: torch.Tensor, step: Step, q: Any = q, k: Any = k, v: Any = v) -> None:
            replay.layer.do_kv_cache_update(None, k, v, replay.cache, step.slot_mapping)
            replay.layer.forward(None, q, k, v, replay.cache, step, out)

        run(captured, out, room)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(captured, out, to(room, "cuda"))
        for step in fits:
            for x, own in zip((q, k, v), eager.inputs(step), strict=True):
                x[: len(own)] = own.cuda()
            last = int(step.query_start_loc[-1])
            room.query_start_loc.fill_(last)[: len(step.query_start_loc)] = step.query_start_loc.cuda()
            room.seq_lens.zero_()[: len(step.seq_lens)] = step.seq_lens.cuda()
            room.block_table.zero_()[: len(step.seq_lens), : step.block_table.shape[1]] = step.block_table.cuda()
            room.slot_mapping.fill_(-1)[: len(step.slot_mapping)] = step.slot_mapping.cuda()
            graph.replay()
            wanted = torch.empty_like(out)
            run(eager, wanted, to(room, "cuda"))
            assert torch.equal(out, wanted) and torch.equal(captured.cache, eager.cache)


SPARSEK: dict[str, Any] = {"num_heads": 4, "head_size": 24, "scale": 0.25, "num_kv_heads": 2, "k_keep": 5, "window": 2}


@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": 4}, {"logits_soft_cap": 2.0}, {"sinks": torch.zeros(4)}, {"batch_invariant": True},
        {"kv_sharing_target_layer_name": "a"}, {"restrict": gs.SlidingWindow(3)}, {"alibi_slopes": [1.0]},
    ],
    ids=str,
)  # fmt: skip
def test_what_layers_of_sparsek_refuse(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(gs.Unsupported, match=name):
        PagedSparseK(**SPARSEK, **more)


def test_layers_without_scores_are_refused() -> None:
    with pytest.raises(
        gs.Unsupported, match=r"SPARSEK computes layers that give their keys scores.* GOSSAMER computes"
    ):
        PagedSparseK(4, 24, 0.25, 2)


@pytest.mark.parametrize("most", [None, 2])
def test_steps_of_sparsek(most: int | None) -> None:
    """By single rows, or one sequence after another: each query over its own keys; rows of no sequence are 0."""
    torch.manual_seed(0)
    layer, cache = PagedSparseK(**SPARSEK), torch.full((9, 2, 4, 40), torch.nan)
    k, v, u = torch.randn(3, 10, 2, 16), torch.randn(3, 10, 2, 16), torch.randn(3, 10, 2)
    table, used, edges = torch.randperm(9).view(3, 3).int(), torch.tensor([10, 7, 1]), torch.tensor([0, 2, 3, 4])
    for r in range(3):
        slots = (table[r, :, None] * 4 + torch.arange(4)).flatten()[:10]
        layer.do_kv_cache_update(None, with_scores(k[r], u[r]), v[r], cache, slots)
    q, out = torch.randn(6, 4, 24), torch.full((6, 4, 16), torch.nan)
    step = Step(4, edges.int(), used.int(), 10, table, torch.arange(4), most)
    assert not layer.forward(None, q, None, None, cache, None, torch.ones(2, 4, 16)).any()
    layer.forward(None, q, None, None, cache, step, out)
    for r, n in enumerate(used.tolist()):
        rows = q[edges[r] : edges[r + 1], :, :16].transpose(0, 1)
        held = (x[r, :n].transpose(0, 1) for x in (k, v))
        wanted = gs.sparsek_attention(rows, *held, u[r, :n].T, k_keep=5, window=2, scale=0.25)
        torch.testing.assert_close(out[edges[r] : edges[r + 1]], wanted.transpose(0, 1))
    assert not out[4:].any()
