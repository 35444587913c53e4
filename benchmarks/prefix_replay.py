"""Prompts through the real tree and arena, one at a time: what `prefix_reuse.py` measures.

Match, lock, compute the rest in chunks, insert, leave. With a host arena, what the device evicts is written back, and
loaded again where the host has more of a prompt than the device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from prefix_models import BLOCK_TOKENS, PAGE_TOKENS, WINDOW_TOKENS, Request

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import Key, block_key
from halocline.cache.locks import Lock
from halocline.cache.match import Match
from halocline.cache.tier import Hold, Tier, TierCounts
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, span
from halocline.memory.grant import NO_HANDLES, Handles, Order, Refusal
from halocline.memory.host import HostArena
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding

CHUNK_TOKENS = 8192


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

    def __init__(self, layout: ArenaLayout, host_bytes: int = 0) -> None:
        self.layout = layout
        self.arena = Arena(layout)
        self.tree = Tree(self.arena, granule_tokens=BLOCK_TOKENS, granule_bytes=8)
        self.tier = Tier(self.tree, HostArena(layout, host_bytes)) if host_bytes else None
        self.host_hit_tokens = 0
        self.hit_tokens = self.prompt_tokens = self.moved_bytes = self.written_bytes = 0
        self.first_pages: list[int] = []
        self.own: list[Handles] = []

    def serve(self, request: Request) -> int:
        """Let one request come, compute and leave; return the tokens that it did not have to compute."""
        key = block_key(request.blocks[: request.tokens // BLOCK_TOKENS], request.tokens)
        found = self.tree.match(key)
        boundary, output = found.boundary_tokens, max(1, request.output_tokens)
        self.hit_tokens += boundary
        lock, hold = self._enter(found, request, output)
        boundary = boundary if hold is None else hold.boundary_tokens
        full_tokens = lock.full_tokens  # perhaps beyond the boundary: windows are restored there, full pages only read
        starts = [full_tokens if isinstance(pool.retention, Full) else boundary for pool in self.layout.pools]
        self.first_pages = [start // pool.page_tokens for start, pool in zip(starts, self.layout.pools, strict=True)]
        if hold is not None:
            for pool in self.tree.locks.windows:
                self.first_pages[pool] = self.tree.first_page(pool, boundary)
        self.own = [NO_HANDLES for _ in self.layout.pools]
        computed = boundary
        for border in (request.tokens, request.tokens + output - 1):
            while computed < border:
                end = min(border, computed // CHUNK_TOKENS * CHUNK_TOKENS + CHUNK_TOKENS)
                self._compute(lock, computed, end)
                computed = end
                if hold is not None:
                    self._load(hold)
                self._advance(lock, key, computed, request.tokens)
                if hold is not None and self.tier is not None:
                    self.tier.arrive(hold, lock, key)
                    hold = None
        self.tree.close(lock)
        self.arena.release(lock.grant)
        self.prompt_tokens += request.tokens
        return boundary

    def _enter(self, found: Match, request: Request, output: int) -> tuple[Lock, Hold | None]:
        """Lock what is on the device; where the host has more, lock that, too: it is loaded with the first chunk."""
        offer = None if self.tier is None else self.tier.offer(found)
        start, locked = found.boundary_tokens, found.boundary_tokens
        if offer is not None and offer.verdict == "host":
            start, locked = offer.boundary_tokens, 0
        lock = self.tree.lock(found, locked, "request", resident(self.layout, request.tokens, output, start))
        assert not isinstance(lock, Refusal), lock.message
        if self.tier is None or offer is None or offer.verdict != "host":
            return lock, None
        self.host_hit_tokens += offer.boundary_tokens - offer.device_tokens
        return lock, self.tier.hold(offer, "request", lock.full_tokens)

    def _load(self, hold: Hold) -> None:
        """Order the load of `hold` beside the chunk whose pages have just been committed."""
        assert self.tier is not None
        tables = zip(self.first_pages, self.own, strict=True)
        places = [(first, self.arena.physical(pool, own)) for pool, (first, own) in enumerate(tables)]
        self.tier.loads(hold, places)

    def _compute(self, lock: Lock, start: int, end: int) -> None:
        pages = []
        for pool, shape in enumerate(self.layout.pools):
            pages.append(max(0, span(shape, start, end)[1] - self.first_pages[pool] - len(self.own[pool])))
        wanted = Demand(pages)
        step = self.arena.reserve("step", wanted.above(Demand(lock.grant.room)))
        assert not isinstance(step, Refusal), step.message
        done = self.arena.commit([Order(lock.grant, wanted, step)])
        if self.tier is None:
            self.tree.forget(done.evicted)
        else:
            self.tier.forget(done.evicted, done.moves)
            self.tier.host.take_work()  # nothing is stored here, so nothing is copied
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


@dataclass(frozen=True)
class Replayed:
    """What one replay of a trace came to."""

    kv_bytes: int
    hit_rate: float
    moved_ratio: float
    seconds: float
    host_bytes: int = 0
    host_rate: float = 0.0
    """Hits that only the host had, as a share of all prompt tokens: beside `hit_rate`, that of the device."""
    loaded_ratio: float = 0.0
    """Bytes loaded / bytes written by computing, which stands for both."""
    stored_ratio: float = 0.0
    """Bytes written back / bytes written by computing."""


def replay_trace(trace: Sequence[Request], kv_bytes: int, audit_every: int = 0, host_bytes: int = 0) -> Replayed:
    """Serve `trace` out of an arena of `kv_bytes`; audit after every so many requests, unless it is 0."""
    begin, replay = perf_counter(), Replay(hybrid(10, 52, kv_bytes), host_bytes)
    for number, request in enumerate(trace, 1):
        replay.serve(request)
        if audit_every and number % audit_every == 0:
            violations = [*replay.arena.audit(), *replay.tree.audit()]
            if replay.tier is not None:
                violations += [*replay.tier.arena.audit(), *replay.tier.audit()]
            assert not violations, violations
    rate, moved = replay.hit_tokens / replay.prompt_tokens, replay.moved_bytes / replay.written_bytes
    counts = TierCounts() if replay.tier is None else replay.tier.counts
    return Replayed(
        kv_bytes,
        rate,
        moved,
        perf_counter() - begin,
        host_bytes,
        replay.host_hit_tokens / replay.prompt_tokens,
        counts.loaded_bytes / replay.written_bytes,
        counts.written_bytes / replay.written_bytes,
    )


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
