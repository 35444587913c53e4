"""`halocline chat`: a conversation on the terminal, without a server."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from halocline.cli.options import with_settings
from halocline.cli.sampling import MaxTokens, Temperature, TopK, TopP
from halocline.config import Config
from halocline.errors import RequestError
from halocline.params import SamplingParams

if TYPE_CHECKING:
    from halocline.llm import AsyncLLM

DEFAULT_MODEL = "smollm2-135m"
_WHY = (
    "smollm2-135m: a small instruct model. All its layers use full attention, so its arena has one pool; "
    "gemma3-270m is the hybrid here, but a base model, which continues text and does not chat."
)


@with_settings(server=False, model_argument=True, defaults={"model": DEFAULT_MODEL, "log_level": "warning"})
def chat(
    config: Config,
    system: Annotated[str | None, typer.Option(help="instructions that stand before the conversation")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends, /new starts over."""
    if config.model == DEFAULT_MODEL:
        typer.echo(_WHY, err=True)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    asyncio.run(_converse(config, system, params))


async def _converse(config: Config, system: str | None, params: SamplingParams) -> None:
    from halocline.llm import AsyncLLM

    opening = [{"role": "system", "content": system}] if system else []
    async with AsyncLLM(**asdict(config)) as llm:
        messages = list(opening)
        while line := await asyncio.to_thread(_read_line):
            if line == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": await _answer(llm, messages, params)})
            except RequestError as error:
                # The conversation outgrew the arena or the model; it cannot go on, but a new one can.
                typer.echo(f"halocline: {error}; /new starts over", err=True)
                messages.pop()


async def _answer(llm: AsyncLLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    text = ""
    async for output in llm.chat(messages, params):
        sys.stdout.write(output.outputs[0].text[len(text) :])
        sys.stdout.flush()
        text = output.outputs[0].text
    sys.stdout.write("\n")
    return text


def _read_line() -> str:
    """Return the next thing the person says; empty at the end of input."""
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    return sys.stdin.readline().strip()
