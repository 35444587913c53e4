"""Memory on pages of 2 MiB: fewer misses of the processor's address cache (TLB), in deciding and in copying.

The tree, the requests and the records of a busy engine are hundreds of thousands of small objects on pages of 4 KiB,
and a page of KV of 256 KiB lies on 64 of them. Where the processor keeps no address of so many, an access costs a walk
through the page tables; in a virtual machine through two of them. The kernel can put 512 such pages on one:

    private memory, at its first touch          madvise(MADV_HUGEPAGE)
    memory that has been written, in place      madvise(MADV_COLLAPSE), Linux 6.1 and later, files in memory too

Each is an improvement and never a condition: where it cannot be done, nothing changes. The second one works even where
the operator has switched huge pages off for all programs, so nothing is asked for there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from halocline.units import MIB

__all__ = ["Settler", "keep_freed_memory", "map_file", "private_memory", "use_huge_pages", "use_huge_pages_beside"]

HUGE_BYTES = 2 * MIB
MOST_BYTES = 512 * MIB
"""Python's objects lie in many small mappings, weights and arenas of pages in a few large ones. The small ones go
first, and this bounds the time: a page of 2 MiB takes some milliseconds."""

LEAST_SHARE = 0.75
"""So much of 2 MiB must be in memory already: the rest of it is taken, too. The heaps and stacks of dozens of threads
are mostly address space, and would double what a process holds."""

MADV_COLLAPSE = 25
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""What glibc's mallopt(3) takes."""
MOST_KEPT_BYTES = 256 * MIB
LARGEST_IN_HEAP_BYTES = 32 * MIB
"""As much as glibc would raise the bound to by itself, as memory of that size is freed."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_IS_LINUX = sys.platform.startswith("linux")
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _is_wanted() -> bool:
    """Whether there are huge pages, and the operator has not switched them off for all programs."""
    try:
        return _IS_LINUX and "[never]" not in _SWITCH.read_text(encoding="utf-8")
    except OSError:
        return False


# ---- what Python holds


def keep_freed_memory() -> None:
    """Let arrays of a few MiB lie side by side in one heap, and the heap keep what was freed.

    Else each is a mapping of its own, of which only whole huge pages can be used, and which is given back and touched
    anew from step to step. To be called before anything is built; does nothing where there is no mallopt(3).
    """
    try:
        mallopt = _LIBRARY.mallopt
    except AttributeError:
        return
    mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)
    mallopt(M_TOP_PAD, 2 * HUGE_BYTES)
    mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)


def use_huge_pages(most_bytes: int = MOST_BYTES) -> int:
    """Put this process's private memory on pages of 2 MiB, small mappings first; return bytes asked for.

    Taken are 2 MiB of which most is in memory. Calling it again costs little where nothing has changed. Returns 0 where
    huge pages are switched off, or the system has no such call or no list of a process's mappings.
    """
    if not _is_wanted():
        return 0
    asked = 0
    for begin, size in sorted(_private_mappings(), key=lambda mapping: mapping[1]):
        if size > most_bytes:  # an arena: it was asked for as a whole
            break
        for piece in _resident(begin, size):
            if asked + HUGE_BYTES > most_bytes:
                return asked
            _collapse(piece, HUGE_BYTES)  # its answer changes nothing: what cannot be done now stays as it is
            asked += HUGE_BYTES
    return asked


def use_huge_pages_beside() -> None:
    """Do the same in a thread of its own: it takes most of a second. Without a thread to be had nothing happens."""
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=use_huge_pages, name="halocline-huge-pages", daemon=True).start()


def _private_mappings() -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the whole huge pages within each private, writable mapping without a file."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            rows = [line.split(maxsplit=5) for line in lines]
    except OSError:
        return
    for span, access, _, _, inode, *name in rows:
        if access != "rw-p" or inode != "0" or (name and name[0].strip() != "[heap]"):
            continue
        begin, end = (int(each, 16) for each in span.split("-"))
        begin, end = _ceil(begin), end // HUGE_BYTES * HUGE_BYTES
        if begin < end:
            yield begin, end - begin


def _resident(begin: int, size: int) -> Iterator[int]:
    """Yield the addresses of those 2 MiB of a mapping of which most is in memory."""
    call, per_piece = _LIBRARY.mincore, HUGE_BYTES // mmap.PAGESIZE
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found = bytearray(size // mmap.PAGESIZE)
    if call(begin, size, ctypes.addressof(ctypes.c_uint8.from_buffer(found))):
        return  # unmapped meanwhile
    for piece in range(size // HUGE_BYTES):
        pages = found[piece * per_piece : (piece + 1) * per_piece]
        if len(pages) - pages.count(0) >= LEAST_SHARE * per_piece:
            yield begin + piece * HUGE_BYTES


def _collapse(address: int, size: int) -> int:
    """Return 0 or the system's error number: EINVAL where it cannot be done, others where it cannot now."""
    madvise = _LIBRARY.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return 0 if madvise(address, size, MADV_COLLAPSE) == 0 else ctypes.get_errno()


def _ceil(address: int) -> int:
    return -(-address // HUGE_BYTES) * HUGE_BYTES


# ---- large memory, asked for as a whole


def private_memory(size: int) -> memoryview:
    """Return `size` bytes of zeros, their start a multiple of 2 MiB, on huge pages from the first touch on.

    Raises OSError when there is no room.
    """
    whole = mmap.mmap(-1, size + HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without
            whole.madvise(mmap.MADV_HUGEPAGE)
    start = -_address(whole) % HUGE_BYTES
    return memoryview(whole)[start : start + size]


def map_file(descriptor: int, size: int, *, is_writable: bool) -> memoryview:
    """Return the bytes of a file in memory, shared with all who map it, where huge pages of it can be used.

    They cannot where its start is no multiple of 2 MiB in this process, and mmap.mmap cannot be told a place. The
    mapping goes away with the last view of it. Raises OSError when there is no room.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    if not _IS_LINUX or size < HUGE_BYTES:
        return memoryview(mmap.mmap(descriptor, size, prot=access))
    room = _map(None, size + HUGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = _ceil(room)
    try:
        _map(start, size, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        # What lay between may be gone already, and the place another thread's.
        _unmap(room, start - room)
        _unmap(start + size, room + HUGE_BYTES - start)
        raise

    class Mapping(ctypes.c_uint8 * size):  # type: ignore[misc]
        """A class of its own: only those can be told when they go."""

    mapped = Mapping.from_address(start)
    # Not at the interpreter's end, when others may still read it: the process takes all its memory along.
    weakref.finalize(mapped, _unmap, room, size + HUGE_BYTES).atexit = False
    view = memoryview(mapped).cast("B")
    return view if is_writable else view.toreadonly()


_PROT_NONE, _MAP_FIXED = 0, 0x10


def _map(address: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    call = _LIBRARY.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_int64)
    found = call(address, size, access, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    assert isinstance(found, int), "it is not address 0"
    return found


def _unmap(address: int, size: int) -> None:
    call = _LIBRARY.munmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    call(address, size)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(memory))


class Settler:
    """A thread that puts a file in memory on huge pages, piece by piece, after all of a piece has been written.

    A file's memory is small pages at its first touch, whatever was advised, unless the administrator of the machine
    has said otherwise. What was never written stays unwritten. It takes a tenth of a core at most.
    """

    LOOK_SECONDS = 1.0
    REST = 9
    """It rests so many times as long as it worked."""

    def __init__(self, descriptor: int, memory: memoryview) -> None:
        """`memory`: the file as `map_file` gave it."""
        self.settled_bytes = 0
        self._descriptor, self._memory = descriptor, memory
        self._address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self._settled: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="halocline-settler", daemon=True)

    def start(self) -> None:
        """Begin; where huge pages are switched off, or no thread is to be had, everything stays as it is."""
        if _is_wanted():
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def close(self) -> None:
        """Let the thread end; the descriptor may be closed then."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def settle(self) -> Iterator[int]:
        """Put what has been written on huge pages, one page after another; yield of each 0 or the system's error."""
        for begin, end in self._written():
            for piece in range(-(-begin // HUGE_BYTES), end // HUGE_BYTES):
                if piece not in self._settled:
                    error = _collapse(self._address + piece * HUGE_BYTES, HUGE_BYTES)
                    if not error:
                        self._settled.add(piece)
                        self.settled_bytes += HUGE_BYTES
                    yield error

    def _written(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of what has been written of the file."""
        end, size = 0, len(self._memory)
        while end < size:
            try:
                begin = os.lseek(self._descriptor, end, os.SEEK_DATA)
                end = os.lseek(self._descriptor, begin, os.SEEK_HOLE)
            except OSError:  # nothing behind this place
                return
            yield begin, min(end, size)

    def _run(self) -> None:
        most = len(self._memory) // HUGE_BYTES
        while len(self._settled) < most and not self._ended.wait(self.LOOK_SECONDS):
            begin = time.monotonic()
            for error in self.settle():
                if error == errno.EINVAL and not self._settled:
                    return  # not on this kernel
                if self._ended.wait(self.REST * (time.monotonic() - begin)):
                    return
                begin = time.monotonic()
