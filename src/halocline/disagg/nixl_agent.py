"""The NIXL library as links use it: one agent of a process, whose memory it knows once and for all, and reads.

Nothing but reads is ever posted, so nobody writes into another's memory. A read that was posted cannot be taken back:
it may still write into the memory that it was given until it says that it is over, however long its peer is silent.
That is why reads go into staging memory (`nixl_staging.py`) and never into an arena.

The library is an extra, and it is driven from here: its own progress thread would take a whole core even when nothing
happens. Over TCP the bytes that others read are sent by this process, so whoever lets others read calls `stir`.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]
from msgspec import Meta
from numpy.typing import NDArray

from halocline.disagg.arena_pages import Bytes
from halocline.errors import LinkError

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
"""Distributions that have the same interface; the first is one of the others, chosen by the CUDA that torch has."""
HOW_TO_GET_IT = "install it with: pip install 'halocline[nixl]'"
BACKEND = "UCX"
HOST_MEMORY = "DRAM"
MAX_METADATA_BYTES = 1 << 20
LIVELY_SECONDS = 0.5
"""How long after the last stir reads of others are looked after at the quick pace."""
QUICK_SECONDS = 1e-4
SLOW_SECONDS = 5e-3
LINGER_SECONDS = 60.0
"""How long guests that have left are looked after: what they still read is in their way until it ends."""


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """What another worker must know before it can read from this one's arena."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    address: Annotated[int, Meta(ge=0, lt=1 << 62)]
    """Where the arena begins in this process."""
    size: Annotated[int, Meta(ge=0, lt=1 << 62)]
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
    """The library's own words for how to reach this process, and its memory."""


class Ranges(NamedTuple):
    """Runs of bytes of one process."""

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


class Read:
    """A read that was posted. Its memory is its own until `is_over`."""

    def __init__(self, agent: NixlAgent, handle: Any, state: str) -> None:
        """`state`: what the library said when it was posted."""
        self._agent, self._handle, self._state = agent, handle, state

    def is_done(self) -> bool:
        """Return whether all bytes are there; raises LinkError when some of them will never be."""
        if self._state == "PROC":
            self._state = self._agent.state_of(self._handle)
        if self._state not in ("PROC", "DONE"):
            raise LinkError(f"pages cannot be read from the peer: {self._state}")
        return self._state == "DONE"

    @property
    def is_over(self) -> bool:
        """Whether nothing is written any more."""
        try:
            return self.is_done()
        except LinkError:
            return True


class NixlAgent:
    """The library's agent of this process. Every method may be called from any thread."""

    def __init__(self, host: str) -> None:
        """`host`: this worker's address in the network that pages shall go by.

        Raises LinkError without the library, or where it cannot use that network.
        """
        library = load_library()
        self.name = secrets.token_hex(8)
        self._address = self._size = 0
        self._meeting = threading.Lock()
        self._known: dict[str, bytes] = {}
        """Workers that the library knows, and by which words."""
        self._users: Counter[str] = Counter()
        self._leaving: list[tuple[str, Sequence[Read]]] = []
        self._changed = threading.Condition()
        self._guests = 0
        self._lively_until = self._linger_until = 0.0
        self._is_closed = False
        self._complaint = ""
        """The library's last one."""
        self._server: threading.Thread | None = None
        config = library.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        options = options_for(resolved(host))
        self._agent: Any = library.nixl_agent(self.name, config)
        try:
            self._agent.create_backend(BACKEND, options)
        except Exception as error:
            raise LinkError(f"NIXL cannot use the network of {host}: {error}") from error

    # ---- being read from

    def offer(self, arena: Bytes) -> None:
        """Let others read the arena, shape (arena bytes,): once, before the first introduction."""
        self._address, self._size = arena.ctypes.data, arena.nbytes
        self.register(arena)
        self._server = threading.Thread(target=self._serve, name="halocline-nixl", daemon=True)
        self._server.start()

    def register(self, memory: Bytes) -> None:
        """Make memory known to the library; raises LinkError when it does not take it."""
        try:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], HOST_MEMORY)
        except Exception as error:
            raise LinkError(f"NIXL does not take {memory.nbytes} bytes of memory: {error}") from error

    def introduction(self) -> bytes:
        """Return what another worker's `meet` takes."""
        assert self._server is not None, "an arena is offered before anybody is told where it is"
        return msgspec.msgpack.encode(
            Introduction(self.name, self._address, self._size, self._agent.get_agent_metadata())
        )

    def welcome(self) -> None:
        """Look after one guest more, who may read from now on."""
        with self._changed:
            self._guests += 1
            self._changed.notify_all()

    def farewell(self) -> None:
        """Look after one guest less."""
        with self._changed:
            self._guests -= 1
            self._linger_until = time.monotonic() + LINGER_SECONDS

    def stir(self) -> None:
        """Expect reads now."""
        with self._changed:
            self._lively_until = time.monotonic() + LIVELY_SECONDS
            self._changed.notify_all()

    def _serve(self) -> None:
        """Move what others read, for as long as there are others; quickly when reads are expected."""
        while True:
            with self._changed:
                now = time.monotonic()
                if not self._guests and now > self._linger_until:
                    self._changed.wait_for(lambda: self._guests or self._is_closed)
                elif now > self._lively_until:
                    self._changed.wait(SLOW_SECONDS)
                if self._is_closed:
                    return
            time.sleep(QUICK_SECONDS if self._move() else SLOW_SECONDS)

    def _move(self) -> bool:
        """Let the library do its work; False where it complains, of one guest perhaps, and the others go on."""
        try:
            self._agent.get_new_notifs()  # nobody sends any; to ask for them is how it is told to
        except Exception as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logging.getLogger("halocline.disagg").warning("NIXL does not look after its guests: %s", error)
            return False
        return True

    # ---- reading from others

    def meet(self, body: bytes) -> Introduction:
        """Get to know another worker, as often as one likes; raises LinkError for words that make no sense."""
        try:
            peer = msgspec.msgpack.decode(body, type=Introduction)
        except msgspec.DecodeError as error:
            raise LinkError(f"the peer's introduction cannot be read: {str(error)[:200]}") from error
        with self._meeting:
            self._sweep()
            if self._known.get(peer.agent, peer.metadata) != peer.metadata or peer.agent == self.name:
                raise LinkError("the peer's introduction has the name of another worker")
            if peer.agent not in self._known:
                self._add(peer)
            self._users[peer.agent] += 1
        return peer

    def part(self, peer: Introduction, reads: Sequence[Read]) -> None:
        """Undo one `meet`. The library knows the worker as long as one of `reads` may still be under way."""
        with self._meeting:
            self._users[peer.agent] -= 1
            self._leaving.append((peer.agent, reads))
            self._sweep()

    def read(self, peer: Introduction, theirs: Ranges, own: Ranges) -> Read:
        """Begin to read runs of another's arena into registered memory of this process."""
        try:
            handle = self._agent.initialize_xfer("READ", self._descriptors(own), self._descriptors(theirs), peer.agent)
            return Read(self, handle, self._agent.transfer(handle))
        except Exception as error:
            raise LinkError(f"pages cannot be read from the peer: {error}") from error

    def state_of(self, handle: Any) -> str:
        """Return PROC while a read is under way, DONE when it is done, and else what is wrong with it."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception as error:
            return str(error) or type(error).__name__

    def close(self) -> None:
        """End it, once nobody holds a read of it; memory that was registered may be freed afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._server is not None:
            self._server.join()
        self._agent = None

    def _descriptors(self, ranges: Ranges) -> Any:
        rows = np.zeros((len(ranges.addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = ranges
        return self._agent.get_xfer_descs(rows, HOST_MEMORY)

    def _add(self, peer: Introduction) -> None:
        try:
            name = self._agent.add_remote_agent(peer.metadata)
        except Exception as error:
            raise LinkError(f"NIXL finds no way to the peer: {error}") from error
        if name not in (peer.agent, peer.agent.encode()):
            self._remove(name.decode(errors="replace") if isinstance(name, bytes) else str(name))
            raise LinkError("the peer's introduction has the words of another worker")
        self._known[peer.agent] = peer.metadata

    def _sweep(self) -> None:
        """Let the library forget workers that nobody uses; one whose connection broke can only be met anew."""
        self._leaving = [(name, reads) for name, reads in self._leaving if not all(read.is_over for read in reads)]
        busy = {name for name, _ in self._leaving}
        for name in [name for name in self._known if not self._users[name] and name not in busy]:
            del self._known[name], self._users[name]
            self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            logging.getLogger("halocline.disagg").debug("NIXL does not forget %s: %s", name, error)


def missing() -> str:
    """Return why NIXL cannot be used as far as that is seen without loading it; empty when nothing is against it."""
    if any(importlib.util.find_spec(name) is not None for name in PACKAGES):
        return ""
    return f"NIXL is not installed; {HOW_TO_GET_IT}"


def load_library() -> Any:
    """Return NIXL's Python interface; raises LinkError where it is not installed or does not load."""
    wrong = missing()
    if wrong:
        raise LinkError(wrong)
    raises = logging.raiseExceptions
    try:
        name = next(name for name in PACKAGES if importlib.util.find_spec(name) is not None)
        library = importlib.import_module(name)
    except ImportError as error:
        raise LinkError(f"NIXL is installed and cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raises  # it changes the whole process's
    if not hasattr(library, "nixl_agent"):
        raise LinkError(f"the module {name}, {library.__spec__}, is not NIXL")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return library


def options_for(host: str) -> dict[str, str]:
    """Return options of the library's backend that keep it in the network of `host`, an address of this machine.

    Whoever reaches its port can read and write this process's memory: it knows no token. So it listens nowhere else,
    unless the operator says where: in UCX's own variable, which also names adapters for RDMA.
    """
    if "UCX_NET_DEVICES" in os.environ or ipaddress.ip_address(host).is_unspecified:
        return {}
    names = [name for name, given in psutil.net_if_addrs().items() if host in {each.address for each in given}]
    if not names:
        raise LinkError(
            f"{host} is no address of this machine, so NIXL cannot be kept in its network; "
            "give the machine's own with --link-host, or name devices in UCX_NET_DEVICES"
        )
    return {"engine_config": f"NET_DEVICES={names[0]}"}


def resolved(host: str) -> str:
    """Return the address of a host name; raises LinkError when it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LinkError(f"{host} has no address: {error.strerror or error}") from error
