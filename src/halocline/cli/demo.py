"""`halocline demo`: 24 clients at once in a small arena, twice: as one arena, and split as other engines split it.

First come 32 answers of one word, so that the engine expects short answers; then 24 clients with answers of mixed
length arrive together. The arena is too small for them, so grants are extended, some requests wait, and some are
retracted and come back. Nobody is refused and nothing that was sent changes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import typer

from halocline.cli.options import with_settings
from halocline.cli.watch import CACHED, RETRACTIONS, Watch, bytes_by_pool, needed_bytes, until_idle
from halocline.config import Config
from halocline.errors import ConfigError, EngineDeadError
from halocline.units import format_bytes

DEFAULTS = {"kv_bytes": "40MiB", "port": 0, "max_running_requests": 64, "log_level": "warning"}
STATIC = "static:0.8"
OPENINGS = (
    "The sea is salt because",
    "Fresh water floats on salt water, so",
    "Once upon a time there was a river that",
    "The first thing a diver sees in a cave is",
    "A list of the five oceans:",
    "The tide comes in twice a day because",
)
FACTS = (
    "A halocline is the line between two waters that share one basin. ",
    "In the caves of Yucatan divers see it as a shimmer, where fresh water lies on salt water. ",
    "It moves with rain and tide, and no wall holds it. ",
    "Where a river meets the sea, the salt water creeps upstream below the fresh. ",
)
CLIENTS = 24
FIRST_ANSWERS = 32
WORD_ENDS = [" ", "\n", "."]
MOST_TOKENS = 64
LONG_PROMPT_EVERY = 6
"""Every sixth prompt is long: that is where sliding layers hold less than full ones."""
REMARK = """
Seconds are this machine's, and whatever else it does. Most of these prompts are short, and of short ones a split holds
about as many. What it loses with long ones stands above, under "requests at once", and over hours of real traffic in
what `halocline replay` shows."""


@dataclass
class Run:
    """What one run of the load showed."""

    policy: str
    seconds: float = 0.0
    tokens: int = 0
    answers: list[str] = field(default_factory=list)
    watch: Watch | None = None


@with_settings(server=True, defaults=DEFAULTS)
def demo(config: Config) -> None:
    """Serve 24 clients at once from a small arena, and show what the memory did."""
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            ["the demo speaks to its server with the openai client; pip install 'halocline[demo]'"]
        ) from error
    runs = [show(config, shows_answers=True), show(replace(config, policy=STATIC), shows_answers=False)]
    typer.echo(table(runs))
    typer.echo(REMARK)


def show(config: Config, *, shows_answers: bool) -> Run:
    """Start a server, send the load, stop it."""
    from halocline.serve import running_server

    typer.echo(f"\n--- policy {config.policy}")
    with running_server(config, echo=lambda line: typer.echo(f"  | {line}")) as server:
        run = asyncio.run(load(server.url, config, shows_answers=shows_answers))
    if server.process.returncode:
        raise EngineDeadError(f"the server ended with exit code {server.process.returncode}")
    return run


async def load(url: str, config: Config, *, shows_answers: bool) -> Run:
    """Send everything through the openai client and watch the server meanwhile."""
    from openai import AsyncOpenAI

    run = Run(config.policy)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=config.api_key or "none", timeout=600) as client:

        async def ask(number: int, prompt: str, max_tokens: int, stop: list[str] | None = None) -> None:
            text, tokens = "", 0
            stream = await client.completions.create(
                model=config.served_model_name or config.model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                stop=stop,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for event in stream:
                text += event.choices[0].text if event.choices else ""
                tokens = event.usage.completion_tokens if event.usage else tokens
            run.tokens += tokens
            if shows_answers and stop is None:
                seconds = time.perf_counter() - start
                typer.echo(f"{seconds:5.1f} s  client {number:2}, {tokens:3} tokens: {_ends(prompt)} ->{_line(text)}")

        start = time.perf_counter()
        await asyncio.gather(*(ask(number, "The answer is", MOST_TOKENS, WORD_ENDS) for number in range(FIRST_ANSWERS)))
        await until_idle(url)
        typer.echo(
            f"{CLIENTS} clients ask at once" + ("; each answer is shown when it is complete" if shows_answers else "")
        )
        run.tokens, start = 0, time.perf_counter()
        async with Watch(url) as run.watch:
            await asyncio.gather(*(ask(number, *wish(number)) for number in range(CLIENTS)))
        run.seconds = time.perf_counter() - start
    return run


def wish(number: int) -> tuple[str, int]:
    """Return the prompt and the most tokens of one client."""
    opening = OPENINGS[number % len(OPENINGS)]
    facts = "".join(FACTS) * 16 if number % LONG_PROMPT_EVERY == 0 else FACTS[number % len(FACTS)]
    # One class of max_tokens (above 32, to 64): what the short answers taught holds for these as well.
    return facts + opening, MOST_TOKENS - (number * 13) % 31


def table(runs: list[Run]) -> str:
    """Return both runs side by side."""
    rows: dict[str, list[str]] = {"": [run.policy for run in runs]}
    for run in runs:
        watch = run.watch
        assert watch is not None, "a run was watched"
        rows.setdefault("requests at once, at most", []).append(str(watch.peak_running))
        rows.setdefault("retractions", []).append(f"{watch.last.get(RETRACTIONS, 0):.0f}")
        rows.setdefault("bytes needed at the peak", []).append(format_bytes(needed_bytes(watch.at_peak)))
        for pool, used in bytes_by_pool(watch.at_peak).items():
            rows.setdefault(f"  of them {pool}", []).append(format_bytes(used))
        rows.setdefault("bytes cached beside them", []).append(format_bytes(int(watch.at_peak.get(CACHED, 0))))
        rows.setdefault("seconds", []).append(f"{run.seconds:.1f}")
        rows.setdefault("generated tokens/s", []).append(f"{run.tokens / run.seconds:.1f}")
    return "\n" + "\n".join(f"{name:28}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows.items())


def _ends(prompt: str) -> str:
    return prompt if len(prompt) <= 48 else f"... {prompt[-44:]}"


def _line(text: str) -> str:
    flat = " ".join(text.split())
    return f" {flat[:72]}{' ...' if len(flat) > 72 else ''}"
