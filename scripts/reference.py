"""Writes the pages that are made of the program itself: `python scripts/reference.py`; a test compares them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from halocline.cli.migrate import FOREIGN
from halocline.cli.options import default_text, flag_of
from halocline.config import Config

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
        "* A request that was retracted computes its tokens again; what was sent never changes.",
        '* Figures are bytes of one arena; there is no "KV cache usage" per kind.',
    ]
    return "\n".join(lines) + "\n"


PAGES = {"reference/flags.md": flags, "migrate.md": migrate}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
