"""The roles of the arrays among a kernel's arguments, in the order of the call, as `device.entries` has them."""

from __future__ import annotations

from typing import Any

from gossamer.cute.parameters import Parameter, parameters_of

# By kind, as `cute.parameters` reads them.
_COLUMNS = "dk/4! dv/4! work segments"
_GRADIENT = "q/4 k/4 v/4 dout/4 terms"
_BLOCK = "lists lo hi pool"
_GATHERED = "indices bits"
_END = "lengths tile_counter+"
KINDS = {
    "forward": f"q/4 k/4 v/4 out/4! lse/3! work {_BLOCK} sinks part_out! part_lse! merges {_END}",
    "merge": "out/4+ lse/3+ part_out part_lse merges sinks",
    "preprocess": "out/4 dout/4 lse/3 dlse/3 terms! dq_sum! sinks",
    "backward": f"{_GRADIENT} dq_sum+ ds/2! {_COLUMNS} {_BLOCK} part_dk! part_dv! {_END}",
    "kept": "ds/2 k/4 dq/4! work lists part_dq! lengths tile_counter+",
    "wide": f"{_GRADIENT} dq_sum! ds/2! {_COLUMNS} {_BLOCK} part_dk! part_dv! {_END}",
    "query_gradient": f"{_GRADIENT} dq/4! work {_BLOCK} part_dq! {_END}",
    "postprocess": "dq_sum dq/4!",
    "sum_parts": "result/4+ parts merges",
    "gather forward": f"q/4 k/4 v/4 out/4! lse/3! work {_GATHERED} sinks part_out! part_lse! {_END}",
    "gather query": f"{_GRADIENT} dq/4! work {_GATHERED} part_dq! {_END}",
    "gather columns": f"{_GRADIENT} {_COLUMNS} {_GATHERED} part_dk! part_dv! {_END}",
    "rows forward": "q/4 k/4 v/4 out/4! lse/3! items indices sinks part_out! part_lse! lengths",
    "rows query": f"{_GRADIENT} dq/4! items indices part_dq! lengths",
    "rows columns": f"{_GRADIENT} dk/4! dv/4! items indices part_dk! part_dv! lengths",
    "gather gradients": f"{_GRADIENT} dk_sum+ dv_sum+ dq/4! work {_GATHERED} part_dq! {_END}",
}


def parameters(kind: str, *key: Any) -> tuple[Parameter, ...]:
    """The arrays among the arguments of a kernel of `hopper.compiled`, made for a key."""
    text = KINDS[f"{kind} {key[0].direction}" if kind in ("gather", "rows") else kind]
    if kind == "gather" and key[0].dtype == "float32":
        text = text.replace("v/4 ", "v/4 k_halves! v_halves! powers! ", 1)
    if kind == "backward" and not key[0].with_dq:
        text = text.replace("dq_sum+", "dq_sum!")  # an argument that nothing touches: any memory will do
    return parameters_of(text)
