"""What came of a small world, in one line, and how to see it again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Story:
    """What came of a world."""

    seed: int
    steps: int
    seconds: float
    requests: int
    finished: int
    aborted: int
    failed: int
    retractions: int
    moves: int
    cached_tokens: int
    leaps: int
    digest: str
    fault: str | None
    """The law that broke, and how; None: all held."""
    details: str = ""
    """Where in the program it was noticed."""

    def line(self) -> str:
        """Return the story in one line."""
        if self.fault is not None:
            return f"seed {self.seed}: step {self.steps}: {self.fault}\n  {command(self.seed)}"
        return (
            f"seed {self.seed}: {self.requests} requests, {self.finished} finished, {self.aborted} aborted, "
            f"{self.failed} failed, "
            f"{self.steps} steps, {self.retractions} retractions, {self.moves} moves, {self.cached_tokens} tokens from "
            f"the cache, {self.leaps} leaps, digest {self.digest}"
        )


def command(seed: int) -> str:
    """Return the line that shows a world again."""
    return f"python -m halocline.sim.worlds --seed {seed} --trace"
