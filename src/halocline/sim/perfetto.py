"""A window of a run's steps as a trace that https://ui.perfetto.dev and chrome://tracing open.

    process     one per policy
    threads     steps, prefills, decodes, the first in line with the reason why it waits, ends of requests
    counters    bytes of each pool, held and cached; requests that run and wait

The format is the "JSON Object Format" of the Trace Event Format: times in microseconds, `X` complete events, `C`
counters, `i` instants, `M` names. The events of a thread never overlap: viewers would draw such as nested calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from halocline.sim.report.figures import REASONS

Event = dict[str, Any]
Step = Mapping[str, Any]
"""One record of an outcome's `window`, as `StepRecord` is written."""

STEPS, PREFILLS, DECODES, WAITING, ENDS = range(1, 6)
THREADS = {STEPS: "steps", PREFILLS: "prefills", DECODES: "decodes", WAITING: "first in line", ENDS: "ends"}


def trace(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of all runs of a report that have a window."""
    events: list[Event] = []
    for process, outcome in enumerate(document["outcomes"], start=1):
        events += _names(process, str(outcome["policy"]))
        for step in outcome["window"]:
            events += _step(process, step)
        events += _waiting(process, outcome["window"])
    about = {"halocline": document["halocline"], "command": document["command"]} | document["setup"]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def as_json(document: Mapping[str, Any]) -> str:
    """Return the trace as the text of a file."""
    return json.dumps(trace(document), allow_nan=False, separators=(",", ":")) + "\n"


def _names(process: int, policy: str) -> Iterator[Event]:
    yield _meta(process, 0, "process_name", {"name": policy})
    yield _meta(process, 0, "process_sort_index", {"sort_index": process})
    for thread, name in THREADS.items():
        yield _meta(process, thread, "thread_name", {"name": name})
        yield _meta(process, thread, "thread_sort_index", {"sort_index": thread})


def _step(process: int, step: Step) -> Iterator[Event]:
    prefills = [each for each in step["segments"] if each["start"] < each["prompt_tokens"]]
    decodes = [each for each in step["segments"] if each["start"] >= each["prompt_tokens"]]
    tokens = sum(each["tokens"] for each in step["segments"])
    about = {"tokens": tokens, "moves": step["moves"], "running": step["running"], "waiting": step["waiting"]}
    yield _slice(process, STEPS, step, f"step {step['step']}", about)
    if prefills:
        chunk = sum(each["tokens"] for each in prefills)
        name = prefills[0]["request_id"] if len(prefills) == 1 else f"{len(prefills)} prompts"
        yield _slice(
            process, PREFILLS, step, f"{name}, {chunk} tokens", {"chunks": [_chunk(each) for each in prefills]}
        )
    if decodes:
        about = {
            "tokens": sum(each["tokens"] for each in decodes),
            "requests": [each["request_id"] for each in decodes],
        }
        yield _slice(process, DECODES, step, f"{len(decodes)} decodes", about)
    end = _micro(step["start_seconds"] + step["seconds"])
    for request in step["ended"]:
        yield {"name": request, "ph": "i", "s": "t", "ts": end, "pid": process, "tid": ENDS}
    start = _micro(step["start_seconds"])
    yield _counter(process, start, "held bytes", step["held_bytes"])
    yield _counter(process, start, "cached bytes", step["cached_bytes"])
    yield _counter(process, start, "requests", {"running": step["running"], "waiting": step["waiting"]})


def _waiting(process: int, steps: Sequence[Step]) -> Iterator[Event]:
    """Yield one slice for each stretch of steps in which the first in line waited for the same reason."""
    for reason, stretch in groupby(steps, key=lambda step: step["reason"]):
        if not reason:
            continue
        steps_of_it = list(stretch)
        first, last = steps_of_it[0], steps_of_it[-1]
        start, end = _micro(first["start_seconds"]), _micro(last["start_seconds"] + last["seconds"])
        about = {"meaning": REASONS.get(reason, reason), "most that wait": max(each["waiting"] for each in steps_of_it)}
        yield _complete(process, WAITING, reason, start, end, about)


def _chunk(segment: Mapping[str, Any]) -> dict[str, Any]:
    start, tokens = segment["start"], segment["tokens"]
    return {"request": segment["request_id"], "from": start, "to": start + tokens, "of": segment["prompt_tokens"]}


def _slice(process: int, thread: int, step: Step, name: str, about: Mapping[str, Any]) -> Event:
    start = _micro(step["start_seconds"])
    return _complete(process, thread, name, start, _micro(step["start_seconds"] + step["seconds"]), about)


def _complete(process: int, thread: int, name: str, start: float, end: float, about: Mapping[str, Any]) -> Event:
    return {
        "name": name,
        "cat": THREADS[thread],
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 3),
        "pid": process,
        "tid": thread,
        "args": dict(about),
    }


def _counter(process: int, at: float, name: str, values: Mapping[str, float]) -> Event:
    return {"name": name, "ph": "C", "ts": at, "pid": process, "tid": 0, "args": dict(values)}


def _meta(process: int, thread: int, name: str, about: Mapping[str, Any]) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": dict(about)}


def _micro(seconds: float) -> float:
    """Return microseconds, to the nanosecond: ends and beginnings of neighbouring steps must round alike."""
    return round(1e6 * seconds, 3)
