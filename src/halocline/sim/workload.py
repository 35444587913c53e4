"""What is asked of a replay: jobs, each a request with its time, its text as runs of content ids, and an output length.

Text is not kept as text. A run `(content id, tokens)` is so many tokens of one content; equal runs at equal positions
of two prompts are equal text, and the content id is used as the token id itself. So a trace of 12,000 requests with 145
million prompt tokens is some 300,000 small tuples, and the prefix cache sees which beginnings are shared.

Times are seconds from the workload's start. A job with `after` belongs to a session: it arrives `think_seconds` after
that other job has finished (a user who reads, a tool that runs), and never before its own `arrive_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Run = tuple[int, int]
"""(content id, tokens)"""

CONTENT_IDS = 2**31
"""Content ids are below this: they are token ids, and those are 32-bit integers in every plan."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload; exactly `output_tokens` are generated (end-of-sequence is ignored)."""

    id: str
    arrive_seconds: float
    prompt: tuple[Run, ...]
    output_tokens: int
    output_id: int
    """Content id of the output, so that a later turn can have it in its prompt."""
    after: str | None = None
    """Id of the job whose end this one waits for."""
    think_seconds: float = 0.0
    """Seconds between the end of `after` and this job's arrival."""
    abort_seconds: float | None = None
    """The client goes away so long after the arrival, unless the job has ended before; None: it stays."""
    priority: int = 0
    """Smaller is more senior."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.prompt)

    def tokens(self) -> tuple[int, ...]:
        """Return the prompt as token ids, each content id as often as its run is long."""
        tokens: list[int] = []
        for content, count in self.prompt:
            tokens += [content] * count  # one integer many times: ten times as fast as as many equal integers
        return tuple(tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival; one with `after` stands anywhere behind the job that it waits for."""

    name: str
    source: str
    """Where it comes from, in words for a report: a file's path, or a generator with all its settings."""
    jobs: tuple[Job, ...]

    def __post_init__(self) -> None:
        """Assert the order and the ids: who makes a workload has to see to both."""
        seen: set[str] = set()
        before = 0.0
        for job in self.jobs:
            assert job.id not in seen, f"two jobs are called {job.id}"
            seen.add(job.id)
            if job.after is None:
                assert job.arrive_seconds >= before, f"{job.id} arrives at {job.arrive_seconds}, one before at {before}"
                before = job.arrive_seconds
            else:
                assert job.after in seen, f"{job.id} waits for {job.after}, which does not stand before it"

    @property
    def span_seconds(self) -> float:
        """Time of the last arrival that is known beforehand; 0 for an empty workload."""
        return max((job.arrive_seconds for job in self.jobs), default=0.0)

    def first(self, most_jobs: int) -> Workload:
        """Return the first `most_jobs` jobs. None of them waits for one that is cut off: that stands behind."""
        return Workload(self.name, self.source, self.jobs[:most_jobs])


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return `runs` without empty ones, neighbours of one content made one."""
    result: list[Run] = []
    for content, tokens in runs:
        if not tokens:
            continue
        if result and result[-1][0] == content:
            result[-1] = (content, result[-1][1] + tokens)
        else:
            result.append((content, tokens))
    return tuple(result)
