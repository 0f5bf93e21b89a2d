"""Models that the real engine serves, with gossamer as its backend, beside transformers."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.integrations.vllm import register
from gossamer.integrations.vllm.attending import PagedAttention
from gossamer.integrations.vllm.trace import read
from tests.vllm.models import saved

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[(7 * i + 3) % 200 + 3 for i in range(n)] for n in (5, 40, 90, 33, 64, 17)]
PROMPTS.append([*PROMPTS[2][:80], 9, 8, 7])  # begins as another
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NEW = 20  # tokens


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes an engine of the model in a folder, which is ended behind the test."""
    import vllm

    register("CPU_ATTN")
    made: list[Any] = []

    def make(folder: Path, options: dict[str, Any] | None = None, **more: Any) -> Any:
        usual = {
            "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 256,
            "max_num_seqs": 4, "max_num_batched_tokens": 48, "attention_backend": "GOSSAMER",
            "disable_log_stats": False,
            "additional_config": {"gossamer": {"record": str(tmp_path / "steps.jsonl"), **(options or {})}},
        }  # fmt: skip
        # vLLM looks for kernels in all modules, and stumbles over this one, which drafts by n-grams import.
        sys.modules.pop("llvmlite.binding.ffi", None)
        made.append(vllm.LLM(str(folder), **{**usual, **more}))
        return made[0]

    yield make
    for one in made:
        one.llm_engine.engine_core.shutdown()


def served(llm: Any) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """The most probable tokens behind each prompt, the logarithms of their probabilities, and how many were cached."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False, logprobs=0, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], wanted, use_tqdm=False)
    outputs = [x.outputs[0] for x in found]
    tokens = [list(x.token_ids) for x in outputs]
    logprobs = [[told[t].logprob for t, told in zip(x.token_ids, x.logprobs, strict=True)] for x in outputs]
    return tokens, logprobs, [x.num_cached_tokens for x in found]


def compare(model: Any, tokens: list[list[int]], logprobs: list[list[float]], mask: Any = None) -> None:
    """Each token is transformers' choice, and its logarithm of a probability is within 1e-4.

    Args:
        mask: of n positions what layers see.
    """
    for prompt, new, found in zip(PROMPTS, tokens, logprobs, strict=True):
        ids = torch.tensor([prompt + new])
        seen = None if mask is None else mask(ids.shape[1])
        with torch.no_grad():
            logits = model(ids, attention_mask=seen, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new
        wanted = logits.log_softmax(-1)[range(NEW), new]
        assert wanted.exp().max() < 0.999, "a model whose choices are certain shows little"
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


def counted(llm: Any, name: str) -> int:
    """A counter of an engine."""
    (found,) = (x.value for x in llm.get_metrics() if x.name == f"vllm:{name}")
    return int(found)


def layers_of(llm: Any) -> list[Any]:
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [x.impl for x in context.values() if hasattr(x, "impl")]


def test_preempted_sequences(engine: Callable[..., Any], tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    llm = engine(tmp_path, block_size=16, max_model_len=128, num_gpu_blocks_override=12, enable_prefix_caching=False)
    tokens, logprobs, _ = served(llm)
    assert counted(llm, "num_preemptions") > 0
    compare(model, tokens, logprobs)


def test_a_restriction(engine: Callable[..., Any], tmp_path: Path) -> None:
    """Is what a model gives whose layers see no more."""
    model = saved("llama", tmp_path)
    llm = engine(tmp_path, {"restrict": "window:16,sinks:4"})
    tokens, logprobs, _ = served(llm)

    def mask(n: int) -> torch.Tensor:
        i, j = torch.arange(n)[:, None], torch.arange(n)
        return torch.zeros(n, n).masked_fill(~((j <= i) & ((i - j < 16) | (j < 4))), -torch.inf)[None, None]

    compare(model, tokens, logprobs, mask)


USUAL = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
    "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "attn_type": "decoder", "has_sliding_window": True, "use_batch_invariant": True,
}  # fmt: skip


def test_what_is_refused_before_an_engine_starts() -> None:
    from vllm.platforms.interface import DeviceCapability

    from gossamer.integrations.vllm.backend import Backend

    def reasons(**more: Any) -> list[str]:
        return Backend.validate_configuration(**{"device_capability": DeviceCapability(9, 0), **USUAL, **more})

    for fits in ({}, {"block_size": 1}, {"kv_cache_dtype": "bfloat16"}, {"head_size": 512}, {"dtype": torch.float32}):
        assert reasons(**fits) == []
    for wrong, reason in (
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "a cache of float16 for queries of torch.bfloat16 not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
    ):
        assert reason in reasons(**wrong), wrong


def test_what_is_refused_in_a_step() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from gossamer.integrations.vllm.backend import Builder

    builder: Any = object.__new__(Builder)
    builder.recorder = None
    one, two = torch.tensor([1]), torch.tensor([0, 1])
    usual = {
        "query_start_loc": two, "query_start_loc_cpu": two, "seq_lens": one, "num_reqs": 1, "num_actual_tokens": 1,
        "max_query_len": 1, "max_seq_len": 1, "block_table_tensor": one[None], "slot_mapping": one,
    }  # fmt: skip
    assert builder.build(0, CommonAttentionMetadata(**usual)).seq_lens is one
    for name, value in (
        ("causal", torch.tensor([True])), ("causal", False), ("mm_req_doc_ranges", {0: [(0, 1)]}),
        ("rswa_prefix_lens", one), ("encoder_seq_lens", one), ("dcp_local_seq_lens", one),
    ):  # fmt: skip
        with pytest.raises(gs.Unsupported, match=f"^{name} .* GOSSAMER"):
            builder.build(0, CommonAttentionMetadata(**{**usual, name: value}))


def test_full_graphs_of_decoding() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from gossamer.integrations.vllm.backend import Builder

    def support(drafts: int, head_size: int) -> str:
        told = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
        config: Any = SimpleNamespace(speculative_config=told if drafts else None)
        return Builder.get_cudagraph_support(config, SimpleNamespace(head_size=head_size)).name

    assert [support(n, 128) for n in (0, 7, 8)] == ["UNIFORM_BATCH", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE"]
    assert support(0, 512) == AttentionCGSupport.NEVER.name


def test_the_engine_registers_it_by_itself() -> None:
    from vllm.config import AttentionConfig
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    assert AttentionConfig(backend="gossamer").backend is AttentionBackendEnum["GOSSAMER"]
    from gossamer.integrations.vllm.backend import Backend
    from gossamer.integrations.vllm.sparsek_model import SparseKBackend

    assert AttentionBackendEnum["GOSSAMER"].get_class() is Backend
    assert AttentionConfig(backend="sparsek").backend.get_class() is SparseKBackend
    register()
    with pytest.raises(ValueError, match=r"instead_of must be None or one of FLASH_ATTN, .*; got 'NO'"):
        register("NO")


def test_processes_of_an_engine_know_it() -> None:
    """One that is not forked reads a configuration before plugins are loaded."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as backends

    register("CPU_ATTN")
    told = pickle.dumps([backends["GOSSAMER"], backends["SPARSEK"], backends.TRITON_ATTN])
    script = (
        f"import pickle; found = pickle.loads({told!r}); print([x.name for x in found])\n"
        "print({type(found[0])[x].get_path() for x in ('GOSSAMER', 'CPU_ATTN')})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names, paths = done.stdout.splitlines()[-2:]
    assert (
        names == "['GOSSAMER', 'SPARSEK', 'TRITON_ATTN']" and paths == "{'gossamer.integrations.vllm.backend.Backend'}"
    )


def test_the_page_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models" / "vllm.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "vllm.md", "exec"), names)
    names["llm"].llm_engine.engine_core.shutdown()
    assert len(names["tokens"]) == 8


def test_a_cache_of_8_bits_is_refused(engine: Callable[..., Any], tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(Exception, match="kv_cache_dtype must be one of auto, float16, bfloat16 with GOSSAMER; got fp8"):
        engine(tmp_path, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("kind", "page", "more"),
    [
        ("mistral", 32, {}), ("gemma2", 64, {}), ("gemma3", 128, {}), ("gpt_oss", 16, {}),
        ("llama", 16, {"speculative_config": DRAFTS}), ("sparsek", 32, {"attention_backend": "sparsek"}),
        ("sparsek", 64, {"speculative_config": DRAFTS}),
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(
    kind: str, page: int, more: dict[str, Any], engine: Callable[..., Any], tmp_path: Path
) -> None:
    """Chunks of prompts, cached prefixes, drafts, four sequences at once."""
    model = saved(kind, tmp_path)
    llm = engine(tmp_path, block_size=page, **more)
    own = "SparseKImpl" if kind == "sparsek" else "Impl"
    assert [type(x).__name__ for x in layers_of(llm)] == [own] * 2 and isinstance(layers_of(llm)[0], PagedAttention)
    tokens, logprobs, cached = served(llm)
    compare(model, tokens, logprobs)
    steps = list(read(tmp_path / "steps.jsonl"))
    queries = [(step.query_start_loc.diff(), step.seq_lens) for _, step in steps]
    assert all(layers.page_size == page for layers, _ in steps)
    assert max(len(lengths) for _, lengths in queries) == 4
    assert any(bool(((n > 8) & (n < lengths)).any()) for n, lengths in queries), "a chunk behind others"
    assert page == 128 or cached[-1] == 80 // page * page
    if "speculative_config" in more:
        told = "draft" if kind == "sparsek" else "accepted"  # what its random weights repeat
        assert counted(llm, f"spec_decode_num_{told}_tokens") > 0
