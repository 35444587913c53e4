"""Several replays at once: one process per policy, at most so many at a time.

Each process is started afresh (`spawn`), gets everything by value, and tells through a pipe of its own how far it is
and what came of it. Who reads closes the rest down when one fails, when it is interrupted, and when a process dies:
nothing is left running.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from halocline.errors import ConfigError, FailedError, HaloclineError, InvariantError
from halocline.huge_pages import keep_freed_memory, use_huge_pages
from halocline.sim.simulation import Progress, Setup, simulate
from halocline.sim.workload import Workload

SETTLE_SECONDS = 1.0
"""How often what a replay has built is put on huge pages."""

OnProgress = Callable[[int, Progress], None]
"""Called with the number of the setup and how far its run is."""


@dataclass(frozen=True, kw_only=True)
class How:
    """How the workload is let through, the same for all policies."""

    saturated: bool = False
    time_scale: float = 1.0
    most_jobs: int | None = None
    window: tuple[int, int] | None = None
    audit_every: int = 0


def simulate_all(
    setups: Sequence[Setup], workload: Workload, how: How, *, processes: int, on_progress: OnProgress
) -> list[dict[str, Any]]:
    """Return each setup's outcome, as `Outcome.to_dict` writes it, in the order of the setups.

    One setup, or one process, runs here. Raises ConfigError when a setup cannot work, and FailedError when a process
    ended without an answer (killed, out of memory).
    """
    if processes > 1 and len(setups) > 1:
        return _in_processes(setups, workload, how, processes, on_progress)
    return [
        _run(setup, workload, how, lambda progress, number=number: on_progress(number, progress))  # type: ignore[misc]
        for number, setup in enumerate(setups)
    ]


def _run(setup: Setup, workload: Workload, how: How, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    settled = time.monotonic()

    def settle_and_tell(progress: Progress) -> None:
        nonlocal settled
        if time.monotonic() - settled > SETTLE_SECONDS:
            use_huge_pages()
            settled = time.monotonic()
        on_progress(progress)

    keep_freed_memory()
    try:
        outcome = simulate(
            setup,
            workload,
            saturated=how.saturated,
            time_scale=how.time_scale,
            on_progress=settle_and_tell,
            window=how.window,
            most_jobs=how.most_jobs,
            audit_every=how.audit_every,
        )
    except InvariantError as error:
        raise FailedError(f"the replay of {setup.policy} failed: {error}") from error
    return outcome.to_dict()


def _in_processes(
    setups: Sequence[Setup], workload: Workload, how: How, processes: int, on_progress: OnProgress
) -> list[dict[str, Any]]:
    waiting = list(enumerate(setups))
    found: dict[int, dict[str, Any]] = {}
    with _crew() as start:
        numbers: dict[Connection, int] = {}
        while waiting or numbers:
            while waiting and len(numbers) < processes:
                number, setup = waiting.pop(0)
                numbers[start(setup, workload, how)] = number
            for pipe in connection.wait(list(numbers)):
                assert isinstance(pipe, Connection), "only our pipes are waited for"
                number = numbers[pipe]
                kind, value = _receive(pipe, setups[number])
                if kind == "progress":
                    on_progress(number, value)
                    continue
                found[number] = value
                del numbers[pipe]
    return [found[number] for number in range(len(setups))]


def _receive(pipe: Connection, setup: Setup) -> tuple[str, Any]:
    """Return a message of a process, `progress` or `outcome`; raises what it failed with."""
    try:
        kind, value = pipe.recv()
    except EOFError:
        raise FailedError(
            f"the process that replayed {setup.policy} ended without an answer; was it killed, or out of memory?"
        ) from None
    match kind:
        case "config":
            raise ConfigError(value)
        case "halocline":
            raise FailedError(value)
        case "defect":
            raise RuntimeError(f"the replay of {setup.policy} broke:\n{value}")
    return kind, value


@contextmanager
def _crew() -> Iterator[Callable[[Setup, Workload, How], Connection]]:
    """Yield what starts a process and returns its pipe; none is left at the end."""
    context = get_context("spawn")
    members: list[tuple[BaseProcess, Connection]] = []

    def start(setup: Setup, workload: Workload, how: How) -> Connection:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, setup, workload, how), name=f"replay {setup.policy}")
        members.append((process, ours))
        # Ctrl-C reaches every process of a terminal: this one decides, the others never see it. It starts the tracker
        # first, because starting that one would unblock the signal.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return ours

    try:
        yield start
        for process, _ in members:
            process.join()
    finally:
        for process, pipe in members:
            if process.pid is not None:
                process.terminate()
                process.join()
            pipe.close()


def _work(pipe: Connection, setup: Setup, workload: Workload, how: How) -> None:
    """Run one setup and send what came of it."""
    try:
        pipe.send(("outcome", _run(setup, workload, how, lambda progress: pipe.send(("progress", progress)))))
    except BrokenPipeError:
        return
    except ConfigError as error:
        pipe.send(("config", error.problems))
    except HaloclineError as error:
        pipe.send(("halocline", str(error)))
    except Exception:
        pipe.send(("defect", traceback.format_exc()))
    finally:
        pipe.close()
