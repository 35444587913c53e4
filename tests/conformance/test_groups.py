"""Workers that differ in every setting and compute prompts for each other: the tokens are still those of one (L11).

`test_pairs.py` asks one worker to compute and one to answer. Here two or three do both, each with settings of its own,
clients leave in the middle, and everything is drawn from a seed. Sampled answers are compared with those of one worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from halocline.config import Config
from halocline.params import SamplingParams
from testing.group import Asked, group, leftovers, together
from testing.models import FAMILIES
from testing.pairwise import ANSWERS, PROMPTS, SIZES, Row, expected, prompts, running, settings
from testing.serving import PAGES, differences

pytestmark = pytest.mark.e2e
SEEDS = range(12)
SERVED = ("gemma3", "llama", "mistral", "llama4", "gpt-oss", "gemma3n", "gemma4", "deepseek-v3")


def draw_configs(random: Random, family: str) -> dict[str, Config]:
    """Draw two or three workers, every setting of each by itself; answers of the first outgrow their grants."""
    link_kind, configs = random.choice(("shm", "tcp")), {}
    for name in ("a", "b", "c")[: random.choice((2, 2, 3))]:
        row = Row(
            family=family,
            cache=random.choice(("on", "off")),
            host=random.choice(("none", "ample")),
            chunks=random.choice(("mixed", "whole")),
            retraction="forced" if name == "a" else random.choice(("none", "forced")),
            policy=random.choice(("shared", "static")),
            admission="expected" if name == "a" else random.choice(("expected", "guaranteed")),
            attention=random.choice(("cpu", "reference", "blocked")),
        )
        configs[name] = replace(
            settings(row, random.choice(list(PAGES))),
            role="both",
            link_kind=link_kind,
            decode_reserve_tokens=0 if name == "a" else random.choice((0, 3, 512)),
        )
    return configs


def draw_asked(random: Random, family: str, names: list[str], number: int) -> tuple[Asked, int, list[int]]:
    """Draw a request, which of the known prompts it continues, and what of its answer it brings along."""
    which = random.randrange(len(SIZES))
    new = SIZES[which][1]
    said = list(expected(family)[which].tokens[: random.choice((0, random.randrange(new)))])
    at = random.choice((*names, "a"))
    other = random.choice([name for name in names if name != at])
    asked = Asked(
        f"request {number}",
        prompts()[which] + said,
        new - len(said),
        at,
        other if random.random() < 0.75 else "",
        leaves_after=random.randrange(40) if random.random() < 0.15 else None,
    )
    return asked, which, said


@pytest.fixture(scope="module")
def happened() -> Counter[str]:
    """What has happened in all groups together."""
    return Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_of_any_settings_compute_for_each_other(seed: int, happened: Counter[str]) -> None:
    random = Random(seed)
    family = random.choice(SERVED)
    with group(draw_configs(random, family)) as workers:
        drawn = [draw_asked(random, family, list(workers), number) for number in range(random.choice((8, 14, 24)))]
        tokens = together(workers, [asked for asked, _, _ in drawn])
        for asked, which, said in drawn:
            wanted, got = expected(family)[which], said + tokens[asked.name]
            if asked.leaves_after is not None:
                happened["cut short"] += len(got) < len(wanted.tokens)
                got += wanted.tokens[len(got) :]
            assert differences((wanted,), [got]) == [], asked
        for name, worker in workers.items():
            assert leftovers(worker) == [], name
            assert worker.transfers["leases_lost"] == 0, name
            happened["received"] += worker.transfers["received"]
            happened["sent"] += worker.transfers["sent"]
            # A prompt on its way that gives way to a senior is counted among the retractions.
            happened["gave way"] += worker.transfers["attempts_lost"]
            happened["retracted"] += worker.scheduler.figures().totals.retractions - worker.transfers["attempts_lost"]


def test_in_these_groups_prompts_travelled_answers_were_retracted_and_clients_left(happened: Counter[str]) -> None:
    if not happened:
        pytest.skip("it counts what the other tests of this file have done")
    assert happened["received"] > 4 * len(SEEDS), happened
    assert min(happened["gave way"], happened["cut short"]) > 0, happened
    print(dict(happened))


SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=2, logprobs=3
)


def said(row: Row) -> dict[str, list[tuple[int | None, float, tuple[int, ...], str | None]]]:
    """Return what clients hear of sampled answers: tokens, log-probabilities, the likeliest others, and the end."""
    with running(row) as workers:
        prefill_at = PROMPTS if row.link != "none" else ""
        asked = [
            Asked(f"r{number}", prompt, SIZES[number][1], ANSWERS, prefill_at, SAMPLED)
            for number, prompt in enumerate(prompts())
        ]
        together(workers, asked)
        heard: dict[str, list] = {each.name: [] for each in asked}
        for update in workers[ANSWERS].said:
            assert update.logprobs is not None
            top = tuple(token for token, _ in update.logprobs.top)
            told = (update.token_id, round(update.logprobs.token_logprob, 6), top, update.finish_reason)
            heard[update.request_id].append(told)
        retractions = workers[ANSWERS].scheduler.figures().totals.retractions
        assert (retractions > 0) is row.is_retracting
        if row.link != "none":
            assert workers[ANSWERS].transfers["received"] == len(asked)
    return heard


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
@pytest.mark.parametrize(
    "row",
    [
        Row(link="shm", chunks="whole"),
        Row(link="tcp, other pages", retraction="forced"),
        Row(link="shm, other pages", retraction="forced", cache="off", host="ample"),
    ],
    ids=str,
)
def test_sampled_answers_are_those_of_one_worker(row: Row, family: str) -> None:
    """Noise depends on the seed of a request and on positions, penalties on what was said, wherever that was."""
    assert FAMILIES[family].dtype == torch.float64
    alone = said(Row(family=family, link="none", cache="off"))
    assert said(replace(row, family=family)) == alone
