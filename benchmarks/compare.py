"""What the shared arena buys: requests that run at once in a saturated queue, by policy, for five shapes on two traces.

    make compare                                       the table, its checks, and benchmarks/results/compare.{md,json}
    python benchmarks/compare.py --shapes gemma-3-27b --requests 1000 --results /tmp/out

The shipped scheduler, cache and arena serve the traces from $HALOCLINE_DATA under a fake clock (where the files are
absent: from generators with their statistics, and the table says so), all of a queue waiting from the start, in 60 GiB
of KV, with the prefix cache on and admission `expected 0.8`. Policies:

    shared        one arena
    static:0.8    window pools sized for 0.8 of the full pool's tokens, as a leading engine does by default
    best static   the ratio that holds most on this very trace: in hindsight. The arithmetic bound (sim/bound.py) names
                  a ratio; it and two 10 % beside it are measured, and the best of them stands in the table
    equal-pages   every kind padded to pages of one size
    full          every layer keeps every position

To take minutes and not hours, a queue is a cut of its trace (`queues.py`; of Azure's short requests twice as many), and
decodes leap several tokens per plan where nobody prefills. What both do to a ratio is measured on one shape: the same
queue without leaps, the whole trace. What the cut does by arithmetic stands in the record for every queue. `--quick`
leaves out the ratios beside the best one and the whole trace.

A step computes 8,192 tokens, for gpt-oss-120b 32,768: so many of its requests fit that 8,192 would be the limit.
Nothing is random, so all figures but the wall times repeat exactly. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from queues import Json, Task, best_ratio_by_arithmetic, bound_of, measure, run_all, trace, with_policy

from halocline.units import GIB, format_bytes, parse_bytes

SHAPES = ("gpt-oss-120b", "gemma-3-27b", "gemma-4-31b-like", "llama-4-scout", "mimo-v2-flash-like")
TRACES = ("mooncake", "azure")
FIXED = ("shared", "static:0.8", "equal-pages", "full")
CHECKED = ("gemma-3-27b", "mooncake")
CHECKED_POLICIES = ("shared", "static:0.8")
WIDE_STEPS = {"gpt-oss-120b": 32_768}
STEP_TOKENS = 8192
TIMES = {"mooncake": 1, "azure": 2}
"""Requests of a trace, times `--requests`: of short ones several times as many run at once."""
FEWEST = {("gpt-oss-120b", "azure"): 6460, ("mimo-v2-flash-like", "azure"): 4850}
"""At least so many requests where 1,300 and 900 run at once: fewer would hardly fill the arena once."""
BESIDE = 1.1
"""Ratios this much above and below the arithmetic's best are measured too."""
RESULTS = Path(__file__).resolve().parent / "results"


def ratio_text(ratio: float) -> str:
    """Write a ratio with three digits, as it stands in a policy's name."""
    return f"static:{float(f'{ratio:.3g}'):g}"


def main() -> None:
    arguments = read_arguments()
    tasks = [task_of(shape, name, arguments) for shape in arguments.shapes for name in arguments.traces]
    best = find_ratios(tasks, arguments.processes)
    found = run_all(all_calls(tasks, best, arguments), arguments.processes, lambda label, answer: None)
    record: Json = {
        "kv_bytes": arguments.kv_bytes,
        "step_tokens": {shape: step_tokens_of(shape) for shape in arguments.shapes},
        "leap_tokens": arguments.leap,
        "queues": {name: trace(name, arguments.requests * TIMES[name]).source for name in arguments.traces},
        "more_requests": {f"{shape}, {name}": count for (shape, name), count in FEWEST.items()},
        "rows": [row_of(task, best[key_of(task)], found, quick=arguments.quick) for task in tasks],
        "checks": checks_of(found),
        "wall_seconds": round(sum(answer.get("wall_seconds", 0.0) for answer in found.values())),
    }
    text = table_of(record)
    print(text)
    write(record, text, arguments.results)
    print(json.dumps(record))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Concurrency of every policy in saturated queues.")
    parser.add_argument("--requests", type=int, default=1510, help="about so many of a trace (Azure: twice as many)")
    parser.add_argument("--leap", type=int, default=16, help="most tokens of a decode under one plan")
    parser.add_argument("--kv-bytes", type=parse_bytes, default=60 * GIB)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--traces", nargs="+", default=TRACES, choices=TRACES)
    parser.add_argument("--quick", action="store_true", help="no ratios beside the best, no whole trace")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for compare.json and compare.md")
    return parser.parse_args()


def step_tokens_of(shape: str) -> int:
    return WIDE_STEPS.get(shape, STEP_TOKENS)


def task_of(shape: str, name: str, arguments: argparse.Namespace) -> Task:
    """Return the shared arena's replay of one queue."""
    requests = max(arguments.requests * TIMES[name], FEWEST.get((shape, name), 0))
    step_tokens = step_tokens_of(shape)
    return Task(shape, name, "shared", arguments.kv_bytes, requests, arguments.leap, step_tokens=step_tokens)


def key_of(task: Task) -> str:
    return f"{task.shape}, {task.trace}"


def find_ratios(tasks: Sequence[Task], processes: int) -> dict[str, float]:
    """Return the best static ratio of each queue by arithmetic, on a third of its requests."""
    calls = [
        (key_of(task), best_ratio_by_arithmetic, replace(task, requests=max(700, task.requests // 3))) for task in tasks
    ]
    return run_all(
        calls, processes, lambda label, ratio: print(f"{label}: the arithmetic holds most under {ratio_text(ratio)}")
    )


def candidates(ratio: float, *, quick: bool) -> tuple[str, ...]:
    """Return the static policies that are measured besides static:0.8."""
    return tuple(map(ratio_text, (ratio,) if quick else (ratio / BESIDE, ratio, ratio * BESIDE)))


def all_calls(
    tasks: Sequence[Task], best: dict[str, float], arguments: argparse.Namespace
) -> list[tuple[str, Callable[[Any], Any], Any]]:
    """Return every replay, the longest first, so that the last ones are short."""
    calls: list[tuple[str, Callable[[Any], Any], Any]] = []
    checked = [task for task in tasks if (task.shape, task.trace) == CHECKED]
    if checked:
        for policy in CHECKED_POLICIES:
            task = with_policy(checked[0], policy)
            if not arguments.quick:
                calls.append((f"whole trace: {policy}", measure, replace(task, requests=0)))
            calls.append((f"without leaps: {policy}", measure, replace(task, leap=1)))
            calls.append((f"without prefix cache: {policy}", measure, replace(task, prefix_cache=False)))
    for task in tasks:
        calls.append((f"{key_of(task)}: arithmetic, cut", bounds, task))
        calls.append((f"{key_of(task)}: arithmetic, whole trace", bounds, replace(task, requests=0)))
        policies = dict.fromkeys((*FIXED, *candidates(best[key_of(task)], quick=arguments.quick)))
        calls += [(f"{key_of(task)}: {policy}", measure, with_policy(task, policy)) for policy in policies]
    return calls


def row_of(task: Task, ratio: float, found: dict[str, Json], *, quick: bool) -> Json:
    """Return one row of the table: every policy's figures, and what shared holds over the static ones."""
    policies = dict.fromkeys((*FIXED, *candidates(ratio, quick=quick)))
    cells = {policy: found[f"{key_of(task)}: {policy}"] for policy in policies}
    split = [policy for policy in cells if policy.startswith("static:")]
    best = max(split, key=lambda policy: cells[policy]["concurrency"])
    shared = cells["shared"]["concurrency"]
    bound = {part: found[f"{key_of(task)}: arithmetic, {part}"] for part in ("cut", "whole trace")}
    return {
        "shape": task.shape,
        "trace": task.trace,
        "best_static": best,
        "over_static_0.8": shared / cells["static:0.8"]["concurrency"],
        "over_best_static": shared / cells[best]["concurrency"],
        "bound_without_reuse": bound,
        "policies": cells,
    }


def bounds(task: Task) -> Json:
    """Return what the arithmetic holds without any prefix reuse, and the ratio."""
    shared, split = bound_of(task).concurrency, bound_of(task, 0.8).concurrency
    return {"shared": shared, "static:0.8": split, "ratio": shared / split}


def checks_of(found: dict[str, Json]) -> Json:
    """Return shared over static:0.8 of the checked queue, as measured and with each simplification undone."""
    variants = {
        "as measured": f"{CHECKED[0]}, {CHECKED[1]}",
        "without leaps": "without leaps",
        "whole trace": "whole trace",
        "without prefix cache": "without prefix cache",
    }
    checks: Json = {}
    for name, label in variants.items():
        answers = [found.get(f"{label}: {policy}") for policy in CHECKED_POLICIES]
        if answers[0] is not None and answers[1] is not None:
            shared, split = answers[0]["concurrency"], answers[1]["concurrency"]
            checks[name] = {"shared": shared, "static:0.8": split, "ratio": shared / split}
    for name in checks:
        checks[name]["ratio_change"] = checks[name]["ratio"] / checks["as measured"]["ratio"] - 1
    return checks


def table_of(record: Json) -> str:
    """Return the table in Markdown, with what was measured and how."""
    lines = [
        f"Requests that run at once in a saturated queue, {format_bytes(record['kv_bytes'])} of KV, prefix cache on; "
        "in brackets the share of prompt tokens that the cache had.",
        "",
        *(f"* {name}: {source}" for name, source in record["queues"].items()),
        f"* at least {' and '.join(f'{count:,} for {shape} on {name}' for (shape, name), count in FEWEST.items())}",
        f"* steps of at most {STEP_TOKENS:,} tokens (gpt-oss-120b: {WIDE_STEPS['gpt-oss-120b']:,}); leaps of at most "
        f"{record['leap_tokens']} tokens",
        "",
        "| shape | trace | shared | static:0.8 | best static | equal-pages | full | over static:0.8 | over best |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        cells = row["policies"]

        def cell(policy: str, cells: Json = cells) -> str:
            figures = cells[policy]
            mark = "" if figures["held_share_while_memory_lacks"] else " never full"
            return f"{figures['concurrency']:.1f} ({figures['hit_rate']:.1%}){mark}"

        best = row["best_static"]
        lines.append(
            f"| {row['shape']} | {row['trace']} | {cell('shared')} | {cell('static:0.8')} | {cell(best)} {best[7:]} "
            f"| {cell('equal-pages')} | {cell('full')} | {row['over_static_0.8']:.2f} | {row['over_best_static']:.2f} |"
        )
    if record["checks"]:
        lines += [
            "",
            f"{CHECKED[0]} on {CHECKED[1]}, each simplification undone alone:",
            "",
            "| queue | shared | static:0.8 | ratio | against the table |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {check['shared']:.1f} | {check['static:0.8']:.1f} | {check['ratio']:.3f} "
                f"| {check['ratio_change']:+.1%} |"
                for name, check in record["checks"].items()
            ),
        ]
    return "\n".join(lines) + "\n"


def write(record: Json, text: str, folder: Path) -> None:
    """Write compare.json and compare.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "compare.md").write_text("# What the shared arena buys\n\n" + text, encoding="utf-8")
    print(f"written to {folder / 'compare.json'} and compare.md")


if __name__ == "__main__":
    main()
