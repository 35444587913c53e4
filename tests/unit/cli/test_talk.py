"""`halocline generate` and `halocline chat` on a tiny model: what stands on the terminal, and with which exit code."""

from __future__ import annotations

import io

import pytest

from halocline.cli import chat
from halocline.cli.main import main
from halocline.config import Config
from testing.models import save_tiny

ARENA = ("--kv-bytes", "2MiB", "--threads", "1", "--step-tokens", "64", "--max-running-requests", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "gemma3", chat=True))


def test_one_prompt_stands_before_what_continues_it(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", folder, *ARENA, "--max-tokens", "8", "The sea"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The sea")
    assert len(out) > len("The sea\n")
    assert err == ""


def test_several_prompts_are_printed_in_their_order(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", folder, *ARENA, "--max-tokens", "8", "one", "two", "three"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one")
    assert out.index("\ntwo") < out.index("\nthree")


def test_of_a_prompt_that_is_refused_only_the_reason_is_printed(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The sea\n"))
    assert main(["generate", "--model", folder, *ARENA, "--max-tokens", "5000"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("halocline: ")
    assert "5000" in err


def test_without_a_prompt_it_says_how_to_give_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate"]) == 2
    assert "standard input was empty" in capsys.readouterr().err


def test_a_conversation_goes_on_starts_over_and_outlives_a_refusal(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["hi", "and", "/new", "hi", "long " * 1000, "/new", "hi", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(said) + "\n"))
    asked: list[list[str]] = []
    answer = chat._answer

    async def recorded(llm: object, messages: list[dict[str, str]], params: object) -> str:
        asked.append([message["role"] for message in messages])
        return await answer(llm, messages, params)  # type: ignore[arg-type]

    monkeypatch.setattr(chat, "_answer", recorded)
    assert main(["chat", folder, *ARENA, "--max-tokens", "8", "--system", "be brief"]) == 0
    err = capsys.readouterr().err
    first, second = ["system", "user"], ["system", "user", "assistant", "user"]
    assert asked == [first, second, first, second, first]
    assert "/new starts over" in err
    assert "full attention" not in err, "that is said of the default model"


def test_the_default_of_chat_is_an_instruct_model_and_it_says_which_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []

    async def nothing(config: Config, *_: object) -> None:
        models.append(config.model)

    monkeypatch.setattr(chat, "_converse", nothing)
    assert main(["chat"]) == 0
    assert models == ["smollm2-135m"]
    err = capsys.readouterr().err
    assert "instruct" in err
    assert "full attention" in err
    assert "base model" in err
