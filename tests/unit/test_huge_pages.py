"""Huge pages: what is asked for is this process's own memory, within the bound, and nothing in it changes."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halocline import huge_pages
from halocline.huge_pages import HUGE_BYTES, use_huge_pages

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the call is Linux's")


def test_elsewhere_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages() == 0


def test_a_bound_below_every_mapping_asks_for_nothing() -> None:
    assert use_huge_pages(HUGE_BYTES - 1) == 0


@linux_only
def test_what_was_written_is_kept_and_what_was_not_stays_unwritten() -> None:
    pages = 8
    with mmap.mmap(-1, pages * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        bytes_of = np.frombuffer(mapped, dtype=np.uint8)
        begin = -bytes_of.ctypes.data % HUGE_BYTES
        written = bytes_of[begin : begin + 2 * HUGE_BYTES]
        written[:: mmap.PAGESIZE] = 7
        before = resident_bytes(bytes_of.ctypes.data)
        assert use_huge_pages(1 << 62) >= 2 * HUGE_BYTES
        assert (written[:: mmap.PAGESIZE] == 7).all()
        assert not written[1 :: mmap.PAGESIZE].any()
        assert resident_bytes(bytes_of.ctypes.data) - before < HUGE_BYTES, "pages that were never written are now held"
        del written, bytes_of


@linux_only
def test_small_mappings_come_first_and_files_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def madvise(address: int, size: int, advice: int) -> int:
        asked.append((address, size))
        return 0

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    total = use_huge_pages(1 << 62)
    sizes = [size for _, size in asked]
    assert total == sum(sizes) > 0
    assert sizes == sorted(sizes)
    assert all(address % HUGE_BYTES == 0 == size % HUGE_BYTES for address, size in asked)
    files = [
        tuple(int(each, 16) for each in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.split()[4] != "0"
    ]
    assert not any(begin < address + size and address < end for begin, end in files for address, size in asked)


def resident_bytes(address: int) -> int:
    """Return how much of the mapping that holds `address` is in memory."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            holds = begin <= address < end
        elif holds and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no mapping holds {address:#x}")
