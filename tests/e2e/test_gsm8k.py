"""Law L11 end to end: real weights, real questions, the launched server, a small arena; tokens equal to `generate`.

200 questions with 64 greedy tokens each (20 with 32 in `make test`), all sent at once, in float32. First come 40
answers of a token or two, so that the engine grants little and must retract when the long ones come: that this happens
is asserted. A token that differs counts, unless the reference's own two best logits lie within 1e-4 there; both counts
are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest

from halocline.cli.watch import RETRACTIONS, needed_bytes, until_idle
from halocline.config import Config
from halocline.serve import running_server
from testing.reference import compare, greedy_references

MODEL = "gemma3-270m"
SHORT_ANSWERS = 40
"""Enough that the engine trusts what it saw (32), of the same class of max_tokens as the questions."""


@pytest.mark.parametrize(
    ("questions", "max_tokens", "kv_bytes", "threads"),
    [
        # Beside another process of tests threads that wait for each other take five times as long as one.
        pytest.param(20, 32, "20MiB", 1, id="20"),
        pytest.param(200, 64, "64MiB", None, id="200", marks=pytest.mark.e2e),
    ],
)
@pytest.mark.timeout(3600)
def test_served_tokens_equal_those_of_generate(
    data_folder: Path, questions: int, max_tokens: int, kv_bytes: str, threads: int | None
) -> None:
    lines = (data_folder / "gsm8k_test_400.jsonl").read_text(encoding="utf-8").splitlines()[:questions]
    texts = [json.loads(line)["question"] for line in lines]
    references = greedy_references(MODEL, texts, max_tokens)
    config = Config(
        model=MODEL,
        dtype="float32",
        port=0,
        kv_bytes=kv_bytes,
        admission="expected:0.05",
        log_level="warning",
        threads=threads or len(os.sched_getaffinity(0)),
    )
    with running_server(config) as server:
        answers, figures = asyncio.run(ask(server.url, texts, max_tokens))
    assert server.process.returncode == 0, list(server.lines)
    verdicts = [compare(reference, answer) for reference, answer in zip(references, answers, strict=True)]
    equal, ties, different = (verdicts.count(word) for word in ("equal", "tie", "different"))
    retractions = int(figures[RETRACTIONS])
    print(
        f"\n{questions} questions: {equal} equal, {ties} differ where the reference is tied, {different} differ; "
        f"{retractions} retractions"
    )
    assert different == 0, [texts[i][:60] for i, verdict in enumerate(verdicts) if verdict == "different"]
    assert retractions > 0, "the arena was large enough: nothing was tested"
    assert needed_bytes(figures) == 0, "bytes are still needed after the last answer"
    assert figures["halocline_violations_total"] == 0


async def ask(url: str, texts: list[str], max_tokens: int) -> tuple[list[list[int]], dict[str, float]]:
    """Return each answer's token ids, and the server's figures after all of it."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def one(prompt: str, **wishes: object) -> list[int]:
            # Ids, not text: every byte of a character that is cut into tokens has the same text.
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **wishes}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return list(response.json()["choices"][0]["token_ids"])

        await asyncio.gather(*(one("The answer is", stop=[" ", "\n", "."]) for _ in range(SHORT_ANSWERS)))
        answers = await asyncio.gather(*map(one, texts))
    return list(answers), await until_idle(url)
