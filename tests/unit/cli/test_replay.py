"""`halocline replay` from the command line: both loops, every file it writes, every mistake, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from halocline.cli import replay as cli
from halocline.cli.main import main
from halocline.sim.generators import GENERATORS
from testing.engine import fake_spec
from testing.server import live_server, wait_until
from testing.traces import write_trace

MODEL = ("--model", "gemma-3-270m", "--kv-bytes", "64MiB")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_trace(tmp_path_factory.mktemp("trace") / "small.jsonl"))


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the record that the command prints, and what it writes on standard error."""
    assert main(["replay", *arguments, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_an_open_loop_follows_the_traces_times(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    record, err = replayed(capsys, trace, *MODEL)
    (run,) = record["outcomes"]
    assert run["loop"] == "open"
    assert run["requests"] == {"arrived": 12, "finished": 12, "rejected": 0, "failed": 0, "aborted": 0}
    assert run["seconds"] >= 4.4, "the last one arrives then"
    assert run["tokens"]["cached"] == 6 * 512, "every second request begins as the one before"
    assert "small on gemma-3-270m, open loop" in err
    assert "shared: 12 of 12 requests" in err


def test_a_time_scale_of_two_is_twice_the_load(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    record, _ = replayed(capsys, trace, *MODEL, "--time-scale", "2")
    assert 2.2 <= record["outcomes"][0]["seconds"] < 4.4
    assert record["setup"]["time scale"] == "2 times the load"


def test_a_saturated_loop_lets_all_stand_in_line(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    record, _ = replayed(capsys, trace, *MODEL, "--saturated", "--requests", "7", "--prefix-cache", "off")
    (run,) = record["outcomes"]
    assert run["loop"] == "saturated"
    assert run["requests"]["finished"] == 7
    assert run["hit_rate"] == 0.0
    assert run["seconds"] < 2.0, "nobody waits for the trace's times"


def test_equal_commands_decide_alike_and_the_record_says_how_to_repeat_them(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (trace, *MODEL, "--policy", "static:0.8", "--admission", "guaranteed", "--no-known-lengths", "--seed", "5")
    first, _ = replayed(capsys, *asked)
    assert main(shlex.split(first["command"])[1:]) == 0
    again = json.loads(capsys.readouterr().out)
    assert first["outcomes"][0]["digest"] == again["outcomes"][0]["digest"]
    assert first["command"] == again["command"]
    assert first["command"].endswith("--policy static:0.8 --admission guaranteed --no-known-lengths --json - --seed 5")


def test_a_generator_needs_no_file_and_takes_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("poisson:rate=5,prompt=200,output=5,requests=6", *MODEL)
    runs = [replayed(capsys, *asked, *seed)[0]["outcomes"][0] for seed in ((), ("--seed", "3"), ("--seed", "3"))]
    assert [run["requests"]["finished"] for run in runs] == [6, 6, 6]
    assert runs[0]["digest"] != runs[1]["digest"] == runs[2]["digest"]
    named, _ = replayed(capsys, f"{asked[0]},seed=3", *MODEL, "--seed", "9")
    assert named["outcomes"][0]["digest"] == runs[1]["digest"], "what is named in the workload wins"


def test_every_generator_is_named_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["replay", "--help"]) == 0
    out = "".join(capsys.readouterr().out.split())  # lines are broken anywhere
    assert [name for name in (*GENERATORS, "flip") if name not in out] == []
    assert [option for option in ("--policy", "--saturated", "--server", "--perfetto") if option not in out] == []


def test_why_a_request_was_rejected_is_said_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("mooncake-like:requests=12", "--model", "gemma-3-270m", "--kv-bytes", "30MiB", "--policy", "shared,full")
    record, err = replayed(capsys, *asked)
    for run in record["outcomes"]:
        why, times = run["rejections"], run["requests"]["rejected"]
        assert why["limited_by"] == "the longest that fits the arena"
        assert f"max_model_len is {why['max_model_len']}" in why["first"]
        assert f"{run['policy']} rejected {times} of 12 requests: max_model_len is {why['max_model_len']:,} " in err
        assert why["first"] in err


def test_a_workload_is_sent_to_a_live_server_and_reported_alike(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "live.html"
    with live_server(spec=fake_spec("build_on_arena", reply="salt water ")) as server:
        how = ("--server", f"{server.url}/v1/", "--saturated", "--concurrency", "3", "--html", str(page))
        record, err = replayed(capsys, trace, *how, "--requests", "5")
        (run,) = record["outcomes"]
        assert run["requests"]["finished"] + run["requests"]["rejected"] == 5
        assert run["requests"]["finished"] > 0
        assert run["arena"]["bytes"] > 0
        assert record["setup"]["server"].endswith(", 3 clients")
        assert f"written: {page}" in err
        assert "requests: finished" in err
        assert main(["replay", "poisson:rate=50,prompt=100000,requests=2", "--server", server.url]) == 1
        assert "the server answered none of 2 requests; 2 times" in capsys.readouterr().err


def test_several_policies_run_in_processes_of_their_own_and_every_file_is_written(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "perfetto")}
    files = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    policies = ("--policy", "shared,static:0.8", "--policy", "equal-pages", "--processes", "2")
    assert main(["replay", trace, *MODEL, *policies, *files, "--window", "2:9"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(paths["json"].read_text())
    assert [run["policy"] for run in record["outcomes"]] == ["shared", "static:0.8", "equal-pages"]
    assert [run["requests"]["finished"] for run in record["outcomes"]] == [12, 12, 12]
    assert len({run["digest"] for run in record["outcomes"]}) == 3
    here, _ = replayed(capsys, trace, *MODEL)
    assert here["outcomes"][0]["digest"] == record["outcomes"][0]["digest"], "a process of its own decides alike"
    assert [step["step"] for step in record["outcomes"][0]["window"]] == [*range(2, 9)]
    (heads,) = (re.findall(r"[\w:.-]+", line) for line in out.splitlines() if "equal-pages" in line)
    assert heads == ["shared", "static:0.8", "equal-pages"]
    assert "…" not in out, "a pipe has no width"
    assert "<title>Halocline replay: small on gemma-3-270m</title>" in paths["html"].read_text()
    events = json.loads(paths["perfetto"].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3}
    assert [line for line in err.splitlines() if line.startswith("written: ")] == [
        f"written: {path}" for path in (paths["json"], paths["html"], paths["perfetto"])
    ]
    assert sorted(os.listdir(tmp_path)) == ["report.html", "report.json", "report.perfetto"]


def test_a_report_is_written_before_anybody_is_shown_a_table(trace: str, tmp_path: Path) -> None:
    page, record = tmp_path / "report.html", tmp_path / "report.json"
    command = [sys.executable, "-m", "halocline", "replay", trace, *MODEL, "--html", str(page), "--json", str(record)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("halocline: cannot write to standard output: No space left on device\n")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(record.read_text())["outcomes"]


def test_names_of_files_that_are_no_text_are_read_and_written(trace: str, tmp_path: Path) -> None:
    """As bytes on the command line: in-process they would never be a shell's."""
    folder = os.fsencode(tmp_path)
    own = folder + b"/tr\xff\xfe.jsonl"
    Path(os.fsdecode(own)).write_bytes(Path(trace).read_bytes())
    paths = {kind: folder + b"/\xff." + kind.encode() for kind in ("json", "html", "perfetto")}
    files = [word for kind, path in paths.items() for word in (b"--" + kind.encode(), path)]
    command = [os.fsencode(sys.executable), b"-m", b"halocline", b"replay", own, *map(str.encode, MODEL), *files]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as under most locales
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=strict)
    assert done.returncode == 0, done.stderr
    assert "tr\\udcff\\udcfe on gemma-3-270m" in done.stdout
    read = {kind: Path(os.fsdecode(path)).read_text(encoding="utf-8") for kind, path in paths.items()}
    assert "tr\\udcff\\udcfe.jsonl" in read["html"]
    assert json.loads(read["json"])["outcomes"][0]["requests"]["finished"] == 12
    assert json.loads(read["perfetto"])["traceEvents"]


def running_in(group: int) -> list[psutil.Process]:
    """Return the processes of a process group that are not over."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("absent.jsonl", *MODEL), "absent.jsonl"),
        (("TRACE", "--model", "gemma-3-27", "--kv-bytes", "1GiB"), "'gemma-3-27b'"),
        (("TRACE", *MODEL, "--policy", "statik:0.8"), "policy is 'statik:0.8'"),
        (("TRACE", *MODEL, "--policy", ","), "no policy is named"),
        (("TRACE", "--model", "gemma-3-270m", "--kv-bytes", "0"), "kv_bytes: 0 is 0 bytes"),
        (("TRACE", "--model", "gemma-3-270m", "--kv-bytes", "60 gigs"), "cannot read '60 gigs' as bytes"),
        (("TRACE", "--model", "gemma-3-270m"), "give --kv-bytes"),
        (("TRACE", "--kv-bytes", "1GiB"), "give --model"),
        (("--model", "gemma-3-270m", "--kv-bytes", "1GiB"), "no trace"),
        (("TRACE", "--model", "gemma-3-270m", "--kv-bytes", "100KiB"), "policy shared: "),
        (("TRACE", "--model", "gemma-3-270m", "--kv-bytes", "8MiB"), "none of 12 requests fits"),
        (("TRACE", *MODEL, "--html", "/proc/absent/report.html"), "cannot write /proc/absent/report.html"),
        (("TRACE", *MODEL, "--device", "h20"), "no device is called 'h20'"),
        (("TRACE", *MODEL, "--window", "1:2"), "--perfetto"),
        (("TRACE", *MODEL, "--perfetto", "x", "--window", "9:2"), "window is '9:2'"),
        (("TRACE", *MODEL, "--ttft-limit", "soon"), "ttft_limit: cannot read 'soon' as a duration"),
        (("TRACE", *MODEL, "--time-scale", "0"), "time_scale is 0.0"),
        (("TRACE", *MODEL, "--audit", "often"), "audit is 'often'"),
        (("TRACE", *MODEL, "--concurrency", "4"), "give --server URL as well"),
        (("TRACE", "--server", "http://127.0.0.1:99999"), "'http://127.0.0.1:99999' is no server's address"),
        (("TRACE", "--server", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
        (("TRACE", "--server", "http://127.0.0.1:9", "--kv-bytes", "1GiB"), "the server has its own"),
        (("TRACE", "--server", "http://127.0.0.1:9", "--saturated"), "--concurrency N"),
        (("TRACE", *MODEL, "--polices", "full"), "--policy"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code = main(["replay", *(trace if word == "TRACE" else word for word in arguments)])
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if line.startswith("halocline: ")]
    assert (code, out, len(told)) == (2, "", 1), err
    assert words in told[0]


def test_all_mistakes_are_told_at_once(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--window", "1", "--leap", "0", "--prefix-cache", "maybe"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_ctrl_c_ends_every_process_and_leaves_no_file(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "long.jsonl", 4000, prompt=2000, output=60)
    asked = (str(trace), "--model", "gemma-3-27b", "--kv-bytes", "60GiB", "--policy", "shared,full", "--processes", "2")
    command = [sys.executable, "-m", "halocline", "replay", *asked, "--html", str(tmp_path / "report.html")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        group = os.getpgid(process.pid)
        # The first line of progress: both processes are at work.
        assert process.stderr is not None
        first = process.stderr.readline()
        os.killpg(group, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 130, rest
    assert "of 4,000 requests" in first
    assert "Traceback" not in rest
    assert os.listdir(tmp_path) == ["long.jsonl"]
    wait_until(lambda: not running_in(group), "every process of the command to end")


def test_a_terminal_sees_a_bar_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with cli.bars(console, ["shared", "[red]evil"], 10) as on_progress:
        on_progress(1, SimpleNamespace(ended=7, jobs=10, seconds=12.0, running=3, waiting=2))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "7/10" in shown
    assert "12 s, 3 run, 2 wait" in shown
    assert "[red]evil" in shown


def test_where_nobody_sees_a_bar_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(cli, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    on_progress = cli.lines(["shared", "full"])
    for ended in range(11):
        clock[0] += 1.0
        on_progress(0, SimpleNamespace(ended=ended, jobs=10, seconds=1.0, running=1, waiting=0, wall_seconds=1.0))
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" requests")[0] for line in told] == ["shared: 0 of 10", "shared: 5 of 10", "shared: 10 of 10"]
