"""Small traces as files, in a public format."""

from __future__ import annotations

import json
from pathlib import Path


def write_trace(path: Path, requests: int = 12, *, prompt: int = 700, output: int = 8, apart_ms: int = 400) -> Path:
    """Write a Mooncake trace in which every second request begins as the one before: its first block of 512 tokens."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(requests):
            length = prompt + 16 * (number % 3)
            ids = [number // 2 * 100, *(number * 100 + 1 + block for block in range(-(-length // 512) - 1))]
            row = {
                "timestamp": number * apart_ms,
                "input_length": length,
                "output_length": output + number % 4,
                "hash_ids": ids,
            }
            file.write(json.dumps(row) + "\n")
    return path
