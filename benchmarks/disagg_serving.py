"""1 prefill + 1 decode worker against one process, under mixed load: long prompts arrive while others are answered.

    python benchmarks/disagg_serving.py [--model gemma3-270m] [--seconds 30]

Both sides get the same cores and the same bytes of arena in all, one after the other. The last line is one JSON object:
`ttft_ratio` and `tpot_ratio` are medians of the pair over medians of the single process (below 1: the pair is faster),
with the 95th percentiles beside them.

What such a figure means on two virtual cores: a pair has one thread per engine, so a prompt is computed by half of what
the single process computes it with, and its first token cannot come sooner unless it had to queue behind decodes. The
HTTP servers and the router (three more processes than one alone) take their time from the same two cores. What the
pair can win there is evenness: no decode waits behind another's chunk. It says nothing of two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from halocline.serve import SERVING_AT

LONG_EVERY = 4
"""Every fourth prompt is long."""
SHORT_TOKENS, LONG_TOKENS, NEW_TOKENS = 64, 1024, 48


@dataclass
class Seen:
    """What clients saw."""

    first_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    """Mean time between tokens of each answer."""
    failed: int = 0


@contextmanager
def served(arguments: list[str]) -> Iterator[str]:
    """Run `halocline serve` and yield where it serves."""
    command = [sys.executable, "-m", "halocline", "serve", "--port", "0", "--log-level", "error", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(line for line in process.stdout if line.startswith(SERVING_AT)).removeprefix(SERVING_AT).strip()
        yield url
    finally:
        process.terminate()
        process.communicate()


async def ask(http: httpx.AsyncClient, number: int, seen: Seen) -> None:
    """Send one request and take its times."""
    draw = random.Random(number)
    length = LONG_TOKENS if number % LONG_EVERY == 0 else SHORT_TOKENS
    body = {
        "prompt": [draw.randrange(1000, 200_000) for _ in range(length)],
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    begin = time.perf_counter()
    times: list[float] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith('data: {"error"') or answer.status_code != 200:
                seen.failed += 1
                return
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    seen.first_seconds.append(times[0] - begin)
    seen.token_seconds.append((times[-1] - times[0]) / (NEW_TOKENS - 1))


async def load(url: str, seconds: float, rate: float) -> Seen:
    """Let requests arrive at a rate, at the same moments for both sides."""
    seen, draw = Seen(), random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        await ask(http, 1, Seen())
        begin, tasks = time.perf_counter(), []
        while time.perf_counter() - begin < seconds:
            tasks.append(asyncio.ensure_future(ask(http, 100 + len(tasks), seen)))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*tasks)
    return seen


def high(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals, per side")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--kv-mib", type=int, default=512, help="of all arenas together")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    same = ["--model", options.model, "--prefix-cache", "off"]
    half = ["--disagg", "1p1d", "--threads", str(max(1, cores // 2)), "--kv-bytes", f"{options.kv_mib // 2}MiB"]
    sides = {"one": ["--threads", str(cores), "--kv-bytes", f"{options.kv_mib}MiB"], "pair": half}
    seen: dict[str, Seen] = {}
    for name, arguments in sides.items():
        with served([*same, *arguments]) as url:
            seen[name] = asyncio.run(load(url, options.seconds, options.rate))
        each = seen[name]
        print(
            f"{name}: {len(each.first_seconds)} answers, {each.failed} failed, first token "
            f"{statistics.median(each.first_seconds):.3f} s (p95 {high(each.first_seconds):.3f}), per token "
            f"{statistics.median(each.token_seconds):.4f} s (p95 {high(each.token_seconds):.4f})",
            flush=True,
        )
    one, pair = seen["one"], seen["pair"]
    result = {
        "ttft_ratio": statistics.median(pair.first_seconds) / statistics.median(one.first_seconds),
        "tpot_ratio": statistics.median(pair.token_seconds) / statistics.median(one.token_seconds),
        "ttft_p95_ratio": high(pair.first_seconds) / high(one.first_seconds),
        "tpot_p95_ratio": high(pair.token_seconds) / high(one.token_seconds),
        "failed": one.failed + pair.failed,
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
