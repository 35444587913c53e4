"""Workloads as files of the two public formats, so that a generated one can be fed to any tool that reads traces.

What a format cannot say is an error and not dropped: sessions, whose arrivals depend on how fast the server is, have no
times of their own. Priorities and aborts are not part of either format and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from halocline.errors import ConfigError
from halocline.sim.readers import AZURE_COLUMNS, MOONCAKE_BLOCK_TOKENS
from halocline.sim.workload import Job, Run, Workload

START = datetime(2023, 11, 16)
"""Second 0 of a written Azure trace."""


def write_mooncake(workload: Workload, path: str | Path) -> None:
    """Write Mooncake JSONL: milliseconds, and one hash id per 512 tokens.

    An id stands for a block *and* all before it, as in the public traces; ids count up from 0. Raises ConfigError for
    jobs that wait for others.
    """
    _refuse_sessions(workload)
    ids: dict[tuple[int, tuple[Run, ...]], int] = {}
    with Path(path).open("w", encoding="utf-8") as file:
        for job in workload.jobs:
            hash_ids, before = list[int](), -1
            for block in blocks_of(job):
                before = ids.setdefault((before, block), len(ids))
                hash_ids.append(before)
            row = {
                "timestamp": round(job.arrive_seconds * 1000),
                "input_length": job.prompt_tokens,
                "output_length": job.output_tokens,
                "hash_ids": hash_ids,
            }
            file.write(json.dumps(row) + "\n")


def write_azure(workload: Workload, path: str | Path) -> None:
    """Write an Azure CSV: times to 100 ns from 2023-11-16 on, and lengths; which prompts begin alike is lost.

    Raises ConfigError for jobs that wait for others.
    """
    _refuse_sessions(workload)
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(",".join(AZURE_COLUMNS) + "\n")
        for job in workload.jobs:
            ticks = round(job.arrive_seconds * 10**7)
            whole = START + timedelta(seconds=ticks // 10**7)
            file.write(f"{whole:%Y-%m-%d %H:%M:%S}.{ticks % 10**7:07},{job.prompt_tokens},{job.output_tokens}\n")


def blocks_of(job: Job) -> Iterator[tuple[Run, ...]]:
    """Yield what stands in each 512 tokens of a prompt, the last block partial."""
    block: list[Run] = []
    room = MOONCAKE_BLOCK_TOKENS
    for content, tokens in job.prompt:
        left = tokens
        while left:
            taken = min(left, room)
            block.append((content, taken))
            left, room = left - taken, room - taken
            if not room:
                yield tuple(block)
                block, room = [], MOONCAKE_BLOCK_TOKENS
    if block:
        yield tuple(block)


def _refuse_sessions(workload: Workload) -> None:
    waiting = next((job for job in workload.jobs if job.after is not None), None)
    if waiting is not None:
        raise ConfigError(
            [f"{waiting.id} of {workload.name} arrives after {waiting.after} has finished; a trace file has only times"]
        )
