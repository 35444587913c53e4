"""Runs of pages of all shapes: adjacent or not, with padding, small and large, partly outside their landing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from halocline.disagg import stream
from halocline.disagg.arena_pages import HOT_BYTES, checksum, copy_and_sum
from halocline.disagg.helper import Helper
from halocline.disagg.landings import ABSENT
from halocline.disagg.stretches import MOST_PARTS, Stretches, unwanted
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding
from halocline.schedule.events import PoolPages
from testing.links import Kind, joined, key, landed, send_chunk

SMALL = (LayerKV(0, Full(), 1, 8, 8, 2), LayerKV(1, Sliding(40), 1, 8, 8, 2))
PADDED = (LayerKV(0, Full(), 1, 8, 8, 2), LayerKV(1, Sliding(40), 3, 8, 8, 2), LayerKV(2, Sliding(40), 1, 5, 3, 2))
LARGE = (LayerKV(0, Full(), 16, 96, 96, 2),)


def layout_of(layers: tuple[LayerKV, ...], page_tokens: int, slabs: int) -> ArenaLayout:
    return solve_layout(layers, slabs * solve_layout(layers, 1 << 30, page_tokens).slab_bytes, page_tokens)


def in_parts(draw: np.random.Generator, numbers: np.ndarray, most: int) -> np.ndarray:
    """Return the numbers in another order which keeps some of them adjacent."""
    cuts = np.sort(draw.integers(0, len(numbers), draw.integers(1, most)))
    parts = np.split(numbers, cuts)
    return np.concatenate([parts[place] for place in draw.permutation(len(parts))]).astype(np.int32)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize(("layers", "page_tokens"), [(SMALL, 4), (PADDED, 4), (SMALL, 256), (LARGE, 64)])
def test_each_page_of_the_landing_gets_its_bytes_and_no_other_byte_changes(
    kind: Kind, layers: tuple[LayerKV, ...], page_tokens: int, tmp_path: Path
) -> None:
    layout = layout_of(layers, page_tokens, slabs=64)
    draw = np.random.default_rng(page_tokens)
    with joined(layout, layout, kind, tmp_path) as (sender, to_receiver, receiver, peer):
        for attempt in range(1, 5):
            sources, targets, expected = [], [], receiver.arena.copy()
            slabs = np.array_split(np.arange(layout.slabs), len(layout.pools))
            for pool, own in zip(layout.pools, slabs, strict=True):
                every = np.arange(own[0] * pool.pages_per_slab, (own[-1] + 1) * pool.pages_per_slab)
                count, before, behind = 20, int(draw.integers(0, 3)), int(draw.integers(0, 3))
                theirs, ours = (in_parts(draw, every, 6)[:count] for _ in range(2))
                first = int(draw.integers(0, 4))
                sources.append(PoolPages(first, theirs))
                targets.append(PoolPages(first + before, ours[before : count - behind]))
                for place in range(before, count - behind):
                    there, here, size = int(theirs[place]), int(ours[place]), pool.page_bytes
                    page = sender.arena[there * pool.stride_bytes :][:size]
                    expected[here * pool.stride_bytes :][:size] = page
            receiver.landings.open(key(peer, attempt), 0, 40 * page_tokens, tuple(targets))
            send_chunk(sender, to_receiver, tuple(sources), attempt=attempt)
            assert landed(receiver).refused == ""
            assert np.array_equal(receiver.arena, expected)
            landing = receiver.landings.find(key(peer, attempt))
            assert landing is not None
            assert all(pool.has.all() for pool in landing.pools)
            receiver.landings.close(key(peer, attempt))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_only_what_stands_in_the_landing_counts_as_there(kind: Kind, tmp_path: Path) -> None:
    """A run that ends before the landing's last page leaves that page missing."""
    layout = layout_of(SMALL[:1], 4, slabs=64)
    with joined(layout, layout, kind, tmp_path) as (sender, to_receiver, receiver, peer):
        receiver.landings.open(key(peer), 0, 80, (PoolPages(0, np.arange(20, dtype=np.int32)),))
        send_chunk(sender, to_receiver, (PoolPages(3, np.arange(10, 20, dtype=np.int32)),))
        assert landed(receiver).refused == ""
        assert receiver.landings.missing(key(peer)) == 40


def test_numbers_of_a_landing_are_absent_on_both_sides_of_it(tmp_path: Path) -> None:
    layout = layout_of(SMALL[:1], 4, slabs=64)
    with joined(layout, layout, "tcp", tmp_path) as (_, _, receiver, peer):
        receiver.landings.open(key(peer), 0, 80, (PoolPages(5, np.array([9, 0, 7], np.int32)),))
        landing = receiver.landings.find(key(peer))
        assert landing is not None
        cases = {
            (3, 7): [ABSENT, ABSENT, 9, 0, 7, ABSENT, ABSENT],
            (6, 1): [0],
            (0, 2): [ABSENT, ABSENT],
            (8, 2): [ABSENT, ABSENT],
            (2**62, 2): [ABSENT, ABSENT],
        }
        for (index, count), expected in cases.items():
            assert receiver.landings.numbers(landing, 0, index, count) == expected
        # What belongs nowhere is never adjacent to page 0.
        assert list(receiver.landings._own.spans(0, [ABSENT, ABSENT, 0, 1], 1 << 20)) == [(0, 1), (1, 2), (2, 4)]


def test_a_page_that_is_copied_in_pieces_has_the_checksum_of_the_whole() -> None:
    source = np.random.default_rng(0).integers(0, 256, 3 * HOT_BYTES + 17, np.uint8)
    target = np.zeros_like(source)
    assert copy_and_sum(source, target) == checksum(source)
    assert np.array_equal(source, target)


def test_groups_are_the_same_for_both_sides_and_cover_each_run_once() -> None:
    counts, sizes = [7, 0, 3], (4, 4, 1)
    found = list(stream.groups(counts, sizes))
    assert found == [(0, 0, 4), (0, 4, 3), (2, 0, 1), (2, 1, 1), (2, 2, 1)]


def test_stretches_are_filled_in_order_whatever_comes_at_once() -> None:
    memory = bytearray(1000)
    into = Stretches([memoryview(memory)[at : at + 10] for at in range(0, 1000, 10)])
    came = bytes(range(250)) * 4
    sent = 0
    for size in (1, 9, 10, 25, 300, 600, 55):
        ahead = into.ahead(size)
        assert sum(map(len, ahead)) == size
        for part in ahead:
            part[:] = came[sent : sent + len(part)]
            sent += len(part)
        into.skip(size)
    assert into.left_bytes == 0
    assert bytes(memory) == came
    assert len(Stretches([memoryview(memory)[:1]] * 1000).ahead(1000)) == MOST_PARTS
    assert sum(map(len, unwanted((1 << 16) + 5))) == (1 << 16) + 5


def test_a_helper_does_what_is_left_and_nobody_returns_before_all_is_done() -> None:
    helper, done, threads = Helper(), set[int](), set[str]()

    def act(number: int) -> None:
        name = threading.current_thread().name
        time.sleep(0.05 if name == "halocline-helper" else 0.001)
        threads.add(name)
        done.add(number)

    for _ in range(50):
        helper.share(act, range(30))
        assert done == set(range(30))
        done.clear()
        if len(threads) == 2:
            break
    assert len(threads) == 2, "only one thread worked"
    helper.close()
    helper.share(act, range(3))
    assert done == {0, 1, 2}, "work that is offered later is done without it"


def test_an_error_in_either_thread_reaches_whoever_shares_the_work() -> None:
    helper, is_helped = Helper(), threading.Event()

    def act(number: int) -> None:
        if threading.current_thread().name == "halocline-helper":
            is_helped.set()
            raise ValueError("of the helper")
        assert is_helped.wait(20), "nobody helps"

    with pytest.raises(ValueError, match="of the helper"):
        helper.share(act, range(20))
    helper.share(lambda _: None, range(3))
    helper.close()


def test_where_the_system_has_no_thread_for_a_helper_all_is_done_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError(f"can't start {self.name}")

    helper, done = Helper(), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        helper.share(done.append, range(3))
        helper.close()
    assert done == [0, 1, 2]
