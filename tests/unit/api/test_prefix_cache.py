"""What clients see of the prefix cache: cached tokens in usage, salts that keep them apart. On the fake and on the real
scheduler, arena and tree (before a fake model)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from testing.engine import fake_spec, ids_of
from testing.server import LiveServer, events, live_server, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "A prompt of more than two whole granules, whatever they are: " + "it goes on and on, " * 12


@pytest.fixture(scope="module", params=["build", "build_on_arena"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live_server(spec=fake_spec(request.param, reply="Hé 😀 {prompt}")) as live:
        yield live


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


def ask(http: httpx.Client, path: str = COMPLETIONS, **body: Any) -> tuple[str, dict[str, Any]]:
    response = http.post(path, json={"max_tokens": 12, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice, *_), used = answer["choices"], answer["usage"]
    return choice.get("text") or choice["message"]["content"], used


def cached(used: dict[str, Any]) -> int:
    return int(used["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_that_was_answered_before_is_cached_and_answered_alike(http: httpx.Client) -> None:
    prompt = "first " + LONG
    first, cold = ask(http, prompt=prompt)
    second, hot = ask(http, prompt=prompt)
    assert cached(cold) == 0
    assert 0 < cached(hot) < hot["prompt_tokens"] == cold["prompt_tokens"]
    assert cached(hot) % 16 == 0, "whole granules"
    assert first == second
    assert hot["total_tokens"] == hot["prompt_tokens"] + hot["completion_tokens"], "cached tokens are prompt tokens"


def test_a_chat_that_was_answered_before_is_cached(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "chat " + LONG}, {"role": "user", "content": "u"}]
    assert cached(ask(http, CHAT, messages=messages)[1]) == 0
    assert cached(ask(http, CHAT, messages=messages)[1]) > 0


def test_salts_keep_prefixes_apart(http: httpx.Client) -> None:
    prompt = "salted " + LONG
    found = {}
    for salt in ("a", "a", "b", "b", None, None):
        body = {} if salt is None else {"cache_salt": salt}
        found.setdefault(salt, []).append(cached(ask(http, prompt=prompt, **body)[1]))
    for salt, (cold, hot) in found.items():
        assert cold == 0, f"salt {salt!r} saw another one's prefix, which had just been found"
        assert hot > 0


def test_a_null_salt_is_none(http: httpx.Client) -> None:
    prompt = "null " + LONG
    ask(http, prompt=prompt)
    assert cached(ask(http, prompt=prompt, cache_salt=None)[1]) > 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("salt", [7, True, ["a"], {"a": 1}, "", "s" * 257])
def test_a_salt_that_is_none_is_a_400_that_names_it(http: httpx.Client, path: str, salt: object) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "u"}]}
    response = http.post(path, json=body | {"cache_salt": salt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_at_its_end_what_was_cached(http: httpx.Client, path: str) -> None:
    prompt = f"stream {path} " + LONG
    body: dict[str, Any] = (
        {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    )
    body |= {"max_tokens": 12, "stream_options": {"include_usage": True}}
    usages = [events(http, path, **body)[-1]["usage"] for _ in range(2)]
    assert cached(usages[0]) == 0
    assert cached(usages[1]) > 0


def test_the_openai_client_reads_it(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answers = [
            client.completions.create(
                model="fake", prompt="client " + LONG, max_tokens=4, extra_body={"cache_salt": "openai"}
            )
            for _ in range(2)
        ]
    cold, hot = (answer.usage for answer in answers)
    assert cold is not None
    assert hot is not None
    assert cold.prompt_tokens_details is not None
    assert hot.prompt_tokens_details is not None
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert (hot.prompt_tokens_details.cached_tokens or 0) > 0


def test_of_several_choices_only_what_all_found_is_saved(http: httpx.Client) -> None:
    prompt = "choices " + LONG
    _, cold = ask(http, prompt=prompt, n=4)
    _, hot = ask(http, prompt=prompt, n=4)
    assert cached(cold) == 0, "one of the choices computed the prompt"
    assert 0 < cached(hot) < hot["prompt_tokens"]


def test_of_several_prompts_the_cached_ones_are_summed(http: httpx.Client) -> None:
    known, new = "known " + LONG, "new " + LONG
    one = cached(ask(http, prompt=known)[1]) or cached(ask(http, prompt=known)[1])
    _, used = ask(http, prompt=[known, new, known])
    assert cached(used) == 2 * one
    assert used["prompt_tokens"] == 2 * len(ids_of(known)) + len(ids_of(new))


def test_a_short_prompt_is_never_cached(http: httpx.Client) -> None:
    assert [cached(ask(http, prompt="x" * 16)[1]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("builder", ["build", "build_on_arena"])
def test_the_metrics_count_what_was_looked_up_and_found(builder: str) -> None:
    with (
        live_server(spec=fake_spec(builder, reply="Hé {prompt}")) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
    ):
        hot = [ask(http, prompt=LONG)[1] for _ in range(2)][1]

        def metric(name: str) -> str:
            lines = http.get("/metrics").text.splitlines()
            return next((line.rpartition(" ")[2] for line in lines if line.startswith(f"halocline_{name} ")), "")

        looked_up = float(2 * len(ids_of(LONG)))
        wait_until(lambda: metric("prefix_lookup_tokens_total") == str(looked_up), "both lookups in the figures")
        assert metric("prefix_hit_tokens_total") == str(float(cached(hot)))
        assert metric('prefix_lookups_total{reason="not keyed"}') == "1.0"
        assert metric('prefix_lookups_total{reason="whole"}') == "1.0"
        assert metric('evicted_pages_total{pool="full"}') == "0.0"
        assert metric("prefix_nodes") != ""


@pytest.mark.parametrize("builder", ["build", "build_on_arena"])
def test_without_a_cache_nothing_is_cached_and_no_metric_speaks_of_one(builder: str) -> None:
    with (
        live_server(spec=fake_spec(builder, reply="Hé {prompt}", prefix_cache=False)) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
    ):
        assert [cached(ask(http, prompt=LONG)[1]) for _ in range(2)] == [0, 0]
        server.wait_idle()
        assert "halocline_prefix" not in http.get("/metrics").text


class TestOnTheRealScheduler:
    """What only the shipped tree can show; the server is its own, so that nothing else is cached in it."""

    @pytest.fixture
    def real(self) -> Iterator[LiveServer]:
        with live_server(spec=fake_spec("build_on_arena", reply="Hé 😀 {prompt}", step_seconds=0.002)) as live:
            yield live

    def test_prompts_that_begin_alike_share_the_beginning(self, real: LiveServer) -> None:
        with httpx.Client(base_url=real.url, timeout=60.0) as http:
            assert cached(ask(http, prompt=LONG + "one end " * 8)[1]) == 0
            assert cached(ask(http, prompt=LONG + "another " * 8)[1]) >= 0, "the window before a new branch may be gone"
            third = cached(ask(http, prompt=LONG + "a third " * 8)[1])
        assert len(ids_of(LONG)) - 16 <= third + 16
        assert third <= len(ids_of(LONG)), "no token beyond what they share"

    async def test_eight_equal_prompts_at_once_get_one_text_and_are_computed_by_somebody(
        self, real: LiveServer
    ) -> None:
        async with httpx.AsyncClient(base_url=real.url, timeout=60.0) as http:

            async def one() -> dict[str, Any]:
                response = await http.post(COMPLETIONS, json={"prompt": LONG, "max_tokens": 30})
                assert response.status_code == 200
                return dict(response.json())

            answers = await asyncio.gather(*(one() for _ in range(8)))
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        real.wait_idle()
        assert real.snapshot.violations == ()
        assert real.snapshot.counters["defects"] == 0
        found = sorted(cached(answer["usage"]) for answer in answers)
        assert found[0] == 0, "somebody computed it"
        assert found[-1] < answers[0]["usage"]["prompt_tokens"], "nobody computed nothing"

    async def test_what_an_aborted_request_computed_is_cached_for_the_next(self, real: LiveServer) -> None:
        async with httpx.AsyncClient(base_url=real.url, timeout=60.0) as http:
            body = {"prompt": LONG, "max_tokens": 400, "ignore_eos": True}
            async with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line:
                        break
            again = (await http.post(COMPLETIONS, json={"prompt": LONG, "max_tokens": 4})).json()
        assert cached(again["usage"]) > 0
        real.wait_idle()
        assert real.snapshot.violations == ()
