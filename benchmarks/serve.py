"""`make bench`: the server beside transformers, concurrency in fixed bytes, the control plane alone.

Every ratio comes from one run of this script on one machine: our server and the peers take turns, several rounds, and
medians are compared. The last line of the output is one JSON object:

    vs_generate_batch_16   16 clients over HTTP, tokens per second, against transformers' continuous batching
    vs_static_16           the same against its static batch of 16 equal prompts
    vs_generate_1          one client over HTTP against `generate`
    peak_concurrency       requests of 2,048 + 128 tokens that ran at once in 256 MiB of KV, by the server's own figures
    exact_concurrency      what those bytes hold if nothing is lost
    uniform_concurrency    what a cache holds that keeps all layers at full length
    step_256_ms            scheduling one step with 256 running requests
    prompt_12k_us          taking and freeing the pages of a 12,000-token prompt
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from statistics import median

from halocline.cli.load import Load, first_model, run_load
from halocline.cli.watch import PEAK_RUNNING, Watch
from halocline.config import Config
from halocline.serve import running_server
from halocline.units import MIB, ceil_div

HERE = Path(__file__).parent
MODEL = "gemma3-270m"
KV_BYTES = 256 * MIB
FRESH = count(step=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured; medians are compared")
    parser.add_argument("--only", choices=("speed", "concurrency", "control"), help="one part alone")
    given = parser.parse_args()
    parts = {"speed": lambda: speed(given.rounds), "concurrency": concurrency, "control": control_plane}
    found: dict[str, float] = {}
    for name, measure in parts.items():
        if given.only in (None, name):
            found |= measure()
    print(json.dumps(found))


def speed(rounds: int) -> dict[str, float]:
    """Return tokens per second of each side, and the ratios."""
    seen: dict[str, list[float]] = {}
    config = Config(model=MODEL, dtype="bfloat16", port=0, kv_bytes="1GiB")
    with running_server(config) as server:
        folder = model_folder()
        sides = {
            "ours_16": lambda: ours(server.url, clients=16, each=2),
            "generate_batch_16": lambda: peer("generate_batch", folder, 16, 2),
            "static_16": lambda: peer("static", folder, 16, 2),
            "ours_1": lambda: ours(server.url, clients=1, each=4),
            "generate_1": lambda: peer("generate", folder, 4, 1),
        }
        ours(server.url, clients=16, each=1)
        for number in range(rounds):
            for name, measure in sides.items():
                seen.setdefault(name, []).append(measure())
                print(f"round {number + 1}: {name:18} {seen[name][-1]:8.1f} tokens/s", flush=True)
    middle = {name: median(values) for name, values in seen.items()}
    for name, values in seen.items():
        print(f"{name:18} median {middle[name]:8.1f}   from {min(values):.1f} to {max(values):.1f}")
    return {
        "vs_generate_batch_16": round(middle["ours_16"] / middle["generate_batch_16"], 3),
        "vs_static_16": round(middle["ours_16"] / middle["static_16"], 3),
        "vs_generate_1": round(middle["ours_1"] / middle["generate_1"], 3),
        **{f"{name}_tokens_per_second": round(value, 1) for name, value in middle.items()},
    }


def ours(url: str, clients: int, each: int) -> float:
    # No prompt is sent twice: every round computes all of its own, and the prefix cache has its cost but no hits.
    load = Load(clients * each, clients, prompt_tokens=256, output_tokens=64, seed=next(FRESH))
    report = asyncio.run(run_load(url, MODEL, load))
    assert sum(answer.output_tokens for answer in report.answers) == load.requests * 64, "an answer was cut short"
    return report.output_tokens_per_second


def peer(how: str, folder: str, prompts: int, rounds: int) -> float:
    command = [sys.executable, str(HERE / "peers.py"), how, folder, "--prompts", str(prompts), "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the peer {how} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_second"])


def model_folder() -> str:
    from halocline.model.sources import resolve

    return str(resolve(MODEL, quiet=True).folder)


def concurrency() -> dict[str, float]:
    """Return how many requests of 2,048 + 128 tokens ran at once in 256 MiB, and what the bytes hold on paper."""
    prompt, output = 2048, 128
    with running_server(Config(model=MODEL, dtype="bfloat16", port=0, kv_bytes=KV_BYTES)) as server:
        figures = asyncio.run(peak(server.url, Load(24, 24, prompt, output)))
    exact, uniform = on_paper(prompt + output - 1)  # the last token's KV is never stored
    print(f"256 MiB of KV, {prompt} + {output} tokens: {figures} at once; exact {exact}, uniform {uniform}")
    return {"peak_concurrency": figures, "exact_concurrency": exact, "uniform_concurrency": uniform}


async def peak(url: str, load: Load) -> int:
    await first_model(url)
    async with Watch(url) as watch:
        await run_load(url, MODEL, load)
    return int(watch.last[PEAK_RUNNING])


def on_paper(positions: int, page_tokens: int = 16) -> tuple[int, int]:
    """Return floor(bytes / bytes of one request): exact per kind, and with all layers at full length.

    Gemma 3 270M: 3 full and 15 sliding layers (512), one KV head of 256, bf16: 1 KiB per position and layer.
    """
    page_bytes = 1024 * page_tokens
    full_pages = ceil_div(positions, page_tokens)
    window_pages = min(full_pages, ceil_div(512 - 1, page_tokens) + 1)
    exact = (3 * full_pages + 15 * window_pages) * page_bytes
    return KV_BYTES // exact, KV_BYTES // (18 * full_pages * page_bytes)


def control_plane() -> dict[str, float]:
    done = subprocess.run([sys.executable, str(HERE / "control_plane.py")], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"benchmarks/control_plane.py failed:\n{done.stderr[-2000:]}")
    print(done.stdout.rstrip())
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: found[key] for key in ("step_256_ms", "prompt_12k_us")}


if __name__ == "__main__":
    main()
