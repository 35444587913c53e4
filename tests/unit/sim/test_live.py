"""A workload as load on a live server: what is sent when, what is counted, and that nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from halocline.sim import live
from halocline.sim.gauge import Gauge
from halocline.sim.live import Seen, Target, run_live
from halocline.sim.prompts import FIRST_ID, IDS, as_text, as_token_ids
from halocline.sim.report import html
from halocline.sim.report.json import document
from halocline.sim.report.live import outcome_of
from halocline.sim.scrape import ArenaLook
from halocline.sim.workload import Job, Workload
from testing.engine import fake_spec
from testing.server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(spec=fake_spec("build_on_arena", reply="salt water ")) as started:
        yield started


def job(name: str, at: float = 0.0, tokens: int = 40, output: int = 6, **more: Any) -> Job:
    return Job(name, at, ((int(name, 36), tokens),), output, 10**6, **more)


def workload(*jobs: Job) -> Workload:
    return Workload("hand-made", "a test", jobs)


def sent(server: LiveServer, *jobs: Job, **how: Any) -> tuple[Seen, dict[str, Any]]:
    target = Target(url=server.url, model="fake", **how)
    told: list[Any] = []
    seen = asyncio.run(run_live(target, workload(*jobs), told.append))
    assert told[-1].ended == told[-1].jobs == len(jobs)
    return seen, outcome_of(seen, target, workload(*jobs))


def test_an_open_loop_sends_each_job_at_its_time(server: LiveServer) -> None:
    seen, run = sent(server, job("a"), job("b", 0.2), job("c", 0.4))
    assert run["requests"] == {"arrived": 3, "finished": 3, "rejected": 0, "failed": 0, "aborted": 0, "short": 0}
    assert [(answer.prompt_tokens, answer.output_tokens) for answer in seen.answers] == [(40, 6)] * 3
    assert seen.seconds >= 0.4
    assert run["tokens"]["prompt"] == 120
    assert run["tokens"]["output"] == 18
    assert run["ttft_seconds"]["p50"] <= run["e2e_seconds"]["p50"]
    assert 0 < run["concurrency"]["mean"] <= run["concurrency"]["peak"]
    assert run["goodput"]["share"] == 1.0


def test_a_time_scale_makes_the_traces_time_run_faster(server: LiveServer) -> None:
    assert sent(server, job("a"), job("b", 30.0), time_scale=100.0)[0].seconds < 15.0


def test_a_saturated_loop_has_so_many_requests_open_and_no_more(server: LiveServer) -> None:
    jobs = [job(f"{number:x}", 1000.0 * number, output=30) for number in range(8)]
    seen, run = sent(server, *jobs, concurrency=2)
    assert run["requests"]["finished"] == 8
    assert run["loop"] == "saturated"
    assert run["concurrency"]["peak"] == 2
    assert 0 < run["middle_seconds"][1] <= seen.seconds, "the traces' times are of no interest"


def test_a_prefix_that_was_sent_before_is_told_as_cached(server: LiveServer) -> None:
    first, second = job("x1", tokens=64), Job("x2", 0.0, ((int("x1", 36), 64), (7, 16)), 4, 10**6, after="x1")
    seen, run = sent(server, first, second)
    assert [answer.cached_tokens for answer in seen.answers] == [0, 64]
    assert run["tokens"]["cached"] == 64
    assert run["hit_rate"] == pytest.approx(64 / (64 + 80))


def test_a_later_turn_is_sent_when_the_one_before_has_ended_and_its_user_has_thought(server: LiveServer) -> None:
    seen, run = sent(server, job("a1"), job("a2", after="a1", think_seconds=0.3), job("a3", after="a2"))
    assert run["requests"]["finished"] == 3
    assert run["concurrency"]["peak"] == 1
    assert seen.seconds >= 0.3


def test_a_later_turn_has_the_answer_that_was_given_in_its_prompt(server: LiveServer) -> None:
    first = job("z1", tokens=64, output=33)
    second = Job("z2", 0.0, (*first.prompt, (first.output_id, 33), (9, 10)), 4, 10**6 + 1, after="z1")
    seen, _ = sent(server, first, second)
    assert [answer.prompt_tokens for answer in seen.answers] == [64, 107]
    assert seen.answers[1].cached_tokens == 96, "whole pages of 16, the answer's but its last token included"


def test_a_client_that_goes_away_is_counted_and_its_memory_comes_back(server: LiveServer) -> None:
    _, run = sent(server, job("a", output=2000, abort_seconds=0.15), job("b", 0.05))
    assert (run["requests"]["aborted"], run["requests"]["finished"]) == (1, 1)
    server.wait_idle()


def test_what_a_server_refuses_is_counted_with_its_words(server: LiveServer) -> None:
    seen, run = sent(server, job("a"), job("b", tokens=10**5))
    assert run["requests"]["rejected"] == 1
    assert run["requests"]["finished"] == 1
    (words,) = run["errors"]
    assert "400" in words
    assert seen.ended == 2
    assert run["goodput"]["share"] == 0.5
    assert not run["goodput"]["is_met"]


def test_words_are_sent_where_a_server_takes_no_token_ids(server: LiveServer) -> None:
    _, run = sent(server, job("a", tokens=5), as_text=True)
    assert run["requests"]["finished"] == 1
    assert run["tokens"]["prompt"] == len(as_text(job("a", tokens=5)))


def test_our_own_server_tells_of_its_arena(server: LiveServer) -> None:
    _, run = sent(server, *(job(f"{number:x}", output=40) for number in range(6)))
    assert run["kv_bytes"] == run["arena"]["bytes"] > 0
    assert run["tokens"]["computed"] >= 6 * 39, "the figures do not tell of the last answers yet"
    assert run["retractions"] >= 0
    series = run["series"]
    assert set(series["held_bytes"]) == set(series["cached_bytes"]) != set()
    for at in range(len(series["time_seconds"])):
        parts = [series["free_bytes"][at], series["hole_bytes"][at]]
        parts += [values[at] for kind in ("held_bytes", "cached_bytes") for values in series[kind].values()]
        assert sum(parts) == pytest.approx(run["arena"]["bytes"])
    arena = run["arena"]
    assert sum(arena["held_bytes"].values()) == pytest.approx(arena["held_share"] * arena["bytes"])
    shares = [arena[f"{kind}_share"] for kind in ("held", "cached", "holes", "free")]
    assert sum(shares) == pytest.approx(1.0)


def test_what_was_seen_becomes_the_same_report(server: LiveServer) -> None:
    _, run = sent(server, job("a"), job("b"))
    page = html.page(document("0", "halocline replay x", {}, [run | {"errors": {"<b>no room</b>": 3}}]))
    assert "3 times</td><td>&lt;b&gt;no room&lt;/b&gt;" in page
    assert "plot-arena" in page
    assert "plot-concurrency" in page
    json.dumps(run, allow_nan=False)


# ---- another server


def answering(answer: Callable[[httpx.Request], httpx.Response], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every client speak to `answer`."""

    def open_client(url: str, *_: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(live, "open_client", open_client)


def stranger(request: httpx.Request) -> httpx.Response:
    """Answer as a server without /metrics, usage and ignore_eos."""
    if request.url.path != "/v1/completions":
        return httpx.Response(404)
    pieces = ['data: {"choices": [{"text": "x"}]}'] * 3
    return httpx.Response(200, text="\n\n".join([*pieces, "data: [DONE]"]))


def test_a_server_that_tells_nothing_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(stranger, monkeypatch)
    target = Target(url="http://elsewhere", model="m")
    seen = asyncio.run(run_live(target, workload(job("a", output=5)), lambda progress: None))
    run = outcome_of(seen, target, workload())
    assert run["requests"]["finished"] == 1
    assert run["requests"]["short"] == 1, "three tokens instead of five"
    assert run["tokens"] == {"prompt": 0, "output": 3}
    assert "arena" not in run
    assert "held_bytes" not in run["series"]
    html.page(document("0", "", {}, [run]))


@pytest.mark.parametrize(
    ("answer", "how", "words"),
    [
        (httpx.Response(500, text="out of memory"), "failed", "out of memory"),
        (httpx.Response(429, text="too many"), "rejected", "too many"),
        (httpx.Response(200, text='data: {"error": {"message": "gone"}}'), "failed", "gone"),
        (httpx.Response(200, text="data: {broken"), "failed", "no JSON"),
        (httpx.Response(200, text="data: [DONE]"), "failed", "no token"),
    ],
)
def test_whatever_a_server_answers_is_counted_and_never_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, how: str, words: str
) -> None:
    answering(lambda request: answer if request.url.path == "/v1/completions" else httpx.Response(404), monkeypatch)
    target = Target(url="http://elsewhere", model="m", concurrency=2)
    seen = asyncio.run(run_live(target, workload(job("a"), job("b", after="a")), lambda progress: None))
    assert seen.counts == {how: 2}, "the later turn is tried as well, as in a simulation"
    assert words in next(iter(seen.errors))
    assert (seen.gauge.running, seen.gauge.waiting) == (0, 0)


def test_a_defect_of_our_own_is_not_counted_as_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(stranger, monkeypatch)
    monkeypatch.setattr(live, "as_token_ids", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_live(Target(url="http://x", model="m"), workload(job("a")), lambda progress: None))


# ---- prompts


def test_prompts_have_their_length_and_ids_that_every_vocabulary_has() -> None:
    made = Job("a", 0.0, ((12345, 7), (2**31 - 1, 6)), 1, 5)
    assert as_token_ids(made)[:8] == [65, 43, 21, 20, 20, 65, 43, 67]
    assert len(as_token_ids(made)) == made.prompt_tokens == len(as_text(made).split())
    assert all(FIRST_ID <= token < FIRST_ID + IDS for token in as_token_ids(made))


def test_an_answer_that_was_seen_is_taken_as_it_was_as_far_as_it_goes() -> None:
    made = Job("a", 0.0, ((3, 2), (50, 4)), 1, 60)
    assert as_token_ids(made, {50: [201, 202, 203, 204, 205]}) == [23, 20, 201, 202, 203, 204]
    assert as_token_ids(made, {50: [201]}) == [23, 20, 201, 70, 20, 20]


def test_different_contents_differ_within_five_tokens_and_equal_ones_are_equal() -> None:
    contents = [0, 1, 99, 100, 101, 9999, 10**4, 10**6, 2**31 - 1]
    prompts = sorted(tuple(as_token_ids(Job("a", 0.0, ((content, 5),), 1, 0))) for content in contents)
    assert all(one != other for one, other in pairwise(prompts))
    short, long = (as_token_ids(Job("a", 0.0, ((77, tokens),), 1, 0)) for tokens in (300, 512))
    assert long[:300] == short


# ---- integrals


def test_a_gauge_integrates_over_the_run_and_the_middle() -> None:
    gauge = Gauge()
    gauge.change(1.0, waiting=2)
    gauge.change(2.0, waiting=-1, running=1)
    gauge.press(2.0)
    gauge.change(4.0, waiting=-1, running=1)
    gauge.drain(6.0)
    gauge.change(7.0, running=-2)
    assert gauge.peak_running == 2
    assert (gauge.run.seconds, gauge.run.running, gauge.run.waiting) == (7.0, 2 + 6, 2 + 2)
    assert (gauge.middle.seconds, gauge.middle.running) == (4.0, 6.0)


def test_samples_are_means_over_their_interval_and_hold_the_arena_as_last_seen() -> None:
    gauge = Gauge(("full",))
    gauge.look(ArenaLook(100.0, 60.0, 10.0, {"full": 20.0}, {"full": 10.0}))
    gauge.change(0.0, running=1)
    gauge.change(1.0, running=1)
    gauge.sample(4.0)
    gauge.sample(4.0)
    assert gauge.series.means().tolist() == [[1.75, 0.0, 60.0, 10.0, 20.0, 10.0]]
