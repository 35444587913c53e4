"""The liveness rule: who gives way when a running request outgrows its grant (design 2.5).

A decode whose next token needs a page beyond its grant asks for more. Refused, it

    1. retracts strict juniors, as few bytes as suffice;
    2. when all of them together would not suffice, retracts only itself,
    3. except the most senior request, which fits an empty arena and so is never retracted: it is *short*, and waits for
       what no retraction can free (pages of other owners). Alone and still refused, it fails.

While the most senior request is short, juniors get no new grant: memory only ever comes free for it. Seniority is
total, so the most senior request always moves on, and with it, one after another, everyone.
"""

from __future__ import annotations

from operator import le

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, zero
from halocline.memory.grant import Refusal
from halocline.schedule.events import Reason
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Request
from halocline.schedule.retract import Victims
from halocline.schedule.roster import Roster
from halocline.schedule.sharing import Sharing


class Growth:
    """Grants the next token's pages to all decodes, in order of seniority."""

    def __init__(self, arena: Arena, keeper: Keeper, roster: Roster, sharing: Sharing) -> None:
        self._arena = arena
        self._sharing = sharing
        self._keeper = keeper
        self._roster = roster
        self._refused: Request | None = None
        """Who was last refused an extension, or its return after a retraction."""
        self._refusal = ""
        self.lacking = zero(len(arena.layout.pools))
        """What was refused, beyond all that is held and promised."""

    def short(self) -> Request | None:
        """Return the most senior request if it was refused what it needs to go on, else None."""
        refused = self._refused
        return refused if refused is not None and refused is self._roster.most_senior() else None

    def short_reason(self, request: Request) -> Reason | None:
        """Return why `request` gets nothing new if somebody more senior is short, else None."""
        short = self.short()
        if short is None or short is request:
            return None
        return Reason("senior-short", f"{short.id} is more senior and was refused memory: {self._refusal}")

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """Note that the budget refused `request` an extension or its return, and in which words."""
        self._refused = request
        self._refusal = refusal.message
        self.lacking = refusal.extra

    def grant(self, request: Request) -> None:
        """Note that `request` got what it needed."""
        if self._refused is request:
            self._refused = None

    def reserve_decodes(self, reasons: dict[str, Reason]) -> list[tuple[Request, Demand]]:
        """Grant every decode its next page; return who needs which pages. Those that stay without are in `reasons`.

        Most decodes are inside their last page and are not touched at all.
        """
        needy = [r for r in self._roster.decoding if r.holding is not None and r.computed >= r.holding.page_until]
        served = []
        for request in needy:
            holding = request.holding
            if holding is None:
                continue  # retracted for a senior a moment ago
            wanted = self._keeper.wanted_by_decode(holding, request.computed + 1)
            if self._has_room(holding, wanted) or self._extend(request, holding, reasons):
                served.append((request, wanted))
        return served

    def reserve_leap(self, tokens: int) -> list[tuple[Request, Demand]] | None:
        """Grant every decode the pages of its next `tokens` tokens, as above; None where some are not to be had.

        Nobody is retracted and nobody fails for a leap. Grants that were raised before the refusal stay so: they will
        be asked for in the next steps anyway.
        """
        served = []
        for request in self._roster.decoding:
            holding = request.holding
            if holding is None or request.computed + tokens <= holding.page_until:
                continue
            wanted = self._keeper.wanted_by_decode(holding, request.computed + tokens)
            if not self._has_room(holding, wanted):
                price = self._price(request, tokens)
                if isinstance(self._arena.extend(holding.grant, self._raised(holding, price)), Refusal):
                    return None
                self._roster.totals.extensions += 1
            served.append((request, wanted))
        return served

    def _has_room(self, holding: Holding, wanted: Demand) -> bool:
        room = Demand(holding.grant.room).minus(self._sharing.reserved(holding))
        return all(map(le, wanted, room))

    def _price(self, request: Request, tokens: int) -> Demand:
        # So many tokens more, and what it already has: grants of outgrown requests rise page by page.
        output = len(request.history) + tokens - request.resumed_at
        lookahead = self._keeper.lookahead_tokens
        return resident(self._arena.layout, request.resumed_at, output, request.computed, lookahead)

    def _extend(self, request: Request, holding: Holding, reasons: dict[str, Reason]) -> bool:
        blocked = self.short_reason(request)
        if blocked is not None:
            reasons[request.id] = blocked
            self._roster.retract(request, offload=True)
            return False
        price = self._price(request, 1)
        answer = self._arena.extend(holding.grant, self._raised(holding, price))
        refusal = self._make_room(request, holding, price, answer) if isinstance(answer, Refusal) else None
        if refusal is not None:
            reasons[request.id] = Reason("memory", refusal.message)
            self._give_way(request, refusal)
            return False
        self._roster.totals.extensions += 1
        self.grant(request)
        return True

    def _raised(self, holding: Holding, price: Demand) -> Demand:
        return Demand(map(max, price.minus(self._sharing.covered(holding)), holding.grant.demand))

    def _make_room(self, request: Request, holding: Holding, price: Demand, refusal: Refusal) -> Refusal | None:
        """Retract juniors so that `price` fits, and take it; return the refusal that is left, None when granted."""
        extra = self._raised(holding, price).minus(holding.grant.demand)
        juniors = self._roster.juniors_of(request)
        victims = Victims(self._arena, extra, juniors, self._sharing.given_back).choose()
        if victims is None:
            return refusal
        for victim in victims:
            self._roster.retract(victim, offload=True)
        # Priced again: pages that a victim shared with the asker may be charged to the asker now.
        answer = self._arena.extend(holding.grant, self._raised(holding, price))
        return answer if isinstance(answer, Refusal) else None

    def _give_way(self, request: Request, refusal: Refusal) -> None:
        if request is not self._roster.most_senior():
            self._roster.retract(request, offload=True)
            return
        self.refuse(request, refusal)
        if self._roster.running == 1:
            self._roster.fail(
                request,
                f"out of memory after {request.output_tokens} tokens: no other request runs, and yet its next page "
                f"does not fit beside what other owners hold: {refusal.message}",
            )
