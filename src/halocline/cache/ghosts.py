"""What was kept once and had to go: digests of evicted prefixes, so that a return is told from a first visit.

A prompt that comes back after its pages went has shown that its return takes longer than the arena remembers. Such
sessions come in turn, each driving out the next (D1): to keep them all in turn is to keep none.

A prefix is remembered at granules 1, 2, 4, 8 ... and at its end: the next prompt of the session goes on differently.
"""

from __future__ import annotations

from hashlib import sha256

from halocline.cache.keys import Key

REMEMBERED = 1 << 16
DIGEST_BYTES = 12
Digests = tuple[tuple[int, bytes], ...]
"""(granules, digest of the key up to there), ascending."""


def digests(key: Key, granules: int, granule_bytes: int) -> Digests:
    """Return the digests of the first `granules` of `key`: one pass over its bytes."""
    space = key.namespace
    running = sha256(repr((space.model, space.adapter, space.salt)).encode())  # processors have instructions for it
    done, found, border = 0, [], 1
    while done < granules:
        stop = min(border, granules)
        running.update(key.data[done * granule_bytes : stop * granule_bytes])
        found.append((stop, running.copy().digest()[:DIGEST_BYTES]))
        done, border = stop, 2 * border
    return tuple(found)


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
