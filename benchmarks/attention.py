"""Attention backends over random pages: decode of many sequences, and one prefill chunk.

    python benchmarks/attention.py --dtype bfloat16 --context 1024 --sequences 32

Prints one line per backend, in milliseconds per layer (the fastest of the repetitions), and ends with one JSON object.
`gather` is what an engine without a paged kernel does: copy all K and V together, then torch's own attention.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding
from halocline.model.attention import AttentionStep, LayerView, Scores, choose
from halocline.model.attention.facts import layer_views
from testing.conformance import HandScheduler, make_layout


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prefill chunk, at the end of the context")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--window", type=int, default=0, help="0: full attention")
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--backends", default="cpu,blocked,gather")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6, help="layers used in turn, so that no cache holds the pages")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def gather_attention(query: Tensor, layer: LayerView, step: AttentionStep, scores: Scores) -> Tensor:
    """Copy every segment's pages together and call torch's attention (decodes of equal length only)."""
    facts = step.pools[layer.pool]
    assert facts is not None
    pages = facts.pages.long().view(step.segments, -1)
    length = step.first_positions[0] + 1 - int(facts.tables.first_page[0]) * layer.page_tokens
    k, v = (view[pages].flatten(1, 2)[:, :length].transpose(1, 2) for view in (layer.k, layer.v))
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], k, v, scale=scores.scaling, enable_gqa=True
    )[:, :, 0]


def milliseconds(work: Callable[[int], object], repeats: int) -> float:
    best = float("inf")
    for index in range(repeats + 1):
        began = time.perf_counter()
        work(index)
        if index:  # the first round warms threads and caches up
            best = min(best, time.perf_counter() - began)
    return best * 1e3


def measure(args: argparse.Namespace, dtype: torch.dtype, sequences: int, tokens: int) -> dict[str, float]:
    retention = Sliding(args.window) if args.window else Full()
    specs = [LayerKV(i, retention, args.kv_heads, args.dim, args.dim, dtype.itemsize) for i in range(args.layers)]
    layout = make_layout(specs, args.page_tokens, sequences * (args.context // args.page_tokens + 2))
    arena = torch.randn(layout.arena_bytes // dtype.itemsize, dtype=torch.float32).to(dtype).view(torch.uint8)
    views = layer_views(arena, layout, dtype)
    names = [str(i) for i in range(sequences)]
    work = [(name, range(args.context), args.context - tokens, tokens) for name in names]
    step = AttentionStep.of(HandScheduler(layout).plan(0, work), layout)
    rows = sequences * tokens
    query = torch.randn(1, args.heads, rows, args.dim).to(dtype)[0].transpose(0, 1)
    new = tuple(torch.randn(rows, args.kv_heads, args.dim).to(dtype) for _ in range(2))
    scores = Scores(args.dim**-0.5)
    times = {}
    for name in args.backends.split(","):
        if name == "gather":
            if tokens > 1:
                continue
            times[name] = milliseconds(
                lambda i: gather_attention(query, views[i % args.layers], step, scores), args.repeats
            )
            continue
        backend = choose(name)
        times[name] = milliseconds(
            lambda i, b=backend: b.attend(query, new, views[i % args.layers], step, scores), args.repeats
        )
    return times


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    for dtype_name in args.dtypes.split(","):
        dtype = getattr(torch, dtype_name)
        for kind, sequences, tokens in (("decode", args.sequences, 1), ("prefill", 1, args.chunk)):
            times = results[f"{kind}-{dtype_name}"] = measure(args, dtype, sequences, tokens)
            print(f"{kind:8} {dtype_name:9}", *(f"{name} {value:8.2f} ms" for name, value in times.items()))
    print(
        json.dumps(
            {
                "milliseconds": results,
                "settings": vars(args),
                "threads": torch.get_num_threads(),
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
