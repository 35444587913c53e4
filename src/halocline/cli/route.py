"""`halocline route`: one address before many workers, on a terminal."""

from __future__ import annotations

import typer

from halocline.cli.options import with_record
from halocline.route import RouteSettings, run_router


@with_record(RouteSettings)
def route(settings: RouteSettings) -> None:
    """Route requests to workers: prompts are computed on --prefill ones, answers on --decode ones."""
    raise typer.Exit(run_router(settings))
