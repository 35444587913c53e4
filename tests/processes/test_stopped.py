"""A worker that is stopped past its lease and wakes changes no byte of a page that is another's by then.

Two real processes with real links; what the one that stops is about to do when it does is chosen, and done late: when
its pages have later owners. Both compare all bytes of their arenas in every turn (`testing.stopped`), and every answer
is the token oracle's, which hangs on every byte that it reads.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from halocline.faults.sketch import LEASE_SECONDS, VOCAB
from halocline.params import SamplingParams
from halocline.sim.oracle import reference
from testing.stopped import PAGE_TOKENS, RETENTIONS, SLABS

TESTS = Path(__file__).parents[1]
LINKS = ("shm", "tcp")
E2E = pytest.mark.e2e
TOKENS = 12
PATIENCE_SECONDS = 60.0


def prompt(name: str) -> list[int]:
    return [(position * 31 + 7 * sum(name.encode())) % VOCAB for position in range(40)]


class Process:
    """One worker, and what it has said."""

    def __init__(self, name: str, kind: str, folder: Path, **settings: Any) -> None:
        base = {"name": name, "kind": kind, "folder": str(folder), "after": 0, "where": "", "stays_open": False}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "testing.stopped", json.dumps(base | settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        self.said: list[dict[str, Any]] = []
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = self.wait(lambda: self._first("address"))

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)

    def _take(self, line: str) -> None:
        word = json.loads(line)
        self.said.append(word)
        if "token" in word:
            self.outputs.setdefault(word["name"], []).extend([word["token"]] if word["token"] is not None else [])
            if word["end"]:
                self.ends[word["name"]] = word["end"]

    def _first(self, key: str) -> Any:
        return next((word[key] for word in self.said if key in word), None)

    def wait(self, reached: Callable[[], Any]) -> Any:
        """Listen until something is true, and return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := reached()):
            assert time.monotonic() < deadline, f"not reached: {self.said[-5:]}, {self.ends}"
            assert self._child.poll() is None, f"it ended: {self.said[-5:]}"
            while not self._lines.empty():
                self._take(self._lines.get())
            time.sleep(0.01)
        return found

    def ask(self, name: str, at: str = "") -> None:
        self._command(name=name, prompt=prompt(name), tokens=TOKENS, at=at)

    def _command(self, **words: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(words) + "\n")
        self._child.stdin.flush()

    def wait_until_stopped(self) -> None:
        self.wait(lambda: self._first("stops"))
        process = psutil.Process(self._child.pid)
        self.wait(lambda: process.status() == psutil.STATUS_STOPPED)

    def wake(self) -> None:
        os.kill(self._child.pid, signal.SIGCONT)

    def was_late(self) -> bool:
        """Whether the thread that stopped went on when its pages were no longer its business."""
        self.wait(lambda: any("late" in word for word in self.said))
        return bool(self._first("late"))

    def violations(self) -> list[str]:
        return [word["violation"] for word in self.said if "violation" in word]

    def report(self) -> dict[str, Any]:
        """Return what is left and what was counted, when nothing is left or time is up."""

        def clean() -> dict[str, Any] | None:
            self._command(report=True)
            time.sleep(0.1)
            last = [word for word in self.said if "leftovers" in word][-1:]
            return last[0] if last and not last[0]["leftovers"] else None

        found: dict[str, Any] = self.wait(clean)
        return found

    def end(self) -> None:
        self.wake()
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def two(kind: str, tmp_path: Path, who: str, **settings: Any) -> Iterator[tuple[Process, Process]]:
    """Start a prefill and a decode worker, one of which stops."""
    with ExitStack() as stack:
        made = []
        for name in ("p", "d"):
            folder = tmp_path / name
            folder.mkdir()
            made.append(Process(name, kind, folder, **(settings if name == who else {})))
            stack.callback(made[-1].end)
        yield made[0], made[1]


def answers_are_right(worker: Process, names: list[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for name in names:
        wanted = reference(RETENTIONS, tuple(prompt(name)), TOKENS, VOCAB, params=params, eos=())
        assert (worker.ends[name], worker.outputs[name]) == ("length", wanted), name


def happen(prefill: Process, decode: Process, stopped: Process) -> None:
    """Let a transfer stop half way, others take its pages on both sides, and the one that stopped wake."""
    later = [f"later {number}" for number in range(8)]
    assert len(later) * (40 + TOKENS) / PAGE_TOKENS > 2 * SLABS, "later owners take every page"
    decode.ask("first", prefill.address)
    stopped.wait_until_stopped()
    for worker in (prefill, decode):
        for name in later:
            worker.ask(name)
    time.sleep(1.5 * LEASE_SECONDS)
    if (
        stopped is decode
    ):  # by the lease or because the peer is silent, whichever ends first: nothing is left over there
        assert prefill.report()["totals"]["sent"] == 0, "the transfer was over before its peer stopped"
    stopped.wake()
    for worker in (prefill, decode):
        worker.wait(lambda worker=worker: set(later) <= worker.ends.keys())
        answers_are_right(worker, later)
    decode.wait(lambda: "first" in decode.ends)
    assert not prefill.violations()


@pytest.mark.parametrize(
    ("kind", "where", "after"),
    [
        pytest.param("tcp", "before a write", 1, id="tcp, before it writes"),
        pytest.param("shm", "before a write", 1, id="shm, before it writes", marks=E2E),
        pytest.param("tcp", "before a write", 2, id="tcp, between two writes", marks=E2E),
        pytest.param("shm", "before a write", 2, id="shm, between two writes", marks=E2E),
        pytest.param("tcp", "in a write", 1, id="tcp, while it writes", marks=E2E),
        pytest.param("shm", "in a write", 1, id="shm, while it writes", marks=E2E),
    ],
)
def test_a_decode_worker_that_wakes_writes_into_no_later_owners_page(
    kind: str, where: str, after: int, tmp_path: Path
) -> None:
    with two(kind, tmp_path, "d", where=where, after=after) as (prefill, decode):
        happen(prefill, decode, decode)
        assert decode.was_late() == (where == "before a write")
        assert not decode.violations()
        answers_are_right(decode, ["first"])
        for worker in (prefill, decode):
            worker.report()


@E2E
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("after", [1, 2])
def test_a_prefill_worker_that_wakes_sends_no_later_owners_page(kind: str, after: int, tmp_path: Path) -> None:
    with two(kind, tmp_path, "p", where="before a read", after=after) as (prefill, decode):
        happen(prefill, decode, prefill)
        assert prefill.was_late()
        assert not decode.violations()
        answers_are_right(decode, ["first"])
        assert decode.report()["totals"]["attempts_lost"] > 0
        prefill.report()


@E2E
@pytest.mark.parametrize("kind", LINKS)
def test_the_comparison_sees_a_landing_that_is_not_closed(kind: str, tmp_path: Path) -> None:
    with two(kind, tmp_path, "d", where="before a write", after=1, stays_open=True) as (prefill, decode):
        decode.ask("first", prefill.address)
        decode.wait_until_stopped()
        for number in range(8):
            decode.ask(f"later {number}")
        time.sleep(1.5 * LEASE_SECONDS)
        decode.wake()
        decode.wait(decode.violations)
