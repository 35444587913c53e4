"""Tiny random models of many families, and a tiny tokenizer: real transformers code, no downloads, milliseconds.

tiny_config("gemma3", sliding_window=9)     a config of the family's own class
tiny_model("gemma3")                        float64 (gpt-oss: float32), eager attention, fixed seed
reference_tokens(model, prompt, 20)         what transformers' own generate continues it with, greedily
save_tiny(tmp_path, "gemma3")               a model folder as people have them: config, safetensors, tokenizer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from halocline.model.loading import LoadedModel
from halocline.model.sources import ModelSource

VOCAB = 320
"""Rows of the embedding; the tokenizer uses the first `len(tiny_tokenizer())` of them."""
EOS, BOS, PAD = 1, 2, 0
WINDOW = 12
"""Window (or chunk) in tokens of every local layer: no multiple of a page of 8 or 16."""
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """How to build one family: its config class, what it needs beyond `_COMMON`, and the precision it can run in."""

    config_class: str
    extra: dict[str, Any]
    dtype: torch.dtype = torch.float64


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", {}),
    "mistral": Family("MistralConfig", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": Family("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": Family(
        "Qwen3Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "head_dim": 16}
    ),
    "gemma2": Family(
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": [SLIDING] * 3 + [FULL]},
    ),
    "cohere2": Family("Cohere2Config", {"head_dim": 16, "sliding_window": WINDOW, "logit_scale": 1.0}),
    # Its experts use a grouped product that has no float64 kernel.
    "gpt-oss": Family(
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        torch.float32,
    ),
    "phi3": Family("Phi3Config", {"sliding_window": WINDOW, "original_max_position_embeddings": 1024}),
    "llama4": Family(
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 1, 1, 0],
            "moe_layers": [],
            "num_local_experts": 2,
        },
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
        },
    ),
    "exaone4": Family("Exaone4Config", {"sliding_window": WINDOW, "layer_types": [SLIDING] * 3 + [FULL]}),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 4,
        },
    ),
    # Full layers with wider heads than the sliding ones, and two layers that reuse earlier K and V.
    "gemma4": Family(
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "ministral": Family(
        "MinistralConfig", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2}
    ),
    "olmo3": Family("Olmo3Config", {"sliding_window": WINDOW, "layer_types": [SLIDING] * 3 + [FULL]}),
    # Positions are learned, not rotary; every head has its own K and V.
    "gpt2": Family("GPT2Config", {"num_key_value_heads": 4, "n_positions": 1024}),
}
"""Every family that tests know; `SERVED` are those whose greedy tokens must equal `generate`."""

SERVED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "cohere2", "gpt-oss", "phi3")


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a tiny model; `overrides` are fields of the family's config class."""
    recipe = FAMILIES[family]
    config_class: Callable[..., PreTrainedConfig] = getattr(transformers, recipe.config_class)
    return config_class(**{**_COMMON, **recipe.extra, **overrides})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype | None = None, **overrides: Any) -> PreTrainedModel:
    """Return a tiny model with random weights: eval mode, eager attention, float64 unless the family cannot."""
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        _shake_constants(model)
    # to() must come last: initialising in float32 makes the same weights for every dtype.
    return model.to(dtype or FAMILIES[family].dtype).eval()


def tiny_loaded(
    family: str, *, seed: int = 0, dtype: torch.dtype | None = None, device: str = "cpu", **overrides: Any
) -> LoadedModel:
    """Return a tiny model as `halocline.model.loading.load` would."""
    model = tiny_model(family, seed=seed, dtype=dtype, **overrides).requires_grad_(False).to(device)
    config = model.config
    return LoadedModel(
        source=ModelSource(f"tiny-{family}", Path(), "folder"),
        model=model,
        config=config,
        dtype=dtype or FAMILIES[family].dtype,
        device=torch.device(device),
        eos_token_ids=(EOS,),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
    )


def _shake_constants(model: PreTrainedModel) -> None:
    # Fresh norms are constant, fresh biases and sinks zero: a backend that lost one would still pass.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.2)


def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the `tokens` tokens with which transformers' `generate` continues `prompt`, greedily, past any eos."""
    inputs = torch.tensor([list(prompt)], device=model.device)
    # generate fills what a given config leaves open from the model's own one, so eos must be removed there.
    model.generation_config.eos_token_id = None
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=PAD)
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    model.generation_config.eos_token_id = EOS
    return [int(token) for token in output[0, len(prompt) :]]


def tiny_prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return `tokens` random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (tokens,), generator=generator).tolist()


CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "one arena of bytes, many kinds of water: full attention, sliding windows",
    "a halocline is the line between two waters that share one basin",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: any text round-trips, and a character may span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", model_max_length=1024
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype | None = None, chat: bool = False, **overrides: Any
) -> Path:
    """Write a tiny model and the tokenizer into `folder` as people have them on disk, and return the folder."""
    tiny_model(family, seed=seed, dtype=dtype, **overrides).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder
