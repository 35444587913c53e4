"""Prefill here, decode there, in one command: local workers and a router, started together and ended together.

    halocline serve --disagg 1p1d
        |- python -m halocline.group ... --role prefill      each worker is a server of its own, on a free port
        |- python -m halocline.group ... --role decode
        `- the router, in this process, on --port

Workers are in sessions of their own, so that Ctrl-C reaches this process alone: the router drains first, then they go.
However this process ends, they end: each watches a pipe whose other end is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue

import yaml

from halocline.api.server import LAST_WORDS_SECONDS, allow_connections, listen, sigterm_is_ctrl_c
from halocline.config import Config, build, read_file
from halocline.engine.rendezvous import watch_parent
from halocline.errors import ConfigError, EngineDeadError, HaloclineError
from halocline.memory.sizing import auto_kv_bytes
from halocline.route import RouteSettings, serve_router
from halocline.serve import LOG_FORMAT, SERVING_AT, link_token, run_server, say

logger = logging.getLogger("halocline.group")

LAST_LINES = 40


class Worker:
    """One server process of a group, and what it prints."""

    def __init__(self, name: str, config: Config, folder: Path) -> None:
        """Start it; `url` waits until it serves. Its settings go through a file: one of them is a secret."""
        self.name = name
        self._drain_seconds = config.drain_seconds
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._urls: Queue[str | None] = Queue()
        path = folder / f"{name.replace(' ', '-')}.yaml"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(asdict(config)), encoding="utf-8")
        child_reads, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "halocline.group", str(path), str(child_reads), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_reads,),
                start_new_session=True,
                text=True,
                bufsize=1,
            )
        finally:
            os.close(child_reads)
        self._reader = threading.Thread(target=self._read, name=f"halocline-{name}", daemon=True)
        self._reader.start()

    def url(self) -> str:
        """Wait until the worker serves, and return where; raises EngineDeadError with its last words."""
        url = self._urls.get()
        if url is None:
            code = self.process.wait()
            raise EngineDeadError(f"the {self.name} worker did not start (exit code {code}): {self.last_words()}")
        return url

    def last_words(self) -> str:
        """Return the last lines that it printed, in one."""
        return " | ".join(list(self._lines)[-5:])

    def _read(self) -> None:
        """Print what the worker prints, under its name, to its end."""
        assert self.process.stdout is not None, "the worker's output is a pipe"
        try:
            with self.process.stdout:
                for line in self.process.stdout:
                    self._lines.append(line.rstrip("\n"))
                    if line.startswith(SERVING_AT):
                        self._urls.put(line.removeprefix(SERVING_AT).strip())
                    # Its address is no news for clients, and programs look for the router's line.
                    with contextlib.suppress(OSError):  # nobody reads here any more; the worker's pipe must stay empty
                        say(f"[{self.name}] {self._lines[-1]}")
        finally:
            self._urls.put(None)

    def stop(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def join(self) -> int:
        """Wait for its end, which is a matter of seconds after `stop`; returns its exit code."""
        try:
            code = self.process.wait(self._drain_seconds + LAST_WORDS_SECONDS + 30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        os.close(self._lifeline)
        self._reader.join()
        return code


def run_group(config: Config) -> int:
    """Serve with local workers and a router until told to stop; returns the exit code. Raises ConfigError."""
    counts = config.disagg_rule
    assert counts is not None, "run_group is for --disagg"
    if config.role != "both":
        raise ConfigError([f"--disagg starts workers of both roles; --role {config.role} is for one worker alone"])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=LOG_FORMAT)
    logging.getLogger("halocline").setLevel(config.log_level.upper())
    config = replace(config, link_token=link_token(config) or secrets.token_urlsafe(32))
    allow_connections()
    has_served = False
    try:
        # One handler or another from here to the end: a signal between two would leave the workers' settings behind.
        with (
            sigterm_is_ctrl_c(),
            listen(config.host, config.port) as listener,
            _workers(config, counts) as workers,
        ):
            urls = [worker.url() for worker in workers]
            settings = RouteSettings(
                prefill=tuple(urls[: counts[0]]),
                decode=tuple(urls[counts[0] :]),
                host=config.host,
                port=config.port,
                api_key=config.api_key,
                worker_api_key=config.api_key,
                link_token=config.link_token,
                lost_seconds=config.lease_seconds,
                drain_seconds=config.drain_seconds,
                log_level=config.log_level,
            )
            watch = _Watch(workers, counts[0])
            try:
                code = asyncio.run(serve_router(settings, listener))
                has_served = True
            finally:
                watch.end()
            return 1 if any(worker.process.poll() is not None for worker in workers) else code
    except KeyboardInterrupt:
        # Told to stop before there was anything to serve, or a second time.
        return 130 if has_served else 0


def worker_configs(config: Config, counts: tuple[int, int]) -> dict[str, Config]:
    """Return the settings of each worker by its name: they share the machine's cores and an `auto` arena's bytes."""
    import psutil

    workers = sum(counts)
    cores = os.cpu_count() or 1
    shared = replace(
        config, disagg=None, host="127.0.0.1", port=0, link_port=0, threads=config.threads or max(1, cores // workers)
    )
    if config.kv_bytes == "auto" and config.device in ("auto", "cpu"):
        shared = replace(shared, kv_bytes=max(1, auto_kv_bytes(psutil.virtual_memory().available) // workers))
    named = {f"prefill {i}": replace(shared, role="prefill") for i in range(counts[0])}
    return named | {f"decode {i}": replace(shared, role="decode") for i in range(counts[1])}


@contextlib.contextmanager
def _workers(config: Config, counts: tuple[int, int]) -> Iterator[list[Worker]]:
    """Start all workers at once; at the end all are gone."""
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="halocline-group-") as folder:
        try:
            # Not a comprehension: who has been started is known also when the next one cannot be.
            for name, each in worker_configs(config, counts).items():
                workers.append(Worker(name, each, Path(folder)))
            yield workers
        finally:
            try:
                for worker in workers:
                    worker.stop()
                for worker in workers:
                    worker.join()
            except KeyboardInterrupt:
                for worker in workers:
                    worker.process.kill()  # its engine ends with it
                raise


class _Watch:
    """Says which worker has ended, and stops serving when nobody is left who could answer.

    The router by itself would wait for somebody's return; here nobody starts a worker again.
    """

    def __init__(self, workers: Sequence[Worker], prefills: int) -> None:
        self._decoders = workers[prefills:]
        self._lock = threading.Lock()
        self._is_over = False
        for worker in workers:
            threading.Thread(target=self._wait, args=(worker,), daemon=True).start()

    def end(self) -> None:
        """Take no notice of ends from now on."""
        with self._lock:
            self._is_over = True

    def _wait(self, worker: Worker) -> None:
        code = worker.process.wait()
        with self._lock:
            if self._is_over:
                return
            left = sum(each.process.poll() is None for each in self._decoders)
            so = "it is not started again, others go on" if left else "nobody is left who could answer: stopping"
            logger.error(
                "event=worker_ended worker=%r code=%s decode_workers_left=%d message=%r words=%r",
                worker.name,
                code,
                left,
                so,
                worker.last_words(),
            )
            if not left:
                self._is_over = True
                os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Be one worker of a group: settings file, lifeline, process id of the group."""
    path, lifeline, parent = arguments[0], int(arguments[1]), int(arguments[2])
    os.set_inheritable(lifeline, False)
    # The engine's own process watches this one in the same way.
    watch_parent(lifeline, parent, lambda: None)
    settings = read_file(path)
    Path(path).unlink()  # a secret is in it
    return run_server(build(settings), outlives_engine=False)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HaloclineError as error:
        sys.stderr.write(f"halocline: {error}\n")
        sys.exit(2)
