"""The engine's own process: `python -m halocline.engine.process FOLDER LIFELINE BEACON PARENT [MODULE ...]`.

It is started by `engine.launch` and by nobody else. It reads its `Spec` from the lifeline pipe, builds scheduler and
backend, says Hello, and turns the core until it is told to stop or its parent ends. The beacon pipe is written by
nobody: its closing tells the front end that this process is gone.

Where it is begun before its spec is known, it imports the modules named meanwhile: PyTorch and transformers take
seconds, in which the front end finds and checks the model.

SIGINT and SIGTERM are ignored: a terminal or a service manager sends them to every process of a group, and the front
end must be able to drain first. It ends the engine itself, and the engine ends by itself when the front end dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from halocline.engine.core import EngineCore, EngineParts
from halocline.engine.figures import snapshot_of
from halocline.engine.messages import (
    Bye,
    Cancel,
    Command,
    Figures,
    Hello,
    Outputs,
    Report,
    Shutdown,
    Spec,
    StartFailed,
    Starting,
    Submit,
    decode_command,
    encode,
)
from halocline.engine.rendezvous import Folder, read_line, watch_parent
from halocline.engine.wire import event_of, reports_of
from halocline.errors import ConfigError, HaloclineError, ModelError
from halocline.huge_pages import keep_freed_memory, use_huge_pages_beside

logger = logging.getLogger("halocline.engine")

FIGURES_SECONDS = 0.5
"""At most so often are figures sent while there is work; always when the engine becomes idle."""
IDLE_SECONDS = 1.0
"""An idle engine looks up so often."""
BLOCKED_SECONDS = 0.02
"""With work but nothing to compute, the engine asks again after this time."""
REPORTS_KEPT = 10_000
"""Unread reports; beyond, the engine waits for its front end."""
LINGER_MS = 2000
YOUNG_OBJECTS = 10_000
"""So many more objects made than freed start a collection of the youngest: a step of 256 requests leaves fewer."""

Progress = Callable[[str, float | None], None]


class EngineLink:
    """The engine's end of the two sockets. Used by one thread."""

    def __init__(self, folder: Folder) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._commands.bind(folder.commands)
        self._reports = self._context.socket(zmq.PUSH)
        self._reports.set_hwm(REPORTS_KEPT)
        self._reports.setsockopt(zmq.LINGER, LINGER_MS)
        self._reports.connect(folder.reports)
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)

    def also_wake_for(self, descriptor: int) -> None:
        """End a wait in `receive` when this file descriptor is readable, too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, report: Report) -> None:
        """Send one report; waits when the front end has not read the last 10,000."""
        self._reports.send(encode(report))

    def receive(self, wait_seconds: float) -> list[Command]:
        """Return all commands that have come, waiting up to `wait_seconds` for the first or for another descriptor."""
        commands: list[Command] = []
        if wait_seconds:
            self._poller.poll(int(wait_seconds * 1000))
        while True:
            try:
                frame = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            try:
                commands.append(decode_command(frame))
            except (msgspec.DecodeError, HaloclineError) as error:
                logger.error("event=bad_command error=%r", error)

    def close(self) -> None:
        """Send what is left and close."""
        self._commands.close(linger=0)
        self._reports.close()
        self._context.term()


def main(arguments: list[str]) -> int:
    """Run one engine process to its end; returns its exit code."""
    keep_freed_memory()
    path, lifeline, beacon, parent = Path(arguments[0]), *map(int, arguments[1:4])
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    for descriptor in (lifeline, beacon):
        os.set_inheritable(descriptor, False)
    folder = Folder(path)
    importing = import_ahead(arguments[4:])
    line = read_line(lifeline, parent)
    if not line:
        folder.close()
        return 0  # whoever began this process found that there is nothing to build, or is gone
    spec = msgspec.json.decode(line, type=Spec)
    watch_parent(lifeline, parent, folder.close)
    logging.basicConfig(
        level=spec.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    link = EngineLink(folder)
    try:
        importing.join()  # two threads that import transformers at once find half of it
        parts = _build(spec, link, folder)
        if parts is None:
            return 1
        core = EngineCore(parts.scheduler, parts.backend, audit=spec.audit, exchange=parts.exchange)
        if parts.exchange is not None:
            link.also_wake_for(parts.exchange.fileno())
        settle_memory()
        link.send(Hello(os.getpid(), parts.model, parts.capacity, parts.link))
        use_huge_pages_beside()
        logger.info("event=engine_ready pid=%d model=%s", os.getpid(), parts.model.name)
        try:
            crank(core, link)
        finally:
            core.close()
    finally:
        link.close()
    return 0


def import_ahead(modules: Sequence[str]) -> threading.Thread:
    """Import `modules` in a thread of its own. What fails there fails again, and is told, where it is needed."""

    def run() -> None:
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)

    thread = threading.Thread(target=run, name="halocline-import", daemon=True)
    thread.start()
    return thread


def settle_memory() -> None:
    """Take what has been built for good out of the garbage collector's sight, and let it look less often.

    With PyTorch and a model imported 360,000 objects are there to stay. A collection of the oldest generation visits
    them all, between two tokens, and finds nothing: 100 ms and more, many steps' time. What a step makes dies by
    counting references; cycles come from errors only, so that collections need not be frequent either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def crank(core: EngineCore, link: EngineLink, clock: Callable[[], float] = time.monotonic) -> None:
    """Turn the core until a Shutdown comes."""
    figures_at, had_work, computed = clock(), False, True
    _send_figures(core, link, figures_at)
    while True:
        wait_seconds = IDLE_SECONDS if not core.has_work else 0.0 if computed else BLOCKED_SECONDS
        commands = link.receive(wait_seconds)
        if any(isinstance(command, Shutdown) for command in commands):
            break
        before = core.steps
        for command in commands:
            if isinstance(command, Submit) and command.prefill_at:
                core.assign(command.request_id, command.prefill_at)
        updates = core.turn(event_of(command) for command in commands)
        computed = core.steps > before
        if updates:
            link.send(Outputs(reports_of(updates)))
        if clock() - figures_at >= FIGURES_SECONDS or (had_work and not core.has_work):
            figures_at = clock()
            _send_figures(core, link, figures_at)
        had_work = core.has_work
    _end(core, link)


def _send_figures(core: EngineCore, link: EngineLink, now: float) -> None:
    try:
        link.send(Figures(snapshot_of(core, now)))
    except Exception:
        # Figures that cannot be told are a defect, but no reason to end everybody's requests.
        logger.exception("event=figures_failed")


def _end(core: EngineCore, link: EngineLink) -> None:
    """Drop what still runs, recount, and say goodbye."""
    core.turn([event_of(Cancel(request_id)) for request_id in core.live])
    violations = core.audit()
    _send_figures(core, link, time.monotonic())
    link.send(Bye(violations))
    logger.info("event=engine_end violations=%d", len(violations))


def _build(spec: Spec, link: EngineLink, folder: Folder) -> EngineParts | None:
    """Call the builder; what goes wrong is told to the parent in words instead of a traceback in its terminal."""

    def progress(text: str, fraction: float | None = None) -> None:
        link.send(Starting(text, fraction))

    try:
        own = {spec.folder_setting: str(folder.path)} if spec.folder_setting else {}
        return load_builder(spec)(spec.settings | own, progress)
    except ConfigError as error:
        link.send(StartFailed("config", str(error), tuple(error.problems)))
    except ModelError as error:
        link.send(StartFailed("model", str(error)))
    except Exception as error:
        logger.exception("event=start_failed")
        link.send(StartFailed("other", f"{type(error).__name__}: {error}"))
    return None


def load_builder(spec: Spec) -> Callable[[dict[str, Any], Progress], EngineParts]:
    """Find the function that `spec.builder` names."""
    sys.path[:0] = spec.python_path
    module, _, function = spec.builder.partition(":")
    builder: Callable[[dict[str, Any], Progress], EngineParts] = getattr(importlib.import_module(module), function)
    return builder


if __name__ == "__main__":
    if not __debug__:
        sys.exit("halocline does not run under python -O: its assertions are part of its safety")
    code = main(sys.argv[1:])
    # Everything that must be put away has been; the interpreter's own teardown with a model in it takes seconds.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
