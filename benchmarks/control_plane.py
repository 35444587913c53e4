"""What deciding costs, without a model: one step of the scheduler, and the pages of one long prompt.

    python benchmarks/control_plane.py [--steps 400] [--running 256]

Shape: Gemma 3 27B in bf16 (10 full + 52 sliding layers, 16-token pages). `step_256_ms` is plan + apply of a step in
which 256 requests decode and a sixteenth of them needs a page (their windows are full, so as many give one up).
`prompt_12k_us` is reserve + commit + release of every page that a 12,000-token prompt touches in both pools. Medians;
the last line is one JSON object. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
from collections.abc import Callable
from statistics import median
from time import perf_counter

from halocline.memory.arena import Arena
from halocline.memory.demand import step_price
from halocline.memory.grant import Order, Refusal
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import Sampled, StepPlan, StepResult
from halocline.units import GIB

PAGE_TOKENS = 16
SHORTEST_TOKENS = 1100  # longer than the window of 1,024
PROMPT_TOKENS = 12_000


def gemma_3_27b(budget_bytes: int) -> ArenaLayout:
    """Return the arena of the benchmark's shape."""
    kinds = [Full()] * 10 + [Sliding(1024)] * 52
    return solve_layout([LayerKV(i, kind, 16, 128, 128) for i, kind in enumerate(kinds)], budget_bytes, PAGE_TOKENS)


def answers(plan: StepPlan) -> StepResult:
    """Return a token for every segment that wants one."""
    return StepResult(plan.step, tuple(Sampled(s.request_id, 7) for s in plan.segments if s.samples))


def decoding_scheduler(running: int, steps: int) -> Scheduler:
    """Return a scheduler in which `running` requests decode, their positions spread evenly over a page."""
    arena = Arena(gemma_3_27b(1024 * GIB))
    rules = Rules(step_tokens=8192, max_running_requests=running, max_model_len=8192, vocab_size=100)
    scheduler = Scheduler(arena, rules)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 512, ignore_eos=True)
    for index in range(running):
        prompt = (1,) * (SHORTEST_TOKENS + index % PAGE_TOKENS)
        scheduler.handle(Arrive(f"request-{index}", prompt, params, index))
    while scheduler.figures().decoding < running:
        plan = scheduler.plan(0.0)
        assert plan is not None, f"no progress: {scheduler.reasons()}"
        scheduler.apply(answers(plan))
    return scheduler


def time_steps(running: int, steps: int) -> list[float]:
    """Return the seconds of plan + apply of each step; making the result is the backend's work and not counted."""
    scheduler, seconds = decoding_scheduler(running, steps), []
    for _ in range(steps):
        begin = perf_counter()
        plan = scheduler.plan(0.0)
        planned = perf_counter() - begin
        assert plan is not None, "nobody decodes"
        assert len(plan.segments) == running, f"{len(plan.segments)} requests decode, not {running}"
        result = answers(plan)
        begin = perf_counter()
        scheduler.apply(result)
        seconds.append(planned + perf_counter() - begin)
    return seconds


def time_prompts(rounds: int) -> list[float]:
    """Return the seconds of taking and freeing the pages of one 12,000-token prompt, computed in one chunk."""
    layout = gemma_3_27b(64 * GIB)
    arena, demand = Arena(layout), step_price(layout, 0, PROMPT_TOKENS)

    def take_and_free() -> None:
        grant = arena.reserve("prompt", demand)
        assert not isinstance(grant, Refusal), grant
        arena.commit([Order(grant, demand)])
        arena.release(grant)

    return timed(take_and_free, rounds)


def timed(work: Callable[[], None], rounds: int) -> list[float]:
    """Return the seconds of each of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return seconds


def show(name: str, seconds: list[float], unit_seconds: float, unit: str) -> float:
    """Print the median and the 99th percentile; return the median in `unit`."""
    middle = median(seconds) / unit_seconds
    worst = sorted(seconds)[int(len(seconds) * 0.99)] / unit_seconds
    print(f"{name:<16} median {middle:9.3f} {unit}   p99 {worst:9.3f} {unit}   of {len(seconds)}")
    return middle


def main() -> None:
    """Measure, print, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps to time")
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    arguments = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cpus, python {platform.python_version()}"
    print(f"machine: {machine}")
    gc.collect()
    gc.freeze()
    step_ms = show(f"step_{arguments.running}_ms", time_steps(arguments.running, arguments.steps), 1e-3, "ms")
    prompt_us = show("prompt_12k_us", time_prompts(arguments.steps), 1e-6, "us")
    figures = {f"step_{arguments.running}_ms": round(step_ms, 3), "prompt_12k_us": round(prompt_us, 1)}
    print(json.dumps(figures | {"machine": machine}))


if __name__ == "__main__":
    main()
