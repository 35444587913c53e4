"""GGUF files become model folders, once: `transformers` needs a minute to unpack one, a folder loads in seconds.

Quantised weights are unpacked to bfloat16; a file of plain floats keeps its type.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import gguf
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    modeling_gguf_pytorch_utils,
)

from halocline.errors import ModelError
from halocline.model.gguf_header import GgufHeader, read_gguf_header
from halocline.model.progress import Stages, transformers_is_silent

STAGES = ("reading the file", "converting the tokenizer", "unpacking the weights", "writing the weights")


def convert_gguf(path: Path, folder: Path, stages: Stages) -> None:
    """Write the model and tokenizer of the GGUF file at `path` into `folder`; advances `stages` by `STAGES`.

    Raises ModelError for a damaged file, or one of an architecture that `transformers` cannot read.
    """
    header = read_gguf_header(path)
    if not header.has_tokenizer:
        raise ModelError(f"the GGUF file {str(path)!r} holds no tokenizer; use one made with its vocabulary")
    try:
        with transformers_is_silent(), _file_parsed_once():
            _convert(path, folder, stages, _dtype(header))
    except Exception as error:  # the file's values go through three libraries, and each has its own way to fail
        raise ModelError(
            f"cannot convert the GGUF file {str(path)!r} of architecture {header.architecture!r}: {error}"
        ) from error


def gguf_config(path: Path) -> PreTrainedConfig:
    """Return the config of the GGUF file at `path`, with the type that its converted weights would have.

    No weights are read. Raises ModelError for a damaged file, or one of an unknown architecture.
    """
    header = read_gguf_header(path)
    try:
        with transformers_is_silent():
            config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # the file's values go through three libraries, and each has its own way to fail
        raise ModelError(
            f"cannot read the config of the GGUF file {str(path)!r} of architecture {header.architecture!r}: {error}"
        ) from error
    config.dtype = _dtype(header)
    return config


def _convert(path: Path, folder: Path, stages: Stages, dtype: torch.dtype) -> None:
    place, name = str(path.parent), path.name
    with stages.stage():
        config = AutoConfig.from_pretrained(place, gguf_file=name)
    with stages.stage():
        AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    with stages.stage():
        quantization = GgufConfig(gguf_file=name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, config=config, dtype=dtype, quantization_config=quantization
        )
    with stages.stage():
        # What is saved is an ordinary model: without this it would ask for the GGUF file when loaded.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.config.name_or_path = path.stem
        model.save_pretrained(folder)


def _dtype(header: GgufHeader) -> torch.dtype:
    # Norms are F32 in every file, so the type of the matrices is the other one.
    matrices = header.types - {"F32"}
    if not matrices:
        return torch.float32
    return torch.float16 if matrices == {"F16"} else torch.bfloat16


@contextmanager
def _file_parsed_once() -> Iterator[None]:
    # transformers parses the file anew for config, tokenizer and weights, ten seconds each for 262,144 tokens, and
    # draws a bar of its own that no setting hides.
    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items),
    ):
        yield
