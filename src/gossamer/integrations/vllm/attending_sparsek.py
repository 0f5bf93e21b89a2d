"""SparseK attention of a layer over an engine's cache in pages. Nothing of the engine is imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.integrations.vllm.attending import PagedAttention, Step
from gossamer.plan.problem import Unsupported
from gossamer.sparse_k.paged import Kept, ScoredPages, attend_each, attend_rows
from gossamer.sparse_k.scored_keys import CHANNELS
from gossamer.torch.paged_kernel import FEW


class PagedSparseK(PagedAttention):
    """The attention of one layer, whose keys have the size D + 8: `with_scores`."""

    def __init__(self, *args: Any, k_keep: int | None = None, window: int = 0, **named: Any) -> None:
        """A layer; arguments are those of `PagedAttention` but the named ones here.

        Raises:
            Unsupported: it is not computed.
        """
        if k_keep is None:
            raise Unsupported(
                "SPARSEK computes layers that give their keys scores, those of SparseKForCausalLM; this model's layers "
                "have none. GOSSAMER computes them"
            )
        super().__init__(*args, **named)
        asked = {
            "sliding_window": self.sliding_window, "logits_soft_cap": self.softcap, "sinks": self.sinks,
            "kv_sharing_target_layer_name": self.kv_sharing_target_layer_name, "restrict": named.get("restrict"),
            "batch_invariant": self.batch_invariant or None,
        }  # fmt: skip
        for name, value in asked.items():
            if value is not None:
                raise Unsupported(f"{name} is not computed by layers that attend by SparseK")
        self.kept = Kept(k_keep, window, self.scale)

    def attend(self, query: Tensor, kv_cache: Tensor, step: Step, output: Tensor) -> Tensor:
        """SparseK attention of query (T, H, D + 8) to pages (P, G, page_size, D + 8 + E), written to output (T, H, E).

        The last 8 numbers of a query are not read. Steps of up to 8 tokens a sequence wait for nothing; others read the
        lengths on the host, once for all layers. Rows of no sequence become 0.
        """
        q = query[..., :-CHANNELS]
        pages = ScoredPages(kv_cache, step.block_table, step.seq_lens)
        if step.max_query_len is not None and step.max_query_len <= FEW:
            attend_rows(q, step.query_start_loc, pages, self.kept, output)
            return output
        hosts = step.shared.get("hosts")
        if hosts is None:
            hosts = step.shared["hosts"] = step.query_start_loc.tolist(), step.seq_lens.tolist()
        edges, used = hosts
        output[edges[-1] :] = 0
        attend_each(q, edges, used, pages, self.kept, output)
        return output
