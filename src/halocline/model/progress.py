"""What a person sees while a model is fetched, converted and loaded: one line with a bar, on standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)


class Stages:
    """A bar over named stages; off a terminal, one log line per stage. `quiet` shows no bar."""

    def __init__(self, title: str, stages: Sequence[str], *, quiet: bool = False) -> None:
        self._title, self._left = title, list(stages)
        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=len(stages))

    def __enter__(self) -> Stages:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Run the next stage; the bar moves when it is done."""
        stage = self._left.pop(0)
        self._bar.update(self._task, description=f"{self._title}: {stage}")
        if self._bar.disable:
            logger.info("event=model_stage model=%s stage=%r", self._title, stage)
        yield
        self._bar.advance(self._task)


@contextmanager
def transformers_is_silent() -> Iterator[None]:
    """Keep bars and log lines of `transformers` off the terminal: ours say the same once, and errors still raise."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
