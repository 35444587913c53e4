"""The trace of a window of steps: valid by the Trace Event Format, and it says what the steps did."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from halocline.sim.outcome import SegmentRecord
from halocline.sim.perfetto import DECODES, ENDS, PREFILLS, STEPS, THREADS, WAITING, as_json
from testing.outcomes import GIB, document, outcome, step

PROMPT = SegmentRecord("line 7", 0, 512, 1000)
REST = SegmentRecord("line 7", 512, 488, 1000)
OTHER = SegmentRecord("line 8", 0, 20, 20)
DECODE = SegmentRecord("line 3", 1200, 1, 1000)
WINDOW = (
    step(5, DECODE, PROMPT, waiting=3, reason="memory"),
    step(6, DECODE, REST, OTHER, waiting=2, reason="memory", moves=4),
    step(7, DECODE, waiting=1, reason="slots", ended=("line 3",)),
    step(8),
)


def trace(*runs: Any) -> dict[str, Any]:
    return json.loads(as_json(document(*(runs or (outcome(window=WINDOW), outcome("full", window=WINDOW))))))


def test_every_event_has_what_the_format_asks_for() -> None:
    read = trace()
    assert read["displayTimeUnit"] == "ms"
    assert read["traceEvents"]
    for event in read["traceEvents"]:
        assert event["ph"] in {"X", "C", "M", "i"}
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] > 0
            case "C":
                assert event["args"]
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "M":
                assert set(event["args"]) <= {"name", "sort_index"}
            case "i":
                assert event["s"] == "t"


def test_a_process_is_a_policy_and_its_threads_have_names() -> None:
    names = {event["pid"]: event["args"]["name"] for event in trace()["traceEvents"] if event["name"] == "process_name"}
    assert names == {1: "shared", 2: "full"}
    threads = [event["args"]["name"] for event in trace()["traceEvents"] if event["name"] == "thread_name"]
    assert threads == [*THREADS.values()] * 2


def test_slices_of_a_thread_never_overlap() -> None:
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace()["traceEvents"]:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 8
    for spans in by_thread.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= end - 1e-6


def slices(thread: int) -> list[dict[str, Any]]:
    return [
        event
        for event in trace(outcome(window=WINDOW))["traceEvents"]
        if event["tid"] == thread and event["ph"] in {"X", "i"}
    ]


def test_steps_prefills_and_decodes_say_what_they_computed() -> None:
    assert [each["name"] for each in slices(STEPS)] == ["step 5", "step 6", "step 7", "step 8"]
    assert [each["args"]["tokens"] for each in slices(STEPS)] == [513, 509, 1, 0]
    assert slices(STEPS)[1]["args"]["moves"] == 4
    assert slices(STEPS)[0]["ts"] == 100_000.0
    assert slices(STEPS)[0]["dur"] == 20_000.0
    assert [each["name"] for each in slices(PREFILLS)] == ["line 7, 512 tokens", "2 prompts, 508 tokens"]
    assert slices(PREFILLS)[1]["args"]["chunks"][0] == {"request": "line 7", "from": 512, "to": 1000, "of": 1000}
    assert [each["args"]["requests"] for each in slices(DECODES)] == [["line 3"]] * 3


def test_who_waits_first_is_one_slice_for_as_long_as_the_reason_stays() -> None:
    memory, slots = slices(WAITING)
    assert (memory["name"], memory["ts"], memory["dur"]) == ("memory", 100_000.0, 40_000.0)
    assert memory["args"]["most that wait"] == 3
    assert (slots["name"], slots["dur"]) == ("slots", 20_000.0)


def test_an_end_is_an_instant_at_the_end_of_its_step() -> None:
    assert [(each["name"], each["ts"]) for each in slices(ENDS)] == [("line 3", 160_000.0)]


def test_counters_have_the_bytes_of_each_pool() -> None:
    counters = [event for event in trace(outcome(window=WINDOW))["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"held bytes", "cached bytes", "requests"}
    held = [event["args"] for event in counters if event["name"] == "held bytes"]
    assert held == [{"full": 3 * GIB, "sliding-1024": GIB}] * 4
