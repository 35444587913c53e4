"""Starting the engine's process, and everything that belongs to it until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from halocline.engine.messages import Spec, StartFailed
from halocline.engine.rendezvous import Folder, pipe_pair
from halocline.errors import ConfigError, EngineDeadError, HaloclineError, ModelError

COMMANDS_KEPT = 100_000
"""Commands that the engine has not read; beyond, new requests are refused."""
REPORTS_KEPT = 1000
"""Reports that wait in the front end's socket; more wait in the engine's."""


@dataclass
class EngineProcess:
    """One engine process with its folder and pipes. It imports, and waits to be told what to build."""

    folder: Folder
    process: subprocess.Popen[bytes]
    lifeline: int
    beacon: int
    is_closed: bool = False

    def tell(self, spec: Spec) -> None:
        """Say what to build. An engine that has ended hears nothing; its beacon says so."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.lifeline, msgspec.json.encode(spec) + b"\n")

    def close(self) -> None:
        """Free everything; the process has ended or is killed now. A second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self.lifeline, self.beacon):
            os.close(descriptor)
        self.folder.close()


@dataclass
class Launched:
    """An engine process that was told what to build, with the sockets to it."""

    engine: EngineProcess
    context: zmq.asyncio.Context
    commands: zmq.Socket[bytes]
    reports: zmq.asyncio.Socket

    def close(self) -> None:
        """Free everything; the process has ended or is killed now."""
        self.commands.close(linger=0)
        self.reports.close(linger=0)
        self.context.term()
        self.engine.close()


def begin(ahead: Sequence[str] = ()) -> EngineProcess:
    """Start an engine process before it is known what it will build; meanwhile it imports the modules `ahead`."""
    with contextlib.ExitStack() as undo:
        folder = Folder.create()
        undo.callback(folder.close)
        with pipe_pair() as (child_reads, lifeline, beacon, child_writes):
            undo.callback(os.close, lifeline)
            undo.callback(os.close, beacon)
            arguments = [str(folder.path), str(child_reads), str(child_writes), str(os.getpid()), *ahead]
            process = subprocess.Popen(
                [sys.executable, "-m", "halocline.engine.process", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_reads, child_writes),
                # A terminal's Ctrl-C goes to the whole group; the front end decides when the engine ends.
                start_new_session=True,
            )
        undo.pop_all()
    return EngineProcess(folder, process, lifeline, beacon)


def launch(spec: Spec, engine: EngineProcess | None = None) -> Launched:
    """Tell an engine process, begun before or now, what to build; it says Hello or StartFailed when it is ready."""
    with contextlib.ExitStack() as undo:
        if engine is None:
            engine = begin()
            undo.callback(engine.close)
        context = zmq.asyncio.Context()
        undo.callback(context.term)
        reports = context.socket(zmq.PULL)
        undo.callback(reports.close, linger=0)
        reports.set_hwm(REPORTS_KEPT)
        reports.bind(engine.folder.reports)
        commands: zmq.Socket[bytes] = zmq.Socket(zmq.Context(context), zmq.PUSH)
        undo.callback(commands.close, linger=0)
        commands.set_hwm(COMMANDS_KEPT)
        commands.connect(engine.folder.commands)
        undo.pop_all()
    engine.tell(spec)
    return Launched(engine, context, commands, reports)


async def wait_for_exit(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process without a thread: an event loop that closes could not stop one."""
    deadline = asyncio.get_running_loop().time() + seconds
    while process.poll() is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)


def how_it_ended(code: int | None) -> str:
    """Say in words how a process ended that left this exit code."""
    if code is None:
        return "its exit code is not known"
    if code >= 0:
        return f"exit code {code}"
    hint = {signal.SIGKILL: " (by somebody, or by the kernel because memory ran out)"}
    return f"killed by {signal.Signals(-code).name}{hint.get(signal.Signals(-code), '')}"


def start_error(report: StartFailed) -> HaloclineError:
    """Return the exception that the engine met while it started."""
    if report.kind == "config":
        return ConfigError(list(report.problems) or [report.message])
    if report.kind == "model":
        return ModelError(report.message)
    return EngineDeadError(f"the engine could not start: {report.message}")
