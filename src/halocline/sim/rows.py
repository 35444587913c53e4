"""What to make room for: lengths as an operator types them, or those of a trace.

4096+256              prompt + output in tokens
4096+256,500+80:3     two lengths and their mix, in which the second counts three times
trace.jsonl           the mix of a trace, its median, its 95th percentile and its longest request
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from halocline.errors import ConfigError
from halocline.memory.sizing import SHOWN_LENGTHS, UNLIMITED_TOKENS
from halocline.paths import existing_path
from halocline.sim.generators import GENERATORS, workload_named
from halocline.sim.room import Row
from halocline.sim.workload import Workload

_LENGTH = re.compile(r"(\d{1,12})\+(\d{1,12})(?::(\d{1,6}))?", re.ASCII)
_MOST_TIMES = 10_000


def shown_rows(limit: int | None) -> list[Row]:
    """Return the lengths that a server shows at start, as rows."""
    shown = [pair for pair in SHOWN_LENGTHS if limit is None or sum(pair) <= limit]
    if limit is not None and limit not in map(sum, shown):
        shown.append((limit - 1, 1))
    return [single_row(*pair) for pair in shown]


def single_row(prompt_tokens: int, output_tokens: int) -> Row:
    """Return the row of requests of one length."""
    return Row(f"{prompt_tokens:,} + {output_tokens:,}", ((prompt_tokens, output_tokens),))


def read_rows(text: str) -> list[Row]:
    """Read what to make room for: `4096+256,12000+343`, a trace file or a generator.

    `4096+256:3` counts three times in the mix. Two lengths or more also give a row for their mix; a trace gives its
    mix, its median, its 95th percentile and its longest request. Raises ConfigError with the accepted forms.
    """
    path = existing_path(text)
    if (path is not None and path.is_file()) or text.partition(":")[0] in (*GENERATORS, "flip"):
        return _rows_of(workload_named(text))
    lengths: list[tuple[int, int]] = []
    problems = []
    for part in filter(None, map(str.strip, text.split(","))):
        found = _LENGTH.fullmatch(part)
        prompt, output, times = (int(group or 1) for group in found.groups()) if found else (0, 0, 0)
        if min(prompt, output, times) < 1 or prompt + output > UNLIMITED_TOKENS or times > _MOST_TIMES:
            problems.append(
                f"lengths has {part!r}; write PROMPT+OUTPUT in tokens, each at least 1, such as 4096+256 or, to count "
                f"it 3 times in the mix, 4096+256:3; several by commas; or name a trace file or a generator"
            )
        else:
            lengths += [(prompt, output)] * times
    if problems or not lengths:
        raise ConfigError(problems or ["lengths names none; write for example 4096+256,12000+343 or a trace file"])
    singles = [single_row(*pair) for pair in dict.fromkeys(lengths)]
    return singles if len(singles) == 1 else [*singles, Row("mix of these", tuple(lengths))]


def _rows_of(workload: Workload) -> list[Row]:
    lengths = sorted(((job.prompt_tokens, job.output_tokens) for job in workload.jobs), key=sum)
    if not lengths:
        raise ConfigError([f"{workload.source} has no requests, so there is nothing to make room for"])
    prompt, output = (round(sum(column) / len(lengths)) for column in zip(*lengths, strict=True))
    label = f"{workload.name}: {len(lengths):,} requests, mean {prompt:,} + {output:,}"
    places = {"median": len(lengths) // 2, "95 % are shorter": len(lengths) * 19 // 20, "longest": -1}
    singles = [
        replace(single_row(*lengths[place]), label=f"{word}: {single_row(*lengths[place]).label}")
        for word, place in places.items()
    ]
    return [Row(label, tuple(lengths)), *singles]


def fitting_rows(rows: Sequence[Row], limit: int | None, reason: str) -> list[Row]:
    """Return the rows without requests that are never served; ConfigError where nothing of a row is left."""
    if limit is None:
        return list(rows)
    kept, problems = [], []
    for row in rows:
        lengths = tuple(pair for pair in row.lengths if sum(pair) <= limit)
        if not lengths:
            longest = max(map(sum, row.lengths))
            problems.append(
                f"{row.label}: {longest} tokens are longer than max_model_len {limit} ({reason}), so no such request "
                f"is ever served; name lengths of at most {limit} in all"
            )
        elif len(lengths) < len(row.lengths):
            kept.append(Row(f"{row.label}, {len(row.lengths) - len(lengths)} too long left out", lengths))
        else:
            kept.append(row)
    if problems:
        raise ConfigError(problems)
    return kept
