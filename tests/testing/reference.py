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


def compare(reference: Reference, expected: list[str], answer: list[str]) -> str:
    """Return "equal", "tie" (the first difference is where the reference itself is undecided) or "different".

    `expected` are the reference's tokens in the spelling of `answer`, possibly without an end-of-sequence token.
    """
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
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    try:
        for path, text in missing:
            reference = _generate(model, tokenizer.encode(text), max_tokens)
            staging = path.with_suffix(f".{os.getpid()}")
            staging.write_text(json.dumps(asdict(reference)))
            staging.rename(path)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _generate(model: transformers.PreTrainedModel, prompt: list[int], max_tokens: int) -> Reference:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].float().topk(2).values.tolist() for logits in made.logits]
    return Reference(prompt, made.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best])
