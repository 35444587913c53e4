"""How pages are read ahead into staging memory, with a stand-in for the library: what is read, held, left and lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from halocline.disagg.messages import PoolFacts
from halocline.disagg.nixl_agent import Introduction
from halocline.disagg.nixl_pull import Pulled, mac
from halocline.disagg.nixl_staging import LOT_BYTES, Lots, lot_bytes_for
from halocline.errors import LinkError
from testing.nixl import HeldAgent

PAGE = 1 << 12
POOLS = (PoolFacts("full", 16, PAGE, PAGE, ()), PoolFacts("window", 16, PAGE - 512, PAGE, ()))
ARENA = np.random.default_rng(5).integers(0, 256, 64 * PAGE, np.uint8)
SECRET = b"a secret of this group"


def introduction(secret: bytes = SECRET, size: int = ARENA.nbytes) -> bytes:
    body = msgspec.msgpack.encode(Introduction("peer", ARENA.ctypes.data, size, b"words"))
    return mac(secret, body) + body


class Reading:
    """A dialer's end with lots of four pages."""

    def __init__(self, agent: HeldAgent, lots: int = 8) -> None:
        self.agent, self.is_over = agent, False
        self.lots = Lots(agent, 4 * PAGE, lots)
        self.sock, self.theirs = socket.socketpair()
        self.pulled = Pulled(agent, self.lots, SECRET, introduction(), POOLS, self.sock, lambda: self.is_over)

    def close(self) -> None:
        self.sock.close()
        self.theirs.close()


@pytest.fixture
def reading() -> Iterator[Reading]:
    one = Reading(HeldAgent())
    yield one
    one.close()


@pytest.fixture
def held() -> Iterator[Reading]:
    one = Reading(HeldAgent(finishes_at_once=False))
    yield one
    one.close()


def expected(pool: int, number: int) -> np.ndarray:
    return ARENA[number * PAGE : number * PAGE + POOLS[pool].page_bytes]


def test_pages_of_all_pools_come_in_the_order_in_which_they_are_asked_for(reading: Reading) -> None:
    places = [(0, 3), (0, 4), (0, 60), (1, 5), (1, 6), (0, 0), (1, 63), (0, 1), (0, 2), (0, 3)]
    count = 0
    for view, (pool, number) in zip(reading.pulled.views(places), places, strict=True):
        assert np.array_equal(view, expected(pool, number))
        count += 1
    assert count == 10
    assert reading.lots.free == 8


def test_pages_that_adjoin_each_other_are_one_run_unless_there_is_padding_between(reading: Reading) -> None:
    list(reading.pulled.views([(0, 7), (0, 8), (0, 9), (0, 11)]))
    list(reading.pulled.views([(1, 7), (1, 8)]))
    assert [read.own.sizes.tolist() for read in reading.agent.reads] == [[3 * PAGE, PAGE], [PAGE - 512, PAGE - 512]]


def test_two_lots_are_read_at_a_time_and_no_third_before_the_first_is_used(held: Reading) -> None:
    views = held.pulled.views([(0, number) for number in range(12)])
    held.agent.finishes_at_once = True  # what is posted from now on is done
    next(views)
    assert len(held.agent.reads) == 2
    for _ in range(3):
        next(views)
    assert len(held.agent.reads) == 2
    next(views)
    assert len(held.agent.reads) == 3
    views.close()


def test_the_last_half_of_the_lots_is_kept_for_those_who_have_none() -> None:
    agent = HeldAgent(finishes_at_once=False)
    lots = Lots(agent, PAGE, count=4)
    assert [lots.take(lambda: False, is_second=True) is not None for _ in range(3)] == [True, True, False]
    assert [lots.take(lambda: False) is not None for _ in range(2)] == [True, True]
    assert lots.take(lambda: True) is None, "all are taken, and who asks is over"


def test_a_lot_of_a_read_that_was_left_is_not_used_before_the_read_is_over(held: Reading) -> None:
    views = held.pulled.views([(0, 1), (0, 2)])
    held.is_over = True
    with pytest.raises(LinkError, match="ended"):
        next(views)
    assert held.lots.free == 7
    held.agent.reads[0].finish()
    assert held.lots.free == 8


def test_whoever_is_done_early_leaves_what_was_read_ahead(held: Reading) -> None:
    views = held.pulled.views([(0, number) for number in range(8)])
    held.agent.finishes_at_once = True
    next(views)
    held.agent.reads[1].state = "PROC"
    views.close()
    assert held.lots.free == 7, "the first lot was done, the second is still being written"
    held.pulled.close()
    ((peer, reads),) = held.agent.parted
    assert peer.agent == "peer"
    assert [read.is_over for read in reads] == [False], "the library must know the peer until they are over"


def test_a_connection_remembers_only_reads_that_may_still_write(reading: Reading) -> None:
    """A chunk's last page is valid until the next chunk is expected, so every chunk is left with its last lot."""
    for chunk in range(100):
        reading.pulled.expect([(0, chunk % 64), (1, 5)])
        reading.pulled.next_page()
        reading.pulled.next_page()
        if chunk == 50:  # one is left half way, and ends later
            reading.agent.finishes_at_once = False
            reading.pulled.expect([(0, number) for number in range(4)])
            reading.is_over = True
            with pytest.raises(LinkError, match="ended"):
                reading.pulled.next_page()
            reading.is_over, reading.agent.finishes_at_once = False, True
    reading.pulled.close()
    assert reading.lots.free == 7
    ((_, reads),) = reading.agent.parted
    assert [read.is_over for read in reads] == [False]


def test_a_peer_that_is_lost_while_it_is_read_ends_the_connection_and_loses_no_lot(held: Reading) -> None:
    held.agent.fails = True
    with pytest.raises(LinkError, match="REMOTE_DISCONNECT"):
        next(held.pulled.views([(0, 1)]))
    assert held.lots.free == 8


def test_a_peer_that_hangs_up_while_it_is_read_is_noticed_though_the_read_never_ends(held: Reading) -> None:
    held.theirs.close()
    begun = time.monotonic()
    with pytest.raises(LinkError, match="ended"):
        next(held.pulled.views([(0, 1)]))
    assert time.monotonic() - begun < 5
    assert held.lots.free == 7


def test_an_introduction_under_another_secret_is_not_read(reading: Reading) -> None:
    with pytest.raises(LinkError, match="not its own"):
        Pulled(reading.agent, reading.lots, SECRET, introduction(b"another"), POOLS, reading.sock, lambda: False)


def test_a_page_that_fits_no_lot_is_refused_before_anything_is_read(reading: Reading) -> None:
    large = (PoolFacts("full", 16, 5 * PAGE, 5 * PAGE, ()),)
    with pytest.raises(LinkError, match="exceed a lot"):
        Pulled(reading.agent, reading.lots, SECRET, introduction(), large, reading.sock, lambda: False)


def test_pages_lie_within_the_arena_that_the_peer_has_introduced(reading: Reading) -> None:
    assert (reading.pulled.pages(0), reading.pulled.pages(1)) == (64, 64)
    small = introduction(size=5 * PAGE + 1)
    assert Pulled(reading.agent, reading.lots, SECRET, small, POOLS, reading.sock, lambda: False).pages(0) == 5


def test_a_lot_holds_the_longest_page_that_any_worker_of_the_model_can_have() -> None:
    assert lot_bytes_for(POOLS) == LOT_BYTES, "16 positions in 4 KiB are 64 KiB for 256"
    # 1 MiB for 16 positions: 256 positions are 16 MiB.
    assert lot_bytes_for((PoolFacts("full", 16, 1 << 20, 1 << 20, ()),)) == 16 << 20
