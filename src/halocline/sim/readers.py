"""Traces from files: which format it is, and the two public formats that have lengths instead of text.

    Mooncake JSONL    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}
                      milliseconds; one hash id per 512 tokens, the last block partial; equal ids are an equal prefix
    Bailian JSONL     the same with "chat_id": seconds, and 16 tokens a block
    Azure CSV         TIMESTAMP,ContextTokens,GeneratedTokens; nothing is known about shared prefixes, so nobody shares
    OpenAI JSONL      requests with messages, prompts or lengths: `halocline.sim.chats`

Every reader gives jobs in order of arrival, the first one at second 0, named `line N` after its line in the file. Lines
that go back in time are sorted (equal times keep the file's order). Content ids count up from 0 in order of first
appearance; outputs come behind them, one id each, that no prompt has. An output of 0 tokens counts as 1: a request that
is computed at all yields a token.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halocline.errors import ConfigError
from halocline.sim.chats import Count, about_tokens, read_chats
from halocline.sim.fields import Fault, Faults, field_of, lines_of, object_of, quoted, seconds_of, tokens_of
from halocline.sim.workload import CONTENT_IDS, Job, Run, Workload
from halocline.units import ceil_div

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace that has lengths and, maybe, block ids."""

    name: str
    seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of its blocks, the last one partial; empty: nothing of the prompt is shared with anybody."""


def read_workload(path: str | Path, count: Count = about_tokens) -> Workload:
    """Read a trace of any known format; `count` tells how many tokens a text has, where a file has texts.

    Raises ConfigError with file, line, what was found and what to do.
    """
    path = Path(path)
    first = next(lines_of(path), None)
    if first is None:
        raise ConfigError([f"{path} is empty; a trace has one request per line"])
    number, text = first
    if not text.startswith("{"):
        return read_azure(path)
    try:
        keys = object_of(text)
    except Fault as fault:
        raise ConfigError([f"{path}, line {number}: {fault}"]) from None
    return read_mooncake(path) if "input_length" in keys or "hash_ids" in keys else read_chats(path, count)


def read_mooncake(path: str | Path) -> Workload:
    """Read a trace with block ids, Mooncake's or Bailian's."""
    path = Path(path)
    faults, rows, is_bailian = Faults(path), list[Row](), False
    for number, text in lines_of(path):
        try:
            value = object_of(text)
            is_bailian = is_bailian or (not rows and "chat_id" in value)
            rows.append(_row(f"line {number}", value, is_bailian))
        except Fault as fault:
            faults.add(number, fault)
    faults.raise_any()
    return Workload(
        path.stem, str(path), jobs_of_rows(rows, BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS)
    )


def _row(name: str, value: dict[str, object], is_bailian: bool) -> Row:
    block_tokens = BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS
    seconds = seconds_of(field_of(value, "timestamp"), "timestamp", 1.0 if is_bailian else 1e-3)
    prompt_tokens = tokens_of(field_of(value, "input_length"), "input_length")
    output_tokens = max(1, tokens_of(field_of(value, "output_length"), "output_length", 0))
    blocks = value.get("hash_ids", ())
    if not isinstance(blocks, (list, tuple)) or not all(type(block) is int for block in blocks):
        raise Fault(f"hash_ids is {quoted(blocks)}; write a list of whole numbers, one per {block_tokens} tokens")
    wanted = ceil_div(prompt_tokens, block_tokens)
    if blocks and len(blocks) != wanted:
        raise Fault(
            f"{len(blocks)} hash_ids for input_length {prompt_tokens}; there must be {wanted}, one per "
            f"{block_tokens} tokens"
        )
    return Row(name, seconds, prompt_tokens, output_tokens, tuple(blocks))


def read_azure(path: str | Path) -> Workload:
    """Read a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, in any order, others beside them."""
    path = Path(path)
    faults, rows, columns = Faults(path), list[Row](), list[int]()
    for number, text in lines_of(path):
        try:
            cells = next(csv.reader([text]))
            if not columns:
                columns = _columns(cells)
                continue
            if len(cells) <= max(columns):
                raise Fault(f"{len(cells)} columns in {quoted(text)}; the header promises at least {max(columns) + 1}")
            time, prompt_tokens, output_tokens = (cells[column] for column in columns)
            rows.append(
                Row(
                    f"line {number}",
                    seconds_of(time, AZURE_COLUMNS[0]),
                    tokens_of(prompt_tokens, AZURE_COLUMNS[1]),
                    max(1, tokens_of(output_tokens, AZURE_COLUMNS[2], 0)),
                    (),
                )
            )
        except (Fault, csv.Error) as fault:
            faults.add(number, fault)
            if not columns:
                break
    faults.raise_any()
    if not rows:
        raise ConfigError([f"{path} has a header and no request; a trace has one request per line"])
    return Workload(path.stem, str(path), jobs_of_rows(rows, 1))


def _columns(header: Sequence[str]) -> list[int]:
    names = [cell.strip() for cell in header]
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise Fault(
            f"no column {', '.join(missing)} in {quoted(','.join(header))}; a trace is a CSV with the header "
            f"{','.join(AZURE_COLUMNS)}, or JSON lines with hash_ids (Mooncake) or messages (OpenAI)"
        )
    return [names.index(name) for name in AZURE_COLUMNS]


def jobs_of_rows(rows: Sequence[Row], block_tokens: int) -> tuple[Job, ...]:
    """Return the jobs of rows: sorted by time, times from 0, block ids numbered anew in order of appearance."""
    rows = sorted(rows, key=lambda row: row.seconds)
    known: dict[int, int] = {}
    prompts = [_prompt(row, block_tokens, known, -1 - index) for index, row in enumerate(rows)]
    assert len(known) + len(rows) <= CONTENT_IDS, f"{len(known)} blocks and {len(rows)} outputs are too many ids"
    return tuple(
        Job(row.name, row.seconds - rows[0].seconds, prompt, row.output_tokens, len(known) + index)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    )


def _prompt(row: Row, block_tokens: int, known: dict[int, int], own: int) -> tuple[Run, ...]:
    """Return a prompt's runs; one without block ids is a single run of its own."""
    if not row.blocks:
        return ((known.setdefault(own, len(known)), row.prompt_tokens),)
    last = row.prompt_tokens - (len(row.blocks) - 1) * block_tokens
    ids = [known.setdefault(block, len(known)) for block in row.blocks]
    return (*((block, block_tokens) for block in ids[:-1]), (ids[-1], last))
