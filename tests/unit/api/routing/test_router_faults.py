"""Workers that fail, behind a router: what is tried again, what a client is told, and who comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from halocline.api.routing.settings import RouteSettings
from halocline.api.server import listen
from halocline.errors import ConfigError
from halocline.route import serve_router
from testing.server import until
from testing.workers import (
    TOKEN,
    Answer,
    Asked,
    FakeWorker,
    Routed,
    answer_error,
    answer_name,
    answer_never,
    answer_reset,
    opening,
    routed,
)


def error_event(code: str) -> dict[str, Any]:
    return {"error": {"message": "gone", "type": "server_error", "param": None, "code": code}}


async def answer_head_then_reset(worker: FakeWorker, asked: Asked) -> None:
    await asked.head()
    asked.reset()


async def answer_opening_then_reset(worker: FakeWorker, asked: Asked) -> None:
    await asked.head()
    await asked.event(opening())
    asked.reset()


async def answer_half_a_body(worker: FakeWorker, asked: Asked) -> None:
    await asked.head(200, "application/json", 100)
    await asked.raw(b'{"choices": [')
    asked.reset()


def answer_opening_then_error(code: str) -> Answer:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        await asked.event(opening())
        await asked.event(error_event(code))
        await asked.done()

    return answer


BEFORE_THE_FIRST_BYTE: dict[str, Answer] = {
    "reset": answer_reset,
    "engine dead": answer_error(503, "engine_unavailable"),
    "overloaded": answer_error(429, "overloaded"),
    "head, then reset": answer_head_then_reset,
    "opening, then reset": answer_opening_then_reset,
    "opening, then engine dead": answer_opening_then_error("engine_unavailable"),
    "half a body": answer_half_a_body,
}


@pytest.mark.parametrize("answer", BEFORE_THE_FIRST_BYTE.values(), ids=BEFORE_THE_FIRST_BYTE)
async def test_a_fault_before_the_first_token_is_tried_on_another_worker(answer: Answer) -> None:
    async with routed(decode=2) as router:
        router.decode[0].script.append(answer)
        assert await router.who() == "decode-1"
        assert [len(each.asked) for each in router.decode] == [1, 1]
        await router.idle()


async def test_a_worker_that_is_not_there_is_passed_over_and_gets_nothing_more() -> None:
    async with routed(decode=2) as router:
        await router.decode[0].kill()
        assert await router.who() == "decode-1"
        assert router.known(router.decode[0]).state == "down"
        faults = router.desk.metrics.render()
        await router.who()
        assert b'halocline_router_faults_total{kind="unreachable"} 1.0' in faults
        assert b'halocline_router_faults_total{kind="unreachable"} 1.0' in router.desk.metrics.render()


async def test_a_worker_that_broke_one_connection_is_back_once_it_says_that_it_lives() -> None:
    async with routed(decode=2) as router:
        router.decode[0].script.append(answer_reset)
        await router.who()
        await until(lambda: router.known(router.decode[0]).is_up, "the doubt is cleared")
        assert router.decode[0].probes == 2


async def test_a_restarted_worker_is_used_again_with_its_new_link_address_and_nothing_remembered() -> None:
    long = "a long beginning " * 40
    async with routed(prefill=1, decode=1) as router:
        await router.who(long)
        for fake in (*router.decode, *router.prefill):
            await fake.kill()
        await router.look()
        assert (await router.complete(long)).status_code == 503
        await router.decode[0].restart()
        await router.prefill[0].restart(link_address="tcp://moved:2")
        await router.look()
        assert not len(router.known(router.decode[0]).seen)
        assert await router.who(long) == "decode-0"
        assert router.decode[0].asked[-1].headers["x-halocline-prefill"] == "tcp://moved:2"
        assert router.known(router.prefill[0]).restarts == 1


async def test_nobody_is_tried_more_often_than_allowed() -> None:
    async with routed(decode=4, attempts=2) as router:
        for fake in router.decode:
            fake.script.append(answer_reset)
        response = await router.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
        assert int(response.headers["retry-after"]) >= 1
        assert sum(len(each.asked) for each in router.decode) == 2


async def test_when_all_are_overloaded_the_client_hears_that() -> None:
    async with routed(decode=2) as router:
        for fake in router.decode:
            fake.script.append(answer_error(429, "overloaded", "4096 wait"))
        response = await router.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert "4096 wait" in response.json()["error"]["message"]
        assert all(router.known(fake).is_up for fake in router.decode), "to be busy is no reason to be dropped"


async def test_a_computation_that_failed_is_not_tried_again() -> None:
    async with routed(decode=2) as router:
        router.decode[0].script.append(answer_error(500, "request_failed"))
        assert (await router.complete()).status_code == 500
        assert router.decode[1].asked == []


# ---- prompts lost between two workers


async def test_a_lost_prompt_is_tried_with_another_prefill_worker_and_last_with_none() -> None:
    async with routed(prefill=3, decode=1) as router:
        router.decode[0].script += [answer_error(503, "prefill_lost")] * 2
        assert await router.who() == "decode-0"
        used = [each.headers.get("x-halocline-prefill") for each in router.decode[0].asked]
        assert used == ["tcp://prefill-0:1", "tcp://prefill-1:1", None]


async def test_two_workers_between_whom_a_prompt_was_lost_are_kept_apart_until_one_is_restarted() -> None:
    async with routed(prefill=1, decode=1) as router:
        router.decode[0].script.append(answer_error(503, "prefill_lost"))
        for _ in range(2):
            await router.who()
        used = [each.headers.get("x-halocline-prefill") for each in router.decode[0].asked]
        assert used == ["tcp://prefill-0:1", None, None]
        await router.prefill[0].kill()
        await router.prefill[0].restart()
        await router.look()
        await router.who()
        assert router.decode[0].asked[-1].headers["x-halocline-prefill"] == "tcp://prefill-0:1"


async def test_a_lost_prompt_after_the_opening_of_a_chat_is_tried_again() -> None:
    async with routed(prefill=1, decode=1) as router:
        router.decode[0].script.append(answer_opening_then_error("prefill_lost"))
        response = await router.complete(stream=True)
        assert response.status_code == 200
        assert "error" not in response.text
        assert len(router.decode[0].asked) == 2


async def test_the_last_lost_prompt_has_a_status_of_its_own() -> None:
    async with routed(decode=1, attempts=1) as router:
        router.decode[0].script.append(answer_opening_then_error("engine_unavailable"))
        response = await router.complete(stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


# ---- after the first byte


async def broken_stream(router: Routed, answer: Answer) -> tuple[list[str], int]:
    """Return the events that a client gets when `answer` is given, and how often workers were asked."""
    router.decode[0].script.append(answer)
    response = await router.complete(stream=True)
    assert response.status_code == 200
    return [line for line in response.text.split("\n\n") if line], sum(len(each.asked) for each in router.decode)


async def test_a_stream_that_breaks_after_a_token_ends_with_an_error_event_and_is_not_repeated() -> None:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        await asked.token("a")
        await asked.chunk(b'data: {"choices": [{"text": "cut off in the midd')
        asked.reset()

    async with routed(decode=2) as router:
        lines, times = await broken_stream(router, answer)
        assert times == 1
        assert json.loads(lines[0][6:])["choices"][0]["text"] == "a"
        assert json.loads(lines[1][6:])["error"]["code"] == "worker_lost"
        assert lines[2:] == ["data: [DONE]"]
        assert b"halocline_router_broken_answers_total 1.0" in router.desk.metrics.render()


async def test_an_error_event_after_a_token_goes_through_unchanged() -> None:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        await asked.token("a")
        await asked.event(error_event("engine_unavailable"))
        await asked.done()

    async with routed(decode=2) as router:
        lines, times = await broken_stream(router, answer)
        assert (times, len(lines)) == (1, 3)
        assert json.loads(lines[1][6:]) == error_event("engine_unavailable")


async def test_a_long_whole_answer_that_breaks_is_seen_to_be_broken() -> None:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head(200, "application/json", 4 << 20)
        await asked.raw(b"x" * (2 << 20))
        await asyncio.sleep(0)
        asked.reset()

    async with routed(decode=2) as router:
        router.decode[0].script.append(answer)
        with pytest.raises(httpx.RemoteProtocolError):
            await router.complete()
        assert router.decode[1].asked == []


# ---- workers that stand still, or come back as another


async def test_a_stopped_worker_loses_its_requests_after_a_while_and_they_are_tried_elsewhere() -> None:
    async with routed(decode=2, lost_seconds=0.1) as router:
        router.decode[0].script.append(answer_never)
        asking = asyncio.create_task(router.who())
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        known = router.known(router.decode[0])
        known.seen_at = asyncio.get_running_loop().time() - 0.1
        router.desk.book.missed(known, "no answer")
        router.desk._news(known)
        assert await asking == "decode-1"
        await asyncio.wait_for(router.decode[0].asked[0].is_gone.wait(), 60)


async def test_a_stream_of_a_stopped_worker_ends_with_an_error_event() -> None:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.head()
        await asked.token("a")
        await asked.is_gone.wait()

    async with routed(decode=1, lost_seconds=0.1) as router:
        router.decode[0].script.append(answer)
        text = ""
        async with router.http.stream("POST", "/v1/completions", json={"stream": True}) as response:
            async for part in response.aiter_text():
                text += part
                known = router.known(router.decode[0])
                known.seen_at = asyncio.get_running_loop().time() - 0.1
                router.desk.book.missed(known, "no answer")
                router.desk._news(known)
        assert json.loads(text.split("\n\n")[1][6:])["error"]["code"] == "worker_lost"


async def test_requests_of_a_workers_former_life_are_lost_as_soon_as_it_is_seen_in_another() -> None:
    async with routed(decode=2) as router:
        router.decode[0].script.append(answer_never)
        asking = asyncio.create_task(router.who())
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        router.decode[0].report["epoch"] = "another"
        await router.look(router.decode[0])
        assert await asking == "decode-1"


@pytest.mark.parametrize("status", ["draining", "stalled", "dead"])
async def test_a_worker_that_says_it_cannot_serve_is_passed_over_until_it_can(status: str) -> None:
    async with routed(decode=2) as router:
        router.decode[0].report |= {"status": status, "message": "because"}
        await router.look()
        assert await router.who() == "decode-1"
        assert (await router.http.get("/health")).json()["dead"] == [f"{router.decode[0].url}: {status}: because"]
        router.decode[0].report |= {"status": "ok", "free_bytes": 5000}
        await router.look()
        assert await router.who() == "decode-0"


async def test_without_a_decode_worker_clients_get_the_reasons_and_when_to_come_again() -> None:
    async with routed(decode=2, ready=False) as router:
        response = await router.complete()
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "no_decode_worker")
        assert "decode-0 is down" in error["message"]
        assert "127.0.0.1" not in error["message"], "clients learn no addresses"
        assert int(response.headers["retry-after"]) >= 1
        assert (await router.http.get("/health")).status_code == 503
        await router.decode[1].start()
        await router.look()
        assert await router.who() == "decode-1"


async def test_a_worker_with_another_token_is_named_and_not_used() -> None:
    async with routed(decode=2) as router:
        router.decode[0].token = "another"
        await router.look()
        assert await router.who() == "decode-1"
        assert "link token" in (await router.http.get("/health")).json()["dead"][0]


# ---- start and stop


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "it serves 'other'; the other workers serve 'tiny'"),
        ({"fingerprint": "g"}, "it serves another 'tiny'"),
        ({"role": "decode"}, "it is a decode worker; the router was told of it as --prefill"),
        ({"link_address": ""}, "it has no link address"),
    ],
    ids=["model", "fingerprint", "role", "no link"],
)
async def test_a_router_does_not_start_over_workers_that_cannot_work_together(
    change: dict[str, Any], words: str
) -> None:
    decode, prefill = FakeWorker("decode-0", "decode"), FakeWorker("prefill-0", "prefill")
    prefill.report |= change
    for fake in (decode, prefill):
        await fake.start()
    try:
        settings = RouteSettings(decode=(decode.url,), prefill=(prefill.url,), link_token=TOKEN, port=0)
        with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match=words) as caught:
            await serve_router(settings, listener)
        assert prefill.url in str(caught.value)
    finally:
        await decode.kill()
        await prefill.kill()


async def test_a_stop_lets_running_requests_end_and_takes_no_new_ones() -> None:
    go_on = asyncio.Event()

    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await go_on.wait()
        await answer_name(worker, asked)

    async with routed(drain_seconds=60) as router:
        router.decode[0].script.append(answer)
        asking = asyncio.create_task(router.who())
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        router.server.stop()
        await until(lambda: router.desk.is_draining, "the router is draining")
        with pytest.raises(httpx.HTTPError):
            # Nobody listens any more; on a connection that is still open it would be a 503.
            (await router.complete()).raise_for_status()
        go_on.set()
        assert await asking == "decode-0"


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_what_does_not_end_in_time_is_ended_with_an_error(is_stream: bool) -> None:
    async def answer(worker: FakeWorker, asked: Asked) -> None:
        if is_stream:
            await asked.head()
            await asked.token("a")
        await asked.is_gone.wait()

    async with routed(drain_seconds=0) as router:
        router.decode[0].script.append(answer)
        asking = asyncio.create_task(router.complete(stream=is_stream))
        await until(lambda: bool(router.decode[0].asked), "the request at the worker")
        if is_stream:
            await until(lambda: b"first_byte_seconds_count 1.0" in router.desk.metrics.render(), "the first byte")
        router.server.stop()
        response = await asking
        if is_stream:
            assert json.loads(response.text.split("\n\n")[1][6:])["error"]["code"] == "router_stopping"
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "router_stopping")
        await asyncio.wait_for(router.decode[0].asked[0].is_gone.wait(), 60)
