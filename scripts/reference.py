"""Writes the pages that are made of the program itself: `python scripts/reference.py`; a test compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from halocline.cli.migrate import FOREIGN
from halocline.cli.options import default_text, flag_of
from halocline.config import Config
from halocline.sim.generators import GENERATORS
from halocline.sim.report import figures
from halocline.sim.report.figure import Figure
from halocline.sim.report.host_figures import HOST
from halocline.sim.settings import ReplaySettings

DOCS = Path(__file__).resolve().parents[1] / "docs"
MADE = "<!-- Made by scripts/reference.py; edit the program, not this page. -->\n"


def flags() -> str:
    """Return docs/reference/flags.md."""
    lines = [
        MADE,
        "# Flags and settings\n",
        "One record holds every setting, in three spellings: a flag (`--kv-bytes 256MiB`), a line of the file that "
        "`--config` names (`kv_bytes: 256MiB`; dashes will do), and an argument in Python "
        '(`LLM(kv_bytes="256MiB")`). Flags win over the file, the file over the defaults. All problems are told at '
        "once; an unknown name is answered with the nearest known one.\n",
        "Settings marked *server* belong to `halocline serve` (and to `bench` and `demo`, which start a server).\n",
        "| flag | default | meaning |",
        "|---|---|---|",
    ]
    for each in fields(Config):
        server = " *server*" if each.metadata["server"] else ""
        default = "" if each.default is None else f"`{default_text(each.default)}`"
        lines.append(f"| `{flag_of(each.name)}` | {default} | {each.metadata['help']}{server} |")
    lines += [
        "\n## Small languages\n",
        "* **bytes**: a whole number, or a number with `KiB`, `MiB`, `GiB`, `TiB` (powers of 1,024) or `KB`, `MB`, "
        "`GB` (powers of 1,000).",
        "* **page tokens**: `16` for all pools, or `full=16,sliding-512=8` by pool name as the start-up block prints "
        "it; powers of two up to 256.",
        "* **admission**: `expected:0.9` grants a request its prompt and the 0.9 quantile of the lengths that finished "
        "requests of its class had; `guaranteed` grants all that it may ever need.",
        "* **policy**: `shared` has one arena; `static:0.8` caps each window pool at 0.8 times the full pool's tokens, "
        "as engines with a split do; `static:0.8:0.9` also caps the pool of recurrent states, at 0.9 bytes per byte of "
        "all the others (0.9 is what it gets when no second number is given).\n",
        "## A file\n",
        "```yaml\nmodel: gemma3-270m\nkv_bytes: 256MiB\nadmission: guaranteed\n"
        "page_tokens: full=16,sliding-512=16\n```",
    ]
    return "\n".join(lines) + "\n"


def migrate() -> str:
    """Return docs/migrate.md."""
    lines = [
        MADE,
        "# Coming from another engine\n",
        "`LLM`, `SamplingParams`, `RequestOutput` and the HTTP API have the names that you know. Flags differ where "
        "the idea differs: memory is given in bytes, because a hybrid model's tokens have no one size. If you type a "
        "flag of this table, the program answers with ours.\n",
    ]
    for engine in sorted({each.engine for each in FOREIGN}, key=str.lower):
        lines += [f"## {engine}\n", "| there | here | remark |", "|---|---|---|"]
        lines += [
            f"| `{each.flag}` | {f'`{each.here}`' if each.here else '-'} | {each.remark} |"
            for each in FOREIGN
            if each.engine == engine
        ]
        lines.append("")
    lines += [
        "## What behaves differently\n",
        "* `max_tokens` absent means as many as fit, not 16.",
        "* A request that can never fit is refused at once, with the arithmetic; one that waits has a reason.",
        "* A request that was retracted computes its tokens again, or gets them back from host memory "
        "(`--host-bytes`) where copying is faster; what was sent never changes.",
        '* Figures are bytes of one arena; there is no "KV cache usage" per kind.',
    ]
    return "\n".join(lines) + "\n"


ALIGNED = ("admission", "step_tokens", "max_running_requests")
"""Settings of a server that a replay has other defaults for."""

REPLAY = """
# `halocline replay`

`halocline replay TRACE --model M --kv-bytes B` lets a workload through the scheduler, prefix cache and arena that
serve, under a fake clock: no weights, no device. Every step takes what a formula says of the device
(`halocline.sim.cost`); every decision is the one that a server would take. Several policies in one run share one
report. With `--server URL` the same workload goes to a live OpenAI-compatible server instead, and the report says
what its clients saw.

TRACE is a file (Mooncake or Bailian JSON lines with `hash_ids`, Azure CSV, OpenAI-style JSON lines), or a
[generator](#generators); [how to bring your own](../how-to/bring-your-own-workload.md).

Exit codes: 0 done; 1 the work failed while it ran; 2 it could not start (trace, model, arena, policy, file), or no
request fits; 130 Ctrl-C. Files are put in their places whole: an interrupted run leaves none.
Links stay, and pipes and devices are written to.

## Flags

{flags}

Bytes and page tokens are written as [for the server](flags.md#small-languages); durations are a number with `us`,
`ms`, `s`, `min` or `h`, or plain seconds. Besides the server's policies a replay knows `equal-pages` (every kind
padded to one page size, as engines with one block size do) and `full` (every layer keeps every position).

Defaults suit a large device. As `halocline serve` decides by default:
`{aligned}`.

## Generators

`NAME:KEY=VALUE,KEY=VALUE`; what is not given has its default. `flip:60:ONE|OTHER` takes turns of 60 seconds between two
workloads, each of them a generator or a file, each as many as the shorter one has; what the longer one still had is
left out. The same text and seed are the same workload on every machine.

{generators}

## Figures

The same list makes the table on the terminal, the page and the JSON record, whose keys stand in the second column,
below `outcomes[i]`. A mean is weighted with time. Where a run has no such figure, the key is absent and the table
shows `-`.

{figures}

Held, cached, holes and free are together the whole arena; the bytes of each pool (`arena.held_bytes.POOL`,
`arena.cached_bytes.POOL`) are means over the same time and add up to the shares. `mean_bytes.held` and
`mean_bytes.cached` have the mean bytes of each pool over the whole run, warm-up and drain of a saturated one included.
`rejections`, where there are any, has the longest prompt plus output that is served, what made it so, and the words of
the first refusal; the terminal and the page say the same. `pools` says how the arena is cut, `middle_seconds` from when
to when the means of a saturated run are taken, `series` has the run over time in at most 1,000 intervals (each value a
mean over its interval), `window` the steps of `--window`.

### Waiting

`waiting_seconds.CODE`: request-seconds of waiting. All who wait count under the reason of the first in line, because
the others wait behind it.

{reasons}

## A live server

`--server URL` sends the workload to `/v1/completions`, streaming and greedy, with `max_tokens` as the trace says and
`ignore_eos`; a client that gives up closes its connection, a later turn is sent when the one before has ended. Open
loop: each request at its time, however long answers take. `--saturated --concurrency N`: N at a time. Where it
differs from a simulation:

* Times are the client's: TTFT from sending to the first piece. Requests *wait* until their first piece and *run* from
  there, which is all that a client can see.
* Contents become token ids from 20 to 119, the same for the same content, so that equal beginnings are equal and
  every vocabulary has them; `--text` sends words instead, about a token each.
* A later turn has the answer that was given in its prompt, where the server tells its tokens (`return_token_ids`);
  elsewhere it has the trace's, and reuse ends where the earlier prompt ended.
* `tokens.cached` and `hit_rate` are there if the server tells `cached_tokens` in `usage`; arena, moves, retractions
  and computed tokens if it is a Halocline, from its `/metrics`. Steps, digest and padding are not, nor what was while
  memory is short: a client cannot see what others wait for. The arena's shares and bytes are means over the whole run.
* A request that is answered 4xx is *rejected*, any other error makes it *failed*; `errors` has the server's words and
  how often. `run: sent late` says how far the client itself lagged behind the trace.

## `--perfetto`

Open the file at https://ui.perfetto.dev. A process is a policy; its threads are the steps, their prefills and
decodes, the reason why the first in line waits, and ends of requests; counters have the bytes of each pool.
"""


def replay() -> str:
    """Return docs/reference/replay.md."""
    rows = [each for each in fields(ReplaySettings) if each.name != "trace"]
    flags = [("flag", "default", "meaning")]
    for each in rows:
        default = "" if each.default is None else f"`{default_text(each.default)}`"
        flags.append((f"`{flag_of(each.name)}`", default, each.metadata["help"]))
    served = {each.name: each.default for each in fields(Config)}
    aligned = " ".join(f"{flag_of(name)} {default_text(served[name])}" for name in ALIGNED)
    groups = (figures.REQUESTS, figures.LATENCIES, figures.TOKENS, figures.ARENA, HOST, figures.RUN)
    reasons = [
        ("code", "the first in line waits because"),
        *((f"`{code}`", why) for code, why in figures.REASONS.items()),
    ]
    return MADE + REPLAY.format(
        flags=_table(flags),
        aligned=aligned,
        generators=_generators(),
        figures="\n\n".join(map(_figures, groups)),
        reasons=_table(reasons),
    )


def _generators() -> str:
    """Return a table of all generators and their settings."""
    rows = [("generator or setting", "default", "meaning")]
    for name, generator in GENERATORS.items():
        rows.append((f"**`{name}`**", "", generator.help))
        rows += [(f"`{key}`", f"`{each.default:g}`", each.help) for key, each in generator.settings.items()]
    return _table(rows)


def _figures(listed: Sequence[Figure]) -> str:
    """Return a table of figures under the names of their groups."""
    head = ", ".join(dict.fromkeys(each.group for each in listed))
    rows = [(each.title, f"`{'.'.join(each.path)}`", each.unit, each.meaning) for each in listed]
    return f"### {head[0].upper()}{head[1:]}\n\n" + _table([("figure", "key", "unit", "meaning"), *rows])


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


PAGES = {"reference/flags.md": flags, "reference/replay.md": replay, "migrate.md": migrate}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
