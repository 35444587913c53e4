"""The table of fields: complete, free of contradictions, and printed in the documentation as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from halocline.api.fields import BOTH, FIELDS, table
from halocline.api.requests import SAMPLING
from halocline.params import SamplingParams

DOCUMENT = Path(__file__).parents[3] / "docs" / "api.md"


def names(endpoint: str) -> set[str]:
    return {field.name for field in FIELDS if endpoint in field.endpoints}


def test_the_documentation_prints_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    printed = text.split("-->\n", 1)[1].split("<!-- end of fields -->")[0]
    assert printed == table(), "run `python -m halocline.api.fields` and paste its output into docs/api.md"
    told = subprocess.run([sys.executable, "-m", "halocline.api.fields"], capture_output=True, text=True, check=True)
    assert told.stdout == table()


def test_each_field_stands_once_for_each_endpoint() -> None:
    for endpoint in BOTH:
        found = [field.name for field in FIELDS if endpoint in field.endpoints]
        assert len(found) == len(set(found))


def test_every_field_of_the_official_client_has_a_treatment() -> None:
    chat = chat_create_params.CompletionCreateParamsBase.__annotations__
    completions = completion_create_params.CompletionCreateParamsBase.__annotations__
    missing = (set(chat) - names("chat")) | (set(completions) - names("completions"))
    assert not missing, f"each must be decided on, not discovered by a user: {missing}"


def test_every_sampling_parameter_can_be_sent() -> None:
    sent = {"logprobs", *SAMPLING}
    assert sent == set(SamplingParams.__struct_fields__)
