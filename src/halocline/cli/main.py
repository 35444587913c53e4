"""The `halocline` command: what an operator types. Every failure is a sentence and an exit code, never a traceback.

Exit codes: 0 done, 1 the work failed while it ran, 2 it could not start (settings, model, memory, port), 130 Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import typer

from halocline.cli import bench, chat, demo, generate, plan, replay, route, serve
from halocline.cli.migrate import explain
from halocline.errors import ConfigError, EngineDeadError, FailedError, HaloclineError, OverloadedError

app = typer.Typer(
    name="halocline",
    help="Serve hybrid-attention language models out of one arena of bytes.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command("serve")(serve.serve)
app.command("route")(route.route)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)
app.command("plan")(plan.plan)
app.command("replay")(replay.replay)


@app.command("version")
def version() -> None:
    """Print the version."""
    from halocline import __version__

    typer.echo(__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (default: those of the process); return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if not __debug__:
        return _fail("halocline checks its own laws with assertions; start it without -O and PYTHONOPTIMIZE")
    foreign = [sentence for sentence in map(explain, arguments) if sentence is not None]
    if foreign:
        return _fail(*foreign)
    try:
        with _told_stdout():
            code = app(arguments, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        return _code_of(error)
    return code if isinstance(code, int) else 0


@contextmanager
def _told_stdout() -> Iterator[None]:
    """Let the block print whatever it likes, and tell as FailedError that standard output does not take it."""
    if sys.stdout is None:  # closed by whoever started this, who wants none of it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # As standard error does: a path may be no text at all, and a terminal may lack a letter.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()  # what fails at the interpreter's end is a traceback
    except OSError as error:
        fault = _fault_of_stdout()
        if fault is None:
            raise
        if isinstance(fault, BrokenPipeError):
            raise SystemExit(1) from error  # without a word, as click and rich end where they notice it
        raise FailedError(f"cannot write to standard output: {fault.strerror or fault}") from error


def _fault_of_stdout() -> OSError | None:
    """Return why standard output takes nothing more, None where it does: no OSError says which file it is of."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as fault:
        # What is left in its buffer would fail once more at the interpreter's end.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return fault
    return None


def _code_of(error: BaseException) -> int:
    """Print an expected failure in one sentence each and return its exit code; a defect keeps its traceback."""
    match error:
        case KeyboardInterrupt() | typer.Abort():
            return 130
        case ConfigError():
            return _fail(*error.problems)
        case EngineDeadError() | FailedError() | OverloadedError():
            return _fail(str(error), code=1)
        case HaloclineError():
            return _fail(str(error))
    # A mistake on the command line. Typer brings its own copy of click in some versions, so the class is known by
    # what it can do.
    show = getattr(error, "format_message", None)
    if show is None:
        raise error
    text = str(show())
    return _fail((text[:1].lower() + text[1:]).rstrip("."))


def _fail(*sentences: str, code: int = 2) -> int:
    for sentence in sentences:
        typer.echo(f"halocline: {sentence}", err=True)
    return code
