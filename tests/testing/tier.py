"""A tree with a second level: bytes by place in both arenas, moved by nothing but what a step's plan orders.

What a page contains is all tokens up to its end. A copy that is made too late, from the wrong place or over a page that
is still read shows as wrong contents in `check`, which believes the keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halocline.cache.keys import EVERYBODY, Namespace, token_key
from halocline.cache.tier import Hold, Tier
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.demand import resident
from halocline.memory.grant import NO_HANDLES, Commit, Handles, Refusal
from halocline.memory.host import HostArena, HostCosts, HostMoves
from halocline.memory.retention import State
from testing.cache import CacheWorld, Runner, TokenRun

Bytes = list[dict[int, object]]


class LoadedRunner(Runner):
    """A request whose prefix is loaded: it reads nothing before that."""

    def check_reads(self) -> None:
        """Look at what the next position reads, once it is there."""
        if self.name not in self.world.loads:
            super().check_reads()


class TieredWorld(CacheWorld):
    """Requests on two levels."""

    def __init__(self, arena: Arena, host_slabs: int, slack_tokens: int = 0, costs: HostCosts | None = None) -> None:
        super().__init__(arena, slack_tokens)
        self.host = HostArena(arena.layout, host_slabs * arena.layout.slab_bytes)
        self.tier = Tier(self.tree, self.host, costs)
        self.loads: dict[str, Hold] = {}
        """By owner: loads that no step has carried out."""
        self.on_device: Bytes = [{} for _ in arena.pools]
        self.on_host: Bytes = [{} for _ in arena.pools]
        self.loaded_tokens = 0

    def enter(
        self,
        tokens: TokenRun,
        output: int = 1,
        namespace: Namespace = EVERYBODY,
        limit: int | None = None,
        hand_over: bool = False,
    ) -> Runner | None:
        """Come in by a load where the host has more of it."""
        found = self.tree.match(token_key(tokens, namespace), limit)
        offer = self.tier.offer(found)
        if offer.verdict != "host":
            return super().enter(tokens, output, namespace, limit, hand_over)
        boundary = offer.boundary_tokens
        self.price = resident(self.layout, len(tokens), output, boundary)
        self.count += 1
        lock = self.tree.lock(found, 0, f"request-{self.count}", self.price)
        if isinstance(lock, Refusal):
            return None
        runner = LoadedRunner(self, lock.grant.owner, list(tokens), len(tokens) + output, lock)
        runner.computed = runner.resumed_at = boundary
        for pool in self.tree.locks.windows:
            runner.first[pool] = self.tree.first_page(pool, boundary)
        self.loads[runner.name] = self.tier.hold(offer, runner.name, lock.full_tokens)
        self.running.append(runner)
        self.hits += boundary
        self.loaded_tokens += boundary - found.boundary_tokens
        self.asked += len(tokens)
        return runner

    def leave(self, runner: Runner) -> None:
        """End a request, and the load that it waits for."""
        if runner.name in self.loads:
            self.tier.end(self.loads.pop(runner.name))
        super().leave(runner)

    # ---- a step

    def carry_out(self, commit: Commit) -> None:
        """Do what the plan orders before the forward, in its order: the host's work, then the moves."""
        self.tier.forget(commit.evicted, commit.moves)
        for work in self.host.take_work():
            if isinstance(work, HostMoves):
                _move(self.on_host, work.moves)
                continue
            for source, target in zip(work.device_pages.tolist(), work.host_pages.tolist(), strict=True):
                self.on_host[work.pool][target] = self.on_device[work.pool].get(source)
        _move(self.on_device, commit.moves)

    def forget(self, evicted: Sequence[Handles]) -> None:
        """Whatever dies without a commit's moves is written back all the same."""
        self.carry_out(Commit((), (), tuple(evicted)))

    def _fill(self, runner: Runner, tokens: int, fresh: Sequence[Handles]) -> None:
        hold = self.loads.get(runner.name)
        if hold is None:
            super()._fill(runner, tokens, fresh)
        else:
            for pool, new in enumerate(fresh):
                runner.own[pool] = np.concatenate((runner.own[pool], new))
            self._load(runner, hold)
            Runner.check_reads(runner)
            super()._fill(runner, tokens, [NO_HANDLES] * len(fresh))
        self._write(runner)

    def _load(self, runner: Runner, hold: Hold) -> None:
        tables = []
        for pool, own in enumerate(runner.own):
            tables.append((runner.first[pool], self.arena.physical(pool, own)))
        for work in self.tier.loads(hold, tables):
            for source, target in zip(work.host_pages.tolist(), work.device_pages.tolist(), strict=True):
                self.on_device[work.pool][target] = self.on_host[work.pool].get(source)
        for pool, own in enumerate(runner.own):
            for handle, place in zip(own.tolist(), tables[pool][1].tolist(), strict=True):
                self.content[pool, handle] = self.on_device[pool].get(place)

    def _write(self, runner: Runner) -> None:
        # The forward: what is computed stands in the places of the request's own pages.
        for pool, own in enumerate(runner.own):
            for handle, place in zip(own.tolist(), self.arena.physical(pool, own).tolist(), strict=True):
                self.on_device[pool][place] = self.content.get((pool, handle))

    def advance(self, runners: Sequence[Runner], checkpoint: bool = True) -> None:
        """Let loads arrive, too."""
        super().advance(runners, checkpoint)
        for runner in runners:
            hold = self.loads.pop(runner.name, None)
            if hold is not None:
                self.tier.arrive(hold, runner.lock, token_key(runner.tokens, runner.lock.namespace))
        for pool in self.tree.shape.states:  # checkpoints that were saved
            for node in self.tree.forest.nodes.values():
                for handle in node.pages[pool][node.holds(pool)].tolist():
                    place = int(self.arena.physical(pool, np.array([handle]))[0])
                    self.on_device[pool][place] = self.content[pool, handle]

    # ---- what must hold

    def check(self) -> None:
        """Raise unless all audits are clean and every page of either tree has what its key says."""
        super().check()
        found = [*self.host.arena.audit(), *self.tier.audit()]
        assert found == [], found
        assert not self.host.has_work, "work that no step carries out"
        self.check_bytes(self.tree, self.on_device)
        self.check_bytes(self.tier.tree, self.on_host)

    def check_bytes(self, tree: Tree, stored: Bytes) -> None:
        """Look at the contents of every page that the nodes of `tree` own."""
        for node in tree.forest.nodes.values():
            path = node.path()
            root = path[0].parent
            assert root is not None
            tokens = tuple(np.frombuffer(b"".join(each.key for each in path), np.uint32).tolist())
            begin = node.start * tree.shape.granule_tokens
            for pool, shape in enumerate(tree.arena.layout.pools):
                there = node.holds(pool)
                places = tree.arena.physical(pool, node.pages[pool][there]).tolist()
                for number, place in zip(np.flatnonzero(there).tolist(), places, strict=True):
                    end = begin + (number + 1) * shape.page_tokens
                    end = len(tokens) if isinstance(shape.retention, State) else end
                    got, where = stored[pool].get(place), "host" if tree is self.tier.tree else "device"
                    assert got == (root.namespace, tokens[:end]), f"{where}: pool {pool} has {got} at {tokens[:end]}"


def _move(stored: Bytes, moves: Sequence[object]) -> None:
    taken = [(move.pool, move.target, stored[move.pool].get(move.source)) for move in moves]  # one parallel pass
    for pool, target, content in taken:
        stored[pool][target] = content
