"""`register`: a name for `model.set_attn_implementation`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from gossamer.checks import show
from gossamer.integrations.transformers.attending import attention_function
from gossamer.integrations.transformers.attention_mask import make_mask
from gossamer.patterns import Pattern

_ours: set[str] = set()


def register(
    name: str = "gossamer", *, restrict: Pattern | Callable[[Any, int | None], Pattern | None] | None = None
) -> None:
    """Register gossamer with transformers: `model.set_attn_implementation(name)` then computes a model's attention.

    The model's own mask is read, and compared with what was read on sampled pairs the first time that its form is met:
    causal, windows, chunks, packed `position_ids`, images, padding on any side. Most of it is made on the device, so
    that a compiled model is one graph. Soft caps, sinks and scales are the model's. What is not computed (a bias of
    positions, active dropout, returned probabilities) raises.

    Args:
        name: of the implementation; a name registered before is replaced, and others stay. transformers reads meaning
            into names that contain "flash", "sdpa", "flex_attention", "eager", "paged", "/" or "|": they are refused.
        restrict: a pattern of absolute positions, padding counted, that is intersected with the mask of every layer;
            or a function of (config, layer index) that returns one, or None for no restriction. The configuration is
            that of the layer's module, whose index is None where the model does not number its layers.

    Raises:
        ValueError: the name means something else to transformers, or `restrict` is neither.
        ImportError: transformers is not installed.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.\-]*", name):
        raise ValueError(f"name must be a word of letters, digits and . _ -, got {show(name)}")
    taken = [part for part in ("flash", "sdpa", "flex_attention", "eager", "paged") if part in name]
    if taken:
        raise ValueError(f"name must not contain {taken[0]!r}, in which transformers reads a meaning; got {name!r}")
    if isinstance(restrict, type) or not (restrict is None or isinstance(restrict, Pattern) or callable(restrict)):
        raise ValueError(
            f"restrict must be a gossamer pattern, a function of (config, layer index) or None, got {show(restrict)}"
        )
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"register needs transformers of at least 5.17 ({error}); "
            "in a checkout of gossamer: pip install '.[transformers]'",
            name="transformers",
        ) from error
    if name not in _ours and (name in AttentionInterface() or name in AttentionMaskInterface()):
        raise ValueError(f"name must not be one that another library registered; got {name!r}")
    compare_known()
    _ours.add(name)
    AttentionInterface.register(name, attention_function(restrict))
    AttentionMaskInterface.register(name, make_mask)


def compare_known() -> None:
    """Compare what is read of transformers' own mask functions with them; in compiled functions nothing else does.

    Raises:
        Unsupported: they differ.
    """
    from transformers import masking_utils as known

    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]], device="cpu")
    padding = torch.tensor([2], device="cpu")
    ids = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    window = known.sliding_window_causal_mask_function(3)
    functions = [
        known.causal_mask_function, known.bidirectional_mask_function, window,
        known.sliding_window_bidirectional_mask_function(3), known.chunked_causal_mask_function(4, padding),
        known.and_masks(window, known.packed_sequence_mask_function(ids)),
    ]  # fmt: skip
    if hasattr(known, "packed_sequence_compatibility_function"):
        functions.append(known.packed_sequence_compatibility_function(window, positions, ids))
    for fn in functions:
        make_mask(1, 12, 12, 0, 0, fn, torch.ones(1, 12, dtype=torch.bool, device="cpu"))
