"""What two workers say to each other: plain tagged structs, packed with msgpack.

    decode side D                                    prefill side P
    Hello                                        <-> Hello            first, both ways
    Ask(request, attempt, prompt ...)             -> Offer | Decline
    Accept(request, attempt, start_tokens)        -> Progress, Pages (chunk 0, 1, ...), Done
    Taken(request, attempt, chunk)                -> unpins that chunk
    Release(request, attempt)                     -> P ends the request
    Revoke | Abort                                -> P waits for the next Accept | ends it
                                                 <-  Fail             P cannot go on with it
    Heartbeat                                    <-> Heartbeat        the connection lives; nothing more

`request` is D's own id. An *attempt* is one try to get its prompt computed; attempts count upwards, and what belongs to
a former one is refused. All messages may come twice, late, out of order, or not at all: that is the business of the
machines (`sender`, `receiver`). Bytes of pages are no part of a message: a link carries them beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halocline.errors import LinkError
from halocline.memory.layout import ArenaLayout, LayerPlace, PoolLayout
from halocline.memory.retention import Full, State, describe
from halocline.params import MAX_SALT_CHARACTERS, SamplingParams
from halocline.step import TokenLogprobs

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 32 << 20
"""No message is longer: a prompt of six million tokens fits."""
MAX_POOLS = 64
MAX_LAYERS = 4096
MAX_ATTEMPT = 2**31 - 1
COUNT_LIMIT = 2**62

Role = Literal["both", "prefill", "decode"]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Words = Annotated[str, Meta(max_length=4000)]
Count = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]
Attempt = Annotated[int, Meta(ge=1, le=MAX_ATTEMPT)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]


class LayerFacts(msgspec.Struct, frozen=True, array_like=True):
    """What one layer keeps, and where it lies in a page of its pool."""

    model: Name
    layer: Count
    kv_heads: Count
    k_dim: Count
    v_dim: Count
    dtype_bytes: Count
    state_bytes: Count
    k_offset: Count
    v_offset: Count

    @property
    def label(self) -> str:
        """The layer's name in an error."""
        return f"{self.model} layer {self.layer}"

    def described(self) -> str:
        """Say what the layer keeps, in words; where it lies is not part of it."""
        if self.state_bytes:
            return f"a state of {self.state_bytes} bytes"
        return f"{self.kv_heads} heads of {self.k_dim} + {self.v_dim} elements of {self.dtype_bytes} bytes"


class PoolFacts(msgspec.Struct, frozen=True, array_like=True):
    """One pool as an arena cuts it; the layers in the order in which they lie in a page."""

    name: Name
    page_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    page_bytes: Count
    stride_bytes: Count
    layers: Annotated[tuple[LayerFacts, ...], Meta(max_length=MAX_LAYERS)]


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a worker's model and arena before a page of it can be read."""

    model: Name
    """Fingerprint of architecture and weights."""
    dtype: Name
    vocab_size: Count
    eos_token_ids: Annotated[tuple[Token, ...], Meta(max_length=1024)] = ()
    granule_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    pools: Annotated[tuple[PoolFacts, ...], Meta(max_length=MAX_POOLS)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello", kw_only=True):
    """Who speaks. `epoch` is drawn anew at every start: a restarted worker is another one."""

    version: Count = PROTOCOL_VERSION
    role: Role
    epoch: Name
    facts: PeerFacts


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """D asks whether P would compute a prompt. With an attempt above the last one it also ends that one."""

    request: Name
    attempt: Attempt
    prompt: Annotated[tuple[Token, ...], Meta(min_length=1)]
    params: SamplingParams
    seed: int
    priority: int = 0
    salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """P would; it holds nothing yet and waits for an accept."""

    request: Name
    attempt: Attempt


class Decline(msgspec.Struct, frozen=True, array_like=True, tag="decline"):
    """P cannot, and why."""

    request: Name
    attempt: Attempt
    message: Words


class Accept(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """D has reserved all that it needs and holds the first `start_tokens` positions already."""

    request: Name
    attempt: Attempt
    start_tokens: Count


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """What P has yet to do before this request's prompt is done; renews D's lease when it falls."""

    request: Name
    attempt: Attempt
    left: Count
    """Pages that may yet be computed, and chunks of other requests to be taken before the next one of this: no number
    to be shown to anybody, it only falls as work is done."""


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of a request in one pool."""

    first_page: Count
    """Index within the request; in a state pool 0."""
    pages: Count


class Pages(msgspec.Struct, frozen=True, array_like=True, tag="pages"):
    """Pages of one chunk, which the link carries beside this message: one run per pool, some of them empty.

    Chunks are numbered from 0 by whoever sends them, who cuts large ones: what is computed in one step may come in
    several, each with a number of its own.
    """

    request: Name
    attempt: Attempt
    chunk: Count
    left_tokens: Count
    """Tokens of this prompt that are not computed yet."""
    runs: Annotated[tuple[PageRun, ...], Meta(max_length=MAX_POOLS)]


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """D has all bytes of a chunk."""

    request: Name
    attempt: Attempt
    chunk: Count


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The prompt is computed and its pages were sent in so many chunks; the first output token."""

    request: Name
    attempt: Attempt
    chunks: Annotated[int, Meta(ge=0, le=1 << 31)]
    token_id: Token
    logprobs: TokenLogprobs | None = None


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """D needs nothing more of this request: P ends it."""

    request: Name
    attempt: Attempt


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag="revoke"):
    """D needs its landing's pages for a senior that is short of memory, or the landing gives way to a prompt that D
    computes for others: P stops, waits again, and offers `attempt + 1`."""

    request: Name
    attempt: Attempt


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """D wants nothing more of this request, up to and including this attempt."""

    request: Name
    attempt: Attempt


class Fail(msgspec.Struct, frozen=True, array_like=True, tag="fail"):
    """P cannot go on with this attempt, and why."""

    request: Name
    attempt: Attempt
    message: Words


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """The connection lives; renews the lease of no request."""


ToSender = Ask | Accept | Taken | Release | Revoke | Abort
ToReceiver = Offer | Decline | Progress | Pages | Done | Fail
Message = Hello | ToSender | ToReceiver | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Pack one message. Raises LinkError when it is longer than any peer would read."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LinkError(
            f"a {type(message).__name__} of {len(frame)} bytes exceeds the {MAX_MESSAGE_BYTES} of a message"
        )
    return frame


def decode(frame: bytes | bytearray | memoryview) -> Message:
    """Unpack one message. Raises LinkError for whatever is none: what a peer sends is never trusted."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LinkError(f"a frame has {len(frame)} bytes, and a message at most {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LinkError(f"what came is no message: {str(error)[:200]}") from error


def facts_of(
    layout: ArenaLayout, *, model: str, dtype: str, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> PeerFacts:
    """Return what a peer must know of a model (`model`: its fingerprint) and an arena."""
    return PeerFacts(
        model=model,
        dtype=dtype,
        vocab_size=vocab_size,
        eos_token_ids=tuple(eos_token_ids),
        granule_tokens=layout.granule_tokens,
        pools=tuple(_pool_facts(pool) for pool in layout.pools),
    )


def _pool_facts(pool: PoolLayout) -> PoolFacts:
    layers = tuple(_layer_facts(place) for place in pool.layers)
    return PoolFacts(pool.name, pool.page_tokens, pool.page_bytes, pool.stride_bytes, layers)


def _layer_facts(place: LayerPlace) -> LayerFacts:
    spec = place.spec
    sizes = (spec.kv_heads, spec.k_dim, spec.v_dim, spec.dtype_bytes, spec.state_bytes)
    return LayerFacts(spec.model, spec.layer, *sizes, place.k_offset, place.v_offset)


def differences(own: Hello, other: Hello) -> list[str]:
    """Return all that keeps pages of `other` from being read here, one sentence each; page lengths may differ."""
    found = []
    if own.version != other.version:
        found.append(f"it speaks version {other.version} of the protocol, this worker version {own.version}")
    if own.epoch == other.epoch:
        found.append("it is this very worker; a worker cannot compute prompts for itself")
    here, there = own.facts, other.facts
    for what, mine, its in (
        ("model", here.model, there.model),
        ("dtype", here.dtype, there.dtype),
        ("vocabulary size", here.vocab_size, there.vocab_size),
        ("end-of-sequence tokens", sorted(here.eos_token_ids), sorted(there.eos_token_ids)),
    ):
        if mine != its:
            found.append(f"its {what} is {its}, here it is {mine}")
    return found + _pool_differences(here.pools, there.pools)


def _pool_differences(here: Sequence[PoolFacts], there: Sequence[PoolFacts]) -> list[str]:
    mine, its = [pool.name for pool in here], [pool.name for pool in there]
    if mine != its:
        return [f"its pools are {', '.join(its) or 'none'}, here they are {', '.join(mine) or 'none'}"]
    found = []
    for own, other in zip(here, there, strict=True):
        layers = {layer.label: layer.described() for layer in own.layers}
        others = {layer.label: layer.described() for layer in other.layers}
        for label in [*layers, *(label for label in others if label not in layers)]:
            if layers.get(label) != others.get(label):
                ours, theirs = layers.get(label, "absent"), others.get(label, "absent")
                found.append(f"pool {own.name}: {label} is {theirs}, here it is {ours}")
        if own.name == describe(State()) and not found and _places(own) != _places(other):
            found.append("pool state: its layers lie in another order")
    return found


def _places(pool: PoolFacts) -> list[tuple[str, int, int]]:
    return [(layer.label, layer.k_offset, layer.v_offset) for layer in pool.layers]


def has_equal_pages(own: PoolFacts, other: PoolFacts) -> bool:
    """Whether a page of `other` can be taken over byte by byte."""
    return (own.page_tokens, own.page_bytes) == (other.page_tokens, other.page_bytes) and _places(own) == _places(other)


def cuts_windows(own: PeerFacts, other: PeerFacts) -> bool:
    """Whether `other` may send less than a page of ours in a pool that does not hold everything.

    It sends whole pages of its own from the first position that decoding reads; where those are shorter, our page
    begins before them.
    """
    whole = (describe(Full()), describe(State()))
    pairs = zip(own.pools, other.pools, strict=True)
    return any(theirs.page_tokens < ours.page_tokens for ours, theirs in pairs if ours.name not in whole)


def check_peer(own: Hello, other: Hello, who: str) -> None:
    """Raise one LinkError that lists every difference which keeps `who` from working with this worker."""
    found = differences(own, other)
    if found:
        raise LinkError(f"{who} cannot work with this worker: " + "; ".join(found))
