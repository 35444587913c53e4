"""Traffic that flips between the two traces every 60 seconds: how soon concurrency follows, by policy.

    python benchmarks/flip.py [--seconds 60] [--turns 3] [--policies shared static:0.8 static:0.1] [--results FOLDER]

Gemma 3 27B in 60 GiB of KV on eight H200 as one device (on one, a request of the Mooncake trace outlives a turn). The
queue is saturated and in order; a turn has as many requests as its trace would be served alone in that time, so traffic
and memory flip together. No setting changes within a run. What "begins", "free" and "back" mean is said, and measured
step by step, in `tests/testing/flips.py`; the steady number is that of the shared arena serving that trace alone.
Prompts take their time; no prefix cache and no leaps, so that every step is seen. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from queues import Json, Task, trace

from halocline.sim.workload import Workload
from halocline.units import GIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # what is measured is measured in tests too

from testing.flips import Flipping, Traffic, paced

SHAPE, DEVICE = "gemma-3-27b", "8xh200"
SIDES = {"a": "mooncake", "b": "azure"}
ENOUGH = {"a": 700, "b": 2500}
"""Requests from which the pace of a trace is found."""
RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    arguments = read_arguments()
    task = Task(SHAPE, "mooncake", "shared", 60 * GIB, 0, prefix_cache=False, device=DEVICE)
    sides = [side(name, task, ENOUGH[key], arguments) for key, name in SIDES.items()]
    traffic = Traffic(task.setup(), *sides, arguments.seconds)
    print(f"alone: {', '.join(f'{SIDES[key]} {value:.1f}' for key, value in traffic.steady.items())}", flush=True)
    rows = []
    for policy in arguments.policies:
        found = traffic.run(replace(task, policy=policy).setup())
        rows.append(row_of(policy, found))
        print(table_of(rows[-1:]), flush=True)
    record: Json = {
        "shape": SHAPE,
        "device": DEVICE,
        "turn_seconds": arguments.seconds,
        "requests": len(traffic.mixed.jobs),
        "steady": {SIDES[key]: value for key, value in traffic.steady.items()},
        "policies": rows,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "flip.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How concurrency follows traffic that flips.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each trace; the last one drains")
    parser.add_argument("--policies", nargs="+", default=("shared", "static:0.8", "static:0.1"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for flip.json")
    return parser.parse_args()


def side(name: str, task: Task, enough: int, arguments: argparse.Namespace) -> Workload:
    """Return a trace at the pace at which it is served alone, at least so many turns of it."""
    whole = trace(name, 0)
    sample = paced(task.setup(), whole.first(enough))
    apart = sample.jobs[1].arrive_seconds
    most = int(arguments.seconds * arguments.turns / apart) + 2
    jobs = tuple(replace(job, arrive_seconds=at * apart) for at, job in enumerate(whole.jobs[:most]))
    return replace(whole, jobs=jobs)


def row_of(policy: str, found: Flipping) -> Json:
    """Return the figures of one policy."""
    outcome = found.outcome
    return {
        "policy": policy,
        "concurrency": outcome.concurrency.mean,
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "flips": [
            asdict(flip)
            | {"to": SIDES[flip.side], "steps_to_free": flip.steps_to_free, "steps_to_back": flip.steps_to_back}
            for flip in found.flips
        ],
    }


def table_of(rows: list[Json]) -> str:
    """Return a few lines per policy."""
    lines = []
    for row in rows:
        lines.append(f"{row['policy']}: {row['concurrency']:.1f} at once, {row['seconds']:.0f} s")
        for flip in row["flips"]:
            back = "never" if flip["steps_to_back"] is None else f"{flip['steps_to_back']} steps later"
            lines.append(
                f"  to {flip['to']:<9} bytes free after {flip['steps_to_free']:>4} steps, back {back:<15} "
                f"{flip['running']:>4} of {flip['steady']:.0f} then, {flip['mean_over_steady']:.2f} of steady to the "
                f"turn's end, arena never below {flip['lowest_held_share']:.0%} held"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
