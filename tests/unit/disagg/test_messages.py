"""Messages: what goes over a link comes back equal, what is none is refused, and peers that differ are told how."""

from __future__ import annotations

from dataclasses import replace as replace_dataclass

import msgspec
import pytest
from msgspec.structs import replace

from halocline.disagg import messages as wire
from halocline.errors import LinkError
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding, State
from halocline.params import SamplingParams
from halocline.step import TokenLogprobs


def layout(page_tokens: int = 16, heads: int = 2, window: int = 100) -> ArenaLayout:
    kinds = [
        LayerKV(0, Full(), heads, 8, 8),
        LayerKV(1, Sliding(window), 2, 8, 8),
        LayerKV(2, State(), state_bytes=4096),
    ]
    return solve_layout(kinds, 1 << 20, page_tokens)


def hello(epoch: str = "one", arena: ArenaLayout | None = None, **facts: object) -> wire.Hello:
    given = {"model": "m", "dtype": "bf16", "vocab_size": 100, "eos_token_ids": (1,), **facts}
    return wire.Hello(role="both", epoch=epoch, facts=wire.facts_of(arena or layout(), **given))  # type: ignore[arg-type]


EVERY_MESSAGE = [
    hello(),
    wire.Ask("r", 1, (1, 2, 3), SamplingParams(temperature=0.5, stop_token_ids=(4,)), -5, 2, "salt"),
    wire.Offer("r", 1),
    wire.Decline("r", 1, "too long"),
    wire.Accept("r", 1, 64),
    wire.Progress("r", 1, 12),
    wire.Pages("r", 1, 0, 12, (wire.PageRun(4, 3), wire.PageRun(0, 0))),
    wire.Taken("r", 1, 0),
    wire.Done("r", 1, 2, 7, TokenLogprobs(-0.5, 2, ((3, -0.25), (7, -0.5)))),
    wire.Release("r", 1),
    wire.Revoke("r", 1),
    wire.Abort("r", 1),
    wire.Fail("r", 1, "it broke"),
    wire.Heartbeat(),
]


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_went(message: wire.Message) -> None:
    frame = wire.encode(message)
    assert wire.decode(frame) == message
    assert wire.decode(memoryview(bytearray(frame))) == message


def test_every_kind_of_message_is_tested() -> None:
    kinds = set(wire.Message.__args__)  # type: ignore[attr-defined]
    assert {type(message) for message in EVERY_MESSAGE} == kinds


BAD = {
    "nothing": b"",
    "noise": b"\xc1\x00\xff",
    "attempt 0": msgspec.msgpack.encode(["offer", "r", 0]),
    "an empty name": msgspec.msgpack.encode(["offer", "", 1]),
    "a long name": msgspec.msgpack.encode(["offer", "r" * 257, 1]),
    "no prompt": msgspec.msgpack.encode(["ask", "r", 1, [], {}, 0]),
    "a negative token": msgspec.msgpack.encode(["ask", "r", 1, [-1], {}, 0]),
    "a wrong temperature": msgspec.msgpack.encode(["ask", "r", 1, [1], {"temperature": -1.0}, 0]),
    "too many pools": msgspec.msgpack.encode(["pages", "r", 1, 0, 0, [[0, 1]] * 65]),
    "an unknown kind": msgspec.msgpack.encode(["sesame", "r", 1]),
    "deep nesting": b"\x91" * 5000,
}


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(LinkError, match="no message"):
        wire.decode(frame)


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(LinkError, match=str(wire.MAX_MESSAGE_BYTES)):
        wire.decode(bytes(wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(LinkError, match="Fail"):
        wire.encode(wire.Fail("r", 1, "x" * wire.MAX_MESSAGE_BYTES))


def test_equal_workers_have_no_differences_and_page_lengths_may_differ() -> None:
    assert wire.differences(hello("one"), hello("two")) == []
    assert wire.differences(hello("one"), hello("two", layout(page_tokens=4))) == []
    wire.check_peer(hello("one"), hello("two"), "the worker at x")


def test_all_differences_are_listed_in_one_error() -> None:
    other = replace(
        hello("one", layout(heads=4), model="n", dtype="fp32", vocab_size=99, eos_token_ids=(2,)), version=3
    )
    with pytest.raises(LinkError) as caught:
        wire.check_peer(hello("one"), other, "the worker at x")
    for words in (
        "the worker at x cannot work with this worker",
        "version 3 of the protocol, this worker version 2",
        "it is this very worker",
        "its model is n, here it is m",
        "its dtype is fp32, here it is bf16",
        "its vocabulary size is 99, here it is 100",
        "its end-of-sequence tokens is [2], here it is [1]",
        "pool full: target layer 0 is 4 heads of 8 + 8 elements of 2 bytes, here it is 2 heads",
    ):
        assert words in str(caught.value)


def test_other_windows_are_other_pools() -> None:
    (found,) = wire.differences(hello("one"), hello("two", layout(window=50)))
    assert found == "its pools are full, sliding-50, state, here they are full, sliding-100, state"


def test_a_layer_that_one_side_lacks_is_named() -> None:
    pools = hello().facts.pools
    fewer = replace(hello("two").facts, pools=(replace(pools[0], layers=()), *pools[1:]))
    (found,) = wire.differences(hello("one"), replace(hello("two"), facts=fewer))
    assert found == "pool full: target layer 0 is absent, here it is 2 heads of 8 + 8 elements of 2 bytes"


def test_pages_are_equal_when_every_byte_has_the_same_place() -> None:
    own = hello().facts.pools[0]
    assert wire.has_equal_pages(own, hello("two").facts.pools[0])
    assert not wire.has_equal_pages(own, hello("two", layout(page_tokens=4)).facts.pools[0])
    moved = replace(own, layers=(replace(own.layers[0], v_offset=own.layers[0].v_offset + 64),))
    assert not wire.has_equal_pages(own, moved)
    assert wire.has_equal_pages(own, replace(own, stride_bytes=own.stride_bytes + 64))  # padding never travels


def test_only_shorter_pages_of_windows_cut_ours() -> None:
    own, shorter, longer = (hello("x", layout(page_tokens=tokens)).facts for tokens in (16, 4, 64))
    assert wire.cuts_windows(own, shorter)
    assert not wire.cuts_windows(own, own)
    assert not wire.cuts_windows(own, longer)
    full_only = replace(own, pools=(shorter.pools[0], *own.pools[1:]))
    assert not wire.cuts_windows(own, full_only)


def test_facts_name_every_layer_and_its_place() -> None:
    arena = layout()
    facts = wire.facts_of(arena, model="m", dtype="d", vocab_size=1)
    assert facts.granule_tokens == arena.granule_tokens == 16
    for pool, fact in zip(arena.pools, facts.pools, strict=True):
        assert (fact.name, fact.page_tokens) == (pool.name, pool.page_tokens)
        assert (fact.page_bytes, fact.stride_bytes) == (pool.page_bytes, pool.stride_bytes)
        places = [(place.spec.layer, place.k_offset, place.v_offset) for place in pool.layers]
        assert [(layer.layer, layer.k_offset, layer.v_offset) for layer in fact.layers] == places
    shifted = replace_dataclass(arena.pools[0], page_tokens=8)
    assert (
        wire.facts_of(replace_dataclass(arena, pools=(shifted, *arena.pools[1:])), model="m", dtype="d", vocab_size=1)
        != facts
    )
