"""What one running request has locked in the tree: where its path ends, and which window pages it still reads.

    tokens        0 ............ resumed .......... inserted .......... full_tokens
    full          locked, all of it: the path to `node`, never written by this request
    window                    |locked, page by page ..|own pages of the request ...
    state                    one checkpoint at `resumed`, until it has been copied

Mostly `resumed` = `full_tokens` when a request comes, and both ends grow together. Where windows or states are gone, it
resumes earlier than the full pages reach and computes [resumed, full_tokens) for their sake alone (H8).
"""

from __future__ import annotations

import msgspec

from halocline.cache.ghosts import Digester
from halocline.cache.keys import EVERYBODY
from halocline.cache.node import Node, Shape
from halocline.memory.grant import NO_HANDLES, Grant, Handles


class Lock:
    """What one running request has locked in the tree. Everybody may read it; only `LockBook` writes it."""

    __slots__ = (
        "_granule_tokens",
        "charged",
        "digester",
        "first_page",
        "grant",
        "handed",
        "id",
        "inserted",
        "is_open",
        "namespace",
        "node",
        "owed",
        "pages",
        "resumed",
        "revealed_tokens",
    )

    def __init__(self, lock_id: int, grant: Grant, node: Node, shape: Shape, resumed: int) -> None:
        self._granule_tokens = shape.granule_tokens
        self.id = lock_id
        self.grant = grant
        self.namespace = EVERYBODY
        self.node = node
        """Where the locked path ends: that of the full pages."""
        self.first_page = [0] * shape.pools
        """Per window pool: the page number (from position 0 of the request) of the first locked page."""
        self.pages: list[Handles] = [NO_HANDLES] * shape.pools
        """Locked pages: of a window pool in a row from `first_page` on, of a state pool the checkpoint. Those of a full
        pool are the path's."""
        self.handed: list[Handles] = [NO_HANDLES] * shape.pools
        """Per state pool: the checkpoint that became the request's own working state instead of being copied."""
        self.charged = [0] * shape.pools
        """Per window pool: locked pages that are charged to it, so that its demand is less by them."""
        self.owed = [0] * shape.pools
        """Charges taken over without room to pay with: the demand falls by them as soon as there is room."""
        self.resumed = resumed
        """Granules that the request did not have to compute."""
        self.inserted = resumed
        """Granules that it has brought, those it resumed after included: its locked window pages end there."""
        self.revealed_tokens = 0
        """How far the prompt agreed with the tree when it came: perhaps a branch. Where states are kept, a chunk should
        end here and leave a checkpoint."""
        self.is_open = True
        self.digester: Digester | None = None
        """What was hashed of its prefix, for marks on its path. Written by the tree."""

    @property
    def resumed_tokens(self) -> int:
        """The boundary at which the request began to compute."""
        return self.resumed * self._granule_tokens

    @property
    def inserted_tokens(self) -> int:
        """Where the next `Advance` begins: its `end_tokens` is never less."""
        return self.inserted * self._granule_tokens

    @property
    def full_tokens(self) -> int:
        """How far the pages of the full pools are the tree's: no own full page begins before.

        Beyond `resumed_tokens` when the request comes, where windows or states are gone that the full pages outlived:
        positions between are computed, but of full pages only read.
        """
        return self.node.end * self._granule_tokens


class Parting(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Pages of one pool that a lock lets go."""

    lock: Lock
    pool: int
    handles: Handles
