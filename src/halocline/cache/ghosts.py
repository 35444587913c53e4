"""What was kept once and had to go: digests of evicted prefixes, so that a return is told from a first visit.

A prompt that comes back after its pages went has shown that its return takes longer than the arena remembers. Such
sessions come in turn, each driving out the next (D1): to keep them all in turn is to keep none.

A prefix is remembered at granules 1, 2, 4, 8 ... and at its end: the next prompt of the session goes on differently.
"""

from __future__ import annotations

from copy import copy
from hashlib import sha256

from halocline.cache.keys import Key, Namespace

REMEMBERED = 1 << 16
DIGEST_BYTES = 12
Digests = tuple[tuple[int, bytes], ...]
"""(granules, digest of the key up to there), ascending."""


class Digester:
    """The digests of one prefix that grows: each of its bytes is hashed once, however often it is asked."""

    __slots__ = ("_border", "_found", "_running", "granules")

    def __init__(self, namespace: Namespace) -> None:
        space = repr((namespace.model, namespace.adapter, namespace.salt))
        self._running = sha256(space.encode())  # processors have instructions for it
        self.granules = 0
        """How many granules were hashed."""
        self._border = 1
        self._found: list[tuple[int, bytes]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> Digester:
        """Copy the hash in its own way: worlds are copied by tests that try what may follow."""
        twin = copy(self)
        twin.detach()
        return twin

    def detach(self) -> None:
        """Share nothing with whom this is a copy of."""
        self._running, self._found = self._running.copy(), self._found.copy()

    def digests(self, data: bytes, granules: int, granule_bytes: int) -> Digests:
        """Return the digests of the first `granules` of `data`, which are no fewer than before and begin as before."""
        assert granules >= self.granules, f"{granules} granules are asked for, {self.granules} were hashed"
        while self._border <= granules:
            self._hash(data, self._border, granule_bytes)
            self._found.append((self._border, self._digest()))
            self._border *= 2
        if granules == 0 or 2 * granules == self._border:  # a border itself
            return tuple(self._found)
        self._hash(data, granules, granule_bytes)
        return (*self._found, (granules, self._digest()))

    def _hash(self, data: bytes, granules: int, granule_bytes: int) -> None:
        self._running.update(data[self.granules * granule_bytes : granules * granule_bytes])
        self.granules = granules

    def _digest(self) -> bytes:
        return self._running.copy().digest()[:DIGEST_BYTES]


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
