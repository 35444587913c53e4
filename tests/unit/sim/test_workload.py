"""Jobs as runs of content ids."""

from __future__ import annotations

import pytest

from halocline.sim.workload import Job, Workload, joined


def job(name: str, seconds: float, after: str | None = None) -> Job:
    return Job(name, seconds, ((1, 3),), 2, 9, after)


def test_a_jobs_tokens_are_its_content_ids_each_as_often_as_its_run_is_long() -> None:
    made = Job("a", 0.0, ((7, 3), (2, 1), (7, 2)), 5, 9)
    assert made.tokens() == (7, 7, 7, 2, 7, 7)
    assert made.prompt_tokens == 6
    assert all(type(token) is int for token in made.tokens())
    assert Job("b", 0.0, (), 1, 0).tokens() == ()


def test_runs_of_one_content_side_by_side_are_one_run() -> None:
    assert joined([(1, 2), (1, 3), (2, 0), (1, 1), (4, 0), (3, 2)]) == ((1, 6), (3, 2))


def test_a_workload_is_cut_after_its_first_jobs() -> None:
    made = Workload("w", "here", (job("a", 0), job("b", 1, "a"), job("c", 2)))
    assert [one.id for one in made.first(2).jobs] == ["a", "b"]
    assert made.span_seconds == 2
    assert made.first(0).span_seconds == 0


@pytest.mark.parametrize(
    "jobs",
    [(job("a", 0), job("a", 1)), (job("a", 1), job("b", 0)), (job("a", 0, "b"), job("b", 1))],
    ids=["twice the same id", "back in time", "after one that comes later"],
)
def test_a_workload_in_another_order_is_a_defect(jobs: tuple[Job, ...]) -> None:
    with pytest.raises(AssertionError):
        Workload("w", "here", jobs)
