"""A router with workers that answer: what goes through, what is added, what is kept back."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from halocline.api.routing import app as router_app
from testing.server import until
from testing.workers import TOKEN, Asked, FakeWorker, answer_error, answer_never, opening, routed

LONG = "the beginning of a long story " * 40


async def test_an_answer_goes_through_with_its_status_body_and_headers() -> None:
    async with routed() as router:
        response = await router.complete("Hi")
        assert response.status_code == 200
        assert response.json() == {"choices": [{"index": 0, "text": "decode-0", "finish_reason": "stop"}]}
        assert response.headers["x-request-id"] == "of-worker"
        asked = router.decode[0].asked[0]
        assert (asked.method, asked.path, asked.body) == ("POST", "/v1/completions", {"prompt": "Hi"})


async def test_chat_and_models_go_to_the_same_paths() -> None:
    async with routed(prefill=1) as router:
        await router.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        await router.http.get("/v1/models")
        await router.http.get("/v1/models/a%2Fb")
        asked = router.decode[0].asked
        paths = ["/v1/chat/completions", "/v1/models", "/v1/models/a%2Fb"]
        assert [each.path for each in asked] == paths
        assert ["x-halocline-prefill" in each.headers for each in asked] == [True, False, False]


async def test_a_request_is_sent_with_the_link_address_of_the_prefill_worker_and_the_token() -> None:
    async with routed(prefill=1) as router:
        await router.who()
        headers = router.decode[0].asked[0].headers
        assert headers["x-halocline-prefill"] == "tcp://prefill-0:1"
        assert headers["x-halocline-link-token"] == TOKEN


async def test_what_a_client_sends_under_our_names_never_reaches_a_worker() -> None:
    sent = {
        "x-halocline-prefill": "tcp://evil:1",
        "x-halocline-link-token": "guess",
        "X-Halocline-Other": "1",
        "cookie": "c",
    }
    async with routed() as router:
        await router.http.post("/v1/completions", json={"prompt": "Hi"}, headers=sent)
        headers = router.decode[0].asked[0].headers
        assert not [name for name in headers if name.startswith("x-halocline")]
        assert "cookie" not in headers


async def test_without_a_living_prefill_worker_requests_go_without_its_header() -> None:
    async with routed(prefill=1) as router:
        await router.prefill[0].kill()
        await router.look()
        assert await router.who() == "decode-0"
        assert "x-halocline-prefill" not in router.decode[0].asked[0].headers


async def test_the_answer_of_a_worker_with_a_client_fault_goes_through_unchanged() -> None:
    async with routed(decode=2) as router:
        router.decode[0].script.append(answer_error(400, "context_length_exceeded", "too long by 7"))
        response = await router.complete()
        assert (response.status_code, response.json()["error"]["message"]) == (400, "too long by 7")
        assert router.decode[1].asked == []


async def test_a_body_that_is_no_json_is_for_the_worker_to_refuse() -> None:
    async with routed(prefill=1) as router:
        router.decode[0].script.append(answer_error(400, "invalid_body"))
        response = await router.http.post("/v1/completions", content=b"{nonsense")
        assert response.json()["error"]["code"] == "invalid_body"
        assert router.decode[0].asked[0].body == b"{nonsense"


# ---- streams


async def test_a_stream_goes_through_byte_for_byte_and_token_by_token() -> None:
    """The worker sends the second token only after the client has read the first: nothing waits for more."""
    read_first, sent = asyncio.Event(), []

    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        for text in ("a", "b"):
            await asked.token(text)
            await read_first.wait()
        await asked.done()

    async with routed() as router:
        router.decode[0].script.append(answer)
        async with router.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            async for part in response.aiter_raw():
                sent.append(part)
                read_first.set()
    events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("a", "b")]
    assert b"".join(sent) == b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in events) + b"data: [DONE]\n\n"


async def test_a_client_that_goes_away_closes_the_workers_connection_between_two_tokens() -> None:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        await asked.token("a")
        await asked.is_gone.wait()

    async with routed(prefill=1) as router:
        router.decode[0].script.append(answer)
        async with router.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
            await anext(response.aiter_raw())
        await asyncio.wait_for(router.decode[0].asked[0].is_gone.wait(), 60)
        await router.idle()
        assert len(router.decode[0].asked) == 1


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_goes_away_before_the_first_byte_is_not_tried_again(is_stream: bool) -> None:
    async with routed(decode=2) as router:
        router.decode[0].script.append(answer_never)
        asking = asyncio.create_task(router.complete(stream=is_stream))
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        asking.cancel()
        await asyncio.wait_for(router.decode[0].asked[0].is_gone.wait(), 60)
        await router.idle()
        assert router.decode[1].asked == []
        assert b'responses_total{route="completions",status="499"} 1.0' in router.desk.metrics.render()


async def test_a_client_that_stops_reading_stops_the_worker() -> None:
    """The worker writes for ever; what it could write ends where the buffers on the way are full."""
    written = 0

    async def answer(worker: FakeWorker, asked: Asked) -> None:
        nonlocal written
        await asked.head()
        while not asked.is_gone.is_set():
            await asked.token("x" * 60_000)
            written += 1

    async with routed() as router:
        router.decode[0].script.append(answer)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        body = b'{"prompt": "Hi", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.3)
        # Sockets and transports on both hops: tens of MiB at most, and then silence.
        assert 0 < written * 60_000 < 64 << 20
        writer.transport.abort()
        await router.idle()


async def test_the_opening_of_a_chat_is_held_until_the_first_token() -> None:
    go_on = asyncio.Event()

    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        await asked.event(opening())
        await go_on.wait()
        await asked.event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
        await asked.done()

    async with routed() as router:
        router.decode[0].script.append(answer)
        body = {"messages": [], "stream": True}
        asking = asyncio.create_task(router.http.post("/v1/chat/completions", json=body))
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        go_on.set()
        lines = [line for line in (await asking).text.split("\n\n") if line]
        assert [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
        ]


# ---- keys and limits


async def test_the_api_key_is_checked_here_and_passed_on() -> None:
    async with routed(api_key="k") as router:
        assert (await router.complete()).status_code == 401
        assert (await router.http.get("/v1/models", headers={"authorization": "Bearer no"})).status_code == 401
        response = await router.http.post("/v1/completions", json={}, headers={"authorization": "Bearer k"})
        assert response.status_code == 200
        assert [each.headers["authorization"] for each in router.decode[0].asked] == ["Bearer k"]


async def test_workers_can_have_a_key_of_their_own() -> None:
    async with routed(worker_api_key="w") as router:
        await router.http.post("/v1/completions", json={}, headers={"authorization": "Bearer of-the-client"})
        assert router.decode[0].asked[0].headers["authorization"] == "Bearer w"


async def test_one_request_too_many_is_refused_and_the_next_one_taken() -> None:
    async with routed(max_requests=1) as router:
        router.decode[0].script.append(answer_never)
        asking = asyncio.create_task(router.complete())
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        refused = await router.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert refused.headers["retry-after"] == "1"
        asking.cancel()
        await router.idle()
        assert await router.who() == "decode-0"


async def test_bodies_and_headers_have_limits() -> None:
    async with routed() as router:
        large = await router.http.post("/v1/completions", content=b" " * (8 * 1024 * 1024 + 1))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        long = await router.http.get("/v1/models", headers={"x-long": "x" * router_app.MOST_HEADER_BYTES})
        assert (long.status_code, long.json()["error"]["code"]) == (431, "headers_too_large")
        assert router.decode[0].asked == []


async def test_an_unknown_path_is_a_404_in_the_shape_of_all_errors() -> None:
    async with routed() as router:
        response = await router.http.get("/v1/worker")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert router.decode[0].asked == []


# ---- choosing


async def test_requests_go_where_most_bytes_are_free() -> None:
    async with routed(decode=3) as router:
        for fake, free in zip(router.decode, (100, 900, 500), strict=True):
            fake.report["free_bytes"] = free
        await router.look()
        assert await router.who() == "decode-1"


async def test_what_was_just_sent_counts_until_the_worker_says_more() -> None:
    """Each request may need some 256 of a worker's 1,000 bytes: two in flight leave less than the other has."""
    async with routed(decode=2) as router:
        for fake in router.decode:
            fake.report["token_bytes"] = 1
            fake.script += [answer_never] * 2
        await router.look()
        asking = [asyncio.create_task(router.complete(f"{i}")) for i in range(4)]
        await until(lambda: sum(len(each.asked) for each in router.decode) == 4, "four requests at the workers")
        assert [len(each.asked) for each in router.decode] == [2, 2]
        for each in asking:
            each.cancel()
        await router.idle()


async def test_the_next_turn_of_a_conversation_goes_where_the_first_one_went() -> None:
    async with routed(decode=2, prefill=2) as router:
        router.decode[1].report["free_bytes"] = 1001
        await router.look()
        assert await router.who(LONG) == "decode-1"
        router.decode[0].report["free_bytes"] = 1900
        await router.look()
        assert await router.who(LONG + "and its end") == "decode-1"
        assert await router.who("another story") == "decode-0"
        assert len({each.headers["x-halocline-prefill"] for each in router.decode[1].asked}) == 1


async def test_a_conversation_moves_when_its_worker_is_much_fuller() -> None:
    async with routed(decode=2) as router:
        router.decode[1].report["free_bytes"] = 1001
        await router.look()
        assert await router.who(LONG) == "decode-1"
        router.decode[0].report["free_bytes"] = 2003
        await router.look()
        assert await router.who(LONG) == "decode-0"


async def test_salts_keep_conversations_apart_and_prefill_workers_share_the_work() -> None:
    """Nothing tells the router that a whole answer's prompt is computed, so the second prompt goes to the other one."""
    async with routed(prefill=2) as router:
        router.decode[0].script += [answer_never] * 2
        asking = [asyncio.create_task(router.complete(LONG, cache_salt=salt)) for salt in ("a", "b")]
        await until(lambda: len(router.decode[0].asked) == 2, "both at the worker")
        links = {each.headers["x-halocline-prefill"] for each in router.decode[0].asked}
        assert links == {"tcp://prefill-0:1", "tcp://prefill-1:1"}
        for each in asking:
            each.cancel()
        await router.idle()


# ---- figures


async def test_health_and_metrics_tell_of_every_worker() -> None:
    async with routed(prefill=1, decode=2) as router:
        assert (await router.http.get("/health")).json()["status"] == "ok"
        await router.decode[1].kill()
        await router.look()
        await router.who()
        response = await router.http.get("/health")
        body = response.json()
        assert (response.status_code, body["status"], body["model"]) == (200, "degraded", "tiny")
        assert len(body["dead"]) == 1
        assert body["dead"][0].startswith(router.decode[1].url)
        text = (await router.http.get("/metrics")).text
        assert f'halocline_router_worker_up{{side="decode",worker="{router.decode[0].url}"}} 1.0' in text
        assert f'halocline_router_worker_up{{side="decode",worker="{router.decode[1].url}"}} 0.0' in text
        assert f'halocline_router_sent_total{{side="prefill",worker="{router.prefill[0].url}"}} 1.0' in text
        assert 'halocline_router_responses_total{route="completions",status="200"} 1.0' in text
        assert "halocline_router_first_byte_seconds_count 1.0" in text


async def test_the_router_itself_needs_no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with routed() as router, httpx.AsyncClient(base_url=router.url, trust_env=False) as http:
        assert (await http.post("/v1/completions", json={})).status_code == 200
