"""`register`: the name of the backend in vLLM."""

from __future__ import annotations

import copyreg
from typing import Any

from gossamer.checks import show

NAME = "GOSSAMER"
BACKEND = "gossamer.integrations.vllm.backend.Backend"  # imported when an engine asks for it
MODEL = "gossamer.integrations.vllm.sparsek_model"  # likewise
NAME_OF_SPARSEK = "SPARSEK"
BACKENDS = {NAME: BACKEND, NAME_OF_SPARSEK: f"{MODEL}.SparseKBackend"}

_replaced: set[str] = set()


def register(instead_of: str | None = None) -> None:
    """Register gossamer with vLLM: `LLM(..., attention_backend="GOSSAMER")` then computes a model's attention by it.

    vLLM calls this itself in each of its processes, as a plugin, where gossamer is installed. Causal attention and
    sliding windows, soft caps, sinks, groups, chunked prefill, prefix caching, speculative tokens and full CUDA graphs
    of decoding are computed; what is not (8-bit caches, ALiBi, MLA, encoders, image ranges) is refused when the engine
    is made.

    Args:
        instead_of: a backend of vLLM to take the place of, in this process and in those of an engine that it makes by
            the name. On a CPU vLLM takes its "CPU_ATTN" whatever is named.

    Raises:
        ValueError: vLLM has no backend of that name.
        ImportError: vLLM is not installed, or is older than 0.32.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
        from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: F401  (of caches (pages, heads, slots, size))
    except ImportError as error:
        raise ImportError(f"register needs vllm of at least 0.32 ({error})", name="vllm") from error
    known = AttentionBackendEnum.__members__
    if instead_of is not None and (not isinstance(instead_of, str) or instead_of not in known):
        raise ValueError(f"instead_of must be None or one of {', '.join(known)}; got {show(instead_of)}")
    if NAME not in known:
        for name, path in BACKENDS.items():
            register_backend(name, path)
        _register_model()
        # An engine's process reads its configuration before plugins are loaded: the name brings its registration along.
        copyreg.pickle(AttentionBackendEnum, _reduced)
    if instead_of is not None:
        register_backend(AttentionBackendEnum[instead_of], BACKEND)
        _replaced.add(instead_of)


def _reduced(backend: Any) -> Any:
    """What a backend of vLLM is pickled as."""
    return (_registered, (backend.name, *_replaced)) if backend.name in BACKENDS else backend.__reduce_ex__(2)


def _register_model() -> None:
    """Let vLLM serve `SparseKForCausalLM`, which it reads from a folder of transformers'."""
    from vllm import ModelRegistry

    import gossamer.integrations.transformers.sparsek_config  # noqa: F401  (registers the name of its configuration)

    ModelRegistry.register_model("SparseKForCausalLM", f"{MODEL}:SparseKForCausalLM")


def _registered(name: str, *replaced: str) -> Any:
    """The backend, registered in this process as in that which it comes from."""
    for instead_of in (None, *replaced):
        register(instead_of)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]
