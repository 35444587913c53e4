"""Who goes first where workers compute prompts for each other: why none of them waits in a circle.

A landing holds memory, and a request slot, while another worker computes its prompt; that one admits the prompt when it
has room, and its room may be full of landings which wait for this worker:

    worker 1   landing of a .......... holds the room that d waits for         d is computed here for worker 2
                   waits for                    waits for
    worker 2   c, computed for 1, waits for the room of ..... landing of b     its prompt is d

**The rule.** Workers have an order, and every landing either stands (its prompt is computed by a worker before this
one in the order) or gives way (by one after it). Where a prompt that another worker has room for waits here, and there
is nothing to compute, a landing that gives way is revoked, the most junior first and one after the other; its request
is not admitted again before the prompts that waited then have been, or have gone.

**No circle.** Whatever else waits here waits for what is computed here, or for pages that only have to be taken, and
these end on their own. So let W be the first worker in the order at which prompts for others wait for ever. Landings
that stand at W are served by workers before W, where nothing waits for ever: they end. Landings that give way are
revoked, and stay away until those prompts are in. So in the end they find the arena empty, into which each of them
fits. **No livelock.** Between two such revocations of one request, some prompt that was computed for another worker was
admitted or has gone, and these are as many as there are attempts. A landing that stands is never revoked for this, so
the worker before has no attempts more for it; nor has, by induction, any other.

`tests/laws/test_circles.py` tries all interleavings of small worlds, with this rule and without it.
"""

from __future__ import annotations

from collections.abc import Iterator

from halocline.schedule.events import Offered, Reason, RevokeWanted
from halocline.schedule.request import Request
from halocline.schedule.roster import Roster


class Courtesy:
    """Which landings of one scheduler give way, and for what."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._yielding: set[str] = set()
        """Requests whose landings give way."""
        self._first: dict[str, frozenset[tuple[str, int]]] = {}
        """Of those that gave way: the prompts for others, and their attempts, that go before it."""
        self._held: dict[str, Request] = {}
        """Those that were offered again meanwhile: in the line of the absent, until it is their turn."""

    def offered(self, event: Offered) -> None:
        """Be told of an offer that was taken note of: take its request out of the line again if it is not its turn."""
        request = self._roster.live.get(event.request_id)
        if request is None or request.attempt != event.attempt or not request.is_called or request.is_running:
            return
        if event.gives_way:
            self._yielding.add(request.id)
        else:  # who computes it now comes before this worker: then it waits for nobody
            self._forget(request.id)
        if self._goes_before(request.id) is not None:
            self._roster.recall(request)
            self._held[request.id] = request

    def withdrawn(self, request_id: str) -> None:
        """Be told that an offer is not true any more."""
        self._held.pop(request_id, None)

    def give_way(self) -> None:
        """Be told that there was nothing to compute: let a landing go if a prompt for another worker waits for room."""
        wait = frozenset((each.id, each.attempt) for each in self._roster.waiting if each.route == "send")
        receiving = self._roster.receiving.snapshot()
        if not wait or any(each.landing is None or each.landing.is_revoked for each in receiving):
            return  # one after the other: how many suffice is seen when the pages of the last one are free
        for request in reversed(receiving):
            landing = request.landing
            if request.id in self._yielding and landing is not None and landing.is_told:
                landing.is_revoked = True
                self._first[request.id] = wait
                self._roster.outbox.append(RevokeWanted(request.id, request.attempt))
                return

    def call(self) -> None:
        """Let those come in whose turn it is, and forget who has left."""
        for name, request in list(self._held.items()):
            if request.is_ended:
                del self._held[name]
            elif self._goes_before(name) is None:
                del self._held[name]
                self._roster.call(request)
        for name in [name for name in self._yielding if name not in self._roster.live]:
            self._forget(name)

    def _forget(self, request_id: str) -> None:
        # Whoever gave way is one whose landing gives way: so nothing of the others is ever kept.
        self._yielding.discard(request_id)
        self._first.pop(request_id, None)

    def _goes_before(self, request_id: str) -> str | None:
        """Return a prompt for another worker that is still to be admitted before this request, None if there is none.

        Whether it is the same attempt matters: who was revoked there, and is accepted anew, has no more right.
        """
        live = self._roster.live
        for name, attempt in sorted(self._first.get(request_id, ())):
            other = live.get(name)
            if other is not None and other.is_called and not other.is_running and other.attempt == attempt:
                return name
        return None

    def reasons(self) -> Iterator[tuple[str, Reason]]:
        """Yield why those wait who are offered and not yet in the line."""
        for name in self._held:
            why = f"it gave way, and {self._goes_before(name)}, which is computed here for another worker, goes first"
            yield name, Reason("transfer", why)
