"""A saturated queue: requests of given lengths through the shipped scheduler, under a policy, without a model.

There is always somebody waiting, so the number of running requests is what the memory holds. Answers are constant
tokens: nothing is computed, only pages are taken and given back.
"""

from __future__ import annotations

import csv
import json
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

from halocline.memory.arena import Arena
from halocline.memory.layout import ArenaLayout
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive, Rejected
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import Sampled, StepResult
from testing.policies import Layers, Policy, pricing

Lengths = list[tuple[int, int]]
"""(prompt, output) of each request."""
Prompt = int | tuple[int, ...]
"""A length, or the tokens themselves where prompts have something in common."""

WAITING = 8
STATISTICS = {"mooncake": (12_035, 1.0, 343), "azure": (1_155, 0.9, 211)}
"""Mean prompt, spread of its logarithm and mean output of the public traces, for lengths that are made up."""


def trace_lengths(name: str, count: int, folder: str | None = None) -> tuple[Lengths, str]:
    """Return the first `count` lengths of a public trace and their source; made-up ones where the file is absent."""
    home = Path(folder or os.environ.get("HALOCLINE_DATA", "/nowhere"))
    path = home / {"mooncake": "mooncake_conversation.jsonl", "azure": "azure2023_conv.csv"}[name]
    if not path.exists():
        return made_up_lengths(name, count), "made up with the trace's means"
    with path.open(encoding="utf-8") as lines:
        if name == "mooncake":
            rows = [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
            pairs = [(row["input_length"], row["output_length"]) for row in rows]
        else:
            table = [row for _, row in zip(range(count), csv.DictReader(lines), strict=False)]
            pairs = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in table]
    return [(max(1, prompt), max(1, output)) for prompt, output in pairs], path.name


def made_up_lengths(name: str, count: int, seed: int = 0) -> Lengths:
    """Return lengths with a trace's means, the prompts spread like a log-normal, the outputs like an exponential."""
    random = Random(f"{name}-{seed}")
    prompt_mean, spread, output_mean = STATISTICS[name]
    draws = [(random.lognormvariate(0.0, spread), random.expovariate(1.0)) for _ in range(count)]
    scales = prompt_mean / mean(draw[0] for draw in draws), output_mean / mean(draw[1] for draw in draws)
    return [(max(1, round(prompt * scales[0])), max(1, round(output * scales[1]))) for prompt, output in draws]


def sessions(count: int, turns: int, first_tokens: int, more_tokens: int) -> list[tuple[Prompt, int]]:
    """Return the prompts of sessions in turn: each goes on where its last prompt ended."""
    lengths = [first_tokens + turn * more_tokens for turn in range(turns)]
    return [
        (tuple((number * 31 + at * 7 + at * at) % 97 for at in range(length)), 40)
        for length in lengths
        for number in range(count)
    ]


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a queue."""

    concurrency: float
    """Mean of the requests that ran at once, over the steps in which somebody waited for memory."""
    steps: int
    finished: int
    rejected: int
    failed: int
    peak: int
    """The most that ran at once."""
    retractions: int
    recomputed_tokens: int
    computed_tokens: int
    moved_bytes: int
    stuck: bool
    """Whether work was left and nothing could be computed any more."""
    held_pages: tuple[float, ...]
    """Mean pages held per pool, over the same steps."""


class Queue:
    """One scheduler over one arena. Has the attributes that `testing.wrong` spoils."""

    def __init__(self, policy: Policy, layers: Layers, budget_bytes: int, **changes: object) -> None:
        self.policy = policy
        self.arena: Arena = policy.make(layers, budget_bytes)
        self.layout: ArenaLayout = self.arena.layout
        rules = {
            "step_tokens": 8192,
            "max_running_requests": 4096,
            "max_model_len": 1 << 20,
            "vocab_size": 100,
            "admission": ("guaranteed",),
            "prefix_cache": False,
        }
        self.scheduler = Scheduler(self.arena, Rules(**(rules | changes)))  # type: ignore[arg-type]

    def run(self, lengths: Iterable[tuple[Prompt, int]], most_steps: int = 200_000) -> Outcome:
        """Let requests (prompt, output) through, in order, always some of them waiting; return what came of it."""
        with pricing(self.policy.price):
            return self._run(deque(lengths), most_steps)

    def _run(self, left: deque[tuple[Prompt, int]], most_steps: int) -> Outcome:
        scheduler, arrived, rejected, moved = self.scheduler, 0, 0, 0
        running: list[int] = []
        held: list[list[int]] = []
        strides = [pool.stride_bytes for pool in self.layout.pools]
        stuck = False
        for _ in range(most_steps):
            while left and len(scheduler._roster.waiting) < WAITING:
                prompt, output = left.popleft()
                params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
                text = (1,) * prompt if isinstance(prompt, int) else prompt
                updates = scheduler.handle(Arrive(str(arrived), text, params, 0))
                arrived += 1
                rejected += sum(isinstance(update, Rejected) for update in updates)
            plan = scheduler.plan(0.0)
            scheduler.take_updates()
            if plan is None:
                stuck = scheduler.has_work
                break
            if left:
                running.append(scheduler._roster.running)
                held.append(list(self.arena.budget.held))
            moved += sum(strides[move.pool] for move in plan.moves)
            scheduler.apply(StepResult(plan.step, tuple(Sampled(s.request_id, 7) for s in plan.segments if s.samples)))
        totals = scheduler.figures().totals
        warm = len(running) // 8  # the first steps fill the arena
        return Outcome(
            mean(running[warm:]) if running else 0.0,
            totals.steps,
            totals.finished,
            rejected,
            totals.failed,
            totals.peak_running,
            totals.retractions,
            totals.recomputed_tokens,
            totals.computed_tokens,
            moved,
            stuck,
            tuple(map(mean, zip(*held[warm:], strict=True))),
        )


def saturate(policy: Policy, layers: Layers, budget_bytes: int, lengths: Lengths, **changes: object) -> Outcome:
    """Return what `policy` makes of a queue of `lengths` in `budget_bytes`."""
    return Queue(policy, layers, budget_bytes, **changes).run(lengths)
