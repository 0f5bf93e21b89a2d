"""The attention of a layer over an engine's cache in pages. Nothing of the engine is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from gossamer.checks import show
from gossamer.integrations.vllm.options import PageChoice
from gossamer.patterns import Causal, Pattern, SlidingWindow
from gossamer.patterns.handles import token_of
from gossamer.plan.problem import Unsupported
from gossamer.torch.api import attention
from gossamer.torch.arguments import AttentionOptions
from gossamer.torch.calls import known
from gossamer.torch.decoding import WIDEST
from gossamer.torch.device_layout import device_layout
from gossamer.torch.key import alignment
from gossamer.torch.paged_kernel import FEW, ByTable, Given, call_by_table, key_by_table
from gossamer.torch.paged_write import write_pages
from gossamer.torch.structure import PackedSequences, Pages
from gossamer.torch.structure.pages import PageLayout
from gossamer.torch.varlen import varlen

if TYPE_CHECKING:  # which is another operation's, and loaded where an engine asks for it
    from gossamer.blocks import PageBounds, TopkPages

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
    max_query_len: int | None = None  # no sequence has more tokens; None: not told
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
        restrict: Pattern | PageChoice | None = None,
        batch_invariant: bool = False,
        count_mass: bool = False,
        **others: Any,
    ) -> None:
        """A layer; arguments are vLLM's but the last three.

        Args:
            sliding_window: the keys that a query sees, itself included.
            sinks: (H,) logits, one for each head.
            restrict: is intersected with what the layer sees, or which pages it attends to, if it has no window.
            batch_invariant: of a sequence the same bits whatever others are in the step.
            count_mass: add up what chosen pages keep: `kept_mass` of the package.

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
        self.pattern = pattern & restrict if isinstance(restrict, Pattern) else pattern
        self.batch_invariant = batch_invariant
        self.chosen: ChosenPages | None = None
        if isinstance(restrict, PageChoice) and sliding_window is None:
            if kv_sharing_target_layer_name is not None:
                raise Unsupported("topk_pages is not computed by layers that read the cache of another")
            if count_mass and (self.softcap is not None or sinks is not None):
                raise Unsupported("kept_mass is not counted in layers with a soft cap or sinks")
            self.chosen = ChosenPages(restrict, head_size, count_mass)

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Convert sinks as kernels take them, each time that weights are loaded."""
        if self._given_sinks is not None:
            self.sinks = self._given_sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys (T, G, D) and values (T, G, E) into pages (P, G, page_size, D + E)."""
        write_pages(kv_cache, key, value, slot_mapping)
        if self.chosen is not None:
            self.chosen.take_in(kv_cache, slot_mapping)

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
        return self.attend(query, kv_cache, attn_metadata, output)

    def attend(self, query: Tensor, kv_cache: Tensor, step: Step, output: Tensor) -> Tensor:
        """The attention of a step, written to output."""
        D, sinks = self.head_size, self.sinks
        if self.chosen is not None and self.chosen.chooses(step):
            return self._of_chosen(self.chosen, query, kv_cache, step, output)
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

    def _of_chosen(
        self, chosen: ChosenPages, q: Tensor, kv_cache: Tensor, step: Step, output: Tensor
    ) -> Tensor:  # fmt: skip
        """Attention to the pages that this layer chooses, written to output."""
        D = self.head_size
        k, v = kv_cache[..., :D], kv_cache[..., D : D + output.shape[-1]]
        found = chosen.of_step(q, step, k.shape[2], self.scale)
        _, lse = varlen(
            q, k, v, step.query_start_loc, pattern=self.pattern, scale=self.scale, softcap=self.softcap,
            sink_logits=self.sinks, return_lse=True, block_table=found.block_table, seqused_k=found.seqused_k,
            page_layout=LAYOUT, batch_invariant=self.batch_invariant, out=output,
        )  # fmt: skip
        chosen.count(found, lse)
        return output

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


class ChosenPages:
    """The pages that a layer without a window attends to in steps of few tokens, and the bounds that say which."""

    def __init__(self, choice: PageChoice, head_size: int, counts: bool) -> None:
        self.choice, self.head_size, self.counts = choice, head_size, counts
        self.bounds: PageBounds | None = None  # made with the first keys, when the engine has made its cache
        self.mass: Tensor | None = None  # float64: the sum over rows, the least of one, and how many there were
        if counts:
            _counted.append(ref(self))

    def take_in(self, kv_cache: Tensor, slots: Tensor) -> None:
        """Update the bounds by keys that were written."""
        from gossamer.blocks import PageBounds

        k = kv_cache[..., : self.head_size]
        if self.bounds is None:
            self.bounds = PageBounds.empty(k, LAYOUT)
        self.bounds.update(k, slots, LAYOUT)

    def chooses(self, step: Step) -> bool:
        """Whether pages are chosen in a step: each sequence has few tokens, and there may be more pages."""
        few = step.max_query_len is not None and step.max_query_len <= FEW
        return few and self.bounds is not None and step.block_table.shape[1] > self.choice.topk

    def of_step(self, q: Tensor, step: Step, page_size: int, scale: float) -> TopkPages:
        """The pages of each sequence and key head."""
        from gossamer.blocks import topk_pages

        assert self.bounds is not None
        edges, table, used = step.query_start_loc, step.block_table, step.seq_lens
        return topk_pages(q, self.bounds, edges, table, used, page_size, scale=scale, **self.choice._asdict())

    def count(self, found: TopkPages, lse: Tensor) -> None:
        """Add up the mass that rows of sequences keep."""
        if not self.counts:
            return
        if self.mass is None:
            self.mass = lse.new_tensor([0.0, 1.0, 0.0], dtype=torch.float64)
        kept, there = found.kept_mass(lse).double(), lse > -torch.inf
        total, least, rows = self.mass.unbind()
        total += torch.where(there, kept, 0.0).sum()
        least.copy_(torch.minimum(least, torch.where(there, kept, 1.0).amin()))
        rows += there.sum()


_counted: list[ref[ChosenPages]] = []


class KeptMass(NamedTuple):
    """What the chosen pages of a layer keep of the attention to all keys, certified from below."""

    mean: float  # over rows, tokens and query heads
    least: float
    rows: int


def kept_mass() -> list[KeptMass]:
    """What chosen pages keep, of each layer of this process that counts it, in the order in which they were made.

    With `additional_config={"gossamer": {"restrict": "topk_pages:...", "kept_mass": True}}`. Rows are those since the
    last call, of steps in which pages were chosen; warm-up of an engine counts. It waits for the device.
    """
    found = []
    for one in (each() for each in _counted):
        if one is not None and one.mass is not None:
            total, least, rows = one.mass.tolist()
            if rows:
                found.append(KeptMass(total / rows, least, int(rows)))
            one.mass.copy_(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device="cpu"))
    return found


def rounded(n: int) -> int:
    """A number from n to 1.25 n, one of a few: what is planned for one width of a table serves again."""
    unit = 1 << max(0, n.bit_length() - 3)
    return -(-n // unit) * unit
