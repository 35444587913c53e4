"""The router: workers' book, prober and HTTP put together, and its life from the first line to the last.

    bind the port -> ask every worker who it is -> refuse what cannot work together -> serve -> drain

A worker that does not answer yet is no reason not to start: it gets requests as soon as it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

from halocline.api.routing.settings import RouteSettings
from halocline.errors import ConfigError

__all__ = ["RouteSettings", "run_router", "serve_router"]

TOKEN_VARIABLE = "HALOCLINE_LINK_TOKEN"
SERVING_AT = "serving at "
"""The line that says where, as a server prints it; programs that start a router wait for it."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def run_router(settings: RouteSettings) -> int:
    """Route until told to stop; returns the exit code. Raises ConfigError before it serves."""
    from halocline.api.server import allow_connections, listen, sigterm_is_ctrl_c

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=LOG_FORMAT)
    logging.getLogger("halocline").setLevel(settings.log_level.upper())
    allow_connections()
    try:
        with sigterm_is_ctrl_c(), listen(settings.host, settings.port) as listener:
            return asyncio.run(serve_router(settings, listener))
    except KeyboardInterrupt:
        # Told to stop before there was anything to serve.
        return 0


async def serve_router(settings: RouteSettings, listener: socket.socket) -> int:
    """Route on `listener` until SIGINT or SIGTERM; returns the exit code. Raises ConfigError before it serves."""
    from halocline.api.routing.app import create_router_app
    from halocline.api.routing.desk import Desk
    from halocline.api.server import Server, stopped_by_signals

    desk = Desk(settings, link_token_of(settings.link_token))
    with stopped_by_signals() as start:
        try:
            await desk.start()
            problems = [f"{each.side} worker {each.url}: {each.reason}" for each in desk.book.workers if each.is_misfit]
            if problems:
                raise ConfigError(problems)
            for each in desk.book.workers:
                _say(f"{each.side} worker {each.url}: {'ready' if each.is_up else f'{each.state}, {each.reason}'}")
            app = create_router_app(desk)
            start.server = server = Server(app, desk, listener, drain_seconds=settings.drain_seconds)
            _say(f"{SERVING_AT}{_url(*server.address)}", "Ctrl-C stops")
            return await server.serve()
        except asyncio.CancelledError:
            # Told to stop before there was anything to serve.
            return 0
        finally:
            await desk.close()


def link_token_of(text: str | None) -> str:
    """Return the token that `text` says, names (@FILE) or leaves to the environment; raises ConfigError."""
    told = os.environ.get(TOKEN_VARIABLE, "") if text is None else text
    if told.startswith("@"):
        try:
            told = Path(told[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"cannot read the link token from {told[1:]}: {error}"]) from error
    token = told.strip()
    if not token.isascii() or not token.isprintable():
        raise ConfigError(["link_token must be printable ASCII, because it travels in a header"])
    if not token:
        raise ConfigError(
            [f"no link token: set {TOKEN_VARIABLE} or --link-token @FILE to what the workers were started with"]
        )
    return token


def _url(host: str, port: int) -> str:
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = everywhere.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
