"""Two schedulers and a perfect exchange between them: nothing is lost, everything is copied at once or kept waiting.

`Pair` plays what `disagg/` does with real machines and links: what one scheduler says becomes an event of the other,
pages are copied between the two fake backends, word by word, and never into a page of a landing that is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from halocline.cache.keys import Namespace
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Sliding
from halocline.params import SamplingParams
from halocline.schedule.events import (
    Abort,
    Accepted,
    Admitted,
    Arrive,
    Computed,
    Failed,
    Landed,
    LandingReady,
    Lost,
    NewToken,
    Offered,
    PagesReady,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    PoolPages,
    Rejected,
    RevokeWanted,
    Sent,
    Update,
)
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import StepPlan
from testing.schedule import World, greedy, prompt

BROKEN = "the backend broke"
PLAIN = Accepted | Admitted | Failed | NewToken | Rejected


@dataclass
class Side(World):
    """A world that keeps what its scheduler says to the other worker."""

    said: deque[Update] = field(default_factory=deque)
    bare_plans: int = 0
    """Plans so far that computed nothing."""

    def plan(self) -> StepPlan | None:
        """Plan a step, with all checks."""
        plan = super().plan()
        assert plan is None or plan.has_work, "a step without work is no step"
        self.bare_plans += plan is not None and not plan.segments
        return plan

    def _take(self, updates: Sequence[Update]) -> None:
        super()._take([update for update in updates if isinstance(update, PLAIN)])
        for update in updates:
            if isinstance(update, LandingReady | PagesReady):
                self.assert_stays(update.pools)
        self.said.extend(updates)

    def bytes_of(self, pool: int, page: int) -> tuple[int, int]:
        """Return where a page's bytes begin and end in the arena."""
        stride = self.layout.pools[pool].stride_bytes
        return page * stride, (page + 1) * stride

    def break_step(self, *, moves_are_done: bool) -> bool:
        """Plan a step and let the backend raise, before its moves or after them; False when there was none."""
        plan = self.plan()
        if plan is None:
            return False
        if moves_are_done:
            self.backend.run(plan)
        self.note_updates(self.scheduler.fail_step(BROKEN))
        return True

    def assert_stays(self, pools: Sequence[PoolPages]) -> None:
        """All pages that were told are pinned in force, and no move that is yet to be done concerns them."""
        step = self.scheduler._outstanding
        told = [self.bytes_of(pool, page) for pool, run in enumerate(pools) for page in run.pages.tolist()]
        for move in () if step is None else step.plan.moves:
            for low, high in (self.bytes_of(move.pool, move.source), self.bytes_of(move.pool, move.target)):
                assert all(high <= first or last <= low for first, last in told), f"told before {move} is done"
        for pool, run in zip(self.arena.pools, pools, strict=True):
            assert (pool.pins[pool.index_at[run.pages]] > 0).all(), f"told, and not pinned: {run}"


class Pair:
    """A worker that computes prompts and one that decodes them."""

    def __init__(
        self,
        here: tuple[ArenaLayout, Rules],
        there: tuple[ArenaLayout, Rules] | None = None,
        caps: tuple[int | None, ...] | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        host_slabs: int = 0,
    ) -> None:
        """`here` is the decoding worker, with a host arena of `host_slabs`, `there` the computing one (default: a
        twin)."""
        self.decode = Side(*here, caps=caps, make_scheduler=make_scheduler, host_slabs=host_slabs)
        self.prefill = Side(*(there or here))
        self.landings: dict[str, LandingReady] = {}
        self.attempts: dict[str, int] = {}
        self.accepted: list[LandingReady] = []
        """Every landing that was told."""
        self.chunks: list[PagesReady] = []
        """Every piece that was told."""
        self.tokens: dict[str, Computed] = {}
        self.sent: list[str] = []
        self.revoked = 0
        """Landings that were asked back for a senior."""
        self.copied_pages = 0
        self._landed: dict[tuple[str, int], set[tuple[int, int]]] = {}
        """By request and attempt: the (pool, page index) that were copied."""
        self.is_cut = False
        """Whether positions do not arrive that the first decode does not read, as from a worker with smaller pages."""
        self.offers_at_once = True
        self.took_at_once = True
        """Whether the sender hears at once that a chunk has arrived; else its pages stay pinned until the end."""

    def submit(self, name: str, tokens: Sequence[int] | int, params: SamplingParams | int, priority: int = 0) -> Update:
        """Ask the decoding worker for an answer whose prompt the other one computes."""
        text = prompt(tokens, len(self.decode.arrivals)) if isinstance(tokens, int) else tuple(tokens)
        wanted = greedy(params) if isinstance(params, int) else params
        event = Arrive(name, text, wanted, 0, priority, Namespace(), route="receive")
        self.decode.arrivals[name] = event
        answer = self.decode.tell(event)[-1]
        if isinstance(answer, Accepted):
            self.prefill.arrivals[name] = event
            told = self.prefill.tell(Arrive(name, text, wanted, 0, priority, Namespace(), route="send"))[-1]
            assert isinstance(told, Accepted), f"{name} is decoded and cannot be computed: {told}"
            self.attempts[name] = 0
            if self.offers_at_once:
                self.offer(name)
        return answer

    def offer(self, name: str) -> None:
        """Let the computing worker offer the next attempt."""
        self.decode.tell(Offered(name, self.attempts[name]))

    def abort(self, name: str) -> None:
        """The client goes: the landing is closed, then both sides end it."""
        self.landings.pop(name, None)
        self.decode.tell(Abort(name))
        self.prefill.tell(PeerReleased(name, self.attempts[name]))

    def lose(self, name: str, *, is_final: bool = False) -> None:
        """Let an attempt end half way: both sides drop it, and a new one is offered unless it was the last."""
        attempt = self.attempts[name]
        self.landings.pop(name, None)
        self.decode.tell(Lost(name, attempt, "the link broke", is_final))
        if is_final:
            self.prefill.tell(PeerReleased(name, attempt))
            return
        self.prefill.tell(PeerRevoked(name, attempt))
        self.attempts[name] += 1
        if self.offers_at_once:
            self.offer(name)

    # ---- what goes to and fro

    def exchange(self) -> bool:
        """Pass on all that was said; whether there was anything."""
        any_said = False
        while self.decode.said or self.prefill.said:
            any_said = True
            while self.decode.said:
                self._from_decode(self.decode.said.popleft())
            while self.prefill.said:
                self._from_prefill(self.prefill.said.popleft())
        return any_said

    def _from_decode(self, update: Update) -> None:
        name = update.request_id
        match update:
            case LandingReady():
                assert name not in self.landings, f"{name} has a landing already"
                assert update.attempt == self.attempts[name], update
                self.landings[name] = update
                self.accepted.append(update)
                self.prefill.tell(PeerAccepted(name, update.attempt, update.start_tokens))
            case RevokeWanted():
                if name in self.landings:
                    self.revoked += 1
                    self.lose(name)

    def _from_prefill(self, update: Update) -> None:
        name = update.request_id
        match update:
            case PagesReady():
                self.chunks.append(update)
                if name in self.landings and update.attempt == self.attempts[name]:
                    self._copy(self.landings[name], update)
                if self.took_at_once:
                    self.prefill.tell(PeerTook(name, update.attempt, update.chunk))
            case Computed():
                self.tokens[name] = update
                if name in self.landings and update.attempt == self.attempts[name]:
                    self.assert_landed(name)
                    del self.landings[name]
                    self.decode.tell(Landed(name, update.attempt, update.token_id, update.logprobs, self.is_cut))
                    self.prefill.tell(PeerReleased(name, update.attempt))
            case Failed() if name in self.attempts:
                if name not in self.landings:  # nobody reads what was told of an attempt that was lost
                    self.prefill.tell(PeerReleased(name, self.attempts[name]))
                    self.decode.tell(Lost(name, self.attempts[name], "the other worker failed it", True))
                    return
                self.landings.pop(name)
                self.decode.tell(Lost(name, self.attempts[name], "the other worker failed it", True))
                self.prefill.tell(PeerReleased(name, self.attempts[name]))
            case Sent():
                self.sent.append(name)

    def _copy(self, landing: LandingReady, ready: PagesReady) -> None:
        for pool, (target, source) in enumerate(zip(landing.pools, ready.pools, strict=True)):
            there, here = self.prefill.backend.pools[pool], self.decode.backend.pools[pool]
            for at, page in enumerate(source.pages.tolist(), source.first_page):
                place = at - target.first_page
                assert 0 <= place < len(target.pages), f"page {at} of pool {pool} is sent, not landed: {landing}"
                to = int(target.pages[place])
                self.decode.backend.claim(pool, np.array([to]))
                here.raw[to], here.deep[to] = there.raw[page], there.deep[page]
                if self.is_cut:
                    self._cut(pool, to, at, len(self.decode.arrivals[landing.request_id].prompt))
                self.copied_pages += 1
                self._landed.setdefault((landing.request_id, landing.attempt), set()).add((pool, at))

    def _cut(self, pool: int, page: int, at: int, fill: int) -> None:
        layout = self.decode.layout.pools[pool]
        if isinstance(layout.retention, Sliding | Chunked):
            lacking = max(0, layout.retention.first_needed(fill) - at * layout.page_tokens)
            self.decode.backend.pools[pool].raw[page, :lacking] = 0xC07
            self.decode.backend.pools[pool].deep[page, :lacking] = 0xC07

    def assert_landed(self, name: str) -> None:
        """Every page of the landing was sent, once all chunks are told."""
        landing = self.landings[name]
        wanted = {(pool, run.first_page + at) for pool, run in enumerate(landing.pools) for at in range(len(run.pages))}
        assert self._landed.get((name, landing.attempt), set()) == wanted, f"{name} landed with other pages than asked"

    # ---- steps

    def step(self) -> bool:
        """Step both workers and pass on what they say; whether anything happened."""
        moved = self.exchange()
        for side in (self.prefill, self.decode):
            moved |= side.step()
            moved |= self.exchange()
        return moved

    def run(self, most_steps: int = 2000) -> Pair:
        """Step until all work is done."""
        for _ in range(most_steps):
            if not (self.decode.scheduler.has_work or self.prefill.scheduler.has_work):
                return self
            assert self.step(), f"stuck: {self.decode.scheduler.reasons()} / {self.prefill.scheduler.reasons()}"
        raise AssertionError(f"still at work: {self.decode.scheduler.reasons()} / {self.prefill.scheduler.reasons()}")

    def run_until(self, reached: Callable[[], bool], most_steps: int = 500) -> Pair:
        """Step until `reached` is true."""
        for _ in range(most_steps):
            if reached():
                return self
            assert self.step() or reached(), f"stuck: {self.decode.scheduler.reasons()}"
        raise AssertionError("not reached")

    def assert_all_finished(self) -> Pair:
        """Everybody got the oracle's tokens, and nothing is held or pinned on either side."""
        self.decode.assert_all_finished()
        for side in (self.decode, self.prefill):
            assert not side.arena.pins.open, [pin.owner for pin in side.arena.pins.open]
            assert side.is_empty, f"left behind: {side.arena.figures()}"
        return self


def state_of(side: World, name: str) -> str | None:
    """Return the state of a request, None once it has ended."""
    request = side.scheduler._roster.live.get(name)
    return None if request is None else request.state.value
