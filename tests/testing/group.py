"""Real workers of one group in one process: engines made from settings, joined by real links, turned by one thread.

with group({"decode": config, "prefill": config}) as workers:
    tokens = together(workers, asked)

Everything is what ships: `Config`, `prepare`, `build_engine`, `EngineCore`, `Exchange` and links over shared memory or
TCP, whose threads run beside. Only the two processes' fronts are left out, and with them HTTP. Every turn is audited.
"""

from __future__ import annotations

import select
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from halocline.compose import FOLDER_SETTING, build_engine, prepare
from halocline.config import Config
from halocline.engine.core import EngineCore
from halocline.engine.messages import Submit
from halocline.engine.wire import event_of
from halocline.memory.host import HostCosts
from halocline.params import SamplingParams
from halocline.schedule.events import Abort, Event, Failed, NewToken, Rejected, Update
from halocline.schedule.scheduler import Scheduler
from halocline.step import Backend, StepPlan, StepResult

SECRET = "the secret of this group"
MOST_SECONDS = 240.0
NEWS_SECONDS = 0.02
"""So long is news of a link waited for before the clocks of both workers are looked at again."""

GREEDY = SamplingParams(temperature=0.0)


class Watched(Backend):
    """A backend that counts what it is asked to compute."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.mixed_steps = 0
        """Steps that held decodes and chunks of prompts."""
        self.chunks: dict[str, int] = {}
        """Per request, the steps that computed two tokens of it or more."""

    def run(self, plan: StepPlan) -> StepResult:
        """Count, and compute."""
        chunks = [segment.request_id for segment in plan.segments if segment.tokens > 1]
        for request_id in chunks:
            self.chunks[request_id] = self.chunks.get(request_id, 0) + 1
        self.mixed_steps += 0 < len(chunks) < len(plan.segments)
        return self.inner.run(plan)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Worker:
    """One engine of the group."""

    core: EngineCore
    scheduler: Scheduler
    backend: Watched
    address: str
    """Where it takes links; empty where nobody can dial it."""
    events: list[Event] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """How many turns requests have waited, by the code of their reason."""
    said: list[NewToken] = field(default_factory=list)
    """All that its clients heard."""
    rest_bytes: int = field(init=False)
    """Promised for good: the floor."""

    def __post_init__(self) -> None:
        self.rest_bytes = self.scheduler.figures().arena.promised_bytes

    @property
    def transfers(self) -> dict[str, int]:
        """What its exchange has counted; empty for one that works alone."""
        return {} if self.core.exchange is None else self.core.exchange.figures().totals


@dataclass(frozen=True)
class Asked:
    """A prompt to continue: who decodes it, and who computes it (empty: the same worker)."""

    name: str
    prompt: Sequence[int]
    tokens: int
    at: str
    prefill_at: str = ""
    params: SamplingParams = GREEDY
    """All but the number of tokens."""
    leaves_after: int | None = None
    """So many turns of all workers later its client goes away; None: it stays."""


@contextmanager
def group(configs: Mapping[str, Config]) -> Iterator[dict[str, Worker]]:
    """Start one worker for each config; with several they share a secret. Host copies are always taken for cheap."""
    with ExitStack() as stack:
        stack.enter_context(patch("halocline.model.host_costs.measure_costs", lambda *_: HostCosts(1e12, 1.0)))
        workers: dict[str, Worker] = {}
        for name, config in configs.items():
            joined = config if len(configs) == 1 else replace(config, link_token=SECRET)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="halocline-test-"))
            workers[name] = worker = _build(joined, Path(folder))
            stack.callback(worker.core.close)
        yield workers


def _build(config: Config, folder: Path) -> Worker:
    settings: dict[str, Any] = asdict(prepare(config, quiet=True).config) | {FOLDER_SETTING: str(folder)}
    parts = build_engine(settings, lambda text, fraction: None)
    backend = Watched(parts.backend)
    assert isinstance(parts.scheduler, Scheduler)
    core = EngineCore(parts.scheduler, backend, audit="every", exchange=parts.exchange)
    return Worker(core, parts.scheduler, backend, "" if parts.link is None else parts.link.address)


def together(workers: Mapping[str, Worker], asked: Sequence[Asked]) -> dict[str, list[int]]:
    """Let all requests come at once, turn all workers until everything has ended, and return the tokens of each."""
    tokens: dict[str, list[int]] = {each.name: [] for each in asked}
    for seed, each in enumerate(asked):
        _submit(workers, each, seed)
    ends = time.monotonic() + MOST_SECONDS
    for turn in count():
        for each in asked:
            if each.leaves_after == turn:
                workers[each.at].events.append(Abort(each.name))
        if not any(worker.events or worker.core.has_work for worker in workers.values()):
            return tokens
        assert time.monotonic() < ends, {name: worker.scheduler.reasons() for name, worker in workers.items()}
        computed = [_turn(worker, tokens) for worker in workers.values()]
        if not any(computed):
            _wait_for_news(workers)
    raise AssertionError("turns have no end")


def _submit(workers: Mapping[str, Worker], asked: Asked, seed: int) -> None:
    prefill_at = workers[asked.prefill_at].address if asked.prefill_at else ""
    worker = workers[asked.at]
    if prefill_at:
        worker.core.assign(asked.name, prefill_at)
    params = msgspec.structs.replace(asked.params, max_tokens=asked.tokens)
    worker.events.append(event_of(Submit(asked.name, tuple(asked.prompt), params, seed, prefill_at=prefill_at)))


def _turn(worker: Worker, tokens: dict[str, list[int]]) -> bool:
    """Turn one worker; return whether it computed anything."""
    events, worker.events, before = worker.events, [], worker.core.steps
    for update in worker.core.turn(events):
        _note(worker, update, tokens)
    assert worker.core.counters["defects"] == 0, f"a defect; reasons: {worker.scheduler.reasons()}"
    assert not worker.core.violations, list(worker.core.violations)
    worker.waits.update(reason.code for reason in worker.scheduler.reasons().values())
    return worker.core.steps > before


def _note(worker: Worker, update: Update, tokens: dict[str, list[int]]) -> None:
    if isinstance(update, NewToken):
        worker.said.append(update)
        if update.token_id is not None:
            tokens[update.request_id].append(update.token_id)
    assert not isinstance(update, Failed | Rejected), f"{update}"


def _wait_for_news(workers: Mapping[str, Worker]) -> None:
    descriptors = [worker.core.exchange.fileno() for worker in workers.values() if worker.core.exchange is not None]
    if descriptors:
        select.select(descriptors, [], [], NEWS_SECONDS)


def leftovers(worker: Worker) -> list[str]:
    """Say what a worker at rest holds on to: nothing may be there but what the caches keep and can evict."""
    figures = worker.scheduler.figures()
    arenas = {"the arena": figures.arena}
    if figures.host is not None:
        arenas["the host arena"] = figures.host.arena
    found = []
    for name, arena in arenas.items():
        held = {"running": arena.running_bytes, "locked": arena.locked_bytes, "transfer": arena.transfer_bytes}
        found += [f"{count} {what} bytes in {name}" for what, count in held.items() if count]
        if arena.used_bytes + arena.hole_bytes + arena.free_bytes != arena.total_bytes:
            found.append(f"the bytes of {name} do not add up")
        if figures.cache is None and arena.used_bytes:
            found.append(f"{arena.used_bytes} bytes used in {name}, and no cache keeps them")
    if figures.arena.promised_bytes != worker.rest_bytes:
        found.append(f"{figures.arena.promised_bytes} bytes promised, {worker.rest_bytes} at the start")
    found += [f"a pin of {pin.owner}" for pin in worker.scheduler._arena.pins.open]
    if figures.host is not None and figures.host.copies:
        found.append(f"{figures.host.copies} copies of requests in the host arena")
    if worker.core.exchange is not None:
        exchange = worker.core.exchange.figures()
        found += [f"{count} sessions {phase}" for phase, count in exchange.sessions.items() if count]
        if exchange.landing_bytes:
            found.append(f"{exchange.landing_bytes} bytes of landings")
    return found
