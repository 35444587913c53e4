"""One world of workers as it runs, with every law checked.

no hang      every request ends, with the right tokens or with an error that was told, in bounded simulated time
patience     no lease ends of slow lines alone, where workers have one role each and nobody pushes in by priority
no leak      once all is quiet nothing is held but the floor and the cache; audits are clean after every step
fence        nobody writes into pages that are not his landing's any more
L11          every output is the oracle's without pages; one that was cut short is a beginning of it
L12          the digest of all that happened depends on nothing but the seed
"""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from halocline.disagg.network import Network
from halocline.faults.sketch import LATENCY_SECONDS, LEASE_SECONDS, VOCAB, Client, Sketch, WorkerSketch, draw, slowed
from halocline.faults.worker import BrokenLawError, Makers, Worker
from halocline.schedule.events import Abort, Accepted, Arrive, Failed, NewToken, Rejected, Update
from halocline.sim.oracle import reference

MOST_FAULTS = 60
"""No world has more."""
TICK_SECONDS = LEASE_SECONDS / 16
WAKE_SECONDS = 0.001
QUIET_SECONDS = 120 * LEASE_SECONDS
"""So long after the last fault and the last arrival everything must have ended."""


@dataclass
class Asked:
    """One request and what its client has been told."""

    client: Client
    life: Worker | None = None
    limit: int = 0
    output: list[int] = field(default_factory=list)
    end: str | None = None


@dataclass(frozen=True)
class Story:
    """What came of a world."""

    seed: int
    faults: dict[str, int]
    requests: int
    ends: dict[str, int]
    seconds: float
    steps: int
    totals: dict[str, int]
    digest: str
    fault: str | None
    details: str = ""
    breakdown: float = 0.0
    """As it was asked for."""

    @property
    def fault_count(self) -> int:
        """How many faults were injected."""
        return sum(self.faults.values())

    def line(self) -> str:
        """Return the story in one line."""
        if self.fault is not None:
            return f"seed {self.seed}: {self.fault}\n  {command(self.seed, self.breakdown)}"
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"seed {self.seed}: {self.fault_count} faults ({faults}); {self.requests} requests: {ends}; "
            f"{self.seconds:.1f} s, {self.steps} steps, digest {self.digest}"
        )


def command(seed: int, breakdown: float = 0.0) -> str:
    """Return the line that shows a world again."""
    return f"python -m halocline.faults --seed {seed} --trace" + (f" --breakdown {breakdown}" if breakdown else "")


class World:
    """All workers, their network and their clients."""

    def __init__(
        self,
        sketch: Sketch,
        most_faults: int = MOST_FAULTS,
        makers: Makers | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.sketch = sketch
        self.asked = {client.name: Asked(client) for client in sketch.clients}
        self._makers = makers or Makers()
        self._random = Random(f"what strikes in {sketch.seed}")
        self.network = Network(
            Random(f"network of {sketch.seed}"),
            sketch.weather,
            most_faults,
            latency_seconds=LATENCY_SECONDS,
            lease_seconds=LEASE_SECONDS,
            slow_bytes=max(_largest_part_bytes(each) for each in sketch.workers),
            strike=self._strike,
        )
        self.workers: dict[str, Worker] = {}
        self.steps = 0
        self.totals: dict[str, int] = {}
        self._lives = 0
        self._unended = len(self.asked)
        self._digest = hashlib.sha256()
        self._note = note
        self._quiet_since = 0.0
        for each in sketch.workers:
            self._start(each.address)
        for client in sketch.clients:
            self.network.at(client.seconds, partial(self._arrive, self.asked[client.name]))

    @property
    def now(self) -> float:
        """Seconds of simulated time."""
        return self.network.now

    # ---- workers

    def _start(self, address: str) -> None:
        sketch = next(each for each in self.sketch.workers if each.address == address)
        self._lives += 1
        worker = Worker(sketch, f"life {self._lives}", self.network, self._makers)
        self.workers[address] = worker
        worker.post.on_news = partial(self._hurry, worker)
        self._turn_at(worker, self.now)

    def _turn_at(self, worker: Worker, seconds: float) -> None:
        """Let a worker's next turn be at a time, whatever was planned before."""
        worker.turn += 1
        self.network.at(seconds, partial(self._turn, worker, worker.turn))

    def _hurry(self, worker: Worker) -> None:
        """Let a worker that waits for its next tick turn soon: something has come for it."""
        if worker.plan is None:
            self._turn_at(worker, self.now + WAKE_SECONDS)

    def _turn(self, worker: Worker, number: int) -> None:
        """Let a worker hear and plan, and a step later carry out."""
        if not worker.is_current or number != worker.turn:
            return
        if worker.post.is_stopped:
            worker.post.held.append(partial(self._wake, worker))
        elif worker.begin(self.now):
            self.network.at(self.now + worker.sketch.step_seconds, partial(self._finish, worker))
        else:
            self._finish(worker)

    def _wake(self, worker: Worker) -> None:
        """Go on after a stop; the links, which have threads of their own, may be sooner."""
        self._turn_at(worker, self.now + self._random.random() * 4 * LATENCY_SECONDS)

    def _finish(self, worker: Worker) -> None:
        if not worker.is_current:
            return
        if worker.post.is_stopped:
            worker.post.held.append(partial(self._finish, worker))
            return
        computed = worker.plan is not None
        self._take(worker, worker.finish(self.now))
        if computed:
            self.steps += 1
            self._check(worker)
        is_busy = computed or worker.post.inbox or worker.inbox
        self._turn_at(worker, self.now + (0.0 if is_busy else TICK_SECONDS))

    def _strike(self, kind: str, address: str) -> None:
        worker = self.workers[address]
        if not worker.is_current or worker.post.is_stopped:
            return
        self._record(kind, address)
        if kind == "breakdown":
            worker.breakdown = self._random.choice(("before", "after"))
        elif kind == "crash":
            worker.is_current = False
            self.network.crash(address, is_silent=self._random.random() < 0.3)
            self._gather(worker)
            for asked in self.asked.values():
                if asked.life is worker and asked.end is None:
                    self._end(asked, "died")
            self.network.at(self.now + self._random.choice((0.1, 1.0, 3.0)), partial(self._start, address))
        else:
            self.network.stop(address)
            seconds = self._random.choice((0.2, 0.9, 1.3, 4.0)) * LEASE_SECONDS
            self.network.at(self.now + seconds, partial(self.network.wake, worker.post))

    def _gather(self, worker: Worker) -> None:
        for name, count in worker.exchange.figures().totals.items():
            self.totals[name] = self.totals.get(name, 0) + count

    # ---- clients

    def _arrive(self, asked: Asked) -> None:
        client = asked.client
        worker = self.workers[client.worker]
        if not worker.is_current:
            self._end(asked, "refused")
            return
        asked.life = worker
        if client.prefill_at:
            worker.exchange.assign(client.name, client.prefill_at)
        route = "receive" if client.prefill_at else "here"
        worker.inbox.append(Arrive(client.name, client.prompt, client.params, 0, client.priority, route=route))  # type: ignore[arg-type]
        self._hurry(worker)
        if client.abort_seconds is not None:
            self.network.at(self.now + client.abort_seconds, partial(self._abort, asked, worker))

    def _abort(self, asked: Asked, worker: Worker) -> None:
        if asked.end is None and worker.is_current:
            worker.inbox.append(Abort(asked.client.name))
            self._hurry(worker)

    def _take(self, worker: Worker, updates: list[Update]) -> None:
        for update in updates:
            self._record(worker.sketch.address, update)
            asked = self.asked[update.request_id]
            match update:
                case Accepted():
                    asked.limit = update.max_tokens
                case NewToken():
                    if asked.end is not None:
                        raise BrokenLawError(f"{update} came after its end ({asked.end})")
                    if update.token_id is not None:
                        asked.output.append(update.token_id)
                    if update.finish_reason is not None:
                        self._end(asked, update.finish_reason)
                case Failed() if update.code == "prefill_lost" and self.network.fault_count:
                    self._end(asked, "lost")
                case Failed() if update.request_id in worker.may_fail:
                    self._end(asked, "failed")
                case Failed() | Rejected():
                    raise BrokenLawError(f"{update.request_id} is valid and cannot finish: {update.message}")
                case _:
                    pass

    def _end(self, asked: Asked, end: str) -> None:
        asked.end = end
        self._unended -= 1
        self._record(asked.client.name, end, asked.output)
        if end in ("refused", "died") and not asked.output:
            return
        retentions = self.sketch.retentions
        params, eos = asked.client.params, self.sketch.eos_token_ids
        wanted = reference(retentions, asked.client.prompt, asked.limit, VOCAB, params=params, eos=eos)
        if asked.output != (wanted if end in ("stop", "length") else wanted[: len(asked.output)]):
            raise BrokenLawError(f"L11: {asked.client.name} ({end}) got {asked.output}, not {wanted}")

    # ---- laws

    def run(self) -> None:
        """Run to the end. Raises BrokenLawError, or whatever the program raises when it trips over itself."""
        faults = -1
        while True:
            if self.network.fault_count != faults:
                faults, self._quiet_since = self.network.fault_count, self.now
            if self._unended == 0 and self._is_quiet():
                break
            last = max(self._quiet_since, self.sketch.clients[-1].seconds)
            if self.now > last + QUIET_SECONDS:
                raise BrokenLawError(f"no hang: {self._still_going()}")
            when = self.network.next_time()
            assert when is not None, "no worker turns any more"
            self.network.advance(when)
        for worker in self.workers.values():
            self._gather(worker)
            self._check(worker)
            self._record(worker.sketch.address, worker.steps, worker.arena.figures().cached_bytes)
        lost = self.totals["leases_lost"]
        if lost and set(self.network.faults) <= {"slow"} and self.sketch.is_calm:
            raise BrokenLawError(f"patience: {lost} leases were lost, and nobody was more than slow")

    def _is_quiet(self) -> bool:
        return all(
            worker.is_current
            and not worker.post.is_stopped
            and worker.plan is None
            and worker.is_idle
            and not worker.leftovers()
            for worker in self.workers.values()
        )

    def _still_going(self) -> str:
        open_ = [name for name, asked in self.asked.items() if asked.end is None]
        words = [f"requests {open_} have not ended"] if open_ else []
        for address, worker in self.workers.items():
            left = [
                *worker.leftovers(),
                *(f"{name}: {why.code} {why.detail}" for name, why in worker.scheduler.reasons().items()),
            ]
            if left:
                words.append(f"{address}: " + ", ".join(left))
        return "; ".join(words)

    def _check(self, worker: Worker) -> None:
        found = worker.audit()
        if found:
            raise BrokenLawError("; ".join(f"{violation.law}: {violation.message}" for violation in found[:3]))

    def _record(self, *words: object) -> None:
        text = repr(words)
        self._digest.update(text.encode())
        if self._note is not None:
            self._note(f"{self.now:9.3f} {text}")

    def story(self, fault: str | None = None, details: str = "") -> Story:
        """Return what came of it so far."""
        ends = [str(asked.end) for asked in self.asked.values()]
        counts = {end: ends.count(end) for end in dict.fromkeys(ends)}
        digest = self._digest.hexdigest()[:16]
        faults = dict(self.network.faults)
        return Story(
            self.sketch.seed, faults, len(ends), counts, self.now, self.steps, self.totals, digest, fault, details
        )


def _largest_part_bytes(worker: WorkerSketch) -> int:
    """Return what travels under one number at most: a page cannot be cut."""
    return max(worker.most_part_bytes, *(pool.page_bytes for pool in worker.layout.pools))


@dataclass
class Tally:
    """What came of many worlds."""

    worlds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[Story] = field(default_factory=list)
    digest: str = ""
    """Of the digests of all worlds, in order."""

    @property
    def fault_count(self) -> int:
        """How many faults were injected."""
        return self.faults.total()

    def lines(self) -> list[str]:
        """Return broken laws, and what was explored, in words."""
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return [
            *(story.line() for story in self.broken),
            f"{self.fault_count} faults ({faults}) in {self.worlds} worlds; {self.ends.total()} requests: {ends}",
            f"{len(self.broken)} worlds broke a law; digest {self.digest}",
        ]


def explore_many(first_seed: int, faults: int, most_faults: int = MOST_FAULTS, breakdown: float = 0.0) -> Tally:
    """Run one world after the other until so many faults were injected; never more than one world per fault."""
    tally, digest = Tally(), hashlib.sha256()
    while tally.fault_count < faults and tally.worlds < faults:
        story = explore(first_seed + tally.worlds, most_faults, breakdown=breakdown)
        tally.worlds += 1
        tally.faults.update(story.faults)
        tally.ends.update(story.ends)
        digest.update(story.digest.encode())
        if story.fault is not None:
            tally.broken.append(story)
    tally.digest = digest.hexdigest()[:16]
    return tally


def explore(
    seed: int,
    most_faults: int = MOST_FAULTS,
    *,
    breakdown: float = 0.0,
    is_slow: bool = False,
    makers: Makers | None = None,
    note: Callable[[str], None] | None = None,
) -> Story:
    """Run the world of a seed and return what came of it; a broken law is its `fault` and not raised.

    `is_slow`: with slow lines instead of its own weather, see `sketch.slowed`.
    """
    sketch = draw(seed, breakdown)
    world = World(slowed(sketch) if is_slow else sketch, most_faults, makers, note)
    try:
        world.run()
    except BrokenLawError as broken:
        return replace(world.story(str(broken)), breakdown=breakdown)
    except Exception as defect:  # what the program checks of itself, and where it trips
        told = world.story(f"{type(defect).__name__}: {defect}", traceback.format_exc())
        return replace(told, breakdown=breakdown)
    return world.story()
