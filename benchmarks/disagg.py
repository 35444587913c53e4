"""What links between workers carry, beside plain copies of the same bytes; then what a pair of workers is worth.

    python benchmarks/disagg.py [--links-only] [--no-serving] [--no-retraction]

Two processes and the shipped link: the peer sends chunks of pages of 256 KiB, which stand here, verified (xxh3), when
the clock stops. In each round, by turns: pages over shared memory, a plain copy of as many bytes in this process, pages
over TCP, a bare sendall / recv_into of as many bytes over loopback. Medians. The last line is one JSON object:

    shm_vs_memcpy             goal 0.6: bytes per second over shared memory against the plain copy
    tcp_vs_raw                goal 0.8: bytes per second over TCP against the bare socket
    ttft_ratio, tpot_ratio    of disagg_serving.py; retraction_vs_recompute of disagg_retraction.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median

import numpy as np
import torch

from halocline.disagg import messages as wire
from halocline.disagg.arena_pages import ArenaPages
from halocline.disagg.landings import Landings
from halocline.disagg.links import LinkPost, listen_for_links
from halocline.disagg.post import Delivered, Down, News, Up
from halocline.engine.process import settle_memory
from halocline.huge_pages import Settler, use_huge_pages
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full
from halocline.model.arena_tensor import allocate_arena
from halocline.schedule.events import PoolPages
from halocline.units import MIB

SECRET = b"benchmark"
PAGE_TOKENS = 64
KINDS = ("shm", "tcp")
SERVING_FIGURES = ("ttft_ratio", "tpot_ratio")
RETRACTION_FIGURES = ("retraction_vs_recompute",)


def lay_out(pages: int) -> ArenaLayout:
    """Return an arena of one pool with at least so many pages of 256 KiB."""
    return solve_layout([LayerKV(0, Full(), 8, 128, 128)], (pages + 16) * MIB // 4, PAGE_TOKENS)


def open_post(layout: ArenaLayout, kind: str, folder: str, *, listens: bool) -> tuple[LinkPost, Landings, ArenaPages]:
    """Return one worker's end of links, over an arena as the workers allocate theirs."""
    memory = os.memfd_create("benchmark-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if listens else None
    arena = allocate_arena(layout, torch.device("cpu"), memory).numpy()
    arena[:] = np.random.default_rng(0 if listens else 1).integers(0, 256, len(arena), np.uint8)
    readable = None
    if memory is not None:
        readable = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
        list(Settler(memory, arena.data).settle())  # a worker's thread does so in its first seconds
    facts = wire.facts_of(layout, model="m", dtype="d", vocab_size=9)
    pages = ArenaPages(arena, facts.pools)
    landings = Landings(pages, layout.pools)
    hello = wire.Hello(role="both", epoch=f"{kind}-{os.getpid()}", facts=facts)
    listener = listen_for_links(kind, "127.0.0.1", 0, Path(folder)) if listens else None
    return LinkPost(hello, SECRET, pages, landings, readable, listener), landings, pages


def peer(pages: int, folder: str, pipe: Pipe) -> None:
    """The other process: answers every Accept with all its pages, and every byte of the bare socket with its bytes."""
    layout = lay_out(pages)
    posts = {kind: open_post(layout, kind, folder, listens=True)[0] for kind in KINDS}
    bare = socket.create_server(("127.0.0.1", 0))
    settle_memory()  # as a worker does, this and the next
    use_huge_pages()
    threading.Thread(target=send_bare, args=(bare, pages * layout.pools[0].page_bytes), daemon=True).start()
    pipe.send(({kind: post.address for kind, post in posts.items()}, bare.getsockname()))
    run = PoolPages(0, np.arange(pages, dtype=np.int32))
    while not pipe.poll():
        select.select([pipe, *posts.values()], [], [], 1)
        for post in posts.values():
            for news in post.poll():
                if isinstance(news, Delivered) and isinstance(news.message, wire.Accept):
                    asked = news.message
                    runs = (wire.PageRun(0, pages),)
                    post.send(news.peer, wire.Pages(asked.request, asked.attempt, 0, 0, runs), (run,))
    for post in posts.values():
        post.close()


def send_bare(listener: socket.socket, size: int) -> None:
    """Send `size` bytes for each byte that comes."""
    data = np.ones(size, np.uint8)
    sock, _ = listener.accept()
    while sock.recv(1):
        sock.sendall(data)


class Link:
    """This process's end of one kind of link."""

    def __init__(self, kind: str, address: str, pages: int) -> None:
        self.layout, self.pages = lay_out(pages), pages
        self.post, self.landings, self.arena = open_post(self.layout, kind, "", listens=False)
        self.name, self.attempt = self.post.dial(address), 0
        assert isinstance(self._next(), Up), "the peer did not come up"

    def _next(self) -> News:
        while not (news := self.post.poll()):
            select.select([self.post], [], [], 1)
        assert not isinstance(news[0], Down), news[0]
        return news[0]

    def fetch(self) -> None:
        """Let all pages come, verified."""
        self.attempt += 1
        key = (self.name, "r", self.attempt)
        pools = (PoolPages(0, np.arange(self.pages, dtype=np.int32)),)
        self.landings.open(key, 0, self.pages * PAGE_TOKENS, pools)
        self.post.send(self.name, wire.Accept("r", self.attempt, 0))
        news = self._next()
        assert isinstance(news, Delivered), news
        assert not news.refused, news.refused
        assert self.landings.missing(key) == 0, "pages are missing"
        self.landings.close(key)


def measure_links(rounds: int, pages: int) -> dict[str, float]:
    """Take turns; return both ratios."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=peer, args=(pages, folder, theirs))
        process.start()
        theirs.close()  # so that the end of the other process is seen
        addresses, bare = ours.recv()
        links = {kind: Link(kind, addresses[kind], pages) for kind in KINDS}
        size = pages * links["shm"].layout.pools[0].page_bytes
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        sock = socket.create_connection(bare)
        settle_memory()
        use_huge_pages()

        def raw() -> None:
            sock.sendall(b"x")
            view = memoryview(target)
            while view:
                view = view[sock.recv_into(view) :]

        def copy() -> None:
            target[:] = source

        acts = {"shm": links["shm"].fetch, "memcpy": copy, "tcp": links["tcp"].fetch, "raw": raw}
        seconds = take_turns(acts, rounds)
        sock.close()
        for link in links.values():
            link.post.close()
        ours.send("end")
        process.join()
    rate = {name: size / median(each) / 1e9 for name, each in seconds.items()}
    for name, each in seconds.items():
        print(
            f"{name:6} {rate[name]:6.2f} GB/s (best {size / min(each) / 1e9:.2f}, worst {size / max(each) / 1e9:.2f})"
        )
    return {"shm_vs_memcpy": rate["shm"] / rate["memcpy"], "tcp_vs_raw": rate["tcp"] / rate["raw"]}


def take_turns(acts: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each act in each round; one round before them is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(rounds + 1):
        for name, act in acts.items():
            begin = time.perf_counter()
            act()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def last_line(script: str, names: tuple[str, ...]) -> dict[str, float]:
    """Run another benchmark beside this file; return some figures of its last line."""
    command = [sys.executable, str(Path(__file__).with_name(script))]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    print("\n".join(lines), flush=True)
    figures = json.loads(lines[-1])
    return {name: figures[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--pages", type=int, default=256, help="of 256 KiB, in one chunk")
    parser.add_argument("--links-only", action="store_true")
    parser.add_argument("--no-serving", action="store_true")
    parser.add_argument("--no-retraction", action="store_true")
    given = parser.parse_args()
    result = measure_links(given.rounds, given.pages)
    if not (given.links_only or given.no_serving):
        result |= last_line("disagg_serving.py", SERVING_FIGURES)
    if not (given.links_only or given.no_retraction):
        result |= last_line("disagg_retraction.py", RETRACTION_FIGURES)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
