"""The prefix cache: what is kept when a request leaves, and the only owner of cached pages. The facade of cache/.

    match ----> Match ----> lock ----> Lock ----> advance ... advance ----> close      one request's life
    (pure)                    `-> Refusal         (after every step)

    Commit.evicted ----> forget                                                         the arena's word, each time

A request opens a `Lock` even when nothing is cached for it: its path ends at the root then. It holds its own pages as
ever; what it gives the tree stays locked by it until the window has passed it, or until it leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halocline.cache.audit import audit
from halocline.cache.audit_marks import audit_marks
from halocline.cache.decay import Decay
from halocline.cache.forest import Forest
from halocline.cache.ghosts import Digester, Digests
from halocline.cache.insert import Advance, Inserted, Inserter
from halocline.cache.keys import TOKEN_BYTES, Key
from halocline.cache.locks import Lock, LockBook
from halocline.cache.marks import BRANCH_SLACK_TOKENS, Marks
from halocline.cache.match import Match, Resume, match
from halocline.cache.node import Shape
from halocline.cache.standby import Standby
from halocline.errors import InvariantError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand
from halocline.memory.grant import Handles, Refusal


class Tree:
    """The radix trees of one arena."""

    def __init__(
        self,
        arena: Arena,
        granule_tokens: int | None = None,
        granule_bytes: int | None = None,
        slack_tokens: int = BRANCH_SLACK_TOKENS,
    ) -> None:
        """Cache in `arena`; keys have one int32 per token unless `granule_bytes` says how many bytes a granule has."""
        tokens = arena.layout.granule_tokens if granule_tokens is None else granule_tokens
        self.arena = arena
        arena.take_loose_as_alike()
        self.shape = Shape(arena.layout, tokens, tokens * TOKEN_BYTES if granule_bytes is None else granule_bytes)
        self.forest = Forest(arena, self.shape)
        self._resume = Resume(arena.layout, self.shape)
        self.locks = LockBook(arena, self.forest, self._resume)
        self._inserter = Inserter(arena, self.forest, self.locks, self._resume)
        self.marks = Marks(arena, self.forest, self.locks, self._resume, slack_tokens)
        self._standby = Standby(arena, self.forest, self.locks, self._resume, self.marks)
        self._decay = Decay(arena, self.forest, self.locks.full, self.marks)

    # ---- questions

    def first_page(self, pool: int, boundary_tokens: int) -> int:
        """Return the first page of a positional `pool` that position `boundary_tokens` reads."""
        return self._resume.first_page(pool, boundary_tokens)

    def match(self, key: Key, limit_tokens: int | None = None) -> Match:
        """Return the longest boundary, at most `limit_tokens`, at which `key` can be resumed. Changes nothing."""
        return match(self._resume, self.shape, key, self.forest.walk(key), limit_tokens)

    def standing(self, key: Key) -> tuple[Match, Demand | None]:
        """Return the match of `key`, and how much less than it is told `lock` would ask for there: others' locks.

        None where that is not known before the pages themselves are looked at.
        """
        walk, most = self.forest.walk(key), max(0, key.tokens - 1) // self.shape.granule_tokens
        found = match(self._resume, self.shape, key, walk, None)
        if walk.granules > most:
            walk = self.forest.walk(key, most)
        return found, self.locks.locked_of(walk, found.boundary_tokens // self.shape.granule_tokens)

    def boundaries(self, found: Match) -> Iterator[int]:
        """Yield all boundaries in tokens at which the prompt of `found` can be resumed, longest first, 0 last."""
        walk = self.forest.walk(found.key, found.boundary_tokens // self.shape.granule_tokens)
        return (granules * self.shape.granule_tokens for granules in self._resume.boundaries(walk, walk.granules))

    def hot_demand(self, boundary_tokens: int, demand: Demand, *, hand_over: bool = False) -> Demand:
        """Return what resuming at `boundary_tokens` takes in all, locked pages included, if nobody else locks them.

        For the question whether an empty arena holds it: a locked page stands in place of one of `demand`, but a locked
        checkpoint stands beside the working state. So hot may cost more than cold, and a shorter boundary may do. With
        `hand_over` the checkpoint is the working state, and hot costs what cold does: `lock` with the same word.
        """
        extra = int(boundary_tokens > 0 and not hand_over)
        return Demand(pages + extra * (pool in self.shape.states) for pool, pages in enumerate(demand))

    def audit(self) -> list[Violation]:
        """Recount everything from scratch; an empty list means that the tree's laws hold."""
        return [
            *audit(self.arena, self.forest, self.locks),
            *audit_marks(self.arena, self.forest, self.locks, self.marks),
            *self._standby.audit(),
        ]

    # ---- a request's life

    def lock(
        self, found: Match, boundary_tokens: int, owner: str, demand: Demand, *, hand_over: bool = False
    ) -> Lock | Refusal:
        """Lock what resuming at `boundary_tokens` reads and reserve the rest of `demand`, all or nothing.

        Full pages are locked as far as the prompt finds them, all but its last token: perhaps beyond the boundary, see
        `Lock.full_tokens`.
        `demand` is the whole price of the request from that boundary on; what locked pages cover is taken off here.
        With `hand_over`, a checkpoint that nobody else locks or reads leaves the tree and is the request's working
        state (`Lock.handed`): for when a copy beside it does not fit, because others can resume there no more.
        Raises InvariantError if the tree has changed since `found` and cannot resume there any more.
        """
        unit = self.shape.granule_tokens
        granules, key = boundary_tokens // unit, found.key
        walk = self.forest.walk(key, max(0, key.tokens - 1) // unit)
        gone = "the prefix" if walk.granules < granules else self._resume.missing(walk, granules)
        if gone is not None or boundary_tokens % unit or boundary_tokens >= key.tokens:
            raise InvariantError([f"{owner!r} locks up to {boundary_tokens}, a boundary of a stale match: {gone}"])
        takes = hand_over and self.locks.is_sole(walk, granules)
        if takes:
            demand = demand.minus(Demand(int(pool in self.shape.states) for pool in range(self.shape.pools)))
        lock = self.locks.lock(owner, walk, granules, self.forest.root(key.namespace), demand)
        if isinstance(lock, Refusal):
            self.forest.drop_root(key.namespace)
            return lock
        self._decay.end_parted()
        lock.namespace = key.namespace
        lock.revealed_tokens = found.full_tokens
        resumed = self.forest.end_at(lock.node, granules)
        if takes:
            self.locks.take_states(lock)
            self.marks.lift(resumed)
        elif granules:
            self.marks.use(resumed, self._digests(lock, key, granules))
        return lock

    def advance(self, step: Sequence[Advance]) -> list[Inserted]:
        """Take the requests of a step forward: insert their whole granules, end what their windows have passed."""
        done = self._inserter.advance(step)
        self._decay.end_parted()
        for each, inserted in zip(step, done, strict=True):
            if each.protect or inserted.branch is not None:
                self._protect(each, inserted)
        self.marks.unlocked(self.locks.unlocked())
        if self._standby.is_needed:
            for each in step:
                self._standby.follow(each)
        return done

    def drop_states(self, lock: Lock) -> None:
        """End the lock of the checkpoint that a request resumed from: it has been copied."""
        self.locks.drop_states(lock)
        self.marks.unlocked(self.locks.unlocked())

    def pass_to(self, lock: Lock, tokens: int) -> None:
        """End the locks of the checkpoint and of window pages that position `tokens` does not read.

        For a request that computes nothing up to `tokens`: what it lacks up to there comes from elsewhere.
        """
        self.locks.drop_states(lock)
        self.locks.pass_windows([(lock, tokens)])
        self.marks.unlocked(self.locks.unlocked())

    def loosened(self, handles: Sequence[Handles]) -> None:
        """Be told of pages of the tree (per pool) that became evictable because a pin has ended."""
        self.marks.unlocked(handles)

    def close(self, lock: Lock) -> None:
        """End `lock`: what only it locked is evictable. The grant and the request's own pages are the caller's."""
        node = lock.node
        self._standby.end(lock)
        self.locks.close(lock)
        self.marks.unlocked(self.locks.unlocked())
        self._decay.prune(node)
        self.forest.drop_root(lock.namespace)

    def _protect(self, each: Advance, inserted: Inserted) -> None:
        # The end of a prompt or an output; and the branch where this request left what another one had brought.
        lock, branch = each.lock, inserted.branch
        if branch is not None and branch.end > lock.resumed:
            prefix = self._digests(lock, each.key, branch.end)
            self.marks.mark(branch, prefix, proven=False, resumed=lock.resumed)
        if each.protect and lock.inserted:
            self._standby.end(lock)
            prefix = self._digests(lock, each.key, lock.inserted)
            node = self.forest.end_at(lock.node, lock.inserted)
            proven, end = lock.resumed > 0, each.computed_tokens
            self.marks.mark(node, prefix, proven=proven, resumed=lock.resumed, end_tokens=end)

    def _digests(self, lock: Lock, key: Key, granules: int) -> Digests:
        # Of a prefix that only grows while its lock is open.
        if lock.digester is None:
            lock.digester = Digester(key.namespace)
        return lock.digester.digests(key.data, granules, self.shape.granule_bytes)

    # ---- eviction

    def forget(self, died: Sequence[Handles]) -> list[Handles]:
        """Take pages that a commit evicted out of the tree, and what can never be matched without them.

        Call it with every `Commit.evicted`, before anything else; returns what it evicted beyond, per pool.
        """
        return self._decay.forget(died)
