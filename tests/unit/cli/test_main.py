"""The command line: flags are settings, and every mistake is one sentence with an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halocline import __version__
from halocline.cli import options
from halocline.cli.load import LoadError
from halocline.cli.main import main
from halocline.cli.migrate import FOREIGN, explain
from halocline.config import Config, setting_names
from halocline.errors import ConfigError, EngineDeadError, FailedError, ModelError, OverloadedError, RequestError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def given(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    """Return the Config that `halocline serve ARGUMENTS` would start with."""
    seen: list[Config] = []

    def fake(config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setitem(sys.modules, "halocline.serve", type(sys)("halocline.serve"))
    monkeypatch.setattr(sys.modules["halocline.serve"], "run_server", fake, raising=False)
    assert main(["serve", *arguments]) == 0
    return seen[0]


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "version") == (0, f"{__version__}\n", "")


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert all(word in out for word in ("serve", "generate", "chat", "bench", "demo", "version"))


def test_help_shows_every_setting_with_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "serve", "--help")
    assert code == 0
    for name in setting_names():
        assert f"{options.flag_of(name)} " in out.replace(",", " "), name
    assert "[expected:0.9]" in out
    assert "[127.0.0.1]" in out


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = given(monkeypatch, "some/model", "--port", "0", "--kv-bytes", "64MiB", "--clip-max-tokens", "--seed", "-3")
    assert config == Config(model="some/model", port=0, kv_bytes="64MiB", clip_max_tokens=True, seed=-3)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\nkv-bytes: 64MiB\nclip_max_tokens: true\n")
    config = given(monkeypatch, "--config", str(path), "--port", "2", "--no-clip-max-tokens")
    assert config == Config(port=2, kv_bytes="64MiB", clip_max_tokens=False)


def test_the_prefix_cache_is_turned_off_by_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    config = given(monkeypatch, "--prefix-cache", "off", "--prefill-delay-low-bytes", "1MiB")
    assert config == Config(prefix_cache="off", prefill_delay_low_bytes="1MiB")
    assert given(monkeypatch, "--prefix-cache", "on") == Config()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--kv-byte", "1"), "--kv-bytes"),
        (("serve", "--gpu-memory-utilization=0.9"), "use --kv-bytes"),
        (("serve", "--tp-size", "2"), "no such flag here"),
        (("serve", "--disable-radix-cache"), "write --prefix-cache off"),
        (("serve", "--prefix-cache", "of"), "did you mean 'off'?"),
        (("serv",), "'serve'"),
        (("serve", "--port", "eight"), "'--port'"),
        (("serve", "--port", "99999"), "port is 99999"),
        (("serve", "--config", "absent.yaml"), "cannot read the configuration file absent.yaml"),
        (("serve", "--kv-bytes"), "--kv-bytes"),
        (("generate", "x", "--temperature", "-1"), "--temperature"),
        (("generate", "x", "--top-p", "3"), "top_p is 3.0"),
        (("bench", "--concurrency", "0"), "--concurrency"),
        (("bench", "--url", "http://127.0.0.1:99999"), "'http://127.0.0.1:99999' is no server's address"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("halocline: ")
    assert err.count("\n") == 1


def test_all_wrong_settings_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "serve", "--policy", "half", "--admission", "never", "--audit", "x")
    assert code == 2
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["no"]), 2),
        (ModelError("no"), 2),
        (RequestError("no"), 2),
        (EngineDeadError("no"), 1),
        (FailedError("no"), 1),
        (OverloadedError("no"), 1),
        (LoadError("no"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_exit_code_tells_work_that_failed_from_what_could_not_start(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fails(config: Any) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "halocline.serve", type(sys)("halocline.serve"))
    monkeypatch.setattr(sys.modules["halocline.serve"], "run_server", fails, raising=False)
    assert main(["serve"]) == code


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Any) -> int:
        raise ZeroDivisionError("a defect")

    monkeypatch.setitem(sys.modules, "halocline.serve", type(sys)("halocline.serve"))
    monkeypatch.setattr(sys.modules["halocline.serve"], "run_server", broken, raising=False)
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_the_program_refuses_to_run_without_its_assertions() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-m", "halocline", "version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "without -O" in done.stderr


PRINTS = {
    "a few words": "import typer; typer.echo('text')",
    "a few words that stay in the buffer": "import sys; sys.stdout.write('text')",
    "more than the buffer holds": "import sys; sys.stdout.write('text' * 10**5)",
    "a table": "from rich.console import Console; Console().print('text')",
}
"""What commands do: the ways differ in when a fault is noticed."""


def printed(tmp_path: Path, code: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run `halocline version`, printing by `code` instead."""
    (tmp_path / "halocline_printing.py").write_text(
        "import sys\n"
        "from halocline.cli import main as cli\n"
        "app = cli.typer.Typer()\n"
        "app.callback()(lambda: None)\n"
        f"app.command('version')(lambda: exec({code!r}))\n"
        "cli.app = app\n"
        "sys.exit(cli.main(['version']))\n"
    )
    command = [sys.executable, str(tmp_path / "halocline_printing.py")]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **how)


@pytest.mark.parametrize("code", PRINTS.values(), ids=PRINTS)
def test_a_full_standard_output_is_one_sentence_and_exit_code_1(tmp_path: Path, code: str) -> None:
    with open("/dev/full", "w") as full:
        done = printed(tmp_path, code, stdout=full)
    assert done.stderr == "halocline: cannot write to standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("code", PRINTS.values(), ids=PRINTS)
def test_a_reader_that_is_gone_ends_a_command_without_a_word(tmp_path: Path, code: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = printed(tmp_path, code, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("code", PRINTS.values(), ids=PRINTS)
def test_a_standard_output_that_was_closed_is_wanted_by_nobody(tmp_path: Path, code: str) -> None:
    done = printed(tmp_path, code, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_path_that_is_no_text_is_printed_with_what_stands_for_its_bytes(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        done = printed(
            tmp_path,
            r"import typer; typer.echo('\udcff.jsonl')",
            stdout=out,
            env={**os.environ, "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"},
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_bytes() == rb"\udcff.jsonl" + b"\n"


def test_another_files_fault_is_not_told_as_standard_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: Any) -> int:
        with open("/dev/full", "w") as file:
            file.write("text")
        return 0

    monkeypatch.setitem(sys.modules, "halocline.serve", type(sys)("halocline.serve"))
    monkeypatch.setattr(sys.modules["halocline.serve"], "run_server", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        main(["serve"])


def test_help_needs_no_torch() -> None:
    code = "import sys; from halocline.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env={**os.environ})
    assert done.returncode == 0


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda each: f"{each.engine}{each.flag}")
def test_what_other_engines_flags_are_mapped_to_exists(foreign: Any) -> None:
    assert foreign.here is None or foreign.here in options.flag_names()
    if foreign.flag not in options.flag_names():
        assert foreign.engine in (explain(foreign.flag) or "")


def test_our_own_flags_are_not_taken_for_another_engines() -> None:
    assert [flag for flag in options.flag_names() if explain(flag)] == []


def test_ctrl_c_while_the_program_is_imported_is_no_traceback() -> None:
    program = (
        "import builtins, sys\n"
        "from halocline.__main__ import run\n"
        "whole = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'halocline.cli.main':\n"
        "        raise KeyboardInterrupt\n"
        "    return whole(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "sys.exit(run())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
