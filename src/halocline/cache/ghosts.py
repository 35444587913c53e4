"""What was kept once and had to go: digests of evicted prefixes, so that a return is told from a first visit.

A prompt that comes back after its pages went has shown that its return takes longer than the arena remembers. Such
sessions come in turn, each driving out the next (D1): to keep them all in turn is to keep none.

A prefix is remembered at granules 1, 2, 4, 8 ... and at its end: the next prompt of the session goes on differently.
"""

from __future__ import annotations

from hashlib import sha256

from halocline.cache.keys import Key, Namespace

REMEMBERED = 1 << 16
DIGEST_BYTES = 12
Digests = tuple[tuple[int, bytes], ...]
"""(granules, digest of the key up to there), ascending."""


class Digester:
    """The digests of one prefix that grows: what is asked again is hashed from the last power of two on.

    Each is that of the one before it and of the bytes between, so that nothing but digests is kept.
    """

    __slots__ = ("_found", "_seed")

    def __init__(self, namespace: Namespace) -> None:
        self._seed = repr((namespace.model, namespace.adapter, namespace.salt)).encode()
        self._found: list[tuple[int, bytes]] = []
        """At 1, 2, 4, 8 ... granules, as far as that was asked."""

    def digests(self, data: bytes, granules: int, granule_bytes: int) -> Digests:
        """Return the digests of the first `granules` of `data`, which begins as it began before."""
        while 1 << len(self._found) <= granules:
            border = 1 << len(self._found)
            self._found.append((border, self._digest(data, border, granule_bytes)))
        whole = self._found[: granules.bit_length()]
        if granules == 0 or whole[-1][0] == granules:
            return tuple(whole)
        return (*whole, (granules, self._digest(data, granules, granule_bytes)))

    def _digest(self, data: bytes, granules: int, granule_bytes: int) -> bytes:
        before = (granules - 1).bit_length() - 1  # the last power of two below
        done, known = self._found[before] if before >= 0 else (0, self._seed)
        fresh = data[done * granule_bytes : granules * granule_bytes]
        return sha256(known + fresh).digest()[:DIGEST_BYTES]  # processors have instructions for it


def digests(key: Key, granules: int, granule_bytes: int) -> Digests:
    """Return the digests of the first `granules` of `key`: one pass over its bytes."""
    return Digester(key.namespace).digests(key.data, granules, granule_bytes)


class Ghosts:
    """The digests of the last evicted prefixes."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    def remember(self, prefix: Digests, beyond: int) -> None:
        """Note that of `prefix` everything beyond `beyond` granules is gone."""
        for granules, digest in prefix:
            if granules > beyond:
                self._known.pop(digest, None)
                self._known[digest] = None
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def knows(self, prefix: Digests, beyond: int) -> bool:
        """Whether some part of `prefix` longer than `beyond` granules was here and went."""
        return any(granules > beyond and digest in self._known for granules, digest in prefix)
