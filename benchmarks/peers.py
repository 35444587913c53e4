"""What the server is compared with: transformers alone, in a process of its own. Prints one JSON object.

    python benchmarks/peers.py generate_batch FOLDER --prompts 16 --rounds 2

`generate_batch` is transformers' continuous batching, `static` its `generate` on one padded batch, `generate` the same
for one prompt after the other. Prompts have equal length, so the static batch wastes nothing: its best case.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from halocline.cli.load import random_prompt

Run = Callable[[list[list[int]], int], int]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("generate_batch", "static", "generate"))
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="one set of prompts after the other")
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.bfloat16)
    run = {"generate_batch": batched, "static": static, "generate": static}[given.how](model)
    size = 1 if given.how == "generate" else given.prompts
    run([random_prompt(-1 - each, 32) for each in range(size)], 4)
    tokens, start = 0, time.perf_counter()
    for first in range(0, given.prompts * given.rounds, size):
        prompts = [random_prompt(first + each, given.prompt_tokens) for each in range(size)]
        tokens += run(prompts, given.output_tokens)
    seconds = time.perf_counter() - start
    print(json.dumps({"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}))


def static(model: torch.nn.Module) -> Run:
    def run(prompts: list[list[int]], output_tokens: int) -> int:
        ids = torch.tensor(prompts)
        wishes = {"max_new_tokens": output_tokens, "min_new_tokens": output_tokens, "do_sample": False}
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **wishes)
        return int(made[:, ids.shape[1] :].numel())

    return run


def batched(model: torch.nn.Module) -> Run:
    def run(prompts: list[list[int]], output_tokens: int) -> int:
        tokens = sum(len(prompt) + output_tokens for prompt in prompts)
        layout = ContinuousBatchingConfig(page_size=32, num_blocks=2 * tokens // 32 + 64, max_batch_tokens=512)
        # An end token that no vocabulary has: every answer gets its full length.
        wishes = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with torch.inference_mode():
            made = model.generate_batch(
                inputs=prompts, generation_config=wishes, continuous_batching_config=layout, progress_bar=False
            )
        return sum(len(each.generated_tokens) for each in made.values())

    return run


if __name__ == "__main__":
    main()
