"""Traces from files: the two public formats, there and back, and what is said about files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halocline.errors import ConfigError
from halocline.sim.fields import SHOWN_FAULTS
from halocline.sim.readers import read_workload
from halocline.sim.workload import Job, Workload
from halocline.sim.writers import write_azure, write_mooncake

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def mooncake(*rows: tuple[object, object, object, object]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_hash_ids_are_runs_of_512_tokens_and_the_last_is_partial(tmp_path: Path) -> None:
    path = written(tmp_path, mooncake((1000, 1025, 7, [40, 41, 42]), (4000, 1024, 3, [40, 50])))
    made = read_workload(path)
    assert made.jobs == (
        Job("line 1", 0.0, ((0, 512), (1, 512), (2, 1)), 7, 4),
        Job("line 2", 3.0, ((0, 512), (3, 512)), 3, 5),
    )
    assert made.name == "trace"
    assert made.source == str(path)


def test_hash_ids_of_any_size_become_content_ids_from_zero(tmp_path: Path) -> None:
    made = read_workload(written(tmp_path, mooncake((0, 600, 7, [2**63, 17]), (1, 513, 1, [2**63, 2**70]))))
    assert [job.prompt for job in made.jobs] == [((0, 512), (1, 88)), ((0, 512), (2, 1))]


def test_lines_back_in_time_are_sorted_and_equal_times_keep_their_order(tmp_path: Path) -> None:
    rows = [(9000, 1, 1, [1]), (5000, 1, 1, [2]), (9000, 1, 1, [3]), (7000, 1, 0, [2])]
    made = read_workload(written(tmp_path, mooncake(*rows)))
    assert [(job.id, job.arrive_seconds) for job in made.jobs] == [
        ("line 2", 0.0),
        ("line 4", 2.0),
        ("line 1", 4.0),
        ("line 3", 4.0),
    ]
    assert made.jobs[1].output_tokens == 1  # of nothing, one token is made all the same
    assert made.jobs[0].prompt == made.jobs[1].prompt


def test_a_bailian_trace_has_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    line = {"chat_id": 1, "timestamp": 61.114, "input_length": 33, "output_length": 2, "hash_ids": [5, 6, 7]}
    later = line | {"timestamp": 62.614, "input_length": 16, "hash_ids": [5]}
    made = read_workload(written(tmp_path, json.dumps(line) + "\n" + json.dumps(later)))
    assert [job.prompt for job in made.jobs] == [((0, 16), (1, 16), (2, 1)), ((0, 16),)]
    assert made.jobs[1].arrive_seconds == pytest.approx(1.5)


def test_a_line_without_hash_ids_shares_its_prompt_with_nobody(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 700, "output_length": 2})
    made = read_workload(written(tmp_path, f"{line}\n{line}\n"))
    assert [job.prompt for job in made.jobs] == [((0, 700),), ((1, 700),)]


def test_an_azure_trace_has_lengths_and_nothing_shared(tmp_path: Path) -> None:
    text = HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,374,109\n"
    made = read_workload(written(tmp_path, text, "azure.csv"))
    first, second = made.jobs
    assert (first.prompt, first.output_tokens, first.output_id, first.arrive_seconds) == (((0, 374),), 44, 2, 0.0)
    assert (second.prompt, second.output_tokens, second.output_id) == (((1, 374),), 109, 3)
    assert second.arrive_seconds == pytest.approx(4.314579, abs=2e-6)


def test_azure_columns_may_stand_in_any_order_and_times_may_have_a_zone(tmp_path: Path) -> None:
    text = "Model,GeneratedTokens,TIMESTAMP,ContextTokens\nx,4,2024-05-10 00:00:01+00:00,30\nx,5,2024-05-10 00:00:00,20"
    made = read_workload(written(tmp_path, text, "azure.csv"))
    assert [(job.prompt_tokens, job.output_tokens, job.arrive_seconds) for job in made.jobs] == [(20, 5, 0), (30, 4, 1)]


def sample() -> Workload:
    prompts = ((0, 512), (1, 512), (2, 9)), ((0, 512), (3, 400)), ((0, 512), (1, 512), (4, 512)), ((5, 80),)
    jobs = tuple(Job(f"line {at + 1}", at * 2.5, prompt, at + 3, 6 + at) for at, prompt in enumerate(prompts))
    return Workload("sample", "here", jobs)


def test_a_written_mooncake_trace_reads_back_as_it_was(tmp_path: Path) -> None:
    write_mooncake(sample(), tmp_path / "sample.jsonl")
    assert read_workload(tmp_path / "sample.jsonl").jobs == sample().jobs


def test_runs_that_straddle_blocks_share_exactly_their_whole_blocks(tmp_path: Path) -> None:
    prompts = ((0, 700), (1, 900)), ((0, 700), (2, 900)), ((0, 700), (1, 500)), ((3, 512), (0, 700))
    jobs = tuple(Job(f"j{at}", float(at), prompt, 1, 9 + at) for at, prompt in enumerate(prompts))
    write_mooncake(Workload("w", "here", jobs), tmp_path / "w.jsonl")
    made = [job.prompt for job in read_workload(tmp_path / "w.jsonl").jobs]
    ids = [tuple(content for content, _ in prompt) for prompt in made]
    assert ids == [(0, 1, 2, 3), (0, 4, 5, 6), (0, 1, 7), (8, 9, 10)]
    assert [sum(tokens for _, tokens in prompt) for prompt in made] == [1600, 1600, 1200, 1212]


def test_a_written_azure_trace_reads_back_with_its_times_and_lengths(tmp_path: Path) -> None:
    write_azure(sample(), tmp_path / "sample.csv")
    made = read_workload(tmp_path / "sample.csv").jobs
    assert [(j.prompt_tokens, j.output_tokens) for j in made] == [
        (j.prompt_tokens, j.output_tokens) for j in sample().jobs
    ]
    assert [j.arrive_seconds for j in made] == pytest.approx([0, 2.5, 5, 7.5])
    assert (tmp_path / "sample.csv").read_text().splitlines()[2] == "2023-11-16 00:00:02.5000000,912,4"


@pytest.mark.parametrize("write", [write_mooncake, write_azure])
def test_sessions_are_refused_because_a_trace_has_only_times(tmp_path: Path, write: object) -> None:
    jobs = (Job("a", 0.0, ((0, 1),), 1, 2), Job("b", 0.0, ((0, 1),), 1, 3, after="a"))
    with pytest.raises(ConfigError, match="b of w arrives after a has finished"):
        write(Workload("w", "here", jobs), tmp_path / "out")  # type: ignore[operator]
    assert not (tmp_path / "out").exists()


WRONG = {
    "empty": ("", "is empty; a trace has one request per line"),
    "blank": ("\n  \n", "is empty"),
    "neither": ("hello, world\n1,2\n", "line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens in 'hello, world'"),
    "no json": ('{"timestamp": 0, "input_length"\n', "line 1: this is no JSON"),
    "no json later": (mooncake((0, 1, 1, [1])) + "{]\n", "line 2: this is no JSON"),
    "no object": (mooncake((0, 1, 1, [1])) + "[1]\n", r"line 2: this is \[1\]; write one JSON object per line"),
    "deep": (mooncake((0, 1, 1, [1])) + "[" * 100_000, "line 2: this is no JSON"),
    "missing": ('{"input_length": 3}', "line 1: the field 'timestamp' is missing; found 'input_length'"),
    "negative": (mooncake((0, -5, 1, [1])), "line 1: input_length is -5; it must be at least 1"),
    "no prompt": (mooncake((0, 0, 1, [])), "line 1: input_length is 0; it must be at least 1"),
    "negative output": (mooncake((0, 5, -1, [1])), "line 1: output_length is -1; it must be at least 0"),
    "enormous": (mooncake((0, 10**30, 1, [1])), "line 1: input_length is 1000+, and no model takes more than 16777216"),
    "fraction": (mooncake((0, 5.5, 1, [1])), "line 1: input_length is 5.5; write a whole number"),
    "text": (mooncake((0, "many", 1, [1])), "line 1: input_length is 'many'; write a whole number"),
    "flag": (mooncake((0, True, 1, [1])), "line 1: input_length is True; write a whole number"),
    "nan length": (mooncake((0, float("nan"), 1, [1])), "line 1: input_length is nan; write a whole number"),
    "nan": (mooncake((float("nan"), 5, 1, [1])), "line 1: timestamp is nan; write seconds"),
    "infinite": (mooncake((float("inf"), 5, 1, [1])), "line 1: timestamp is inf; write seconds"),
    "late": (mooncake((10**400, 5, 1, [1])), "line 1: timestamp is 1000+"),
    "no time": (mooncake((None, 5, 1, [1])), "line 1: timestamp is None; write seconds as a number"),
    "few blocks": (mooncake((0, 513, 1, [1])), "line 1: 1 hash_ids for input_length 513; there must be 2"),
    "odd blocks": (mooncake((0, 5, 1, ["a"])), r"line 1: hash_ids is \['a'\]; write a list of whole numbers"),
    "header only": (HEADER, "has a header and no request"),
    "short line": (HEADER + "2023-11-16 18:15:46,3\n", "line 2: 2 columns in '2023-11-16 18:15:46,3'"),
    "no date": (HEADER + "yesterday,3,4\n", "line 2: TIMESTAMP is 'yesterday'; write seconds as a number, or a date"),
    "no number": (HEADER + "2023-11-16 18:15:46,,4\n", "line 2: ContextTokens is ''; write a whole number"),
    "half a character": (mooncake((0, 5, 1, [1])) + '{"x": [{"\\uD83D": 1}]}', "line 2: this has half a character"),
    "underscore": (mooncake((0, "6_00", 1, [1])), "line 1: input_length is '6_00'; write a whole number"),
    "underscore in a time": (mooncake(("1_000", 5, 1, [1])), "line 1: timestamp is '1_000'; write seconds as a number"),
    "digits of another script": (HEADER + "2023-11-16 18:15:46,٣,4\n", "line 2: ContextTokens is '٣'; write a whole"),
    "a time in another script": (HEADER + "٣,3,4\n", "line 2: TIMESTAMP is '٣'; write seconds as a number, or a date"),
    "negative cell": (HEADER + "2023-11-16 18:15:46,-3,4\n", "line 2: ContextTokens is '-3'; it must be at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_its_name_its_line_and_what_to_do(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_workload(path)
    assert str(path) in caught.value.problems[0]
    assert len(caught.value.problems[0]) < 300


def test_all_faults_of_a_file_are_told_at_once_up_to_ten(tmp_path: Path) -> None:
    bad = [(0, -1, 1, [1]), (0, 5, 5, [1]), (0, 5, -2, [1])]
    with pytest.raises(ConfigError) as caught:
        read_workload(written(tmp_path, mooncake(*bad)))
    assert [problem.split(", ")[-1][:6] for problem in caught.value.problems] == ["line 1", "line 3"]
    with pytest.raises(ConfigError) as caught:
        read_workload(written(tmp_path, mooncake(*bad * 20)))
    assert len(caught.value.problems) == SHOWN_FAULTS + 1
    assert "there may be more" in caught.value.problems[-1]


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.jsonl does not exist"):
        read_workload(tmp_path / "nowhere.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80" * 9)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_workload(tmp_path / "bytes")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_workload(tmp_path)
