"""What transformers' own `generate` says, greedily, and how far its two best logits lie apart; cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from halocline.model.sources import resolve

BATCH = 10
"""Prompts that `generate` continues at once."""
TIE = 1e-4
"""Two logits nearer than this may change places in float32: the order of additions differs."""


@dataclass(frozen=True)
class Reference:
    """One prompt's tokens and what `generate` continued it with."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    """Best logit less second best, at each place."""


def greedy_references(model_name: str, texts: list[str], max_tokens: int) -> list[Reference]:
    """Return a float32 reference for each text; computed once per text, then read from HALOCLINE_CACHE."""
    source = resolve(model_name, quiet=True)
    folder = _cache_folder(source.name)
    paths = [folder / f"{_key(source.folder, text, max_tokens)}.json" for text in texts]
    missing = [(path, text) for path, text in zip(paths, texts, strict=True) if not path.exists()]
    if missing:
        _compute(source.folder, missing, max_tokens)
    return [Reference(**json.loads(path.read_text())) for path in paths]


def compare(reference: Reference, answer: list[int]) -> str:
    """Return "equal", "tie" (the first difference is where the reference itself is undecided) or "different".

    Both end with the end-of-sequence token where there was one.
    """
    expected = reference.tokens
    if answer == expected:
        return "equal"
    both = zip(expected, answer, strict=False)
    place = next((i for i, (left, right) in enumerate(both) if left != right), min(len(expected), len(answer)))
    return "tie" if place < len(reference.gaps) and reference.gaps[place] <= TIE else "different"


def _cache_folder(name: str) -> Path:
    root = Path(os.environ.get("HALOCLINE_CACHE") or Path.home() / ".cache" / "halocline")
    folder = root / "references" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key(folder: Path, text: str, max_tokens: int) -> str:
    weights = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    said = json.dumps([weights, text, max_tokens, transformers.__version__, "float32"])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _compute(folder: Path, missing: list[tuple[Path, str]], max_tokens: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Prompts of like length together, so that a batch holds little padding.
    ordered = sorted(((path, tokenizer.encode(text)) for path, text in missing), key=lambda each: len(each[1]))
    for first in range(0, len(ordered), BATCH):
        batch = ordered[first : first + BATCH]
        made = _generate(model, [prompt for _, prompt in batch], max_tokens)
        for (path, _), reference in zip(batch, made, strict=True):
            staging = path.with_suffix(f".{os.getpid()}")
            staging.write_text(json.dumps(asdict(reference)))
            staging.rename(path)


@torch.inference_mode()
def _generate(model: transformers.PreTrainedModel, prompts: list[list[int]], max_tokens: int) -> list[Reference]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = made.sequences[:, longest:].tolist()
    best = torch.stack([logits.float().topk(2).values for logits in made.logits], dim=1)
    gaps = (best[..., 0] - best[..., 1]).tolist()
    ends = _ends(model)
    return [
        Reference(prompt, row[:length], gap[:length])
        for prompt, row, gap in zip(prompts, tokens, gaps, strict=True)
        for length in [next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]
    ]


def _ends(model: transformers.PreTrainedModel) -> set[int]:
    """Return the tokens after which a row of the batch is padding."""
    given = model.generation_config.eos_token_id
    return set(given) if isinstance(given, list) else {given}
