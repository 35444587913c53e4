"""The output head's other way of computing: the same numbers, and only where it is meant to be used."""

from __future__ import annotations

import platform

import pytest
import torch

from halocline.model.head import MAX_ROWS, FewRowsLinear, speed_up_head
from testing.models import tiny_model

VOCAB = 20_000


@pytest.fixture
def is_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize("rows", [0, 1, 2, 16, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_the_result_is_that_of_a_linear(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 300, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(1, rows, 48, dtype=torch.bfloat16)
    expected = linear.double()(x.double())
    linear.bfloat16().__class__ = FewRowsLinear
    with torch.inference_mode():
        found = linear(x)
    assert found.shape == (1, rows, 300)
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("is_x86")
def test_a_tied_head_stays_tied() -> None:
    model = tiny_model("gemma3", dtype=torch.bfloat16, vocab_size=VOCAB, tie_word_embeddings=True)
    assert speed_up_head(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight.shape == (VOCAB, 64)


@pytest.mark.usefixtures("is_x86")
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, VOCAB), (torch.bfloat16, 320)])
def test_other_heads_are_left_alone(dtype: torch.dtype, vocab: int) -> None:
    model = tiny_model("llama", dtype=dtype, vocab_size=vocab)
    assert not speed_up_head(model)
    assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_other_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not speed_up_head(tiny_model("llama", dtype=torch.bfloat16, vocab_size=VOCAB))
