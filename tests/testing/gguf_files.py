"""Small GGUF files, as llama.cpp's converter writes them: a tiny Llama with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from testing.models import BOS, EOS, tiny_model, tiny_tokenizer

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(path: Path, *, architecture: str = "llama", with_tokenizer: bool = True) -> PreTrainedModel:
    """Write a tiny Llama in float32 to `path` and return the model that it holds."""
    model = tiny_model("llama", dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if with_tokenizer:
        _add_tokenizer(writer, config.vocab_size)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_values(name, tensor.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokenizer = tiny_tokenizer()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens += [f"<unused{i}>" for i in range(len(tokens), vocab_size)]
    merges = [" ".join(pair) for pair in _merges(tokenizer.backend_tokenizer.to_str())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and token.endswith(">") else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)


def _merges(text: str) -> list[list[str]]:
    return json.loads(text)["model"]["merges"]


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _gguf_values(name: str, values: np.ndarray, config: object) -> np.ndarray:
    # llama.cpp keeps the two halves of a rotary head interleaved.
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            rows, columns = values.shape
            halves = values.reshape(heads, 2, rows // heads // 2, columns)
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
    return values
