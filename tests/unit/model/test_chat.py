"""Chat templates: the model's own, a file's, or the plain fallback that says it is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from halocline.errors import ConfigError, RequestError
from halocline.model.chat import chat_template
from testing.models import BOS, tiny_tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_the_models_own_template_is_used() -> None:
    template = chat_template(tiny_tokenizer(chat=True))
    assert not template.is_fallback
    assert template.render(MESSAGES) == "[system] be brief\n[user] hello\n[assistant] "
    assert template.render(MESSAGES, add_generation_prompt=False) == "[system] be brief\n[user] hello\n"


def test_without_one_the_fallback_says_that_it_is_one() -> None:
    template = chat_template(tiny_tokenizer())
    assert template.is_fallback
    assert template.render(MESSAGES) == "system: be brief\nuser: hello\nassistant:"


def test_a_file_wins_over_the_models_own(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    template = chat_template(tiny_tokenizer(chat=True), str(path))
    assert not template.is_fallback
    assert template.render(MESSAGES) == "<be brief><hello>"


def test_token_ids_are_those_of_the_text() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    template = chat_template(tokenizer)
    assert tokenizer.decode(template.encode(MESSAGES)) == template.render(MESSAGES)


def test_special_tokens_in_a_template_become_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ bos_token }}{{ messages[0].content }}")
    assert chat_template(tiny_tokenizer(), str(path)).encode(MESSAGES)[0] == BOS


def test_messages_that_the_template_refuses_are_the_clients_fault(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        chat_template(tiny_tokenizer(), str(path)).render(MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_with_an_error_is_found_at_start(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("one\n{% for %}")
    with pytest.raises(ConfigError, match="is wrong in line 2"):
        chat_template(tiny_tokenizer(), str(path))


def test_a_missing_template_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the chat template .*none\.jinja"):
        chat_template(tiny_tokenizer(), str(tmp_path / "none.jinja"))
