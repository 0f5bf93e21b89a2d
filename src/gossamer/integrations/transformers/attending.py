"""The attention function that a model's layers call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.checks import show
from gossamer.integrations.transformers.attention_mask import NO_RULES, Attended, Mask
from gossamer.integrations.transformers.device import ON_DEVICE, ONCE
from gossamer.integrations.transformers.host import EVALUATED_PAIRS
from gossamer.integrations.transformers.patterns import both
from gossamer.patterns import Causal, Dense, Pattern
from gossamer.plan.problem import Unsupported
from gossamer.torch.api import attention
from gossamer.torch.arguments import describe
from gossamer.torch.structure import Structure

Restriction = Pattern | Callable[[Any, int | None], Pattern | None] | None

# Arguments of other implementations, or of the model around, that change nothing about what is computed here.
IGNORED = frozenset({
    "cache_position", "deterministic", "is_first_iteration", "labels", "layer_idx", "logits_to_keep", "max_length_k",
    "max_length_q", "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "return_dict", "seq_idx", "token_type_ids", "use_cache",
})  # fmt: skip
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate", "dropout")


class LayerCall(NamedTuple):
    """One call of a layer, as `explain` records it: the arguments of `gossamer.attention`."""

    module: torch.nn.Module
    tensors: tuple[Tensor, Tensor, Tensor]
    pattern: Pattern | Structure | Tensor
    options: dict[str, Any]
    planned: str


# What `explain` listens with; None where nobody does.
listeners: list[Callable[[LayerCall], None]] = []


def attention_function(restrict: Restriction) -> Callable[..., tuple[Tensor, None]]:
    """The function to register: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E) to (B, Q, H, E)."""

    def gossamer_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        sliding_window: Any = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _refuse(module, dropout, others)
        by = _restriction(restrict, module)
        terms: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink_logits": s_aux}
        placed: dict[str, Any] = {}
        pattern: Any
        planned, Q, K = ONCE, query.shape[2], key.shape[2]
        if isinstance(attention_mask, Mask):
            if attention_mask.shape not in ((query.shape[0], 1, Q, K), (1, 1, Q, K)):
                raise Unsupported(
                    f"attention_mask was made for (B, 1, Q, K) = {attention_mask.shape}, and this layer has "
                    f'{(query.shape[0], 1, Q, K)}; use attn_implementation="sdpa"'
                )
            if position_ids is not None:
                attention_mask.separate(position_ids)
            if torch.compiler.is_compiling() and not attention_mask.has_rules(by):
                return outside(
                    module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, is_causal,
                    sliding_window, position_ids, cu_seq_lens_q, cu_seq_lens_k, **others,
                )  # fmt: skip
            pattern, placed, planned = attention_mask.attended(by, query.shape[0], query.device)
        elif attention_mask is None:
            pattern = _without_mask(module, Q, K, is_causal, sliding_window)
            pattern = pattern if by is None else both(pattern, by)
        else:
            pattern = _given(attention_mask, query, K, by)
        for name, edges in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
            if edges is not None:
                _check_documents(attention_mask, name, edges)
        for listener in listeners:
            listener(LayerCall(module, (query, key, value), pattern, {**terms, **placed}, planned))
        if planned == ON_DEVICE:
            attended = Attended(pattern, placed, planned)
            pattern, placed = attention_mask.layout(attended, by, query, key, value, softcap, s_aux), {}
        out = attention(query, key, value, pattern, **terms, **placed)
        return out.transpose(1, 2).contiguous(), None

    outside = torch.compiler.disable(gossamer_attention, reason=NO_RULES)
    return gossamer_attention


def _refuse(module: torch.nn.Module, dropout: float, others: dict[str, Any]) -> None:
    """Raise for what would change the result and is not computed here."""
    config = getattr(module, "config", None)
    if dropout:
        names = [name for name in DROPOUTS if getattr(config, name, None) == dropout]
        field = f"config.{names[0]}" if names else "the config's dropout of attention"
        raise Unsupported(
            f"dropout must be 0.0: attention dropout is not computed, got {dropout}; set {field} = 0.0, or model.eval()"
        )
    if getattr(config, "output_attentions", False):
        raise Unsupported(
            "config.output_attentions must be False: probabilities are never held, an N x N array; use "
            'attn_implementation="eager"'
        )
    for name, value in others.items():
        if value is None or value is False or name in IGNORED:
            continue
        reason = {
            "position_bias": "a bias of positions is not added (T5 and its kind)",
            "output_attentions": "probabilities are never held: an N x N array",
            "cache": "a paged cache of continuous batching is not read",
        }.get(name, "what it asks for is not known here")
        raise Unsupported(
            f"{name} must be None: {reason}; got {describe(value)}. Use another attn_implementation, for example "
            '"sdpa" or "eager"'
        )


def _restriction(restrict: Restriction, module: torch.nn.Module) -> Pattern | None:
    """The pattern by which a layer is restricted."""
    if restrict is None:
        return None
    config = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(
            "restrict is not for a model whose config.is_encoder_decoder is True: positions of its cross attention "
            "are those of two sequences"
        )
    if isinstance(restrict, Pattern):
        return restrict
    restriction = restrict(config, getattr(module, "layer_idx", None))
    if restriction is not None and not isinstance(restriction, Pattern):
        raise ValueError(f"restrict must return a gossamer pattern or None, got {show(restriction)}")
    return restriction


def _without_mask(module: torch.nn.Module, Q: int, K: int, is_causal: bool | None, window: Any) -> Pattern:
    """The pattern of a layer that is given no mask, by the rule of sdpa."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(window, int) and window < max(Q, K):
        raise Unsupported(
            f"sliding_window={window} without an attention_mask of gossamer is not read: models count it differently"
        )
    if not causal or Q == 1:
        return DENSE
    if Q != K:
        raise Unsupported(
            f"attention_mask is None in a causal layer of Q = {Q} queries and K = {K} keys, which says not where the "
            "queries stand"
        )
    return CAUSAL


DENSE, CAUSAL = Dense(), Causal()  # torch before 2.13 takes them only from outside of a compiled function

_checked: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}


def _given(mask: Any, query: Tensor, K: int, by: Pattern | None) -> Tensor:
    """A mask that the user made, as booleans that broadcast to (B, H, Q, K)."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise ValueError(
            "attention_mask must be (B, positions), or a boolean or additive tensor (B, 1 or H, Q, K); "
            f"got {describe(mask)}"
        )
    kept = mask if mask.dtype == torch.bool else _booleans(mask)
    if by is None:
        return kept
    Q = query.shape[2]
    if Q != K or Q * K > EVALUATED_PAIRS:
        raise Unsupported(
            f"restrict with a four-dimensional attention_mask must have as many queries as keys, of at most "
            f"{EVALUATED_PAIRS} pairs; got (Q, K) = {(Q, K)}"
        )
    by.check(Q, K, query.shape[1], query.shape[0])
    return kept & torch.from_numpy(by.materialize(Q, K)).to(mask.device)


def _booleans(mask: Tensor) -> Tensor:
    """The pairs that an additive mask of 0 and minus infinity keeps; all layers share what was found."""
    counted = not mask.is_inference()  # such a tensor does not count the writes to it
    known = _checked.get(id(mask)) if counted else None
    if known is not None and known[0]() is mask and known[1] == mask._version:
        return known[2]
    if not mask.is_floating_point():
        raise ValueError(f"attention_mask must be boolean, or additive and of a floating type; got {describe(mask)}")
    if mask.requires_grad:
        raise ValueError(f"attention_mask must be a constant; got one that requires grad, {describe(mask)}")
    kept = mask == 0
    other = ~kept & ~(mask <= torch.finfo(mask.dtype).min)
    if bool(other.any()):
        raise ValueError(
            "attention_mask, an additive one, must hold 0 and minus infinity (or the least number of its type) alone: "
            f"a bias is not added; got {float(mask[other][0])}"
        )
    if counted:
        at = id(mask)
        _checked[at] = weakref.ref(mask, lambda _: _checked.pop(at, None)), mask._version, kept
    return kept


def _check_documents(mask: Any, name: str, edges: Tensor) -> None:
    """Raise unless cu_seq_lens say what the mask says already."""
    if isinstance(mask, Mask):
        mask.check_documents(name, edges)
        return
    raise Unsupported(
        f"{name} must be None, or have the documents of packed position_ids in a causal model, where attention_mask is "
        f"None and use_cache is False; got {describe(edges)}"
    )
