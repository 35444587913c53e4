"""From chat messages to the prompt: the model's own template, a file's, or a plain fallback that says it is one.

The fallback, for models without a template (base models):

    system: You are brief.
    user: Hello
    assistant:
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from halocline.errors import ConfigError, RequestError

FALLBACK_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How messages become token ids."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    is_fallback: bool
    """Whether the plain template stands in for a missing one: say so to the operator."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt as text.

        Raises RequestError when the template refuses the messages, for example an order of roles.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        assert isinstance(text, str), "tokenize=False gives text"
        return text

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the prompt as token ids. Templates write their own special tokens, so none are added.

        The fallback writes none: there the tokenizer adds what the model expects, such as a first <bos>.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        return self.tokenizer.encode(text, add_special_tokens=self.is_fallback)


def chat_template(tokenizer: PreTrainedTokenizerBase, file: str | None = None) -> ChatTemplate:
    """Return the template of `file` if one is given, else the tokenizer's own, else the fallback.

    Raises ConfigError when the file cannot be read or is no Jinja template.
    """
    if file is not None:
        return ChatTemplate(tokenizer, read_template(file), is_fallback=False)
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    return ChatTemplate(tokenizer, own or FALLBACK_TEMPLATE, is_fallback=not own)


def read_template(file: str) -> str:
    """Return the template in `file`; raises ConfigError when it cannot be read or is no Jinja template."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        jinja2.Environment(autoescape=False, extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read the chat template {file!r}: {error}"]) from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError([f"the chat template {file!r} is wrong in line {error.lineno}: {error.message}"]) from error
    return text
