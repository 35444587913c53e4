"""Starting the engine's process, and everything that belongs to it until it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
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
class Launched:
    """One engine process with its sockets, pipes and folder."""

    folder: Folder
    process: subprocess.Popen[bytes]
    lifeline: int
    beacon: int
    context: zmq.asyncio.Context
    commands: zmq.Socket[bytes]
    reports: zmq.asyncio.Socket

    def close(self) -> None:
        """Free everything; the process has ended or is killed now."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self.lifeline, self.beacon):
            os.close(descriptor)
        self.commands.close(linger=0)
        self.reports.close(linger=0)
        self.context.term()
        self.folder.close()


def launch(spec: Spec) -> Launched:
    """Start an engine process and hand it its spec; it says Hello or StartFailed when it is ready."""
    folder = Folder.create()
    context = zmq.asyncio.Context()
    reports = context.socket(zmq.PULL)
    reports.set_hwm(REPORTS_KEPT)
    reports.bind(folder.reports)
    commands: zmq.Socket[bytes] = zmq.Socket(zmq.Context(context), zmq.PUSH)
    commands.set_hwm(COMMANDS_KEPT)
    commands.connect(folder.commands)
    with pipe_pair() as (child_reads, lifeline, beacon, child_writes):
        arguments = [str(folder.path), str(child_reads), str(child_writes), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-m", "halocline.engine.process", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(child_reads, child_writes),
            # A terminal's Ctrl-C goes to the whole group; the front end decides when the engine ends.
            start_new_session=True,
        )
    with contextlib.suppress(BrokenPipeError):
        os.write(lifeline, msgspec.json.encode(spec) + b"\n")
    return Launched(folder, process, lifeline, beacon, context, commands, reports)


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
