"""`halocline generate`: continue one or several prompts, on the terminal, without a server."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from halocline.cli.options import with_settings
from halocline.cli.sampling import MaxTokens, Stop, Temperature, TopK, TopP
from halocline.config import Config
from halocline.errors import ConfigError
from halocline.params import SamplingParams


@with_settings(server=False, defaults={"log_level": "warning"})
def generate(
    config: Config,
    prompts: Annotated[list[str] | None, typer.Argument(help="what to continue (default: standard input)")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    stop: Stop = None,
) -> None:
    """Continue prompts: one is printed as it comes, several in their order when all are done."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=tuple(stop or ())
    )
    prompts = prompts or [_standard_input()]
    if len(prompts) == 1:
        asyncio.run(_stream(config, prompts[0], params))
        return
    from halocline.llm import LLM

    with LLM(**asdict(config)) as llm:
        for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
            typer.echo(f"{output.prompt}{output.outputs[0].text}\n")


async def _stream(config: Config, prompt: str, params: SamplingParams) -> None:
    from halocline.llm import AsyncLLM

    async with AsyncLLM(**asdict(config)) as llm:
        written = 0
        async for output in llm.generate(prompt, params):
            # With the first piece: of a prompt that is refused nothing is printed but why.
            text = prompt + output.outputs[0].text
            sys.stdout.write(text[written:])
            sys.stdout.flush()
            written = len(text)
        sys.stdout.write("\n")


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError(["no prompt: write `halocline generate 'Once upon a time'`, or pipe a text in"])
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ConfigError(["no prompt: standard input was empty"])
    return text
