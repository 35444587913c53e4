"""`halocline serve`: the HTTP server on a terminal."""

from __future__ import annotations

import typer

from halocline.cli.options import with_settings
from halocline.config import Config


@with_settings(server=True, model_argument=True)
def serve(config: Config) -> None:
    """Serve a model over HTTP, in OpenAI's dialect."""
    if config.disagg is not None:
        from halocline.group import run_group

        raise typer.Exit(run_group(config))
    from halocline.serve import run_server

    raise typer.Exit(run_server(config))
