"""How many prompt tokens the prefix cache saves, by arena size: a trace of prompts through the real tree and arena.

    python benchmarks/prefix_reuse.py TRACE [--kv-bytes 500GiB,1000GiB] [--svg FILE]

TRACE has one JSON object per line: input_length, output_length, hash_ids (one per 512-token block; equal ids mean
equal prefixes up to the block's end). Without it, `mooncake_conversation.jsonl` of the folder $HALOCLINE_DATA. Shape:
Gemma 3 27B in bf16 (10 full + 52 sliding layers, W = 1,024, 16-token pages). Requests come in trace order, one at a
time: match, lock, compute the rest in chunks, insert, leave. What an output leaves has no ids in the trace, so nobody
can hit it.

Beside it, in a model of whole blocks: `bound`, the full layers alone with LRU (windows cost nothing and are always
there); `one lru`, one LRU over everything; `tails`, windows at prompt ends only, LRU. The second table is scenario D1:
10 + 50 layers, sessions in turn, each with its own prefix or all with one. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import Key, block_key
from halocline.cache.locks import Lock
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, span
from halocline.memory.grant import NO_HANDLES, Handles, Order, Refusal
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding
from halocline.units import GIB, parse_bytes

BLOCK_TOKENS = 512
CHUNK_TOKENS = 8192
WINDOW_TOKENS = 1024
PAGE_TOKENS = 16
SIZES = "500GiB,1000GiB,2000GiB,4170GiB"


@dataclass(frozen=True)
class Request:
    """One prompt of a trace."""

    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Request(row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows]


def hybrid(full: int, sliding: int, kv_bytes: int) -> ArenaLayout:
    """Return the arena of a model with so many layers of each kind."""
    kinds = [Full()] * full + [Sliding(WINDOW_TOKENS)] * sliding
    return solve_layout([LayerKV(i, kind, 16, 128, 128) for i, kind in enumerate(kinds)], kv_bytes, PAGE_TOKENS)


class Replay:
    """One arena with its tree, through which requests go one at a time."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.arena = Arena(layout)
        self.tree = Tree(self.arena, granule_tokens=BLOCK_TOKENS, granule_bytes=8)
        self.hit_tokens = self.prompt_tokens = self.moved_bytes = self.written_bytes = 0
        self.first_pages: list[int] = []
        self.own: list[Handles] = []

    def serve(self, request: Request) -> int:
        """Let one request come, compute and leave; return the tokens that it did not have to compute."""
        key = block_key(request.blocks[: request.tokens // BLOCK_TOKENS], request.tokens)
        found = self.tree.match(key)
        boundary, output = found.boundary_tokens, max(1, request.output_tokens)
        lock = self.tree.lock(found, boundary, "request", resident(self.layout, request.tokens, output, boundary))
        assert not isinstance(lock, Refusal), lock.message
        full_tokens = lock.full_tokens  # perhaps beyond the boundary: windows are restored there, full pages only read
        starts = [full_tokens if isinstance(pool.retention, Full) else boundary for pool in self.layout.pools]
        self.first_pages = [start // pool.page_tokens for start, pool in zip(starts, self.layout.pools, strict=True)]
        self.own = [NO_HANDLES for _ in self.layout.pools]
        computed = boundary
        for border in (request.tokens, request.tokens + output - 1):
            while computed < border:
                end = min(border, computed // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS)
                self._compute(lock, computed, end)
                computed = end
                self._advance(lock, key, computed, request.tokens)
        self.tree.close(lock)
        self.arena.release(lock.grant)
        self.hit_tokens += boundary
        self.prompt_tokens += request.tokens
        return boundary

    def _compute(self, lock: Lock, start: int, end: int) -> None:
        pages = []
        for pool, shape in enumerate(self.layout.pools):
            pages.append(max(0, span(shape, start, end)[1] - self.first_pages[pool] - len(self.own[pool])))
        wanted = Demand(pages)
        step = self.arena.reserve("step", wanted.above(Demand(lock.grant.room)))
        assert not isinstance(step, Refusal), step.message
        done = self.arena.commit([Order(lock.grant, wanted, step)])
        self.tree.forget(done.evicted)
        for pool, fresh in enumerate(done.handles[0]):
            self.own[pool] = np.concatenate((self.own[pool], fresh))
            self.written_bytes += len(fresh) * self.layout.pools[pool].stride_bytes
        self.moved_bytes += sum(self.layout.pools[move.pool].stride_bytes for move in done.moves)
        self._step = step

    def _advance(self, lock: Lock, key: Key, computed: int, prompt_tokens: int) -> None:
        end = max(min(computed, prompt_tokens) // BLOCK_TOKENS, lock.inserted) * BLOCK_TOKENS
        own = []
        for pool, shape in enumerate(self.layout.pools):
            count = max(0, end // shape.page_tokens - self.first_pages[pool])
            own.append(Own(self.first_pages[pool], self.own[pool][:count]))
            self._drop(pool, count)
            gone = span(shape, computed, computed + 1)[0] - self.first_pages[pool]
            if gone > 0:
                self.arena.free(lock.grant, pool, self.own[pool][:gone])
                self._drop(pool, gone)
        self.tree.advance([Advance(lock, key, end, computed, own, protect=computed == prompt_tokens)])
        self.arena.release(self._step)

    def _drop(self, pool: int, count: int) -> None:
        self.own[pool] = self.own[pool][count:]
        self.first_pages[pool] += count


# ---- what it is compared with: blocks as a whole, no pages


def ideal(trace: Iterable[Request]) -> float:
    """Return the share of prompt tokens that an infinite cache saves."""
    return modelled(trace, 1 << 62, bound)[0]


@dataclass
class Blocks:
    """An LRU over (kind, block), in bytes."""

    limit: int
    held: OrderedDict[tuple[str, int], int]
    used: int = 0

    def touch(self, kind: str, block: int, size: int) -> None:
        name = (kind, block)
        if name in self.held:
            self.held.move_to_end(name)
        else:
            self.held[name] = size
            self.used += size

    def shrink(self) -> None:
        while self.used > self.limit:
            self.used -= self.held.popitem(last=False)[1]


def modelled(trace: Iterable[Request], kv_bytes: int, policy: object) -> tuple[float]:
    """Return the token hit rate of a block-wise policy."""
    sizes = hybrid(10, 52, 64 * GIB)
    full, sliding = (pool.stride_bytes * BLOCK_TOKENS // PAGE_TOKENS for pool in sizes.pools)
    blocks, hits, total = Blocks(kv_bytes, OrderedDict()), 0, 0
    for request in trace:
        most, ids = (request.tokens - 1) // BLOCK_TOKENS, request.blocks[: request.tokens // BLOCK_TOKENS]
        reach = next((i for i, b in enumerate(ids) if ("full", b) not in blocks.held), len(ids))
        hits += policy(blocks, ids, min(reach, most), full, sliding) * BLOCK_TOKENS
        total += request.tokens
        blocks.shrink()
    return (hits / total,)


def bound(blocks: Blocks, ids: Sequence[int], reach: int, full: int, sliding: int) -> int:
    """Keep full pages only, as if windows cost nothing."""
    del sliding
    for block in reversed(ids):
        blocks.touch("full", block, full)
    return reach


def window_at(blocks: Blocks, ids: Sequence[int], reach: int) -> int:
    """Return the longest boundary whose window is held."""
    while reach and any(("sliding", block) not in blocks.held for block in ids[max(0, reach - 2) : reach]):
        reach -= 1
    return reach


def one_lru(blocks: Blocks, ids: Sequence[int], reach: int, full: int, sliding: int) -> int:
    """Touch whatever is read or written, window pages of every block included."""
    hit = window_at(blocks, ids, reach)
    for at, block in enumerate(ids):
        blocks.touch("full", block, full)
        if at >= hit - 2:
            blocks.touch("sliding", block, sliding)
    return hit


def tails_only(blocks: Blocks, ids: Sequence[int], reach: int, full: int, sliding: int) -> int:
    """Keep the windows of prompt ends alone: exactly W positions."""
    hit = window_at(blocks, ids, reach)
    for at, block in enumerate(ids):
        blocks.touch("full", block, full)
        if at >= len(ids) - 2 or hit - 2 <= at < hit:
            blocks.touch("sliding", block, sliding)
    return hit


# ---- D1


def sessions_in_turn(ratio: float, common: bool, rounds: int = 6, sessions: int = 40) -> float:
    """Return the share of the prefixes that hits after the first round, at working set / arena = `ratio`."""
    blocks = 20
    block_bytes = [layers * BLOCK_TOKENS * 16 * 256 * 2 for layers in (10, 50)]
    session = blocks * block_bytes[0] + 3 * block_bytes[1]
    replay = Replay(hybrid(10, 50, int(sessions * session / ratio)))
    hits = asked = 0
    for turn in range(rounds):
        for number in range(sessions):
            prefix = tuple(range(blocks)) if common else tuple(number * 100 + at for at in range(blocks))
            suffix = 1_000_000 + turn * sessions + number
            hit = replay.serve(Request(blocks * BLOCK_TOKENS + BLOCK_TOKENS, 8, (*prefix, suffix)))
            if turn or (common and number):
                hits, asked = hits + min(hit, blocks * BLOCK_TOKENS), asked + blocks * BLOCK_TOKENS
    return hits / asked


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


def main() -> None:
    """Replay, print, draw, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="requests, one JSON object per line")
    parser.add_argument("--kv-bytes", default=SIZES, help="arena sizes, separated by commas")
    parser.add_argument("--svg", type=Path, help="write the charts to FILE and FILE with -d1 before its suffix")
    parser.add_argument("--audit", type=int, default=0, metavar="N", help="audit after every N requests")
    arguments = parser.parse_args()
    trace_path = arguments.trace or Path(os.environ.get("HALOCLINE_DATA", ".")) / "mooncake_conversation.jsonl"
    trace = read_trace(trace_path)
    sizes = [parse_bytes(size) for size in arguments.kv_bytes.split(",")]
    labels = [f"{size / GIB:g}" for size in sizes]
    ours, moved, written = [], 0, 0
    for size in sizes:
        begin, replay = perf_counter(), Replay(hybrid(10, 52, size))
        for number, request in enumerate(trace, 1):
            replay.serve(request)
            if arguments.audit and number % arguments.audit == 0:
                violations = [*replay.arena.audit(), *replay.tree.audit()]
                assert not violations, violations
        ours.append(replay.hit_tokens / replay.prompt_tokens)
        moved, written = moved + replay.moved_bytes, written + replay.written_bytes
        share = replay.moved_bytes / replay.written_bytes
        seconds = perf_counter() - begin
        print(f"{size / GIB:g} GiB: hit rate {ours[-1]:.4f}, moved {share:.5%} of written, {seconds:.0f} s", flush=True)
    curves = {"halocline": ours}
    for name, policy in (("bound: full layers only", bound), ("one lru", one_lru), ("tails only", tails_only)):
        curves[name] = [modelled(trace, size, policy)[0] for size in sizes]
    best = ideal(trace)
    table("hit rate by GiB", labels, curves)
    ratios = [0.8, 1.1, 1.25, 2.0, 3.0]
    turns = {
        "one common prefix": [sessions_in_turn(ratio, True) for ratio in ratios],
        "a prefix per session": [sessions_in_turn(ratio, False) for ratio in ratios],
        "arena / working set": [min(1.0, 1 / ratio) for ratio in ratios],
    }
    table("D1: working set / arena", [f"{ratio:g}" for ratio in ratios], turns)
    if arguments.svg:
        arguments.svg.write_text(svg("token hit rate by arena size (GiB)", labels, curves, 0.4), encoding="utf-8")
        second = arguments.svg.with_name(f"{arguments.svg.stem}-d1{arguments.svg.suffix}")
        names = [f"{ratio:g}" for ratio in ratios]
        second.write_text(svg("sessions in turn: hits by working set / arena", names, turns, 1.0), encoding="utf-8")
    result = {
        "ideal": round(best, 4),
        "hit_rate": {label: round(rate, 4) for label, rate in zip(labels, ours, strict=True)},
        "moved_ratio": moved / written,
        "d1_per_session": {
            f"{ratio:g}": round(rate, 3) for ratio, rate in zip(ratios, turns["a prefix per session"], strict=True)
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
