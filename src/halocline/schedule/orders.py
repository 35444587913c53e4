"""What must be committed in a step, and whose each order is: one page per pool for decodes, spans for chunks."""

from __future__ import annotations

from collections.abc import Sequence

from halocline.memory.demand import Demand
from halocline.memory.grant import Order
from halocline.schedule.chunk import StepRoom
from halocline.schedule.holding import Keeper
from halocline.schedule.request import Request


def orders_of(
    served: Sequence[tuple[Request, Demand]], room: StepRoom, keeper: Keeper
) -> tuple[list[Order], list[Request]]:
    """Return the orders of the decodes that need a page and of all chunks, and for each the request it is for."""
    orders: list[Order] = []
    takers: list[Request] = []
    for request, wanted in served:
        if request.holding is not None:  # it may have failed after its page was granted
            orders.append(Order(request.holding.grant, wanted))
            takers.append(request)
    for chunk in room.chunks:
        holding = chunk.request.holding
        assert holding is not None, f"{chunk.request.id} left after its chunk was planned"
        wanted = keeper.wanted(holding, chunk.start, chunk.end)
        asked = room.orders(chunk, wanted.plus(keeper.states) if chunk.saves else wanted)
        orders += asked
        takers += [chunk.request] * len(asked)
    return orders, takers
