"""The load that bench sends, the figures it prints, and what demo and bench read from a server, against a live one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from halocline.cli.bench import figures, table
from halocline.cli.demo import CLIENTS, MOST_TOKENS, Run, load, wish
from halocline.cli.demo import table as demo_table
from halocline.cli.load import Answer, Load, LoadError, LoadReport, first_model, random_prompt, run_load
from halocline.cli.main import main
from halocline.cli.watch import PEAK_RUNNING, USED, Watch, bytes_by_pool, needed_bytes, read_figures, running_requests
from halocline.config import Config
from testing.engine import fake_spec
from testing.server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(spec=fake_spec("build_on_arena", reply="salt water ")) as started:
        yield started


def report() -> LoadReport:
    answers = [Answer(10, 5, first_token_seconds=0.1 * i, total_seconds=0.1 * i + 0.4) for i in range(1, 11)]
    return LoadReport(seconds=2.0, answers=answers)


def test_throughput_and_percentiles_come_from_the_answers() -> None:
    found = figures(report())
    assert found["output_tokens_per_second"] == 25.0
    assert found["total_tokens_per_second"] == 75.0
    assert (found["ttft_p50_ms"], found["ttft_p90_ms"], found["ttft_p99_ms"]) == (500.0, 900.0, 1000.0)
    assert found["tpot_p50_ms"] == 100.0


def test_a_run_without_answers_has_figures_too() -> None:
    assert figures(LoadReport(seconds=1.0))["ttft_p50_ms"] == 0.0


def test_the_table_shows_what_was_sent_and_seen() -> None:
    text = table(Load(10, 2, 10, 5), report())
    assert "10 requests of 10 + 5 tokens, 2 at a time" in text
    assert "25.0 tokens/s" in text
    assert "1000.0" in text


def test_prompts_are_random_repeatable_and_in_every_vocabulary() -> None:
    assert random_prompt(1, 50) == random_prompt(1, 50) != random_prompt(2, 50)
    assert all(20 <= token < 120 for token in random_prompt(3, 1000))


def test_a_load_is_answered_whole_and_counted(server: LiveServer) -> None:
    model = asyncio.run(first_model(server.url))
    seen = asyncio.run(run_load(server.url, model, Load(9, 3, prompt_tokens=12, output_tokens=7)))
    assert [(answer.prompt_tokens, answer.output_tokens) for answer in seen.answers] == [(12, 7)] * 9
    assert all(0 < answer.first_token_seconds <= answer.total_seconds for answer in seen.answers)
    assert seen.seconds > 0


def test_bench_prints_one_json_object_on_request(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--prompt-tokens", "6", "--output-tokens", "3", "--concurrency", "2", "--requests", "4")
    assert main(["bench", "--url", f"{server.url}/v1/", "--json", *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 4
    assert found["output_tokens_per_second"] > 0


def test_a_refused_request_ends_the_load_with_the_servers_words(server: LiveServer) -> None:
    with pytest.raises(LoadError, match=r"404.*another-model"):
        asyncio.run(run_load(server.url, "another-model", Load(6, 3, 4, 4)))


def test_where_nobody_listens_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_watch_sees_the_peak_and_the_end(server: LiveServer) -> None:
    async def run() -> Watch:
        async with Watch(server.url) as watch:
            await run_load(server.url, await first_model(server.url), Load(6, 3, 40, 40))
        return watch

    watch = asyncio.run(run())
    assert watch.last[PEAK_RUNNING] >= 3
    assert needed_bytes(watch.at_peak) >= needed_bytes(watch.last)


def test_figures_are_read_by_name_and_label(server: LiveServer) -> None:
    found = asyncio.run(read_figures(server.url))
    assert found["halocline_arena_total_bytes"] > 0
    assert running_requests(found) == 0
    assert len(bytes_by_pool(found)) >= 1


def test_running_requests_and_bytes_are_summed() -> None:
    found = {
        "halocline_requests{prefilling}": 2.0,
        "halocline_requests{decoding}": 3.0,
        "halocline_requests{waiting}": 9.0,
        "halocline_arena_pool_bytes{running,full}": 10.0,
        "halocline_arena_pool_bytes{cached,full}": 5.0,
        "halocline_arena_pool_bytes{running,sliding-512}": 7.0,
    }
    assert running_requests(found) == 5
    assert bytes_by_pool(found) == {"full": 10, "sliding-512": 7}, "what is only cached is not needed"


def test_the_demos_wishes_are_of_mixed_length_and_one_class() -> None:
    wishes = [wish(number) for number in range(CLIENTS)]
    lengths = [len(prompt) for prompt, _ in wishes]
    assert max(lengths) > 10 * min(lengths)
    assert len({most for _, most in wishes}) > 10
    assert all(MOST_TOKENS // 2 < most <= MOST_TOKENS for _, most in wishes)


def test_the_demos_load_runs_through_the_openai_client(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    model = asyncio.run(first_model(server.url))
    run = asyncio.run(load(server.url, Config(model=model), shows_answers=True))
    assert run.watch is not None
    assert run.tokens > 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "  client " in line]) == CLIENTS
    text = demo_table([run, run])
    assert "retractions" in text
    assert text.count("shared") == 2


def test_the_demos_table_has_one_column_for_each_run() -> None:
    watch = Watch("http://nowhere")
    watch.at_peak = {USED: 2.0**20, "halocline_arena_pool_bytes{running,full}": 2.0**20}
    watch.last = {"halocline_retractions_total": 3.0}
    runs = [Run("shared", 2.0, 100, [], watch), Run("static:0.8", 4.0, 100, [], watch)]
    lines = demo_table(runs).strip("\n").splitlines()
    assert lines[0].split() == ["shared", "static:0.8"]
    assert ["generated", "tokens/s", "50.0", "25.0"] in [line.split() for line in lines]
    assert ["of", "them", "full", "1", "MiB", "1", "MiB"] in [line.split() for line in lines]
