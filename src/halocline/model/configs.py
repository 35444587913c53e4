"""What is known of a model without its weights: its config and its tokenizer.

    load_config(source)        the calculator, and the front end before anything is started
    load_tokenizer(source)     the front end

Imports none of the models' code, which takes transformers as long as all the rest: a server says at once what it cannot
serve.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from halocline.errors import ModelError
from halocline.model.folder import has_tokenizer, read_config
from halocline.model.layers import kv_layers
from halocline.model.progress import transformers_is_silent
from halocline.model.sources import ModelSource


def load_config(source: ModelSource) -> PreTrainedConfig:
    """Return the model's config. Raises ModelError when its architecture cannot be served."""
    raw = read_config(source.folder)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str | None):
        raise ModelError(f"the config of {source.name!r} has model_type {model_type!r:.60}; it must be a name")
    if model_type not in CONFIG_MAPPING and "auto_map" in raw and not source.trust_remote_code:
        raise ModelError(
            f"{source.name!r} brings Python code of its own ({model_type!r} is not in transformers); "
            f"if you trust it, start with --trust-remote-code"
        )
    try:
        with transformers_is_silent():
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # a config that lies can fail anywhere in its family's class
        raise ModelError(f"cannot use the config of {source.name!r}: {first_line(error)}") from error
    _check_architecture(source, config, raw)
    return config


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. Raises ModelError when the folder has none, or one that cannot be read."""
    check_tokenizer(source)
    try:
        with transformers_is_silent():
            return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot parse
        raise ModelError(f"cannot read the tokenizer of {source.name!r}: {first_line(error)}") from error


def check_tokenizer(source: ModelSource) -> None:
    """Raise ModelError when the folder has no tokenizer, without reading one."""
    if not has_tokenizer(source.folder) and not source.trust_remote_code:
        raise ModelError(
            f"{source.name!r} has no tokenizer: {str(source.folder)!r} lacks tokenizer.json; "
            f"copy it from the original model"
        )


def _check_architecture(source: ModelSource, config: PreTrainedConfig, raw: dict[str, Any]) -> None:
    remote = "AutoModelForCausalLM" in raw.get("auto_map", {}) and source.trust_remote_code
    if config.is_encoder_decoder:
        raise ModelError(f"{source.name!r} is an encoder-decoder ({config.model_type}); only decoders are served")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise ModelError(f"{source.name!r} is of type {config.model_type!r}, which is not a causal language model")
    kv_layers(config, 2)


def first_line(error: Exception) -> str:
    """Return what an error of a library says first; the rest is often a page of advice."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
