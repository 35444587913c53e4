"""Pages of 2 MiB for what Python holds: fewer misses of the processor's address cache (TLB) while deciding.

The tree, the requests and the records of a busy engine are hundreds of thousands of small objects on pages of 4 KiB.
Each step follows pointers through them, and where the processor keeps no address of so many pages, most of them cost a
walk through the page tables; in a virtual machine through two of them. The kernel can put 512 such pages on one, at
once and in place (madvise(2), MADV_COLLAPSE, since Linux 6.1). It is an improvement, never a condition: where it
cannot be done, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

from halocline.units import MIB

__all__ = ["MOST_BYTES", "use_huge_pages"]

HUGE_BYTES = 2 * MIB
MOST_BYTES = 512 * MIB
"""Python's objects lie in many small mappings, weights and arenas of pages in a few large ones. The small ones go
first, and this bounds the time: a page of 2 MiB takes 1 to 2 ms."""

MADV_COLLAPSE = 25


def use_huge_pages(most_bytes: int = MOST_BYTES) -> int:
    """Put this process's private memory on pages of 2 MiB, small mappings first; return bytes asked for.

    What was never written stays unwritten. Calling it again costs little where nothing has changed. Returns 0 where
    the system has no such call or no list of a process's mappings.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    asked = 0
    for begin, size in sorted(_mappings(), key=lambda mapping: mapping[1]):
        if asked + size > most_bytes:
            break
        # Its answer changes nothing here: a mapping with a hole, or a kernel that cannot, keeps its small pages.
        madvise(begin, size, MADV_COLLAPSE)
        asked += size
    return asked


def _mappings() -> Iterator[tuple[int, int]]:
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
        begin, end = -(-begin // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
        if begin < end:
            yield begin, end - begin
