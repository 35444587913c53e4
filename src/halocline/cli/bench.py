"""`halocline bench`: load a server and say how fast it answered."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Annotated

import typer

from halocline.cli.load import Load, LoadReport, first_model, run_load
from halocline.cli.options import with_settings
from halocline.config import Config

SEED_BITS = 48


@with_settings(server=True, defaults={"port": 0, "log_level": "warning"})
def bench(
    config: Config,
    url: Annotated[str | None, typer.Option(help="a running server; without it one is started here")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="clients that each send one request after the other")] = 16,
    requests: Annotated[int | None, typer.Option(min=1, help="requests in all (default: three per client)")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="random tokens in each prompt")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="tokens generated for each")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Send a closed loop of streaming requests; print tokens per second and latency percentiles."""
    # Prompts that no earlier run has sent: a prefix cache would answer a second run with the first one's work.
    seed = random.SystemRandom().getrandbits(SEED_BITS)
    load = Load(requests or 3 * concurrency, concurrency, prompt_tokens, output_tokens, seed=seed)
    if url is not None:
        report = asyncio.run(_measure(url, config.api_key, load))
    else:
        from halocline.serve import running_server

        with running_server(config) as started:
            report = asyncio.run(_measure(started.url, config.api_key, load))
    typer.echo(json.dumps(figures(report)) if as_json else table(load, report))


async def _measure(url: str, api_key: str | None, load: Load) -> LoadReport:
    url = url.rstrip("/").removesuffix("/v1")
    model = await first_model(url, api_key)
    warm_up = Load(1, 1, min(load.prompt_tokens, 32), min(load.output_tokens, 4), seed=load.seed + load.requests)
    await run_load(url, model, warm_up, api_key)
    return await run_load(url, model, load, api_key)


def figures(report: LoadReport) -> dict[str, float]:
    """Return a run's figures under stable names: tokens per second, and milliseconds."""
    found = {
        "requests": len(report.answers),
        "seconds": round(report.seconds, 3),
        "output_tokens_per_second": round(report.output_tokens_per_second, 2),
        "total_tokens_per_second": round(report.total_tokens_per_second, 2),
    }
    for percent in (50, 90, 99):
        found[f"ttft_p{percent}_ms"] = round(1e3 * report.percentile(lambda each: each.first_token_seconds, percent), 1)
        found[f"tpot_p{percent}_ms"] = round(1e3 * report.percentile(lambda each: each.token_seconds, percent), 1)
    return found


def table(load: Load, report: LoadReport) -> str:
    """Return a run's figures for a person to read."""
    found = figures(report)
    lines = [
        f"{load.requests} requests of {load.prompt_tokens} + {load.output_tokens} tokens, "
        f"{load.concurrency} at a time, {report.seconds:.1f} s",
        f"generated          {found['output_tokens_per_second']:10.1f} tokens/s",
        f"with the prompts   {found['total_tokens_per_second']:10.1f} tokens/s",
        "                          p50        p90        p99",
    ]
    for key, text in (("ttft", "first token, ms"), ("tpot", "each further, ms")):
        lines.append(f"{text:19}" + "".join(f"{found[f'{key}_p{percent}_ms']:10.1f} " for percent in (50, 90, 99)))
    return "\n".join(lines)
