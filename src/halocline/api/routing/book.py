"""What the router knows of its workers: who lives, what each has free, what it was sent. No clock, no I/O.

    unknown     it has not answered yet
    up          it gets requests
    unwell      it answers, and says that it cannot serve: draining, stalled, its engine dead
    down        it does not answer
    misfit      it answers and must not be used: another role, another model, another token

Only `up` gets requests. Every answer to a probe is judged anew, so a restarted worker comes back by itself; its epoch
is another one, and whatever its former life was sent is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from halocline.api.routing.affinity import Beginning, Seen
from halocline.api.routing.choice import DecodeCandidate, PrefillCandidate, choose_decode, choose_prefill

Side = Literal["prefill", "decode"]
State = Literal["unknown", "up", "unwell", "down", "misfit"]

SETTLE_SECONDS = 1.0
"""A worker's figures may not tell yet of what it was sent in the last second."""
PAIR_SECONDS = 30.0
"""After a prompt was lost between two workers, they are not paired for so long."""
WORDS_CHARACTERS = 300


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker answers to GET /v1/worker; unknown fields are ignored."""

    role: Literal["both", "prefill", "decode"]
    epoch: str
    """A random name of this life of the process."""
    model: str
    fingerprint: str = ""
    """Of everything that must be equal on both sides of a transfer, page lengths aside."""
    max_model_len: int = 0
    link_address: str = ""
    """Where it listens for other workers; empty where it does not."""
    status: str = "ok"
    message: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    """Of its arena: what a new request could have."""
    token_bytes: int = 0
    """Roughly the bytes of one token; 0: not known."""
    waiting: int = 0
    running: int = 0

    @property
    def serves(self) -> tuple[str, str]:
        """What must be the same on all workers."""
        return self.model, self.fingerprint


@dataclass(frozen=True, slots=True)
class Load:
    """What one request means to whoever takes it, as far as its body tells."""

    beginning: Beginning
    tokens: int
    """Rough guess of prompt and output together."""


@dataclass(slots=True)
class Worker:
    """One worker on one side of the router, in all its lives."""

    url: str
    side: Side
    name: str
    """How clients are told of it: they learn no addresses."""
    state: State = "unknown"
    reason: str = "it has not answered yet"
    report: Report | None = None
    """The last one, also of a worker that is down."""
    seen_at: float | None = None
    """When it last answered."""
    seen: Seen = field(default_factory=Seen)
    flights: dict[int, Flight] = field(default_factory=dict)
    restarts: int = 0

    @property
    def is_up(self) -> bool:
        """Whether it gets requests."""
        return self.state == "up"

    @property
    def is_misfit(self) -> bool:
        """Whether it answers and must not be used."""
        return self.state == "misfit"

    @property
    def epoch(self) -> str:
        """Its present life; empty before it was ever seen."""
        return self.report.epoch if self.report else ""

    @property
    def free_bytes(self) -> int:
        """What it said to be free, less what was sent since."""
        assert self.report is not None, f"{self.url} has never said what is free"
        return self.report.free_bytes - sum(each.need_bytes for each in self.flights.values() if each.is_recent)

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of prompts that it was sent and has not yet computed."""
        return sum(each.work_bytes for each in self.flights.values())


@dataclass(slots=True)
class Flight:
    """One attempt of one request at one worker; a remote prefill is a flight of its own at the prefill worker."""

    number: int
    worker: Worker
    epoch: str
    began_at: float
    need_bytes: int = 0
    """At a decode worker: what it may need there."""
    work_bytes: int = 0
    """At a prefill worker: what it has still to compute."""
    is_recent: bool = True
    """Whether the worker's last figures may not tell of it yet."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Where an attempt goes."""

    decode: Worker
    prefill: Worker | None
    flights: tuple[Flight, ...]


class Book:
    """All workers; times in seconds of one monotonic clock."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str], lost_seconds: float) -> None:
        self._lost_seconds = lost_seconds
        self.prefill = [Worker(url, "prefill", f"prefill-{i}") for i, url in enumerate(prefill)]
        self.decode = [Worker(url, "decode", f"decode-{i}") for i, url in enumerate(decode)]
        self._serves: tuple[str, str] | None = None
        self._flights = 0
        self._parted: dict[tuple[str, str], float] = {}
        """Pairs of epochs that lost a prompt between them, and until when they are kept apart."""

    @property
    def workers(self) -> list[Worker]:
        """Both sides."""
        return self.decode + self.prefill

    @property
    def model(self) -> str | None:
        """The model that is served; None before a worker answered."""
        return None if self._serves is None else self._serves[0]

    # ---- what workers say, or do not

    def answered(self, worker: Worker, report: Report, now: float) -> None:
        """Take in a worker's answer to a probe."""
        if worker.report is not None and worker.report.epoch != report.epoch:
            worker.seen.clear()
            worker.restarts += 1
        worker.report, worker.seen_at = report, now
        for flight in worker.flights.values():
            flight.is_recent = flight.is_recent and flight.began_at > now - SETTLE_SECONDS
            if not flight.is_recent and not report.waiting + report.running:
                # It has nothing to do, so this was computed: the router sees first tokens of streams only.
                flight.work_bytes = 0
        worker.state, worker.reason = self._judge(worker, report)

    def refused(self, worker: Worker, reason: str, now: float) -> None:
        """Take in that a worker answers, but not as one that this router may use."""
        worker.seen_at = now
        worker.state, worker.reason = "misfit", reason[:WORDS_CHARACTERS]

    def missed(self, worker: Worker, reason: str) -> None:
        """Take in that a worker did not answer, or broke off; it is back when it answers a probe."""
        worker.state, worker.reason = "down", reason[:WORDS_CHARACTERS]

    def lost_pair(self, pick: Pick, now: float) -> None:
        """Keep apart two workers between whom a prompt was lost, for a while."""
        if pick.prefill is not None:
            self._parted = {pair: until for pair, until in self._parted.items() if until > now}
            self._parted[pick.decode.epoch, pick.prefill.epoch] = now + PAIR_SECONDS

    def _judge(self, worker: Worker, report: Report) -> tuple[State, str]:
        if report.role not in ("both", worker.side):
            return "misfit", f"it is a {report.role} worker; the router was told of it as --{worker.side}"
        if worker.side == "prefill" and not report.link_address:
            return "misfit", "it listens for no other workers: it has no link address"
        if self._serves != report.serves:
            others = [each for each in self.workers if each is not worker and each.is_up]
            if self._serves is not None and others:
                return "misfit", self._other_model(report)
            self._serves = report.serves
            # Those of the former model may have found that it is gone.
            for each in self.workers:
                if each.state == "misfit" and each.report is not None and each.report.serves == self._serves:
                    each.state, each.reason = self._judge(each, each.report)
        if report.status != "ok":
            return "unwell", (f"{report.status}: {report.message}" if report.message else report.status)
        return "up", ""

    def _other_model(self, report: Report) -> str:
        assert self._serves is not None, "no model is served yet"
        model, fingerprint = self._serves
        if report.model != model:
            return f"it serves {report.model!r}; the other workers serve {model!r}"
        return (
            f"it serves another {model!r}: its fingerprint is {report.fingerprint[:16]!r}, the others' "
            f"{fingerprint[:16]!r} (weights, type of K and V, or version differ)"
        )

    # ---- who gets what

    def matched(self, load: Load) -> dict[str, int]:
        """Return by name how many bytes of the prompt's beginning each worker has seen."""
        return {each.name: each.seen.matched_bytes(load.beginning) for each in self.workers}

    def pick(self, load: Load, now: float, *, without: Collection[str] = (), can_prefill: bool = True) -> Pick | None:
        """Choose where a request goes and count it there; None: no decode worker is left.

        `without`: names of workers that were tried. `can_prefill`: whether another worker may compute the prompt.
        """
        decode = self._pick_decode(load, without)
        if decode is None:
            return None
        prefill = self._pick_prefill(load, decode, now, without) if can_prefill else None
        flights = [self._begin(decode, now, need_bytes=_need_bytes(decode, load))]
        if prefill is not None:
            work = load.beginning.prompt_bytes - prefill.seen.matched_bytes(load.beginning)
            flights.append(self._begin(prefill, now, work_bytes=work))
            prefill.seen.note(load.beginning)
        decode.seen.note(load.beginning)
        return Pick(decode, prefill, tuple(flights))

    def _pick_decode(self, load: Load, without: Collection[str]) -> Worker | None:
        known = {each.name: each for each in self.decode if each.is_up and each.name not in without}
        chosen = choose_decode([_decode_candidate(each, load) for each in known.values()])
        return None if chosen is None else known[chosen.name]

    def _pick_prefill(self, load: Load, decode: Worker, now: float, without: Collection[str]) -> Worker | None:
        known = {
            each.name: each
            for each in self.prefill
            if each.is_up
            and each.name not in without
            # One process cannot send to itself.
            and each.epoch != decode.epoch
            and self._parted.get((decode.epoch, each.epoch), now) <= now
        }
        candidates = [
            PrefillCandidate(
                each.name, each.outstanding_bytes, len(each.flights), each.seen.matched_bytes(load.beginning)
            )
            for each in known.values()
        ]
        chosen = choose_prefill(candidates, load.beginning.prompt_bytes)
        return None if chosen is None else known[chosen.name]

    def _begin(self, worker: Worker, now: float, *, need_bytes: int = 0, work_bytes: int = 0) -> Flight:
        self._flights += 1
        flight = Flight(self._flights, worker, worker.epoch, now, need_bytes, work_bytes)
        worker.flights[flight.number] = flight
        return flight

    def computed(self, pick: Pick) -> None:
        """Note that the first token has come: the prompt is computed."""
        for flight in pick.flights:
            flight.work_bytes = 0

    def end(self, pick: Pick) -> None:
        """Forget an attempt that is over, however it ended; a second time does nothing."""
        for flight in pick.flights:
            flight.worker.flights.pop(flight.number, None)

    # ---- who is lost

    def lost_reason(self, flight: Flight, now: float) -> str | None:
        """Return why nothing more will come of a flight; None: nothing is known against it."""
        worker = flight.worker
        if worker.epoch != flight.epoch:
            return "the worker was restarted"
        silent_since = worker.seen_at if worker.seen_at is not None else flight.began_at
        if worker.state == "down" and now - silent_since >= self._lost_seconds:
            return f"the worker has been silent for {now - silent_since:.1f} s"
        return None

    def blockers(self) -> str:
        """Say why no decode worker can take a request, without addresses."""
        words = [f"{each.name} is {each.state} ({each.reason})" for each in self.decode if not each.is_up]
        return "; ".join(words) or "all were tried"


def _need_bytes(worker: Worker, load: Load) -> int:
    return worker.report.token_bytes * load.tokens if worker.report is not None else 0


def _decode_candidate(worker: Worker, load: Load) -> DecodeCandidate:
    assert worker.report is not None, f"{worker.url} is up and has said nothing"
    return DecodeCandidate(
        name=worker.name,
        free_bytes=worker.free_bytes,
        need_bytes=_need_bytes(worker, load),
        waiting=worker.report.waiting,
        recent=sum(each.is_recent for each in worker.flights.values()),
        in_flight=len(worker.flights),
        matched_bytes=worker.seen.matched_bytes(load.beginning),
    )
