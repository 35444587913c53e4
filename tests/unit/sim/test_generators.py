"""Workloads by name: their statistics within stated tolerances, their settings, and what is said about wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from halocline.errors import ConfigError
from halocline.sim.generators import GENERATORS, flip, help_text, workload_named
from halocline.sim.likenesses import BATCH_SECONDS, azure_like, mooncake_like
from halocline.sim.readers import read_workload
from halocline.sim.workload import Job, Workload
from halocline.sim.writers import write_azure, write_mooncake


def gaps(workload: Workload) -> np.ndarray:
    return np.diff([job.arrive_seconds for job in workload.jobs])


def variation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def prompts(workload: Workload) -> np.ndarray:
    return np.array([job.prompt_tokens for job in workload.jobs])


def outputs(workload: Workload) -> np.ndarray:
    return np.array([job.output_tokens for job in workload.jobs])


def hits(workload: Workload) -> Iterator[tuple[int, bool]]:
    """Yield how many tokens of each prompt an infinite cache has, and whether they end an earlier prompt's blocks."""
    root: dict[object, list] = {}
    for job in workload.jobs:
        nodes, hit, ends = root, 0, False
        for run in job.prompt:
            if run not in nodes:
                break
            hit += run[1]
            nodes, ends = nodes[run]
        yield hit, ends
        nodes, whole = root, job.prompt_tokens // 512
        for number, run in enumerate(job.prompt, 1):
            node = nodes.setdefault(run, [{}, False])
            node[1] = node[1] or number in (whole, len(job.prompt))
            nodes = node[0]


@cache
def mooncake() -> Workload:
    return mooncake_like(seed=1)


@cache
def azure() -> Workload:
    return azure_like(seed=1)


def test_poisson_arrivals_have_their_rate_and_a_variation_of_one() -> None:
    made = workload_named("poisson:rate=2,prompt=2000,output=200,requests=4000,seed=1")
    assert len(made.jobs) == 4000
    assert gaps(made).mean() == pytest.approx(0.5, rel=0.05)
    assert variation(gaps(made)) == pytest.approx(1, rel=0.05)
    assert {(job.prompt_tokens, job.output_tokens) for job in made.jobs} == {(2000, 200)}
    contents = [run[0] for job in made.jobs for run in job.prompt] + [job.output_id for job in made.jobs]
    assert len(set(contents)) == 8000
    assert made.jobs[0].arrive_seconds == 0


def test_spread_is_the_standard_deviation_over_the_mean() -> None:
    made = workload_named("poisson:prompt=3000,output=100,spread=0.8,requests=8000,seed=3")
    for lengths, mean in ((prompts(made), 3000), (outputs(made), 100)):
        assert lengths.mean() == pytest.approx(mean, rel=0.04)
        assert variation(lengths) == pytest.approx(0.8, rel=0.08)


def test_what_all_prompts_begin_with_is_shared_and_counts_beside_their_own() -> None:
    made = workload_named("poisson:prompt=300,shared=100,requests=5")
    assert {job.prompt[0] for job in made.jobs} == {(0, 100)}
    assert {job.prompt_tokens for job in made.jobs} == {400}


@pytest.mark.parametrize("shape", [0.1, 0.5])
def test_bursts_have_the_variation_of_their_shape(shape: float) -> None:
    made = workload_named(f"bursts:rate=4,shape={shape},requests=20000,seed=2")
    assert gaps(made).mean() == pytest.approx(0.25, rel=0.06)
    assert variation(gaps(made)) == pytest.approx(shape**-0.5, rel=0.06)


def test_an_agents_later_prompt_is_the_earlier_one_its_output_and_new_text() -> None:
    made = workload_named("agents:sessions=200,turns=6,prompt=900,more=70,output=30,shared=40,parked=0.25,seed=5")
    by_name = {job.id: job for job in made.jobs}
    later = [job for job in made.jobs if job.after is not None]
    for job in later:
        before = by_name[str(job.after)]
        assert job.prompt[:-1] == (*before.prompt, (before.output_id, before.output_tokens))
        assert job.prompt[-1][1] == 70
        assert job.arrive_seconds == before.arrive_seconds
    firsts = [job for job in made.jobs if job.after is None]
    assert len(firsts) == 200
    assert {job.prompt for job in firsts if job.prompt[0] != (0, 40) or job.prompt_tokens != 940} == set()
    assert len(made.jobs) / 200 == pytest.approx(6, rel=0.2)
    thinks = np.array([job.think_seconds for job in later])
    assert thinks.mean() == pytest.approx(0.75 * 4 + 0.25 * 120, rel=0.2)
    assert np.median(thinks) < 6


def test_an_agent_ends_before_its_prompt_is_too_long() -> None:
    made = workload_named("agents:sessions=20,turns=1000,prompt=500,shared=0,more=100,output=100,longest=1500")
    assert prompts(made).max() == 1500
    assert len(made.jobs) == 20 * 6


def test_mooncake_like_prompts_and_outputs_have_the_traces_lengths() -> None:
    lengths = prompts(mooncake())
    assert len(mooncake().jobs) == 12_031
    assert lengths.mean() == pytest.approx(12_035, rel=0.1)
    assert lengths.max() <= 126_195
    wanted = {0.01: 894, 0.1: 964, 0.25: 2306, 0.5: 6909, 0.75: 15_367, 0.9: 27_367, 0.99: 85_400}
    for share, length in wanted.items():
        assert np.quantile(lengths, share) == pytest.approx(length, rel=0.2), f"quantile {share}"
    assert outputs(mooncake()).mean() == pytest.approx(342.6, rel=0.04)
    for share, length in {0.1: 24, 0.5: 350, 0.9: 597, 0.99: 1118}.items():
        assert np.quantile(outputs(mooncake()), share) == pytest.approx(length, rel=0.15), f"quantile {share}"


def test_mooncake_like_arrivals_come_in_batches_every_three_seconds() -> None:
    times = np.array([job.arrive_seconds for job in mooncake().jobs])
    assert np.allclose(times % BATCH_SECONDS, 0)
    counts = np.unique(times, return_counts=True)[1]
    assert counts.mean() == pytest.approx(10.2, rel=0.04)
    assert counts.var() == pytest.approx(11.2, rel=0.2)
    assert times[-1] == pytest.approx(3537, rel=0.04)


def test_mooncake_like_prompts_hit_37_percent_mostly_at_the_end_of_an_earlier_prompt() -> None:
    made = mooncake()
    found = list(hits(made))
    total = sum(hit for hit, _ in found)
    assert total / prompts(made).sum() == pytest.approx(0.374, abs=0.025)
    assert sum(hit for hit, ends in found if ends) / total == pytest.approx(0.925, abs=0.03)
    assert all(job.prompt[0][0] == 0 for job in made.jobs)


def test_azure_like_arrivals_and_lengths_have_the_traces_statistics() -> None:
    made = azure()
    assert len(made.jobs) == 19_366
    assert prompts(made).mean() == pytest.approx(1155, rel=0.03)
    assert outputs(made).mean() == pytest.approx(211, rel=0.03)
    for share, length in {0.1: 207, 0.25: 396, 0.5: 1020, 0.75: 1189, 0.95: 4083}.items():
        assert np.quantile(prompts(made), share) == pytest.approx(length, rel=0.08), f"quantile {share}"
    for share, length in {0.1: 54, 0.5: 129, 0.75: 395, 0.99: 601}.items():
        assert np.quantile(outputs(made), share) == pytest.approx(length, rel=0.08), f"quantile {share}"
    assert made.span_seconds == pytest.approx(3502, rel=0.03)
    assert variation(gaps(made)) == pytest.approx(1.09, rel=0.06)
    chats = outputs(made)[(prompts(made) >= 1000) & (prompts(made) < 1200)]
    assert chats.mean() == pytest.approx(407, rel=0.05)
    assert len({job.prompt[0][0] for job in made.jobs}) == 19_366


@pytest.mark.parametrize("kind", ["mooncake", "azure"])
def test_a_generated_trace_is_written_and_read_in_its_own_format(kind: str, tmp_path: Path) -> None:
    made = workload_named(f"{kind}-like:requests=300,seed=4")
    path = tmp_path / f"{kind}.trace"
    (write_mooncake if kind == "mooncake" else write_azure)(made, path)
    read = read_workload(path)
    assert [job.arrive_seconds for job in read.jobs] == pytest.approx(
        [job.arrive_seconds for job in made.jobs], abs=2e-6
    )
    assert [(j.id, j.prompt, j.output_tokens, j.output_id) for j in read.jobs] == [
        (j.id, j.prompt, j.output_tokens, j.output_id) for j in made.jobs
    ]
    assert workload_named(str(path)) == read


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_texts_are_equal_workloads_and_other_seeds_other_ones(name: str) -> None:
    count = "sessions=30" if name == "agents" else "requests=100"
    made = workload_named(f"{name}:{count},seed=7")
    assert made == workload_named(f"{name}:{count},seed=7")
    assert workload_named(made.source).jobs == made.jobs
    assert made.jobs != workload_named(f"{name}:{count},seed=8").jobs


def job(name: str, seconds: float, content: int, after: str | None = None) -> Job:
    return Job(name, seconds, ((content, 5),), 1, content + 1, after)


def test_flip_lets_each_clock_stand_while_the_others_runs() -> None:
    one = Workload("one", "1", tuple(job(str(at), at, 2 * at) for at in (0, 5, 10, 19, 20, 35)))
    other = Workload("other", "2", (job("x", 1, 0), job("y", 12, 2), job("z", 13, 4, "x"), job("w", 25, 6)))
    made = flip(one, other, 10)
    assert [(one.id, one.arrive_seconds) for one in made.jobs] == [
        ("a 0", 0),
        ("a 5", 5),
        ("b x", 11),
        ("a 10", 20),
        ("a 19", 29),
        ("b y", 32),
        ("b z", 33),
        ("a 20", 40),
        ("b w", 55),
    ]  # the fourth turn of the other workload has nobody, so the first one's job at second 35 is not reached
    assert made.jobs[6].after == "b x"
    contents = {run[0] for job in made.jobs[:2] for run in job.prompt} | {job.output_id for job in made.jobs[:2]}
    assert all(run[0] not in contents for job in made.jobs if job.id.startswith("b") for run in job.prompt)


def test_flip_is_written_with_a_bar() -> None:
    made = workload_named("flip:60:mooncake-like:requests=1000|azure-like:requests=2000,seed=3")
    turns = [int(job.arrive_seconds / 60) % 2 for job in made.jobs]
    assert {job.id[0] for job, turn in zip(made.jobs, turns, strict=True) if turn == 0} == {"a"}
    assert {job.id[0] for job, turn in zip(made.jobs, turns, strict=True) if turn == 1} == {"b"}
    assert sum(a != b for a, b in pairwise(turns)) >= 9
    assert workload_named(made.source) == made


def test_the_help_lists_every_generator_with_its_settings() -> None:
    text = help_text()
    for name, generator in GENERATORS.items():
        assert f"{name}: " in text
        assert all(f"  {key}=" in text for key in generator.settings)
    assert "flip:SECONDS:ONE|OTHER" in text


WRONG = {
    "possion:rate=2": "possion:rate=2 is no file and no generator; generators are poisson, bursts, agents",
    "poisson:rat=2": "poisson has no setting 'rat'; it has rate, prompt, output",
    "poisson:rate=0": "poisson: rate is '0'; it must be a number, at least",
    "poisson:rate=fast": "poisson: rate is 'fast'; it must be a number, at least",
    "poisson:rate=nan": "poisson: rate is 'nan'; it must be a number, at least",
    "poisson:rate=inf": "poisson: rate is 'inf'",
    "poisson:rate": "poisson: rate is ''",
    "poisson:requests=1.5": "requests is '1.5'; it must be a whole number, at least 1 and at most 1e",
    "poisson:requests=1e12": "requests is '1e12'; it must be a whole number",
    "poisson:prompt=-3": "prompt is '-3'; it must be a number, at least 1",
    "bursts:shape=0": "bursts: shape is '0'; it must be a number, at least 0.001 and at most 100",
    "agents:parked=2": "agents: parked is '2'; it must be a number, at least 0 and at most 1",
    "flip:60:azure-like": r"write flip:SECONDS:ONE\|OTHER",
    "flip:often:azure-like|azure-like": "'often' is no number of seconds",
    "flip:0:azure-like:requests=9|azure-like:requests=9": "0 seconds for a turn; it must be a number, at least",
    "": "is no file and no generator",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_text_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[text]):
        workload_named(text)


@pytest.mark.parametrize("value", [5e-324, 1e-320, 1e-300, 1e-6, 1e6, 1e300, 1.7e308])
@pytest.mark.parametrize("text", ["poisson:rate", "bursts:shape", "agents:rate", "agents:tool_seconds", "flip"])
def test_a_value_beyond_all_measure_is_refused_or_gives_times(text: str, value: float) -> None:
    """Gaps as long as the largest number add up to no number."""
    few = "sessions=4" if text.startswith("agents") else "requests=4"
    name = f"{text}={value!r},{few}" if text != "flip" else f"flip:{value!r}:poisson:{few}|poisson:{few}"
    try:
        made = workload_named(name)
    except ConfigError as error:
        assert "it must be a number, at least " in str(error)  # noqa: PT017 - many values are taken
        return
    assert made.jobs
    assert all(np.isfinite([job.arrive_seconds, job.think_seconds]).all() for job in made.jobs)


def test_all_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        workload_named("poisson:rate=0,prompt=0,what=1")
    assert len(caught.value.problems) == 3
