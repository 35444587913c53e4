"""Turns what was granted for a step into pages and a plan, and leaves nothing behind where that breaks.

A commit cannot fail. If it does all the same, that is a defect: it is reported as a violation and costs the request
whose order it was, never the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halocline.errors import InvariantError, OverdrawnError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand
from halocline.schedule.chunk import StepRoom
from halocline.schedule.holding import Keeper
from halocline.schedule.offload import HostDesk
from halocline.schedule.orders import orders_of
from halocline.schedule.packing import Packer
from halocline.schedule.request import Request
from halocline.schedule.roster import Roster
from halocline.schedule.sharing import Sharing
from halocline.schedule.transfer import Transfers
from halocline.step import StepPlan

KEPT_VIOLATIONS = 64


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A planned step whose result is awaited."""

    plan: StepPlan
    decodes: tuple[Request, ...]
    room: StepRoom
    decode_tokens: int = 1
    """How many tokens each decode computes: more than one in a leap."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everyone who is computed in this step, in the plan's order."""
        return (*self.decodes, *(chunk.request for chunk in self.room.chunks))


class Committer:
    """Writes the plans of one scheduler, and numbers them."""

    def __init__(
        self,
        arena: Arena,
        packer: Packer,
        keeper: Keeper,
        sharing: Sharing,
        roster: Roster,
        desk: HostDesk,
        transfers: Transfers,
    ) -> None:
        self._arena = arena
        self._packer = packer
        self._keeper = keeper
        self._sharing = sharing
        self._roster = roster
        self._desk = desk
        self._transfers = transfers
        self._planned_steps = 0
        self.violations: deque[Violation] = deque(maxlen=KEPT_VIOLATIONS)
        """Commits that failed, the last ones."""

    def commit(
        self, decodes: list[Request], decode_tokens: int, served: Sequence[tuple[Request, Demand]], room: StepRoom
    ) -> Outstanding | None:
        """Commit the pages of all `served` decodes and of the room's chunks; None when nobody is left to compute.

        A failed order fails its request (those with orders, where it was nobody's), and everyone else goes on.
        """
        orders, takers = orders_of([*served, *room.landings], room, self._keeper)
        try:
            commit = self._arena.commit(orders)
        except InvariantError as defect:
            if not takers:
                raise  # nobody's order, and so nobody to go on without
            concerned = [takers[defect.order]] if isinstance(defect, OverdrawnError) else takers
            self._survive(defect, concerned, room)
            decodes = [request for request in decodes if not request.is_ended]
            if decodes or room.chunks or room.landings:
                return self.commit(decodes, decode_tokens, served, room)
            room.close()
            return None
        self._sharing.forget(commit.evicted, commit.moves)
        self._keeper.fill([request.holding for request in takers if request.holding is not None], commit.handles)
        if not self._keeper.is_current:  # this commit moved pages, or one of another owner did
            self._keeper.look_up(self._roster.holdings(), commit.moves)
        for chunk in room.chunks:
            if chunk.saves and chunk.request.holding is not None:
                self._keeper.set_aside(chunk.request.holding)
        plan = self._packer.pack(self._arena, self._planned_steps, commit.moves, decodes, room.chunks, decode_tokens)
        copies, saves = self._sharing.copies(room.chunks)
        if copies or saves:
            plan = replace(plan, copies=copies, saves=saves)
        offloads, loads = self._desk.take_work([chunk.request for chunk in room.chunks])
        if offloads or loads:
            plan = replace(plan, offloads=offloads, loads=loads)
        self._planned_steps += 1
        return Outstanding(plan, tuple(decodes), room, decode_tokens)

    def _survive(self, defect: InvariantError, concerned: Sequence[Request], room: StepRoom) -> None:
        self.violations += [Violation("L3", text) for text in defect.violations]
        for request in concerned:
            room.drop(request)
            if not request.is_ended:
                self._roster.fail(request, f"internal error, its memory could not be committed: {defect}")

    def abandon(self, takers: Sequence[Request], room: StepRoom, defect: Exception) -> None:
        """Leave nothing behind of a plan that broke half way, which is a defect: no step will give its room back.

        Moves that it ordered will never be done, so those who are not concerned compute their pages again.
        """
        landing = [request for request, _ in room.landings]
        for request in (*takers, *landing, *(chunk.request for chunk in room.chunks)):
            if not request.is_ended:
                self._roster.fail(request, f"internal error while its step was planned: {defect}")
        room.close()
        self.trust_nothing()
        self._desk.distrust()

    def trust_nothing(self) -> None:
        """Let everyone compute again: what pages hold is not known, those of the prefix cache included.

        Pinned pages have not moved: what others were told of stays as it is.
        """
        for request in (*self._roster.prefilling.snapshot(), *self._roster.decoding.snapshot()):
            self._roster.retract(request, keep=False)
        self._transfers.distrust()
        self._sharing.distrust()
