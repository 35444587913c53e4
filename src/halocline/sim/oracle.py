"""The token oracle: a backend whose next token is a hash of the whole visible context, *read through the page tables*.

It behaves like a model of two attention layers per pool, so that every query of a chunk counts and not only the last:

    raw(x)   hash of the token at x and of x itself                           written into every pool's page of x
    U_p(x)   sum of raw over the positions that x sees in pool p               read back through the tables
    deep(x)  hash of all U_p(x)                                                written beside raw
    D_p(x)   sum of deep over the positions that x sees in pool p              read back; the next token is its hash

A state pool folds instead of summing. The fake arena remembers which pool wrote each slab last, and a write for another
pool ruins what the slab held, as it would ruin the bytes. So a wrong page, a stale window, a lost move, or a page freed
too early changes an output (law L11). `reference` computes the same tokens from the bare history with plain
integers: another program, no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from halocline.memory.host import HostCopies, HostMoves, HostWork
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe
from halocline.params import SamplingParams
from halocline.step import Copy, Failure, Sampled, Segment, StepPlan, StepResult

WORD = 2**64
FOLD = 0x5851F42D4C957F2D
A1, A2, B1, B2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93

Words = NDArray[np.uint64]


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value = (value ^ (value >> 30)) * A2 % WORD
    value = (value ^ (value >> 27)) * B1 % WORD
    return value ^ (value >> 31)


def mix_words(values: Words) -> Words:
    """Scramble each of `values` as `mix` does."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(A2)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(B1)
    return values ^ (values >> np.uint64(31))


def salt_of(retention: Retention) -> int:
    """Return a number of the retention's own, the same in every process."""
    return mix(sum(ord(letter) * 257**index for index, letter in enumerate(describe(retention))) % WORD)


def first_seen(retention: Retention, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first position that each of `positions` sees: retention's rule, written again for arrays."""
    match retention:
        case Sliding(window):
            return np.maximum(0, positions - window + 1)
        case Chunked(chunk):
            return positions - positions % chunk
        case _:
            return np.zeros_like(positions)


def choose(value: int, vocab_size: int, forbidden: frozenset[int]) -> int:
    """Return the token of a hash, the next one allowed when it is forbidden."""
    token = value % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


def forbidden_tokens(params: SamplingParams, eos: Sequence[int], forbids_stop: bool) -> frozenset[int]:
    """Return what must not be sampled: end-of-sequence and stop tokens while min_tokens is not reached."""
    return frozenset(eos) | frozenset(params.stop_token_ids) if forbids_stop else frozenset()


class Context:
    """The oracle's view of one growing history, without pages: prefix sums of raw and deep, in plain integers."""

    def __init__(self, retentions: Sequence[Retention]) -> None:
        self._retentions = [(retention, salt_of(retention)) for retention in retentions]
        self._raw = [[0] for _ in retentions]
        self._deep = [[0] for _ in retentions]
        self._length = 0

    def append(self, token: int) -> int:
        """Compute the next position with `token`, and return the hash from which the following token comes."""
        position = self._length
        raw = mix((token * A1 + position * B2 + 1) % WORD)
        seen = [self._extend(self._raw, pool, raw, position) for pool in range(len(self._retentions))]
        deep = sum(mix(value ^ salt) for value, (_, salt) in zip(seen, self._retentions, strict=True)) % WORD
        answer = 0
        for pool, (_, salt) in enumerate(self._retentions):
            answer += mix(self._extend(self._deep, pool, mix(deep ^ salt), position) ^ salt)
        self._length += 1
        return mix(answer % WORD)

    def _extend(self, sums: list[list[int]], pool: int, value: int, position: int) -> int:
        retention, before = self._retentions[pool][0], sums[pool][-1]
        if isinstance(retention, State):
            sums[pool].append((before * FOLD + value) % WORD)
            return sums[pool][-1]
        sums[pool].append((before + value) % WORD)
        return (sums[pool][-1] - sums[pool][retention.first_needed(position)]) % WORD


def reference(
    retentions: Sequence[Retention], prompt: Sequence[int], max_tokens: int, vocab_size: int, **ends: object
) -> list[int]:
    """Return the output of a request alone in the world; `ends` are `params` and `eos`."""
    params = ends.get("params") or SamplingParams()
    eos = ends.get("eos") or ()
    assert isinstance(params, SamplingParams)
    assert isinstance(eos, tuple)
    context, output = Context(retentions), list[int]()
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    answer = [context.append(token) for token in prompt][-1]
    while True:
        early = len(output) < params.min_tokens
        token = choose(answer, vocab_size, forbidden_tokens(params, eos, early))
        output.append(token)
        if len(output) == max_tokens or (token in stops and not early):
            return output
        answer = context.append(token)


class FakePool:
    """The pages of one pool: raw and deep words per page and position; a state page holds its two folds."""

    def __init__(self, pool: PoolLayout, slabs: int) -> None:
        self.pool = pool
        self.salt = salt_of(pool.retention)
        self.raw = np.full((slabs * pool.pages_per_slab, pool.page_tokens), 0xDEAD, dtype=np.uint64)
        self.deep = self.raw.copy()

    def ruin(self, pages: NDArray[np.int64] | slice) -> None:
        """Overwrite `pages` with garbage."""
        self.raw[pages] = 0xBAD0BAD
        self.deep[pages] = 0xBAD1BAD


class FakeHost:
    """The host arena in words: what was copied there, by slab of whichever pool wrote it last."""

    def __init__(self, layout: ArenaLayout, slabs: int) -> None:
        self.pools = [FakePool(pool, slabs) for pool in layout.pools]
        self.slab_pool = np.full(slabs, -1)
        self.pages_stored = self.pages_loaded = self.moves_done = 0

    def offload(self, work: Sequence[HostWork], device: Sequence[FakePool]) -> None:
        """Copy pages of the device here and move pages here, one after another; what was moved away is ruined."""
        for each in work:
            if isinstance(each, HostMoves):
                self._move(each)
                continue
            targets, sources = each.host_pages.astype(np.int64), each.device_pages.astype(np.int64)
            assert len(set(targets.tolist())) == len(targets) == len(sources), each
            self.claim(each.pool, targets)
            here, there = self.pools[each.pool], device[each.pool]
            here.raw[targets], here.deep[targets] = there.raw[sources], there.deep[sources]
            self.pages_stored += len(targets)

    def _move(self, work: HostMoves) -> None:
        assert not {(m.pool, m.source) for m in work.moves} & {(m.pool, m.target) for m in work.moves}, work
        for move in work.moves:
            self.claim(move.pool, np.array([move.target]))
            pool = self.pools[move.pool]
            pool.raw[move.target], pool.deep[move.target] = pool.raw[move.source], pool.deep[move.source]
        for move in work.moves:
            self.pools[move.pool].ruin(slice(move.source, move.source + 1))
        self.moves_done += len(work.moves)

    def load(self, load: HostCopies, device: FakePool) -> None:
        """Copy pages back to the device's pool."""
        here = self.pools[load.pool]
        assert len(set(load.device_pages.tolist())) == len(load.device_pages) == len(load.host_pages), load
        device.raw[load.device_pages], device.deep[load.device_pages] = (
            here.raw[load.host_pages], here.deep[load.host_pages],
        )  # fmt: skip
        self.pages_loaded += len(load.host_pages)

    def claim(self, pool: int, pages: NDArray[np.int64]) -> None:
        """Take the slabs of `pages` for `pool`, ruining what another pool left there."""
        claim_slabs(self.pools, self.slab_pool, pool, pages)


class FakeBackend:
    """Carries a plan out on words instead of tensors."""

    def __init__(self, layout: ArenaLayout, vocab_size: int, eos: tuple[int, ...] = (), host_slabs: int = 0) -> None:
        self.layout = layout
        self.vocab_size = vocab_size
        self.eos = eos
        self.pools = [FakePool(pool, layout.slabs) for pool in layout.pools]
        self.host = FakeHost(layout, host_slabs)
        self.slab_pool = np.full(layout.slabs, -1)
        """Which pool wrote each slab last."""
        self.fails: set[str] = set()
        """Requests whose computation fails."""
        self.moves_done = 0
        self.copies_done = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Do the host's work and the moves, write the new positions, read the context back, hash."""
        self.arrange(plan)
        self.copy(plan.copies)
        views = [_View(self, plan, index) for index in range(len(plan.segments))]
        for view in views:
            view.claim()
        for view in views:
            view.write_raw()
        for view in views:
            view.write_deep()
        self.copy(plan.saves)
        sampled, failures = [], []
        for view in views:
            segment = view.segment
            if segment.request_id in self.fails:
                failures.append(Failure(segment.request_id, "the fake backend was told to fail it"))
            elif segment.samples:
                forbidden = forbidden_tokens(segment.params, self.eos, segment.forbids_stop)
                tokens = [choose(view.answer(), self.vocab_size, forbidden)]
                while view.goes_on(tokens[-1]):
                    tokens.append(choose(view.answer(), self.vocab_size, forbidden))
                sampled.append(Sampled(segment.request_id, tokens[0], None, tuple(tokens[1:])))
        return StepResult(plan.step, tuple(sampled), tuple(failures))

    def close(self) -> None:
        """Hold nothing that needs freeing."""

    def arrange(self, plan: StepPlan) -> None:
        """Do what comes before the forward: offloads, moves, loads."""
        self.host.offload(plan.offloads, self.pools)
        for move in plan.moves:
            self.claim(move.pool, np.array([move.target]))
            pool = self.pools[move.pool]
            pool.raw[move.target], pool.deep[move.target] = pool.raw[move.source], pool.deep[move.source]
        for move in plan.moves:
            self.pools[move.pool].ruin(slice(move.source, move.source + 1))
        self.moves_done += len(plan.moves)
        for load in plan.loads:
            self.claim(load.pool, load.device_pages.astype(np.int64))
            self.host.load(load, self.pools[load.pool])

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy states; no source may be a target."""
        assert not {(c.pool, c.source) for c in copies} & {(c.pool, c.target) for c in copies}, copies
        for copy in copies:
            self.claim(copy.pool, np.array([copy.target]))
            pool = self.pools[copy.pool]
            pool.raw[copy.target], pool.deep[copy.target] = pool.raw[copy.source], pool.deep[copy.source]
            self.copies_done += 1

    def claim(self, pool: int, pages: NDArray[np.int64]) -> None:
        """Take the slabs of `pages` for `pool`, ruining what another pool left there."""
        claim_slabs(self.pools, self.slab_pool, pool, pages)


def claim_slabs(pools: Sequence[FakePool], slab_pool: NDArray[np.int64], pool: int, pages: NDArray[np.int64]) -> None:
    """Take the slabs of `pages` for `pool`, ruining what another pool left there."""
    slabs = np.unique(pages // pools[pool].pool.pages_per_slab)
    for slab in slabs[slab_pool[slabs] != pool]:
        for other in pools:
            per_slab = other.pool.pages_per_slab
            other.ruin(slice(slab * per_slab, (slab + 1) * per_slab))
    slab_pool[slabs] = pool


class _View:
    """One segment's context, seen through its page tables and nothing else."""

    def __init__(self, backend: FakeBackend, plan: StepPlan, index: int) -> None:
        self.backend = backend
        self.segment: Segment = plan.segments[index]
        rows = slice(plan.query_starts[index], plan.query_starts[index + 1])
        self.tokens = plan.token_ids[rows]
        self.positions = self.owned = plan.positions[rows]
        self.start, self.end = self.segment.start, self.segment.start + self.segment.tokens
        assert self.positions.tolist() == list(range(self.start, self.end)), f"{self.segment}: rows {self.positions}"
        if self.segment.is_leap:  # only the first row is known; the others follow one by one
            assert set(self.tokens[1:].tolist()) <= {-1}, (
                f"{self.segment}: tokens that nobody has sampled: {self.tokens}"
            )
            self.tokens, self.positions = self.tokens[:1], self.positions[:1]
        self.pages = [t.pages[t.page_starts[index] : t.page_starts[index + 1]].astype(np.int64) for t in plan.tables]
        self.first_page = [int(table.first_page[index]) for table in plan.tables]
        self.write_from = [int(table.write_from[index]) for table in plan.tables]

    def claim(self) -> None:
        """Every page that this step writes belongs to its pool from now on."""
        for number, pool in enumerate(self.backend.pools):
            if isinstance(pool.pool.retention, State):
                self.backend.claim(number, self.pages[number])
            else:
                written = self.owned[self.owned >= self.write_from[number]]
                if len(written):
                    self.backend.claim(number, np.unique(self._place(number, written)[0]))

    def goes_on(self, token: int) -> bool:
        """Compute the next position of a leap with `token`, which was sampled for it; False when there is none."""
        after = int(self.positions[-1]) + 1
        if after == self.end:
            return False
        self.tokens, self.positions = np.array([token]), np.array([after])
        self.write_raw()
        self.write_deep()
        return True

    def write_raw(self) -> None:
        """Write the token of every new position."""
        positions = self.positions.astype(np.uint64)
        raw = mix_words(self.tokens.astype(np.uint64) * np.uint64(A1) + positions * np.uint64(B2) + np.uint64(1))
        self.new_raw = raw
        for number, pool in enumerate(self.backend.pools):
            if not isinstance(pool.pool.retention, State):
                self._write(number, pool.raw, raw)

    def write_deep(self) -> None:
        """Read what each new position sees, and write the hash of it."""
        deep = np.zeros(len(self.positions), dtype=np.uint64)
        for number, pool in enumerate(self.backend.pools):
            if isinstance(pool.pool.retention, State):
                seen = self._fold(number, pool.raw, self.new_raw)
            else:
                seen = self._window_sum(number, pool.raw, pool.pool.retention, self.positions)
            deep += mix_words(seen ^ np.uint64(pool.salt))
        for number, pool in enumerate(self.backend.pools):
            own = mix_words(deep ^ np.uint64(pool.salt))
            if isinstance(pool.pool.retention, State):
                self._fold(number, pool.deep, own)
            else:
                self._write(number, pool.deep, own)

    def _write(self, number: int, words: Words, fresh: Words) -> None:
        """Write what is the segment's to write; what others computed before it must be the same."""
        writes = self.positions >= self.write_from[number]
        words[self._place(number, self.positions[writes])] = fresh[writes]
        read = words[self._place(number, self.positions[~writes])]
        assert np.array_equal(read, fresh[~writes]), f"{self.segment.request_id}: a shared page has other contents"

    def answer(self) -> int:
        """Return the hash from which the next token comes."""
        total = 0
        for number, pool in enumerate(self.backend.pools):
            if not isinstance(pool.pool.retention, State):
                last = self._window_sum(number, pool.deep, pool.pool.retention, self.positions[-1:])
                total += mix(int(last[-1]) ^ pool.salt)
            else:
                total += mix(int(pool.deep[self.pages[number][0], 0]) ^ pool.salt)
        return mix(total % WORD)

    def _fold(self, number: int, words: Words, fresh: Words) -> Words:
        """Fold `fresh` into the state's page; return the state after each position."""
        page = int(self.pages[number][0])
        before = 0 if self.positions[0] == 0 else int(words[page, 0])
        folds = list(accumulate(fresh.tolist(), lambda state, value: (state * FOLD + value) % WORD, initial=before))
        words[page, 0] = folds[-1]
        return np.array(folds[1:], dtype=np.uint64)

    def _window_sum(
        self, number: int, words: Words, retention: Full | Sliding | Chunked, positions: NDArray[np.int64]
    ) -> Words:
        low = int(first_seen(retention, positions[:1])[0])
        seen = np.arange(low, int(positions[-1]) + 1)
        sums = np.zeros(len(seen) + 1, dtype=np.uint64)
        np.cumsum(words[self._place(number, seen)], out=sums[1:])
        return sums[positions + 1 - low] - sums[first_seen(retention, positions) - low]

    def _place(self, number: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        page_tokens = self.backend.layout.pools[number].page_tokens
        if len(positions) == 0:
            return positions, positions
        index = positions // page_tokens - self.first_page[number]
        assert index.min() >= 0, f"{self.segment.request_id}: position {positions[0]} has left its table"
        assert index.max() < len(self.pages[number]), f"{self.segment.request_id}: no page for {positions[-1]}"
        return self.pages[number][index], positions % page_tokens
