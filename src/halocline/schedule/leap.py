"""How far a step may leap: several tokens of every decode in one step, where that changes nothing for anybody else.

    tokens     min(what was asked for, the fewest that any decode has left, the step's tokens / decodes)

so that nobody is freed later than it would be. One token only, as always,

    while anybody prefills, or might come in now        its chunk would wait for the whole leap
    where somebody wants log-probabilities              the tokens of a leap come without them
    up to where stop tokens become allowed              a segment says once for all its tokens that they are not
    where the pages of the leap are not to be had       a retraction comes when it must come and not before

Every price counts `Rules.lookahead_tokens`, so a request whose whole life is granted never lacks a page of a leap.
"""

from __future__ import annotations

from halocline.schedule.fill import Filler
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules


def leap_tokens(most: int, roster: Roster, filler: Filler, rules: Rules) -> int:
    """Return how many tokens, from 1 to `most`, every decode may compute in the next step."""
    decodes = len(roster.decoding)
    if most == 1 or not decodes or len(roster.prefilling) or filler.may_admit():
        return 1
    most = min(most, rules.step_tokens // decodes)
    for request in roster.decoding:
        known = len(request.history)
        most = min(most, request.end - known)
        if known < request.stops_from:
            most = min(most, request.stops_from - known)
        if request.params.logprobs is not None:
            return 1
    return most
