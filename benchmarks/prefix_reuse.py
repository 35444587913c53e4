"""How many prompt tokens the prefix cache saves, by arena size: a trace of prompts through the real tree and arena.

    python benchmarks/prefix_reuse.py TRACE [--kv-bytes 500GiB,1000GiB] [--results FOLDER] [--processes 2]
                                            [--host-bytes 500GiB,1000GiB]

TRACE has one JSON object per line: input_length, output_length, hash_ids (one per 512-token block; equal ids mean
equal prefixes up to the block's end). Without it, `mooncake_conversation.jsonl` of the folder $HALOCLINE_DATA. Shape:
Gemma 3 27B in bf16 (10 full + 52 sliding layers, W = 1,024, 16-token pages). Requests come in trace order, one at a
time: match, lock, compute the rest in chunks, insert, leave. What an output leaves has no ids in the trace, so nobody
can hit it.

With --host-bytes, every arena is replayed with host arenas of these sizes, too: what it evicts is written back, and
loaded again where the host has more of a prompt than the device. A table, a chart and the JSON object tell hits of the
device and of the host apart, as shares of all prompt tokens.

Beside it stand simple policies, which are defined in `prefix_models.py`. The second table is scenario D1: 10 + 50
layers, sessions in turn, each with its own prefix or all with one. The last line is one JSON object; FOLDER gets it as
prefix-reuse.json, and the charts prefix-reuse.svg, prefix-reuse-d1.svg and, with --host-bytes, prefix-reuse-host.svg.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from prefix_models import BLOCK_TOKENS, PAGE_TOKENS, Request, bound, hit_rate, ideal, one_lru, tails, whole_tails
from prefix_replay import Replayed, hybrid, read_trace, replay_trace, sessions_in_turn

from halocline.units import GIB, parse_bytes

SIZES = "500GiB,1000GiB,2000GiB,4170GiB"
RATIOS = (0.8, 1.1, 1.25, 2.0, 3.0)
"""Working set / arena of D1."""
POLICIES = {
    "bound: full layers only": bound,
    "one lru over everything": one_lru,
    "tails of W at prompt ends": tails,
    "tails of W at whole blocks": whole_tails,
}


def policy_rates(trace: Sequence[Request], sizes: Sequence[int]) -> dict[str, list[float]]:
    """Return the hit rates of the simple policies, by size."""
    block = [pool.stride_bytes * BLOCK_TOKENS // PAGE_TOKENS for pool in hybrid(10, 52, 64 * GIB).pools]
    return {
        name: [hit_rate(trace, policy, size, block[0], block[1]) for size in sizes] for name, policy in POLICIES.items()
    }


# ---- output


def svg(title: str, labels: list[str], curves: dict[str, list[float]], top: float) -> str:
    """Draw curves over labelled sizes."""
    colours = ("#0b7285", "#868e96", "#e8590c", "#862e9c", "#2b8a3e")
    width, height, step = 640, 360, 520 / max(1, len(labels) - 1)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    lines.append(f'<text x="60" y="24" font-size="15">{title}</text>')
    for part in range(5):
        y = 310 - part * 65
        lines.append(f'<path d="M60 {y}H600" stroke="#dee2e6"/>')
        lines.append(f'<text x="14" y="{y + 4}" font-size="11">{top * part / 4:.2f}</text>')
    for at, label in enumerate(labels):
        lines.append(f'<text x="{60 + at * step - 14:.0f}" y="330" font-size="11">{label}</text>')
    for (name, values), colour in zip(curves.items(), colours, strict=False):
        points = " ".join(f"{60 + at * step:.0f},{310 - value / top * 260:.0f}" for at, value in enumerate(values))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        row = 48 + 16 * list(curves).index(name)
        lines.append(f'<text x="70" y="{row}" font-size="12" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>"])


def table(title: str, labels: list[str], curves: dict[str, list[float]]) -> None:
    """Print curves as rows."""
    print(f"{title:<28}" + "".join(f"{label:>10}" for label in labels))
    for name, values in curves.items():
        print(f"{name:<28}" + "".join(f"{value:>10.3f}" for value in values))


@dataclass(frozen=True)
class Work:
    """One piece of the benchmark, as it is handed to a process."""

    path: Path
    sizes: tuple[int, ...]
    audit_every: int
    host_sizes: tuple[int, ...] = ()

    def replay(self, size: int, host_bytes: int = 0) -> Replayed:
        """Replay the trace at one size of the arena and of its host arena."""
        return replay_trace(read_trace(self.path), size, self.audit_every, host_bytes)

    def policies(self) -> dict[str, list[float]]:
        """Model the simple policies at all sizes."""
        return policy_rates(read_trace(self.path), self.sizes)


def measured(work: Work, processes: int) -> Iterator[object]:
    """Yield, in the order of `work.sizes`, the replays; then the rows of the policies, then the two curves of D1.

    Last come the replays with host arenas: of each size those of all host sizes.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        replays = [pool.submit(work.replay, size) for size in work.sizes]
        policies = pool.submit(work.policies)
        turns = [[pool.submit(sessions_in_turn, ratio, common) for ratio in RATIOS] for common in (True, False)]
        yield from (replay.result() for replay in replays)
        yield policies.result()
        with_host = [pool.submit(work.replay, size, host) for size in work.sizes for host in work.host_sizes]
        yield from ([turn.result() for turn in curve] for curve in turns)
        yield from (replay.result() for replay in with_host)


def main() -> None:
    """Replay, print, draw, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="requests, one JSON object per line")
    parser.add_argument("--kv-bytes", default=SIZES, help="arena sizes, separated by commas")
    parser.add_argument("--results", type=Path, help="write the charts and the JSON object into this folder")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="replays at a time")
    parser.add_argument("--audit", type=int, default=0, metavar="N", help="audit after every N requests")
    parser.add_argument("--host-bytes", default="", help="sizes of host arenas to replay with, too")
    given = parser.parse_args()
    hosts = tuple(parse_bytes(size) for size in given.host_bytes.split(",") if size)
    path = given.trace or Path(os.environ.get("HALOCLINE_DATA", ".")) / "mooncake_conversation.jsonl"
    sizes = tuple(parse_bytes(size) for size in given.kv_bytes.split(","))
    labels, replays = [f"{size / GIB:g}" for size in sizes], []
    steps = measured(Work(path, sizes, given.audit, hosts), given.processes)
    for label in labels:
        replay = next(steps)
        assert isinstance(replay, Replayed)
        replays.append(replay)
        rates = f"hit rate {replay.hit_rate:.4f}, moved {replay.moved_ratio:.5%} of written"
        print(f"{label} GiB: {rates}, {replay.seconds:.0f} s", flush=True)
    policies, common, own = next(steps), next(steps), next(steps)
    curves = {"halocline": [replay.hit_rate for replay in replays], **policies}
    turns = {"one common prefix": common, "a prefix per session": own}
    turns["arena / working set"] = [min(1.0, 1 / ratio) for ratio in RATIOS]
    table("hit rate by GiB", labels, curves)
    names = [f"{ratio:g}" for ratio in RATIOS]
    table("D1: working set / arena", names, turns)
    found = figures(ideal(read_trace(path)), labels, replays, turns)
    levels = with_hosts(labels, replays, [each for each in steps if isinstance(each, Replayed)]) if hosts else {}
    if levels:
        found["host"] = levels
        write_levels(given.results, labels, levels)
    result = json.dumps(found)
    if given.results:
        write(given.results / "prefix-reuse.svg", svg("token hit rate by arena size (GiB)", labels, curves, 0.4))
        title = "sessions in turn: hits by working set / arena"
        write(given.results / "prefix-reuse-d1.svg", svg(title, names, turns, 1.0))
        write(given.results / "prefix-reuse.json", result)
    print(result)


def figures(
    best: float, labels: list[str], replays: list[Replayed], turns: dict[str, list[float]]
) -> dict[str, object]:
    """Return the JSON object: rates and ratios are fractions, sizes are in GiB."""
    by_label = dict(zip(labels, replays, strict=True))
    names = [f"{ratio:g}" for ratio in RATIOS]
    return {
        "ideal": round(best, 4),
        "hit_rate": {label: round(replay.hit_rate, 4) for label, replay in by_label.items()},
        "moved_ratio": round(max(replay.moved_ratio for replay in replays), 6),
        "moved_ratio_by_size": {label: round(replay.moved_ratio, 6) for label, replay in by_label.items()},
        "d1_common": dict(zip(names, [round(rate, 3) for rate in turns["one common prefix"]], strict=True)),
        "d1_per_session": dict(zip(names, [round(rate, 3) for rate in turns["a prefix per session"]], strict=True)),
    }


def with_hosts(
    labels: list[str], alone: list[Replayed], replays: list[Replayed]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by host size in GiB what each arena hits on the device, on the host and on both; 0 is no host arena."""
    by_host: dict[int, list[Replayed]] = {0: alone}
    for replay in replays:
        by_host.setdefault(replay.host_bytes, []).append(replay)
    levels: dict[str, dict[str, dict[str, float]]] = {}
    for host, of_host in by_host.items():
        levels[f"{host / GIB:g}"] = {
            "device": dict(zip(labels, [round(each.hit_rate, 4) for each in of_host], strict=True)),
            "host": dict(zip(labels, [round(each.host_rate, 4) for each in of_host], strict=True)),
            "both": dict(zip(labels, [round(each.hit_rate + each.host_rate, 4) for each in of_host], strict=True)),
            "loaded_ratio": dict(zip(labels, [round(each.loaded_ratio, 4) for each in of_host], strict=True)),
            "stored_ratio": dict(zip(labels, [round(each.stored_ratio, 4) for each in of_host], strict=True)),
        }
    return levels


def write_levels(folder: Path | None, labels: list[str], levels: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the hits of both levels, and draw what they come to."""
    rows = {
        f"host {host} GiB: {level}": list(of_host[level].values())
        for host, of_host in levels.items()
        for level in ("device", "host", "both", "loaded_ratio", "stored_ratio")
    }
    table("with a host arena, by GiB", labels, rows)
    if folder is not None:
        curves = {f"host arena of {host} GiB": list(of_host["both"].values()) for host, of_host in levels.items()}
        chart = svg("token hit rate of device and host by arena size (GiB)", labels, curves, 0.4)
        write(folder / "prefix-reuse-host.svg", chart)


def write(path: Path, text: str) -> None:
    """Write `text` and a line's end to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
