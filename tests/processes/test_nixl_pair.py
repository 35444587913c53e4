"""One prefill and one decode process whose pages go by the NIXL library, over TCP on loopback; `make nixl` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from halocline.config import Config
from halocline.disagg.nixl_agent import missing
from testing.models import WINDOW, reference_tokens, save_tiny, tiny_model, tiny_prompt
from testing.pair import Client, check_bytes, link_of, metrics, page_exact_bytes, pair

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.e2e]

TOKENS = 8
LENGTHS = (1, 15, 16, 17, 96, 97, 300, 301, 300, 700)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return Config(
        model=str(save_tiny(tmp_path, "gemma3")),
        dtype="float64",
        threads=1,
        kv_bytes="4MiB",
        step_tokens=96,
        max_running_requests=8,
        audit="every",
        log_level="error",
        link_kind="nixl",
    )


@pytest.mark.parametrize("page_tokens", [None, "full=4,sliding-12=8"])
def test_prompts_have_the_tokens_of_generate_and_only_what_lacks_travels(base: Config, page_tokens: str | None) -> None:
    model = tiny_model("gemma3")
    prompts = [tiny_prompt(length, seed=length) for length in LENGTHS]
    with pair(base, decode={} if page_tokens is None else {"page_tokens": page_tokens}) as (prefill, decode):
        assert link_of(prefill).startswith("nixl://127.0.0.1:")
        asking = Client(prefill, decode)
        exact = 0
        with asking.http:
            for prompt in prompts:
                tokens, usage = asking.ask(prompt, TOKENS, ignore_eos=True)
                assert tokens == reference_tokens(model, prompt, TOKENS)
                start = usage["prompt_tokens_details"]["cached_tokens"]
                exact += page_exact_bytes(decode, len(prompt), start, WINDOW)
        if page_tokens is None:
            check_bytes(prefill, decode, exact)
        assert metrics(decode)["halocline_transfer_received_total"] == len(prompts)
        assert metrics(decode)["halocline_violations_total"] == metrics(prefill)["halocline_violations_total"] == 0


def test_a_decode_worker_that_was_not_started_for_it_reports_why(base: Config) -> None:
    with pair(base, decode={"link_kind": "shm"}) as (prefill, decode):
        asking = Client(prefill, decode)
        with asking.http:
            answer = asking.http.post(
                "/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2}, headers=asking.headers
            )
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "prefill_lost"
    assert "--link-kind nixl" in answer.json()["error"]["message"]
