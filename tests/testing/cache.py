"""Fake requests on a tree and an arena: they match, lock, compute chunks, decode and leave.

Every page that is computed gets a content: all tokens up to its end. A request checks the contents of all that it
reads, so a wrong page, a stale window or a lost checkpoint shows at once (L7, L11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import EVERYBODY, Namespace, token_key
from halocline.cache.locks import Lock
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, span
from halocline.memory.grant import NO_HANDLES, Commit, Handles, Order, Refusal
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Full, Retention, Sliding, State, describe

TokenRun = Sequence[int]

HYBRID = ((Full(), 4, 5), (Sliding(9), 4, 1))
"""One to five, as 10 + 50 layers: a sliding page is five full ones."""
PREFIX = 48
SLACK = 8


def session(number: int, turn: int = 0) -> list[int]:
    """A prefix of its own, then a suffix that nobody has seen."""
    return [*range(number * 1000, number * 1000 + PREFIX), *range(900_000 + turn * 100, 900_000 + turn * 100 + 6)]


def arena_of(*pools: tuple[Retention, int, int], slabs: int, caps: tuple[int | None, ...] | None = None) -> Arena:
    """Make an arena of pools (retention, page_tokens, pages_per_slab)."""
    slab_bytes = 64 * math.lcm(*(per_slab for _, _, per_slab in pools))
    shapes = tuple(
        PoolLayout(describe(kind), kind, (), tokens, slab_bytes // k, k, slab_bytes // k) for kind, tokens, k in pools
    )
    return Arena(ArenaLayout(shapes, slab_bytes, slabs, slabs * slab_bytes), caps)


class Runner:
    """One running request."""

    def __init__(self, world: CacheWorld, name: str, tokens: list[int], end: int, lock: Lock) -> None:
        self.world = world
        self.name = name
        self.tokens = tokens
        self.prompt = len(tokens)
        self.end = end
        """Positions ever computed, plus one: prompt + output."""
        self.lock = lock
        pools = len(world.layout.pools)
        self.computed = lock.resumed_tokens
        self.resumed_at = self.computed
        self.price = world.price
        """The whole price at the boundary where it resumed."""
        self.first = [0] * pools
        self.own: list[Handles] = [NO_HANDLES] * pools
        for pool, shape in enumerate(world.layout.pools):
            if shape.is_positional:
                begin = lock.full_tokens if pool in world.tree.locks.full else self.computed
                self.first[pool] = begin // shape.page_tokens

    def reads(self, pool: int, start: int) -> tuple[int, list[int]]:
        """Return the first page and all handles, locked and own, that computing at `start` reads."""
        first = span(self.world.layout.pools[pool], start, start + 1)[0]
        if pool in self.world.tree.locks.full:
            locked = [int(h) for node in self.lock.node.path() for h in node.pages[pool]]
            return 0, locked + self.own[pool].tolist()
        begin = self.lock.first_page[pool]
        pages = self.lock.pages[pool].tolist()
        if not pages:
            begin = self.first[pool]
        return first, (pages + self.own[pool].tolist())[first - begin :]

    def check_reads(self) -> None:
        """Look at the contents of everything that the next position reads."""
        for pool, shape in enumerate(self.world.layout.pools):
            if not shape.is_positional:
                continue
            first, handles = self.reads(pool, self.computed)
            for number, handle in enumerate(handles[: self.computed // shape.page_tokens - first], first):
                want = (self.lock.namespace, tuple(self.tokens[: (number + 1) * shape.page_tokens]))
                got = self.world.content.get((pool, handle))
                assert got == want, f"{self.name} at {self.computed}: page {number} of pool {pool} is wrong"
            have = first + len(handles)
            assert have * shape.page_tokens >= self.computed, f"{self.name} lacks pages of pool {pool}"


class CacheWorld:
    """A tree, its arena, and the requests that run."""

    def __init__(self, arena: Arena, slack_tokens: int = 0) -> None:
        self.arena = arena
        self.layout = arena.layout
        self.tree = Tree(arena, slack_tokens=slack_tokens)
        self.running: list[Runner] = []
        self.content: dict[tuple[int, int], object] = {}
        self.hits = 0
        self.asked = 0
        self.count = 0
        self.price = Demand()

    # ---- a request's life

    def enter(
        self,
        tokens: TokenRun,
        output: int = 1,
        namespace: Namespace = EVERYBODY,
        limit: int | None = None,
        hand_over: bool = False,
    ) -> Runner | None:
        """Match, lock and reserve; None when it is refused."""
        key = token_key(tokens, namespace)
        found = self.tree.match(key, limit)
        boundary = found.boundary_tokens
        price = resident(self.layout, len(tokens), output, boundary)
        self.count += 1
        self.price = price
        lock = self.tree.lock(found, boundary, f"request-{self.count}", price, hand_over=hand_over)
        if isinstance(lock, Refusal):
            return None
        self.hits += boundary
        self.asked += len(tokens)
        runner = Runner(self, lock.grant.owner, list(tokens), len(tokens) + output, lock)
        self.running.append(runner)
        runner.check_reads()
        for pool in self.tree.shape.states:
            if boundary:
                want, (state,) = (namespace, tuple(tokens[:boundary])), (*lock.pages[pool], *lock.handed[pool])
                assert self.content[pool, int(state)] == want, "the checkpoint is of another prefix"
                runner.own[pool] = lock.handed[pool]
        return runner

    def compute(self, chunks: Sequence[tuple[Runner, int]], checkpoint: bool = True) -> bool:
        """Compute a chunk of each, all in one step; False (nothing done) when the step's room is refused."""
        steps, orders, taken = [], [], []
        for runner, tokens in chunks:
            wanted = self._wanted(runner, tokens)
            beyond = wanted.above(Demand(runner.lock.grant.room))
            step = self.arena.reserve("step", beyond)
            if isinstance(step, Refusal):
                for grant in steps:
                    self.arena.release(grant)
                return False
            steps.append(step)
            orders.append(Order(runner.lock.grant, wanted, step))
            taken.append((runner, tokens))
        done = self.arena.commit(orders)
        self.carry_out(done)
        for (runner, tokens), fresh in zip(taken, done.handles, strict=True):
            self._fill(runner, tokens, fresh)
        self.advance([runner for runner, _ in taken], checkpoint)
        for step in steps:
            self.arena.release(step)
        return True

    def advance(self, runners: Sequence[Runner], checkpoint: bool = True) -> None:
        """Insert whole granules, free what left the windows beyond them, end passed locks."""
        granule = self.tree.shape.granule_tokens
        advances = []
        for runner in runners:
            end = runner.computed // granule * granule
            own = [self._own(runner, pool, end) for pool in range(len(self.layout.pools))]
            saved = self._save_state(runner, end) if checkpoint else None
            for pool in self.tree.shape.states:
                own[pool] = Own(0, NO_HANDLES if saved is None else saved[pool])
            self.tree.drop_states(runner.lock)
            key = token_key(runner.tokens, runner.lock.namespace)
            protect = runner.computed in (runner.prompt, runner.end - 1)
            advances.append(Advance(runner.lock, key, end, runner.computed, own, protect))
        before = self.committed()
        self.tree.advance(advances)
        self._check_neutral(before)
        for runner, each in zip(runners, advances, strict=True):
            saved_pages = Demand(
                len(own.handles) if pool in self.tree.shape.states else 0 for pool, own in enumerate(each.own)
            )
            self.arena.shrink(runner.lock.grant, runner.lock.grant.demand.minus(saved_pages))
            runner.check_reads()

    def leave(self, runner: Runner) -> None:
        """End the request: what the tree got stays, the rest is freed."""
        self.tree.close(runner.lock)
        self.arena.release(runner.lock.grant)
        self.running.remove(runner)

    def serve(self, tokens: TokenRun, chunk: int = 1 << 30, output: int = 1, cuts: bool = True) -> int:
        """Run one request from end to end; return the tokens that it did not have to compute."""
        runner = self.enter(tokens, output)
        assert runner is not None, "the arena is too small for this request alone"
        hit = runner.computed
        while runner.computed < len(tokens) + output - 1:
            left = runner.prompt - runner.computed if runner.computed < runner.prompt else 1
            if runner.computed >= len(runner.tokens):
                runner.tokens.append(1_000_000 + runner.computed)
            revealed = runner.lock.revealed_tokens - runner.computed
            if self.tree.shape.states and cuts and revealed > 0:
                left = min(left, revealed)
            assert self.compute([(runner, min(chunk, left))]), "the step's room is refused"
        self.leave(runner)
        return hit

    def committed(self) -> list[int]:
        """Return what is held and promised per pool, less what is owed: an advance must not change it."""
        owed = [0] * len(self.layout.pools)
        for lock in self.tree.locks.open.values():
            owed = [total + more for total, more in zip(owed, lock.owed, strict=True)]
        budget = self.arena.budget
        return [sum(parts) for parts in zip(budget.held, budget.promised, (-pages for pages in owed), strict=True)]

    def _check_neutral(self, before: list[int]) -> None:
        # Only where a full page is shared from now on, less is committed than before.
        for pool, (was, now) in enumerate(zip(before, self.committed(), strict=True)):
            shared = pool in self.tree.locks.full
            assert now <= was if shared else now == was, f"an advance commits {now} pages of pool {pool} after {was}"

    # ---- workings

    def carry_out(self, commit: Commit) -> None:
        """Tell the tree what a commit has evicted."""
        self.forget(commit.evicted)

    def forget(self, evicted: Sequence[Handles]) -> None:
        self.tree.forget(evicted)

    def _wanted(self, runner: Runner, tokens: int) -> Demand:
        pages = []
        for pool, shape in enumerate(self.layout.pools):
            if isinstance(shape.retention, State):
                pages.append(1 - len(runner.own[pool]))
                continue
            last = span(shape, runner.computed, runner.computed + tokens)[1]
            pages.append(max(0, last - runner.first[pool] - len(runner.own[pool])))
        return Demand(pages)

    def _fill(self, runner: Runner, tokens: int, fresh: Sequence[Handles]) -> None:
        runner.check_reads()
        runner.computed += tokens
        for pool, new in enumerate(fresh):
            runner.own[pool] = np.concatenate((runner.own[pool], new))
            shape = self.layout.pools[pool]
            if isinstance(shape.retention, State):
                continue
            for number, handle in enumerate(runner.own[pool].tolist(), runner.first[pool]):
                end = (number + 1) * shape.page_tokens
                if end <= runner.computed:
                    self.content[pool, handle] = (runner.lock.namespace, tuple(runner.tokens[:end]))

    def _own(self, runner: Runner, pool: int, end: int) -> Own:
        # Parts off what goes to the tree; beyond it, pages that left the window are freed.
        shape = self.layout.pools[pool]
        if isinstance(shape.retention, State):
            return Own(0, NO_HANDLES)
        count = max(0, end // shape.page_tokens - runner.first[pool])
        own = Own(runner.first[pool], runner.own[pool][:count])
        runner.own[pool] = runner.own[pool][count:]
        runner.first[pool] += count
        gone = span(shape, runner.computed, runner.computed + 1)[0] - runner.first[pool]
        if gone > 0:
            self.arena.free(runner.lock.grant, pool, runner.own[pool][:gone])
            runner.own[pool] = runner.own[pool][gone:]
            runner.first[pool] += gone
        return own

    def _save_state(self, runner: Runner, end: int) -> list[Handles] | None:
        # A checkpoint where the step ended at a boundary, if there is room for one.
        states = self.tree.shape.states
        if not states or end != runner.computed or end == 0:
            return None
        grant = runner.lock.grant
        demand = grant.demand.plus(Demand(int(pool in states) for pool in range(len(self.layout.pools))))
        if isinstance(self.arena.extend(grant, demand), Refusal):
            return None
        done = self.arena.commit([Order(grant, Demand(int(p in states) for p in range(len(self.layout.pools))))])
        self.carry_out(done)
        for pool in states:
            self.content[pool, int(done.handles[0][pool][0])] = (runner.lock.namespace, tuple(runner.tokens[:end]))
        return list(done.handles[0])

    def check(self) -> None:
        """Raise unless both audits are clean and everything promised can be committed."""
        assert self.arena.audit() == []
        found = self.tree.audit()
        assert found == [], found
        for runner in self.running:
            runner.check_reads()
            assert runner.lock.grant.demand == self.demand_by_the_books(runner), f"the books of {runner.name} are off"

    def demand_by_the_books(self, runner: Runner) -> Demand:
        """Return the price less full pages locked, less window pages charged, plus what is owed."""
        less = [-owed for owed in runner.lock.owed]
        for pool in self.tree.locks.full:
            less[pool] += sum(len(node.pages[pool]) for node in runner.lock.node.path())
        for pool in self.tree.locks.windows:
            less[pool] += int((self.tree.forest.books[pool].charge == runner.lock.id).sum())
        return runner.price.minus(Demand(less))


def lose(world: CacheWorld, pool: int, pages: Sequence[int]) -> None:
    """Let the pages of these numbers in the tree's only path die, as if they had been evicted."""
    nodes = sorted(world.tree.forest.nodes.values(), key=lambda node: node.start)
    gone = np.concatenate([node.pages[pool] for node in nodes])[list(pages)]
    world.arena.evict(pool, gone)
    world.forget([gone if number == pool else NO_HANDLES for number in range(len(world.layout.pools))])
