"""What the comparisons of whole queues share: the two public traces, cuts of them, and many replays on two processes.

A cut keeps stretches of 250 requests in a row, evenly spread over the trace, and leaves out those between: the lengths
are then those of the whole hour (the first third of it has longer prompts than the rest), and requests that go on
where another ended are still close together.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from halocline.memory.layout import ArenaLayout, solve_layout
from halocline.memory.sizing import static_caps
from halocline.schedule.rules import Admission
from halocline.sim.bound import Bound, fifo_bound
from halocline.sim.device import device_named
from halocline.sim.likenesses import azure_like, mooncake_like
from halocline.sim.readers import read_workload
from halocline.sim.shapes import shape_named
from halocline.sim.simulation import Setup, simulate
from halocline.sim.workload import Workload

Json = dict[str, Any]
Lengths = list[tuple[int, int]]

TRACES = {"mooncake": "mooncake_conversation.jsonl", "azure": "azure2023_conv.csv"}
MADE_REQUESTS = 4000
"""How many are made up where all were asked for."""
STRETCH = 250
"""Requests in a row that a cut keeps together."""
WAITING = 64
"""Requests that a replay holds ready: its means end when the last one is handed over, while so many still wait."""


@lru_cache(maxsize=4)
def trace(name: str, requests: int) -> Workload:
    """Return about `requests` requests of a public trace (0: all), or made-up ones like them where it is absent."""
    path = Path(os.environ.get("HALOCLINE_DATA", "/nowhere")) / TRACES[name]
    if not path.exists():
        return made_like(name, requests)
    whole = read_workload(path)
    every = ceil(len(whole.jobs) / requests) if requests else 1
    jobs = tuple(job for at, job in enumerate(whole.jobs) if at // STRETCH % every == every // 2)
    kept = (
        f"{path.name}, all {len(jobs)}"
        if every == 1
        else f"{path.name}, 1 in {every} stretches of {STRETCH}: {len(jobs)}"
    )
    return Workload(name, f"{kept} requests", jobs)


def made_like(name: str, requests: int) -> Workload:
    """Return a generated workload with the statistics of a trace."""
    return {"mooncake": mooncake_like, "azure": azure_like}[name](requests or MADE_REQUESTS)


def lengths_of(workload: Workload) -> Lengths:
    """Return (prompt, output) tokens of each request."""
    return [(job.prompt_tokens, job.output_tokens) for job in workload.jobs]


@dataclass(frozen=True)
class Task:
    """One replay of a saturated queue."""

    shape: str
    trace: str
    policy: str
    kv_bytes: int
    requests: int
    leap: int = 1
    admission: Admission = ("expected", 0.8)
    prefix_cache: bool = True
    instant_prefill: bool = False
    known_lengths: bool = True
    device: str = "h200"
    step_tokens: int = 8192
    """More only where a shape holds so many requests that prompts would be the limit and not memory."""

    def setup(self) -> Setup:
        """Return the setup of the simulator."""
        return Setup(
            shape=shape_named(self.shape),
            kv_bytes=self.kv_bytes,
            policy=self.policy,
            device=device_named(self.device),
            step_tokens=self.step_tokens,
            admission=self.admission,
            prefix_cache=self.prefix_cache,
            leap_tokens=self.leap,
            instant_prefill=self.instant_prefill,
            known_lengths=self.known_lengths,
        )

    def layout(self) -> ArenaLayout:
        """Return the shared arena's layout of the shape."""
        return solve_layout(shape_named(self.shape).layers, self.kv_bytes)


def measure(task: Task) -> Json:
    """Replay one queue, and return the figures that are compared."""
    work = trace(task.trace, task.requests)
    outcome = simulate(task.setup(), work, saturated=True)
    waited = outcome.waiting_seconds
    return {
        "concurrency": outcome.concurrency.mean,
        "peak": outcome.concurrency.peak,
        "concurrency_while_memory_lacks": outcome.concurrency.mean_while_waiting,
        "hit_rate": outcome.hit_rate,
        "held_share": outcome.arena.held_share,
        "held_share_while_memory_lacks": outcome.arena.held_share_while_waiting,
        "waste_share": outcome.arena.waste_share,
        "memory_share_of_waiting": waited.get("memory", 0.0) / sum(waited.values()) if waited else 0.0,
        "retractions": outcome.retractions,
        "recomputed_tokens": outcome.tokens.recomputed,
        "rejected": outcome.requests.rejected,
        "failed": outcome.requests.failed,
        "finished": outcome.requests.finished,
        "steps": outcome.steps,
        "middle_share": (outcome.middle_seconds[1] - outcome.middle_seconds[0]) / (outcome.seconds or 1.0),
        "wall_seconds": outcome.wall_seconds,
        "digest": outcome.digest,
    }


def bound_of(task: Task, ratio: float | None = None) -> Bound:
    """Return what the arithmetic holds of a task's queue, up to where a replay's means end; under static:R if given."""
    layout = task.layout()
    caps = None if ratio is None else static_caps(layout, ratio)
    return fifo_bound(layout, lengths_of(trace(task.trace, task.requests))[:-WAITING], caps)


def best_ratio_by_arithmetic(task: Task) -> float:
    """Return the static ratio under which the arithmetic holds most: 5 % apart, around the best of coarser ones."""
    tried: dict[float, float] = {}

    def held(step: int) -> float:
        ratio = round(1.05**step, 3)
        if ratio not in tried:
            tried[ratio] = bound_of(task, ratio).concurrency
        return tried[ratio]

    best = max(range(-96, 25, 8), key=held)  # 0.009 to 3.2
    for width in (4, 2, 1):
        best = max((best - width, best, best + width), key=held)
    return round(1.05**best, 3)


def run_all(
    calls: Iterable[tuple[str, Callable[[Any], Any], Any]], processes: int, show: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Call (label, function, argument) each in one of so many processes; `show` is told of each answer as it comes."""
    found: dict[str, Any] = {}
    began = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(function, argument): label for label, function, argument in calls}
        for future in as_completed(futures):
            label = futures[future]
            found[label] = future.result()
            show(label, found[label])
            left = len(futures) - len(found)
            print(f"[{time.perf_counter() - began:6.0f} s, {left:3} left] {label}", file=sys.stderr, flush=True)
    return found


def with_policy(task: Task, policy: str) -> Task:
    """Return the same queue under another policy."""
    return replace(task, policy=policy)
