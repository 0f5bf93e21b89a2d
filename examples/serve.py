"""Ask a model that vLLM serves, with gossamer's attention.

    python -m examples.serve MODEL --prompt "The capital of France is"      # from the root of a checkout
    python -m examples.serve MODEL --restrict window:4096,sinks:64         # approximates the model

MODEL is a folder, or a name that vLLM finds. What it serves and what it refuses: docs/models/vllm.md.
"""

from __future__ import annotations

import argparse
import time

import torch

from gossamer.integrations.vllm import register


def main() -> None:
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", nargs="+", default=["The capital of France is"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--restrict", help="window:KEYS or window:KEYS,sinks:KEYS")
    parser.add_argument("--max-model-len", type=int, help="as the model has it")
    o = parser.parse_args()
    if not torch.cuda.is_available():  # on a CPU vLLM takes its own backend, whatever is named
        register("CPU_ATTN")
    options = {} if o.restrict is None else {"gossamer": {"restrict": o.restrict}}
    llm = LLM(o.model, attention_backend="GOSSAMER", additional_config=options, max_model_len=o.max_model_len)
    started = time.perf_counter()
    answers = llm.generate(o.prompt, SamplingParams(temperature=0, max_tokens=o.tokens))
    seconds = time.perf_counter() - started
    for answer in answers:
        print(f"{answer.prompt}{answer.outputs[0].text}")
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    print(f"{made} tokens in {seconds:.1f} s")


if __name__ == "__main__":
    main()
