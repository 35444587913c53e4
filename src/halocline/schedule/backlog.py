"""How much is computed before a request's prompt is done: what another worker that waits for it is told.

It is a natural number that falls with everything that is computed for the request and for all who go before it. So it
measures progress: whoever waits and renews a lease when it falls waits no longer than the work that was there.
"""

from __future__ import annotations

from collections.abc import Mapping

from halocline.schedule.request import Request, State


def work_before(live: Mapping[str, Request], request_id: str) -> int:
    """Return the tokens that this request's prompt and all who go before it have yet to compute; 0 for an unknown one.

    Who goes before: its seniors, and while it waits itself also juniors that run, because they may hold the slot or the
    memory that it waits for. They count to their ends. Seniors that wait for another worker's word count before it has
    come, so that the number does not rise when it does.
    """
    own = live.get(request_id)
    if own is None:
        return 0
    waits = not own.is_running
    return sum(_left(each) for each in live.values() if each.key <= own.key or (waits and each.is_running))


def _left(request: Request) -> int:
    """Return what a request has yet to compute: its last token is sampled and not computed."""
    if request.state is State.SENDING:
        return 0
    end = len(request.history) if request.route == "send" else request.end - 1
    return max(0, end - request.computed)
