"""The attention of a layer over an engine's cache in pages. Nothing of the engine is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.checks import show
from gossamer.patterns import Causal, Pattern, SlidingWindow
from gossamer.patterns.handles import token_of
from gossamer.plan.problem import Unsupported
from gossamer.torch.api import attention
from gossamer.torch.arguments import AttentionOptions
from gossamer.torch.calls import known
from gossamer.torch.decoding import WIDEST
from gossamer.torch.device_layout import device_layout
from gossamer.torch.key import alignment
from gossamer.torch.paged_kernel import ByTable, Given, call_by_table, key_by_table
from gossamer.torch.paged_write import write_pages
from gossamer.torch.structure import PackedSequences, Pages
from gossamer.torch.structure.pages import PageLayout

LAYOUT: PageLayout = "phsd"  # of a cache (pages, heads, slots, size), whatever lies beside what in memory
CACHES = ("auto", "float16", "bfloat16")  # names of their types


@dataclass(eq=False)
class Step:
    """What a group of layers attends to in one step; names are vLLM's, of its metadata.

    Tensors may be an engine's own, which are written again in the next step: a captured graph reads them then.
    """

    num_actual_tokens: int  # there may be more rows of queries, of no sequence
    query_start_loc: Tensor  # (R + 1,)
    seq_lens: Tensor  # (R,) keys of each sequence, those of this step included
    max_seq_len: int  # no sequence has more
    block_table: Tensor  # (R, n)
    slot_mapping: Tensor  # (tokens,)
    shared: dict[Any, Any] = field(default_factory=dict)  # what layers of one kind share


class PagedAttention:
    """The attention of one layer, as vLLM makes and calls it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        *,
        restrict: Pattern | None = None,
        batch_invariant: bool = False,
        **others: Any,
    ) -> None:
        """A layer; arguments are vLLM's but the last two.

        Args:
            sliding_window: the keys that a query sees, itself included.
            sinks: (H,) logits, one for each head.
            restrict: is intersected with what the layer sees.
            batch_invariant: of a sequence the same bits whatever others are in the step.

        Raises:
            Unsupported: it is not computed.
        """
        if attn_type != "decoder":
            raise Unsupported(f"attention of type {str(attn_type)!r} is not computed by GOSSAMER, but of decoders")
        if kv_cache_dtype not in CACHES:
            raise Unsupported(f"kv_cache_dtype must be one of {', '.join(CACHES)} with GOSSAMER; got {kv_cache_dtype}")
        if alibi_slopes is not None:
            raise Unsupported("alibi_slopes are not computed by GOSSAMER: positions are those within each sequence")
        if batch_invariant and head_size > WIDEST:
            raise Unsupported(f"head_size must be at most {WIDEST} where results are batch invariant; got {head_size}")
        for name, value in others.items():
            if value is not None:
                raise Unsupported(f"{name}={show(value)} of a layer is not computed by GOSSAMER")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.softcap, self.sinks, self._given_sinks = logits_soft_cap or None, sinks, sinks
        self.sliding_window = sliding_window
        pattern: Pattern = Causal() if sliding_window is None else SlidingWindow.of_size(sliding_window)
        self.pattern = pattern if restrict is None else pattern & restrict
        self.batch_invariant = batch_invariant

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Convert sinks as kernels take them, each time that weights are loaded."""
        if self._given_sinks is not None:
            self.sinks = self._given_sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys (T, G, D) and values (T, G, E) into pages (P, G, page_size, D + E)."""
        write_pages(kv_cache, key, value, slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, attn_metadata: Step | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of query (T, H, D) to pages (P, G, page_size, D + E), written to output (T, H, E).

        Rows of no sequence, and all in a run without metadata, become 0.

        Raises:
            Unsupported: a quantized output is asked for.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("a quantized output is not written by GOSSAMER")
        if attn_metadata is None:  # the engine looks how much memory is needed
            return output.fill_(0)
        D, step, sinks = self.head_size, attn_metadata, self.sinks
        tensors = (query, kv_cache, output) if sinks is None else (query, kv_cache, output, sinks)
        which = (  # all that tells calls of a step apart
            self.pattern.handle, self.scale, self.softcap, query.dtype, query.shape, query.stride(), kv_cache.dtype,
            kv_cache.shape, kv_cache.stride(), output.shape, output.stride(), None if sinks is None else sinks.dtype,
            alignment(*tensors),
        )  # fmt: skip
        shared = step.shared.get(which)
        if not isinstance(shared, ByTable):
            k, v = kv_cache[..., :D], kv_cache[..., D : D + output.shape[-1]]
        if shared is None:
            shared = step.shared[which] = self._shared(step, query, k, v, output)
        if isinstance(shared, ByTable):
            shared(Given(query, kv_cache, None, step.query_start_loc, step.block_table, step.seq_lens, sinks, output))
            return output
        out = attention(query, k, v, shared, scale=self.scale, softcap=self.softcap, sink_logits=sinks, layout="bshd")
        return output.copy_(out)

    def _shared(self, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Any:
        """What this layer shares with those of its kind in a step: the call of a kernel that reads the table, or the
        structure of one that does not."""
        given = Given(q, k, v, step.query_start_loc, step.block_table, step.seq_lens, self.sinks, out)
        which = "together", self.pattern.handle, k.shape[2], self.batch_invariant
        # Keys are at the cache's own address, and values behind them.
        key = key_by_table(given, which, self.scale, self.softcap) if k.stride(3) == 1 else None
        call = None if key is None else known.get(key)
        if call is not None:
            return call
        pages = Pages(
            step.block_table, step.seq_lens, k.shape[2], page_layout=LAYOUT, batch_invariant=self.batch_invariant
        )
        packed = PackedSequences(step.query_start_loc, pages=pages, pattern=self.pattern)
        options = AttentionOptions(scale=self.scale, softcap=self.softcap, sink_logits=self.sinks, layout="bshd")
        if key is not None:
            found = call_by_table(q, k, v, packed, options, out, key, token_of(self.pattern.handle), together=True)
            if found is not None:
                return found.call
        pages = pages.up_to(rounded(-(-step.max_seq_len // pages.page_size)) * pages.page_size)
        packed = PackedSequences(step.query_start_loc, pages=pages, pattern=self.pattern)
        return device_layout(q, k, v, packed, softcap=self.softcap, sink_logits=self.sinks, layout="bshd")


def rounded(n: int) -> int:
    """A number from n to 1.25 n, one of a few: what is planned for one width of a table serves again."""
    unit = 1 << max(0, n.bit_length() - 3)
    return -(-n // unit) * unit
