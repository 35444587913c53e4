"""A job's prompt as a live server takes it: ids that every vocabulary has, or words.

A content id becomes a pattern of five tokens, its digits to the base 100 from the lowest on, repeated over the run.
So equal runs are equal tokens, different contents differ within the first five, and no id is above 119 or below 20,
where the special tokens usually are.

An answer that was seen is passed on as it was: a later turn has its own tokens in its prompt.

    content 7       27 20 20 20 20 27 20 20 ...
    content 12345   65 43 21 20 20 65 43 21 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from types import MappingProxyType

from halocline.sim.workload import Job

FIRST_ID, IDS, DIGITS = 20, 100, 5
NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words where most know get through
back much our good new sound take work
"""
WORDS = tuple(_WORDS.split())[:IDS]
assert len(set(WORDS)) == IDS, f"{len(set(WORDS))} different words for {IDS} digits"


def as_token_ids(job: Job, said: Mapping[int, Sequence[int]] = NOTHING) -> list[int]:
    """Return the prompt as exactly `prompt_tokens` token ids from FIRST_ID to FIRST_ID + IDS - 1.

    `said` has the tokens of answers by their content id: these are taken as they are, as far as they go.
    """
    found: list[int] = []
    for content, tokens in job.prompt:
        own = said.get(content, ())[:tokens]
        found += own
        found += [FIRST_ID + digit for digit in _digits(content, tokens - len(own))]
    return found


def as_text(job: Job) -> str:
    """Return the prompt as common English words, `prompt_tokens` of them: for most vocabularies about a token each."""
    return " ".join(WORDS[digit] for content, tokens in job.prompt for digit in _digits(content, tokens))


def _digits(content: int, tokens: int) -> Iterator[int]:
    return islice(cycle([content // IDS**place % IDS for place in range(DIGITS)]), tokens)
