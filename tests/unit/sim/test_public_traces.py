"""The two public traces as they are read, where they are at hand; they skip without."""

from __future__ import annotations

from pathlib import Path

import pytest

from halocline.sim.readers import read_workload
from halocline.sim.writers import write_mooncake


def test_the_mooncake_trace_reads_with_its_published_figures_and_is_written_back_byte_by_byte(
    data_folder: Path, tmp_path: Path
) -> None:
    path = data_folder / "mooncake_conversation.jsonl"
    made = read_workload(path)
    assert len(made.jobs) == 12_031
    assert sum(job.prompt_tokens for job in made.jobs) / 12_031 == pytest.approx(12_035, abs=1)
    assert sum(job.output_tokens for job in made.jobs) / 12_031 == pytest.approx(343, abs=1)
    assert made.span_seconds == pytest.approx(3537, abs=1)
    seen: set[tuple[int, int]] = set()
    blocks = hits = 0
    for job in made.jobs:
        blocks += len(job.prompt)
        hits += sum(run in seen for run in job.prompt)
        seen.update(job.prompt)
    assert hits / blocks == pytest.approx(0.366, abs=0.001)
    write_mooncake(made, tmp_path / "copy.jsonl")
    assert (tmp_path / "copy.jsonl").read_bytes() == path.read_bytes()


def test_the_azure_trace_reads_with_its_published_figures(data_folder: Path) -> None:
    made = read_workload(data_folder / "azure2023_conv.csv")
    assert len(made.jobs) == 19_366
    assert sum(job.prompt_tokens for job in made.jobs) / 19_366 == pytest.approx(1155, abs=1)
    assert sum(job.output_tokens for job in made.jobs) / 19_366 == pytest.approx(211, abs=1)
    assert made.span_seconds == pytest.approx(3501.72, abs=0.01)
