"""One real worker in a process of its own, which stops itself at a chosen moment: `python -m testing.stopped JSON`.

Scheduler, exchange, landings and link are the real ones; the model is the token oracle whose words are bytes of the
arena. A thread of the link stops the whole process (SIGSTOP) when it is about to touch pages. Woken, it lets the engine
act first, until the pages are another's, and only then goes on: the worst that a process that was stopped can do.

Before and after each plan is made the arena is compared with what it was: no byte may have changed outside of the
landings that are open. Commands come as lines on stdin, what happens goes out as lines on stdout, JSON both.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from halocline.disagg import messages as wire
from halocline.disagg import writer
from halocline.disagg.actions import Key
from halocline.disagg.arena_pages import ArenaPages, Bytes
from halocline.disagg.landings import Landing, Landings
from halocline.disagg.links import LinkPost, listen_for_links
from halocline.faults.sketch import UNIT_BYTES, VOCAB, WorkerSketch
from halocline.faults.words import ByteBackend, ByteMemory, Watch
from halocline.faults.worker import Makers, Worker
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, place_layers
from halocline.memory.retention import Full, Sliding, describe
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive, Failed, NewToken, PoolPages
from halocline.schedule.rules import Rules

SECRET = b"a secret of this group"
RETENTIONS = (Full(), Sliding(9))
PAGE_TOKENS, SLABS, SLOTS, LONGEST = 4, 40, 6, 64
PATIENCE_SECONDS = 6.0
"""So long who was woken waits for the engine: three leases."""
AFTER_SECONDS = 0.4
"""So long it waits after that, while later owners compute into the pages."""


def layout() -> ArenaLayout:
    """Return an arena of two pools, one page per slab, in which three requests fit."""
    pools = []
    for number, kind in enumerate(RETENTIONS):
        layer = LayerKV(number, kind, kv_heads=1, k_dim=1, v_dim=1, dtype_bytes=8)
        layers, page_bytes = place_layers([layer], PAGE_TOKENS)
        pools.append(PoolLayout(describe(kind), kind, layers, PAGE_TOKENS, page_bytes, 1, UNIT_BYTES))
    return ArenaLayout(tuple(pools), UNIT_BYTES, SLABS, SLABS * UNIT_BYTES)


def rules() -> Rules:
    """Return the rules of every worker here."""
    return Rules(
        step_tokens=SLOTS + 16,
        max_running_requests=SLOTS,
        max_model_len=LONGEST,
        vocab_size=VOCAB,
        admission=("guaranteed",),
        prefix_cache=False,
        decode_reserve_tokens=8,
    )


def say(**words: Any) -> None:
    """Tell the test, in one write: several threads speak."""
    os.write(1, json.dumps(words).encode() + b"\n")


class Moment:
    """When the process stops itself: at the `after`th time that somebody passes."""

    def __init__(self, after: int) -> None:
        self.after = after

    def passes(self) -> bool:
        """Stop if it is time; return whether it was, when this process goes on."""
        self.after -= 1
        if self.after != 0:
            return False
        say(stops=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return True


class StoppingLock:
    """The lock of a landing; a thread of the link stops before it takes it, or while it holds it."""

    def __init__(self, landing: Landing, moment: Moment, where: str) -> None:
        self._landing, self._moment, self._where = landing, moment, where
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        is_link = threading.current_thread() is not threading.main_thread()
        if is_link and self._where == "before a write" and self._moment.passes():
            until = time.monotonic() + PATIENCE_SECONDS
            while self._landing.is_open and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(AFTER_SECONDS)
            say(late=not self._landing.is_open)
        self._lock.acquire()
        if is_link and self._where == "in a write" and self._moment.passes():
            say(late=False)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class StoppingLandings(Landings):
    """Landings of which some thread stops the process."""

    moment, where, stays_open = Moment(0), "", False

    def open(self, key: Key, start_tokens: int, fill_tokens: int, pools: tuple[PoolPages, ...]) -> None:
        super().open(key, start_tokens, fill_tokens, pools)
        landing = self.find(key)
        assert landing is not None, f"{key} was opened a moment ago"
        landing.lock = StoppingLock(landing, self.moment, self.where)  # type: ignore[assignment]

    def close(self, key: Key) -> None:
        landing = self.find(key)
        super().close(key)
        if self.stays_open and landing is not None:
            landing.is_open = True


class Stopping(Makers):
    """Parts of a worker whose arena may be seen by others, and which stops."""

    def __init__(self, arena: Bytes, landings: type[Landings]) -> None:
        self._arena, self._landings = arena, landings

    def backend(self, layout: ArenaLayout, eos: tuple[int, ...]) -> ByteBackend:
        return ByteBackend(layout, VOCAB, eos, self._arena)

    def memory(self, backend: ByteBackend, facts: wire.PeerFacts, watch: Watch) -> ByteMemory:
        landings = self._landings

        class Memory(ByteMemory):
            def make_landings(self, pages: ArenaPages, layout: ArenaLayout) -> Landings:
                return landings(pages, layout.pools)

        return Memory(backend, facts, watch)


class RealNetwork:
    """Makes the real post where a simulated network makes its own."""

    def __init__(self, kind: str, folder: Path, descriptor: int) -> None:
        self._kind, self._folder, self._descriptor = kind, folder, descriptor

    def open(self, address: str, hello: wire.Hello, memory: ByteMemory) -> LinkPost:
        del address
        listener = listen_for_links(self._kind, "127.0.0.1", 0, self._folder)
        return LinkPost(hello, SECRET, memory.pages, memory.landings, self._descriptor, listener)


def shared_arena(size: int) -> tuple[Bytes, int]:
    """Return memory that other processes can map for reading, and the descriptor for it."""
    file = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    arena = np.frombuffer(mmap.mmap(file, size), np.uint8)
    return arena, os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)


def stop_in_writer(moment: Moment) -> None:
    """Let the sending thread stop the process before it reads a group of pages; woken, it waits to be recalled."""

    def stopping(method: Any, is_described: bool) -> Any:
        def read(self: writer.Writer, pool: int, group: Any) -> Any:
            if self._are_described == is_described and moment.passes():
                until = time.monotonic() + PATIENCE_SECONDS
                while not (self._is_recalled or self._is_stopped) and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(AFTER_SECONDS)
                say(late=self._is_recalled or self._is_stopped)
            return method(self, pool, group)

        return read

    writer.Writer._push = stopping(writer.Writer._push, is_described=False)  # type: ignore[method-assign]
    writer.Writer._sum = stopping(writer.Writer._sum, is_described=True)  # type: ignore[method-assign]


class Child:
    """The loop of the process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        moment = Moment(settings["after"])
        StoppingLandings.moment, StoppingLandings.where = moment, settings["where"]
        StoppingLandings.stays_open = settings["stays_open"]
        if settings["where"] == "before a read":
            stop_in_writer(moment)
        arena, descriptor = shared_arena(layout().arena_bytes)
        sketch = WorkerSketch(settings["name"], layout(), rules(), 0.0, 1 << 20)
        network: Any = RealNetwork(settings["kind"], Path(settings["folder"]), descriptor)
        self.worker = Worker(sketch, settings["name"], network, Stopping(arena, StoppingLandings))
        self.post: Any = self.worker.post
        self.post.inbox = self.post.outgoing = ()
        self.arena = self.worker.backend.arena
        self.seen = self.arena.copy()
        say(address=self.post.address)

    def turn(self) -> None:
        """One turn of the loop, the bytes compared where only landings may have changed."""
        self.compare("between two turns")
        self.worker.begin(time.monotonic())
        self.seen[:] = self.arena  # the landings that were closed are as they were left
        time.sleep(0.005)
        self.compare("after a landing was closed")
        for update in self.worker.finish(time.monotonic()):
            if isinstance(update, NewToken):
                say(name=update.request_id, token=update.token_id, end=update.finish_reason)
            elif isinstance(update, Failed):
                say(name=update.request_id, token=None, end=update.code)
        self.seen[:] = self.arena
        for violation in self.worker.audit():
            say(violation=str(violation))

    def compare(self, when: str) -> None:
        """Say so if a byte has changed that nobody may have written."""
        allowed = np.zeros(len(self.arena), np.bool_)
        for pages in self.worker._landing_pages.values():
            for _, page in pages:
                allowed[page * UNIT_BYTES : (page + 1) * UNIT_BYTES] = True
        wrong = np.flatnonzero((self.arena != self.seen) & ~allowed)
        if len(wrong):
            say(violation=f"{len(wrong)} bytes changed {when}, the first at {wrong[0]}")

    def run(self) -> None:
        """Turn until stdin ends."""
        lines = b""
        while True:
            is_busy = self.worker.scheduler.has_work
            ready, _, _ = select.select([sys.stdin, self.post.fileno()], [], [], 0.002 if is_busy else 0.05)
            if sys.stdin in ready:
                got = os.read(sys.stdin.fileno(), 1 << 16)
                if not got:
                    break
                *whole, lines = (lines + got).split(b"\n")
                for line in whole:
                    self.hear(json.loads(line))
            self.turn()
        self.worker.exchange.close()

    def hear(self, command: dict[str, Any]) -> None:
        """Take a request, or say how things are."""
        if "report" in command:
            say(leftovers=self.worker.leftovers(), totals=dict(self.worker.exchange.figures().totals))
            return
        params = SamplingParams(temperature=0.0, max_tokens=command["tokens"], ignore_eos=True)
        route = "receive" if command["at"] else "here"
        if command["at"]:
            self.worker.exchange.assign(command["name"], command["at"])
        prompt = tuple(command["prompt"])
        self.worker.inbox.append(Arrive(command["name"], prompt, params, 0, route=route))  # type: ignore[arg-type]


if __name__ == "__main__":
    Child(json.loads(sys.argv[1])).run()
