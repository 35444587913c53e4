"""One prefill and one decode process: the tokens are those of one process, and no byte travels that need not.

Page-exact bytes of a prompt of L tokens, of which the decode worker has `start` cached: full pages from start / P to
ceil(L / P), window pages from floor_P(max(0, L - W + 1)) on, and not below `start`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from halocline.config import Config
from testing.models import VOCAB, WINDOW, reference_tokens, save_tiny, tiny_model, tiny_prompt
from testing.pair import Client, check_bytes, metrics, page_exact_bytes, pair
from testing.server import LiveServer

TOKENS = 8
STEP_TOKENS = 96
PROMPTS = 50


def tiny_prompts() -> list[list[int]]:
    """Short and long ones, some of many chunks, and every fifth begins as the one before it."""
    lengths = [(number * 37) % 300 + 1 for number in range(PROMPTS)] + [700, 1, 15, 16, 17, 96, 97]
    found: list[list[int]] = []
    for number, length in enumerate(lengths[-PROMPTS:]):
        prompt = tiny_prompt(length, seed=number)
        found.append(found[-1] + prompt[:40] if number % 5 == 4 else prompt)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = save_tiny(tmp_path_factory.mktemp("pair"), "gemma3")
    return Config(
        model=str(folder),
        dtype="float64",
        threads=1,
        kv_bytes="4MiB",
        step_tokens=STEP_TOKENS,
        max_running_requests=8,
        audit="every",
        log_level="error",
        lease_seconds=10.0,
    )


@pytest.fixture(scope="module")
def shared(base: Config) -> Iterator[tuple[Client, LiveServer, LiveServer]]:
    """One pair for the tests that leave it as they found it."""
    with client(base) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = tiny_model("gemma3")
    return [reference_tokens(model, prompt, TOKENS) for prompt in tiny_prompts()]


@contextmanager
def client(base: Config, **decode: Any) -> Iterator[tuple[Client, LiveServer, LiveServer]]:
    with pair(base, decode=decode) as (first, second):
        asking = Client(first, second)
        with asking.http:
            yield asking, first, second


@pytest.mark.parametrize("link_kind", ["shm", pytest.param("tcp", marks=pytest.mark.e2e)])
def test_50_prompts_have_the_tokens_of_generate_and_only_what_lacks_travels(
    base: Config, expected: list[list[int]], link_kind: str
) -> None:
    with client(replace(base, link_kind=link_kind)) as (asking, prefill, decode):
        exact = cached = 0
        for prompt, wanted in zip(tiny_prompts(), expected, strict=True):
            tokens, usage = asking.ask(prompt, TOKENS, ignore_eos=True)
            assert tokens == wanted
            start = usage["prompt_tokens_details"]["cached_tokens"]
            cached += start
            exact += page_exact_bytes(decode, len(prompt), start, WINDOW)
        assert cached > 0, "no prompt found its beginning cached at the decode worker"
        check_bytes(prefill, decode, exact)
        here = metrics(decode)
        assert here["halocline_transfer_received_total"] == PROMPTS
        assert here["halocline_violations_total"] == metrics(prefill)["halocline_violations_total"] == 0


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("link_kind", "page_tokens"),
    [("shm", "full=4,sliding-12=8"), ("tcp", "full=32,sliding-12=1")],
)
def test_workers_with_other_page_lengths_understand_each_other(
    base: Config, expected: list[list[int]], link_kind: str, page_tokens: str
) -> None:
    with client(replace(base, link_kind=link_kind), page_tokens=page_tokens) as (asking, _, decode):
        for prompt, wanted in list(zip(tiny_prompts(), expected, strict=True))[::4]:
            assert asking.ask(prompt, TOKENS, ignore_eos=True)[0] == wanted
        assert metrics(decode)["halocline_violations_total"] == 0


def test_who_does_not_know_the_secret_cannot_make_a_worker_dial(shared: tuple[Client, LiveServer, LiveServer]) -> None:
    asking, _, decode = shared
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    for token in ({}, {"x-halocline-link-token": "a guess"}):
        headers = {"x-halocline-prefill": "tcp://10.0.0.1:1"} | token
        answer = httpx.post(f"{decode.url}/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "link_token")
        assert httpx.get(f"{decode.url}/v1/worker", headers=token).status_code == 403
    wrong = asking.headers | {"x-halocline-prefill": "http://10.0.0.1:1"}
    answer = httpx.post(f"{decode.url}/v1/completions", json=body, headers=wrong)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_link_address")
    assert metrics(decode)["halocline_transfer_peers"] == 0


def test_nobody_at_the_link_is_an_error_that_says_another_may_be_tried(
    shared: tuple[Client, LiveServer, LiveServer],
) -> None:
    asking, _, decode = shared
    nowhere = asking.headers | {"x-halocline-prefill": "tcp://127.0.0.1:9"}
    for stream in (False, True):
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "stream": stream}
        answer = httpx.post(f"{decode.url}/v1/completions", json=body, headers=nowhere, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "prefill_lost"), answer.text
    assert asking.ask([5, 6, 7], 2)[1]["completion_tokens"] >= 1
    decode.wait_idle()


@pytest.mark.e2e
def test_two_models_do_not_take_each_others_pages(base: Config, tmp_path: Path) -> None:
    other = save_tiny(tmp_path, "gemma3", seed=1)
    with client(base, model=str(other)) as (asking, prefill, _):
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        answer = asking.http.post("/v1/completions", json=body, headers=asking.headers)
        assert answer.status_code == 503
        assert "its model is" in json.dumps(answer.json())
        assert prefill.snapshot.figures is not None
        assert VOCAB > 7
