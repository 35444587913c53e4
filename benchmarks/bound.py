"""What the scheduler loses against arithmetic: its concurrency over that of an oracle without costs.

    python benchmarks/bound.py [--requests 0] [--shape gemma-3-27b] [--results FOLDER]

The oracle (`halocline.sim.bound`) serves the same saturated queue in order, on live page-exact bytes, with prompts that
take no time, and swaps the youngest out at no cost when growth overflows. Beside it, for each trace:

    reservation        the same arithmetic, but each request is granted its whole life when it enters, in whole slabs
                       and beside the floor: what guaranteed admission costs, whoever does it
    guaranteed         the shipped scheduler; prompts take no time (decodes stand still), no prefix cache, no leaps
    expected 0.8       the same; clients name their output's length as max_tokens, which picks the class of the estimate
    expected, unknown  the same; clients name no length, so that all outputs are one class
    real prefill       expected 0.8 with prompts that take their time: bytes held over the arena, while the head of the
                       queue waits for memory

By default the whole traces from $HALOCLINE_DATA; `--requests N` takes a cut (`queues.py`). The last line is one JSON
object. Nothing is random: all figures but the wall times repeat exactly.
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import replace
from pathlib import Path

from queues import WAITING, Json, Task, bound_of, lengths_of, measure, run_all, trace

from halocline.memory.demand import Demand, floor_demand, resident
from halocline.units import GIB, ceil_div, format_bytes, parse_bytes

TRACES = ("mooncake", "azure")
GOALS = {
    ("mooncake", "expected 0.8"): 0.985,
    ("mooncake", "guaranteed"): 0.98,
    ("azure", "expected 0.8"): 0.96,
    ("azure", "guaranteed"): 0.95,
}
RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    arguments = read_arguments()
    tasks = {name: Task(arguments.shape, name, "shared", arguments.kv_bytes, arguments.requests) for name in TRACES}
    calls = [
        (f"{name}, {kind}", measure, task)
        for kind in ("guaranteed", "expected 0.8", "expected, unknown", "real prefill")
        for name, task in ((name, task_of(tasks[name], kind)) for name in TRACES)
    ]
    found = run_all(calls, arguments.processes, lambda label, answer: None)
    rows = [row_of(name, tasks[name], found) for name in TRACES]
    record: Json = {
        "shape": arguments.shape,
        "kv_bytes": arguments.kv_bytes,
        "queues": {name: trace(name, arguments.requests).source for name in TRACES},
        "rows": rows,
    }
    text = table_of(record)
    print(text)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "bound.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (arguments.results / "bound.md").write_text("# The scheduler against arithmetic\n\n" + text, encoding="utf-8")
    print(json.dumps(record))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Concurrency over that of a FIFO oracle.")
    parser.add_argument("--requests", type=int, default=0, help="about so many of each trace; 0: all")
    parser.add_argument("--shape", default="gemma-3-27b")
    parser.add_argument("--kv-bytes", type=parse_bytes, default=60 * GIB)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for bound.json and bound.md")
    return parser.parse_args()


def task_of(task: Task, kind: str) -> Task:
    """Return the replay that a column stands for."""
    task = replace(task, prefix_cache=False, instant_prefill=True)
    match kind:
        case "guaranteed":
            return replace(task, admission=("guaranteed",))
        case "expected, unknown":
            return replace(task, known_lengths=False)
        case "real prefill":
            return replace(task, instant_prefill=False)
        case _:
            return task


def reservation(task: Task) -> float:
    """Return the mean concurrency when each request keeps its whole resident price from its entry to its end."""
    layout = task.layout()
    queue = lengths_of(trace(task.trace, task.requests))[:-WAITING]
    taken = floor_demand(layout)
    running: list[tuple[int, int, Demand]] = []
    now = at = measured = weighted = 0
    is_full = False
    while at < len(queue):
        prompt, output = queue[at]
        price = resident(layout, prompt, output, prompt - 1)
        after = taken.plus(price)
        slabs = sum(ceil_div(pages, pool.pages_per_slab) for pages, pool in zip(after, layout.pools, strict=True))
        if slabs <= layout.slabs:
            heapq.heappush(running, (now + output, at, price))
            taken, at = after, at + 1
            continue
        is_full = True
        end, _, price = heapq.heappop(running)
        measured, weighted = measured + end - now, weighted + (len(running) + 1) * (end - now)
        now, taken = end, taken.minus(price)
    assert is_full, "the arena was never full"
    return weighted / measured


def row_of(name: str, task: Task, found: dict[str, Json]) -> Json:
    """Return one trace's figures, and each over the oracle's concurrency."""
    oracle = bound_of(task)
    held = {"oracle": oracle.concurrency, "reservation": reservation(task)}
    for kind in ("guaranteed", "expected 0.8", "expected, unknown"):
        held[kind] = found[f"{name}, {kind}"]["concurrency"]
    real = found[f"{name}, real prefill"]
    return {
        "trace": name,
        "concurrency": held,
        "over_oracle": {kind: value / oracle.concurrency for kind, value in held.items()},
        "oracle_held_share": oracle.held_share,
        "real_prefill_held_share_while_memory_lacks": real["held_share_while_memory_lacks"],
        "runs": {label: answer for label, answer in found.items() if label.startswith(f"{name}, ")},
    }


def table_of(record: Json) -> str:
    """Return the table in Markdown."""
    lines = [
        f"{record['shape']} in {format_bytes(record['kv_bytes'])} of KV, saturated, prompts in no time, no prefix "
        "cache, no leaps: mean concurrency, in brackets over the oracle's.",
        "",
        *(f"* {name}: {source}" for name, source in record["queues"].items()),
        "",
        "| trace | oracle | reservation | guaranteed | expected 0.8 | expected, unknown | real prefill: held |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        over = row["over_oracle"]
        cells = []
        for kind, value in row["concurrency"].items():
            goal = GOALS.get((row["trace"], kind))
            wanted = f", goal {goal:g}" if goal else ""
            cells.append(f"{value:.2f}" if kind == "oracle" else f"{value:.2f} ({over[kind]:.4f}{wanted})")
        share = row["real_prefill_held_share_while_memory_lacks"]
        held = "never short" if share is None else f"{share:.1%}"
        lines.append(f"| {row['trace']} | {' | '.join(cells)} | {held} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
