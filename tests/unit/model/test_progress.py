"""What is said while a model is fetched and converted: a bar on a terminal, one log line per stage elsewhere."""

from __future__ import annotations

import logging

import pytest
import rich.console
from transformers.utils import logging as transformers_logging

from halocline.llm import progress_bar
from halocline.model.progress import Stages, transformers_is_silent


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console.Console, "is_terminal", True)


def run_stages(*, quiet: bool = False) -> None:
    with Stages("water", ("fetching", "unpacking"), quiet=quiet) as stages:
        for _ in range(2):
            with stages.stage():
                pass


def test_off_a_terminal_each_stage_is_a_log_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="halocline")
    run_stages()
    assert caplog.messages == [f"event=model_stage model=water stage='{stage}'" for stage in ("fetching", "unpacking")]
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_a_bar_names_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    run_stages()
    out, err = capsys.readouterr()
    assert out == "", "a program's output may go into a pipe"
    assert "water" in err
    assert "2/2" in err


@pytest.mark.usefixtures("terminal")
def test_quiet_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    run_stages(quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("shown", "words"), [(True, "2/2"), (False, "")])
def test_a_batch_shows_how_many_prompts_are_done(capsys: pytest.CaptureFixture[str], shown: bool, words: str) -> None:
    with progress_bar(2, shown=shown) as advance:
        advance()
        advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert bool(err) == shown


def test_transformers_gets_its_voice_back() -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    with transformers_is_silent():
        assert transformers_logging.get_verbosity() == logging.CRITICAL
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    with pytest.raises(ZeroDivisionError), transformers_is_silent():
        raise ZeroDivisionError
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
