"""Huge pages: what is asked for is this process's own memory, within the bound, and nothing in it changes."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halocline import huge_pages
from halocline.huge_pages import (
    HUGE_BYTES,
    Settler,
    keep_freed_memory,
    map_file,
    private_memory,
    use_huge_pages,
)
from testing.links import wait_until

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the call is Linux's")


@pytest.fixture(autouse=True)
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whatever this machine's operator wants: a switch of the tests' own, which says what most servers say."""
    mine = tmp_path / "enabled"
    mine.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "_SWITCH", mine)
    return mine


def test_elsewhere_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_IS_LINUX", False)
    assert use_huge_pages() == 0


@linux_only
@pytest.mark.parametrize("said", ["always madvise [never]\n", None])
def test_where_the_operator_has_none_nothing_is_asked_for(
    said: str | None, switch: Path, file_of: Callable[[int], int]
) -> None:
    switch.unlink()
    if said is not None:
        switch.write_text(said)
    assert use_huge_pages() == 0
    settler = Settler(file_of(HUGE_BYTES), private_memory(HUGE_BYTES))
    settler.start()
    assert settler._thread.ident is None
    settler.close()


def test_without_a_thread_to_be_had_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    huge_pages.use_huge_pages_beside()


@linux_only
def test_what_still_reads_at_the_interpreters_end_may(tmp_path: Path) -> None:
    """Whoever registered before the mapping was made runs after whatever that registered."""
    program = (
        "import atexit, os, numpy\n"
        "atexit.register(lambda: os.write(1, b'%d' % view.sum()))\n"
        "from halocline.huge_pages import map_file\n"
        "size = 4 << 20\n"
        "file = os.memfd_create('pages')\n"
        "os.ftruncate(file, size)\n"
        "view = numpy.frombuffer(map_file(file, size, is_writable=True), numpy.uint8)\n"
        "view[:] = 1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"%d" % (4 << 20)), done.stderr


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
        a_few = bytes_of[begin + 3 * HUGE_BYTES : begin + 6 * HUGE_BYTES]  # as stacks of threads are, and their heaps
        a_few[: HUGE_BYTES // 2] = 7
        a_few[HUGE_BYTES : HUGE_BYTES + 1] = 7
        before = resident_bytes(bytes_of.ctypes.data)
        assert use_huge_pages(1 << 62) >= 2 * HUGE_BYTES
        assert (written[:: mmap.PAGESIZE] == 7).all()
        assert not written[1 :: mmap.PAGESIZE].any()
        assert resident_bytes(bytes_of.ctypes.data) - before < HUGE_BYTES, "pages that were never written are now held"
        del written, a_few, bytes_of


@linux_only
def test_small_mappings_come_first_and_files_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def madvise(address: int, size: int, advice: int) -> int:
        asked.append((address, size))
        return 0

    large, small = (np.frombuffer(private_memory(pages * HUGE_BYTES), np.uint8) for pages in (24, 17))
    large[:], small[:] = 1, 1
    monkeypatch.setattr(huge_pages, "_LIBRARY", SimpleNamespace(madvise=madvise, mincore=huge_pages._LIBRARY.mincore))
    total = use_huge_pages(1 << 62)
    assert total == len(asked) * HUGE_BYTES
    assert all(address % HUGE_BYTES == 0 and size == HUGE_BYTES for address, size in asked)
    addresses = [address for address, _ in asked]
    assert addresses.index(small.ctypes.data) < addresses.index(large.ctypes.data)
    assert use_huge_pages(total - HUGE_BYTES) == total - HUGE_BYTES, "the bound is reached, and not passed"
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


def test_private_memory_begins_at_a_huge_page_and_is_zero() -> None:
    memory = private_memory(3 * HUGE_BYTES + 5)
    bytes_of = np.frombuffer(memory, np.uint8)
    assert bytes_of.ctypes.data % HUGE_BYTES == 0
    assert len(bytes_of) == 3 * HUGE_BYTES + 5
    assert not bytes_of.any()
    bytes_of[-1] = 1


def test_there_is_no_room_for_everything(file_of: Callable[[int], int]) -> None:
    with pytest.raises(OSError, match="memory"):
        private_memory(1 << 60)
    before = Path("/proc/self/maps").read_text() if sys.platform.startswith("linux") else ""
    with pytest.raises(OSError, match="memory"):
        map_file(file_of(HUGE_BYTES), 1 << 60, is_writable=False)
    if before:
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= len(before.splitlines()) + 2


@linux_only
@pytest.mark.parametrize("size", [5, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 77])
def test_a_file_is_mapped_once_for_writing_and_once_for_reading(size: int, file_of: Callable[[int], int]) -> None:
    file = file_of(size)
    written = np.frombuffer(map_file(file, size, is_writable=True), np.uint8)
    read = np.frombuffer(map_file(file, size, is_writable=False), np.uint8)
    assert len(written) == len(read) == size
    if size >= HUGE_BYTES:
        assert written.ctypes.data % HUGE_BYTES == read.ctypes.data % HUGE_BYTES == 0
    written[-1] = 9
    assert read[-1] == 9
    assert not read.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


@linux_only
def test_a_mapping_goes_with_the_last_view_of_it(file_of: Callable[[int], int]) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:pages")

    size = 2 * HUGE_BYTES
    view = np.frombuffer(map_file(file_of(size), size, is_writable=True), np.uint8)[7:]
    gc.collect()
    assert mapped() == 1
    del view
    gc.collect()
    assert mapped() == 0


@linux_only
def test_what_was_written_of_a_file_is_settled_and_nothing_else(file_of: Callable[[int], int]) -> None:
    size = 6 * HUGE_BYTES + 9
    file = file_of(size)
    memory = map_file(file, size, is_writable=True)
    bytes_of = np.frombuffer(memory, np.uint8)
    settler = Settler(file, memory)
    assert list(settler.settle()) == []
    bytes_of[HUGE_BYTES + 1 : 4 * HUGE_BYTES] = 5  # the first page of 4 KiB of it, too
    bytes_of[5 * HUGE_BYTES + mmap.PAGESIZE :] = 5  # all but one page of 4 KiB
    done = [not error for error in settler.settle()]
    assert len(done) == 3, "two pieces are not written, one lacks a page"
    assert os.fstat(file).st_blocks * 512 <= 5 * HUGE_BYTES, "pages that were never written are now held"
    assert settler.settled_bytes == sum(done) * HUGE_BYTES
    assert (bytes_of[HUGE_BYTES + 1 : 4 * HUGE_BYTES] == 5).all()
    assert len(list(settler.settle())) == 3 - sum(done), "what is settled is asked for again"
    bytes_of[5 * HUGE_BYTES] = 5
    assert len(list(settler.settle())) == 3 - sum(done) + 1


@linux_only
def test_the_thread_settles_all_and_ends(file_of: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settler, "LOOK_SECONDS", 0.01)
    size = 2 * HUGE_BYTES
    file = file_of(size)
    memory = map_file(file, size, is_writable=True)
    np.frombuffer(memory, np.uint8)[:] = 1
    if any(Settler(file, memory).settle()):
        pytest.skip("this kernel puts no file on huge pages")
    settler = Settler(file, memory)
    settler.start()
    wait_until(lambda: settler.settled_bytes == size)
    settler.close()


@pytest.mark.parametrize(("error", "goes_on"), [(errno.EAGAIN, True), (errno.ENOMEM, True), (errno.EINVAL, False)])
def test_the_thread_gives_up_where_it_can_never_be_done_and_not_where_it_cannot_now(
    error: int, goes_on: bool, file_of: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settler, "LOOK_SECONDS", 0.01)
    answers = iter([error])
    monkeypatch.setattr(huge_pages, "_collapse", lambda address, size: next(answers, 0))
    file = file_of(HUGE_BYTES)
    memory = map_file(file, HUGE_BYTES, is_writable=True)
    np.frombuffer(memory, np.uint8)[:] = 1
    settler = Settler(file, memory)
    settler.start()
    settler._thread.join(20)
    assert not settler._thread.is_alive()
    assert (settler.settled_bytes == HUGE_BYTES) == goes_on


def test_a_thread_that_has_nothing_to_do_ends_when_it_is_told(file_of: Callable[[int], int]) -> None:
    file = file_of(2 * HUGE_BYTES)
    settler = Settler(file, map_file(file, 2 * HUGE_BYTES, is_writable=True))
    settler.close()  # before it began
    settler = Settler(file, map_file(file, 2 * HUGE_BYTES, is_writable=True))
    settler.start()
    settler.close()
    assert not any(thread.name == "halocline-settler" for thread in threading.enumerate())


def test_where_the_library_has_no_mallopt_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory()
    monkeypatch.setattr(huge_pages, "_LIBRARY", object())
    keep_freed_memory()


@pytest.fixture
def file_of() -> Iterator[Callable[[int], int]]:
    """Make files in memory of a size."""
    files: list[int] = []

    def make(size: int) -> int:
        files.append(os.memfd_create("pages"))
        os.ftruncate(files[-1], size)
        return files[-1]

    yield make
    for file in files:
        os.close(file)
