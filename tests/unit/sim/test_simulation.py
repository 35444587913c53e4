"""Whole runs that are small enough to know every time beforehand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from halocline.errors import ConfigError, InvariantError
from halocline.memory.audit import Violation
from halocline.memory.retention import Full
from halocline.schedule.scheduler import Scheduler
from halocline.sim import driver as driver_module
from halocline.sim.simulation import Progress, simulate
from halocline.sim.workload import Job
from testing.replays import job, small_setup, small_shape, workload


def test_the_times_of_two_requests_are_known_to_the_second() -> None:
    # a: step 1 computes its prompt (first token at 1), steps 2 and 3 the others. b comes in step 1, is handed over at
    # its end, has its first token at 2 and its fourth at 5. The clock then jumps to c, which takes one step.
    outcome = simulate(small_setup(), workload(job("a"), job("b", 0.25, output=4), job("c", 9.5, output=1)))
    assert (outcome.seconds, outcome.steps) == (10.5, 6)
    assert outcome.requests.arrived == outcome.requests.finished == 3
    assert [seconds for seconds, _ in outcome.ttft_seconds.cdf] == [1.0, 1.0, 1.75]
    assert [seconds for seconds, _ in outcome.e2e_seconds.cdf] == [1.0, 3.0, 4.75]
    assert [seconds for seconds, _ in outcome.tpot_seconds.cdf] == [1.0, 1.0]
    assert (outcome.ttft_seconds.p50, outcome.ttft_seconds.p90, outcome.ttft_seconds.mean) == (1.0, 1.75, 1.25)
    # a alone for a second, both for two, b for two, nobody for 4.5 s, c for one
    assert outcome.concurrency.mean == pytest.approx((1 + 2 * 2 + 2 * 1 + 1) / 10.5)
    assert outcome.concurrency.peak == 2
    assert (outcome.tokens.prompt, outcome.tokens.output, outcome.tokens.computed) == (30, 8, 30 + 2 + 3)


def test_time_scale_brings_arrivals_together_and_leaves_thinking_as_long_as_it_is() -> None:
    jobs = workload(job("a", 8.0), job("b", 0.0, after="a", think_seconds=5.0))
    assert simulate(small_setup(), jobs).seconds == 8 + 3 + 5 + 3
    assert simulate(small_setup(), jobs, time_scale=4.0).seconds == 2 + 3 + 5 + 3
    with pytest.raises(ConfigError, match="time_scale is 0"):
        simulate(small_setup(), jobs, time_scale=0.0)


def test_a_turn_waits_for_the_end_of_the_one_before_however_it_ended_and_for_its_own_time() -> None:
    first = job("a", abort_seconds=1.5, output=20)
    second, third = job("b", after="a", think_seconds=1.0), job("c", 40.0, after="b", think_seconds=1.0)
    outcome = simulate(small_setup(), workload(first, second, third))
    assert (outcome.requests.aborted, outcome.requests.finished) == (1, 2)
    assert outcome.seconds == 43.0  # a leaves at 2, b runs from 3 to 6, c comes at 40 although b has ended long before


def test_a_client_that_goes_away_is_gone_at_the_end_of_the_step_or_while_it_is_held_back() -> None:
    patient, leaves = job("a", output=30), job("b", 0.5, output=30, abort_seconds=2.0)
    outcome = simulate(small_setup(), workload(patient, leaves))
    assert outcome.requests.aborted == outcome.requests.finished == 1
    assert outcome.concurrency.mean == pytest.approx((30 + 2) / 30)  # b runs in steps 2 and 3
    crowd = [job(f"w{number}", 0.5, abort_seconds=3.0) for number in range(100)]
    outcome = simulate(small_setup(max_running_requests=1), workload(patient, *crowd))
    assert (outcome.requests.arrived, outcome.requests.aborted, outcome.requests.finished) == (101, 100, 1)
    # they wait from the end of the first step to that of the fourth, in which their patience ends
    assert outcome.waiting_seconds == {"slots": 100 * 3.0}
    assert outcome.seconds == 30.0


def test_patience_that_outlasts_the_request_does_not_prolong_the_run() -> None:
    assert simulate(small_setup(), workload(job("a", abort_seconds=100.0))).seconds == 3.0


def test_what_can_never_run_is_rejected_and_the_others_go_on() -> None:
    outcome = simulate(small_setup(pages=16), workload(job("a"), job("huge", prompt=300), job("b")))
    assert (outcome.requests.rejected, outcome.requests.finished, outcome.tokens.prompt) == (1, 2, 20)
    why = outcome.rejections
    assert why is not None
    assert (why.max_model_len, why.limited_by) == (49, "the longest that fits the arena"), (
        "16 pages less 3 and the floor"
    )
    assert why.first.startswith("huge: a prompt of 300 tokens with 1 to generate is too long")
    assert "rejections" not in simulate(small_setup(), workload(job("a"))).to_dict()
    assert outcome.goodput.share == 0.0  # a token a second is not 100 ms
    slow = simulate(
        small_setup(pages=16, tpot_limit_seconds=1.0), workload(job("a"), job("huge", prompt=300), job("b"))
    )
    assert slow.goodput.share == pytest.approx(2 / 3)
    assert not slow.goodput.is_met


def test_goodput_counts_who_met_both_limits() -> None:
    jobs = workload(job("a"), job("b", 0.25), job("c", 0.5, abort_seconds=0.75))
    met = simulate(small_setup(ttft_limit_seconds=1.75, tpot_limit_seconds=1.0), jobs).goodput
    assert (met.share, met.is_met, met.requests_per_second) == (1.0, True, pytest.approx(2 / 4))
    late = simulate(small_setup(ttft_limit_seconds=1.5, tpot_limit_seconds=1.0), jobs).goodput
    assert (late.share, late.is_met) == (0.5, False)
    slow = simulate(small_setup(ttft_limit_seconds=9.0, tpot_limit_seconds=0.9), jobs).goodput
    assert (slow.share, slow.is_met) == (0.0, False)


def test_who_waits_for_memory_is_counted_by_the_second_and_under_its_reason() -> None:
    # 16 positions of each: 4 full pages and at most 3 of the window. The arena holds one such request and the floor.
    big = [job(name, prompt=12, output=5) for name in "abc"]
    outcome = simulate(small_setup(pages=8), workload(*big))
    assert outcome.requests.finished == 3
    assert outcome.seconds == 15.0
    assert outcome.waiting_seconds == {"memory": 5 * 2.0 + 5 * 1.0}
    assert outcome.concurrency.mean_while_waiting == 1.0
    assert outcome.arena.bytes == 8 * 256
    assert outcome.concurrency.peak == 1
    slots = simulate(small_setup(max_running_requests=1), workload(*big))
    assert slots.waiting_seconds == {"slots": 15.0}
    assert slots.concurrency.mean_while_waiting is None, "they waited, but not for memory"
    assert slots.arena.held_share_while_waiting is None


def test_what_was_while_memory_was_short_is_absent_where_it_never_was() -> None:
    jobs = workload(job("a", prompt=12), job("b", prompt=12))
    short, plenty = (simulate(small_setup(pages=pages), jobs).to_dict() for pages in (8, 64))
    assert short["concurrency"]["mean_while_waiting"] == 1.0
    assert short["arena"]["held_share_while_waiting"] > 0.0
    assert plenty["concurrency"].keys() == {"mean", "peak"}
    assert "held_share_while_waiting" not in plenty["arena"]


def test_bytes_are_conserved_at_every_point_and_their_sums_over_the_run() -> None:
    jobs = [job(f"j{number}", number / 4, prompt=20 + number % 30, output=5 + number % 7) for number in range(60)]
    outcome = simulate(small_setup(pages=48, prefix_cache=True), workload(*jobs), audit_every=1)
    series = outcome.series
    for at, free in enumerate(series.free_bytes):
        used = sum(figures[at] for figures in (*series.held_bytes.values(), *series.cached_bytes.values()))
        assert used + series.hole_bytes[at] + free == pytest.approx(outcome.arena.bytes)
    lasts = series.interval_seconds
    assert sum(lasts) == pytest.approx(outcome.seconds)
    for code, waiting in series.waiting_by_reason.items():
        assert sum(a * b for a, b in zip(waiting, lasts, strict=True)) == pytest.approx(outcome.waiting_seconds[code])
    mean = sum(a * b for a, b in zip(series.running, lasts, strict=True)) / outcome.seconds
    assert outcome.concurrency.mean == pytest.approx(mean)
    shares = outcome.arena
    free_share = sum(a * b for a, b in zip(series.free_bytes, lasts, strict=True)) / outcome.seconds / shares.bytes
    assert shares.held_share + shares.cached_share + shares.holes_share + free_share == pytest.approx(1.0)


def test_a_saturated_run_has_means_from_the_first_refusal_to_the_last_hand_over() -> None:
    jobs = workload(*(job(f"j{number}", 1000.0 * number, prompt=12, output=5) for number in range(70)))
    setup = small_setup(pages=24)
    outcome = simulate(setup, jobs, saturated=True)
    assert outcome.loop == "saturated"
    assert outcome.requests.finished == 70
    # three of seven pages fit beside the floor; 64 wait at most, so the last is handed over when six have been admitted
    assert outcome.middle_seconds == (0.0, 6.0)
    assert outcome.concurrency.mean == outcome.concurrency.peak == 3
    assert outcome.seconds == 120.0  # 24 rounds of five steps: nobody waited for an arrival
    assert max(seconds for seconds, _ in outcome.ttft_seconds.cdf) <= 120.0
    assert simulate(setup, jobs).seconds == 69_005.0


def test_the_bytes_of_each_pool_add_up_to_the_shares_of_the_arena() -> None:
    """One window for both: means over the whole run would have warm-up and drain in the bytes and not in the shares."""
    jobs = workload(*(job(f"j{number}", prompt=30, output=9) for number in range(90)))
    outcome = simulate(small_setup(pages=50, step_tokens=16, prefix_cache=True), jobs, saturated=True)
    assert outcome.middle_seconds[1] < outcome.seconds
    arena = outcome.arena
    assert sum(arena.held_bytes.values()) == pytest.approx(arena.held_share * arena.bytes)
    assert sum(arena.cached_bytes.values()) == pytest.approx(arena.cached_share * arena.bytes)
    parts = (arena.held_share, arena.cached_share, arena.holes_share, arena.free_share)
    assert sum(parts) == pytest.approx(1.0)


def test_neither_warm_up_nor_drain_count_in_a_saturated_run() -> None:
    jobs = workload(*(job(f"j{number}", prompt=30, output=9) for number in range(90)))
    outcome = simulate(small_setup(pages=50, step_tokens=16), jobs, saturated=True)
    first, last = outcome.middle_seconds
    series = outcome.series
    running = [now for at, now in zip(series.time_seconds, series.running, strict=True) if first <= at < last]
    assert 1.0 < first < last < outcome.seconds - 1.0
    assert outcome.concurrency.mean == pytest.approx(sum(running) / len(running))
    assert abs(outcome.concurrency.mean - sum(series.running) / len(series.running)) > 0.01


def test_a_retraction_lengthens_the_answer_and_not_the_wait_for_it() -> None:
    lengths = [128 if number % 4 == 0 else 65 for number in range(60)]
    jobs = workload(*(job(f"j{number}", number / 4, 8, output) for number, output in enumerate(lengths)))
    outcome = simulate(small_setup(pages=110, max_running_requests=16, admission=("expected", 0.05)), jobs)
    assert outcome.retractions > 0
    assert outcome.tokens.recomputed > 0
    assert outcome.requests.finished == 60
    assert outcome.tpot_seconds.cdf[0][0] >= 1.0  # a second a step: who was retracted would seem faster than that
    assert outcome.tpot_seconds.cdf[-1][0] > 1.0


def test_with_a_host_arena_a_retraction_computes_nothing_again_and_its_copies_take_their_time() -> None:
    lengths = [128 if number % 4 == 0 else 65 for number in range(60)]
    jobs = workload(*(job(f"j{number}", number / 4, 8, output) for number, output in enumerate(lengths)))
    plain = small_setup(pages=110, max_running_requests=16, admission=("expected", 0.05))
    fast = replace(plain, host_bytes=256 * 200, host_copy_bytes_per_second=1e15)
    without, hosted, slowly = (
        simulate(each, jobs) for each in (plain, fast, replace(fast, host_copy_bytes_per_second=256.0 * 1000))
    )
    assert without.tokens.recomputed > 0
    assert hosted.retractions > 0
    assert hosted.tokens.recomputed == slowly.tokens.recomputed == 0
    # The decisions are the same, so what is copied is: a thousandth of a second a page, there and back.
    assert hosted.steps == slowly.steps
    copied_pages = (slowly.seconds - hosted.seconds) * 1000
    assert copied_pages == pytest.approx(round(copied_pages), abs=1e-3)
    assert copied_pages >= 2 * hosted.retractions * 3  # at least one full page and two of the window


def test_what_the_host_arena_held_and_did_is_told_and_adds_up() -> None:
    lengths = [128 if number % 4 == 0 else 65 for number in range(60)]
    jobs = workload(*(job(f"j{number}", number / 4, 8, output) for number, output in enumerate(lengths)))
    plain = small_setup(pages=110, max_running_requests=16, admission=("expected", 0.05))
    hosted = simulate(replace(plain, host_bytes=256 * 200 + 7), jobs)
    use = hosted.host
    assert use is not None
    assert (use.quota_bytes, use.bytes) == (256 * 200 + 7, 256 * 200)
    assert use.offloaded.times == hosted.retractions == use.restored.times + use.dropped
    assert use.offloaded.tokens == use.restored.tokens, "nothing was dropped"
    assert use.offloaded.bytes % 256 == 0
    assert use.refused == use.write_refused == use.written.times == use.loaded.times == 0
    assert 0 < use.peak_bytes <= use.bytes
    over_time = use.series
    kinds = (*over_time.retracted_bytes.values(), *over_time.cached_bytes.values())
    for at, each in enumerate(zip(*kinds, over_time.hole_bytes, over_time.free_bytes, strict=True)):
        assert sum(each) == pytest.approx(use.bytes), at
    weights = over_time.interval_seconds
    mean = sum(value * last for value, last in zip(over_time.retracted_bytes["full"], weights, strict=True)) / sum(
        weights
    )
    assert use.retracted_bytes["full"] == pytest.approx(mean)
    assert use.held_share == pytest.approx(sum(use.retracted_bytes.values()) / use.bytes)


def test_hits_are_told_by_level_and_sum_to_the_hit_rate() -> None:
    """Four families of prompts in turns, on a device that holds one of them."""
    jobs = []
    for number in range(24):
        family = number % 4
        own = Job(f"j{number}", 40.0 * number, ((family, 64), (100 + number, 8)), 3, 200 + number)
        jobs.append(own)
    plain = small_setup(pages=40, prefix_cache=True)
    without = simulate(plain, workload(*jobs))
    hosted = simulate(replace(plain, host_bytes=256 * 400, host_copy_bytes_per_second=1e15), workload(*jobs))
    use = hosted.host
    assert use is not None
    assert use.host_hit_rate > 0
    assert use.device_hit_rate + use.host_hit_rate == pytest.approx(hosted.hit_rate)
    assert hosted.hit_rate > without.hit_rate
    assert use.loaded.times > 0
    assert use.loaded.tokens == round(use.host_hit_rate * hosted.tokens.prompt)
    assert sum(use.cached_bytes.values()) > 0 == sum(use.retracted_bytes.values())
    assert use.written.bytes > 0


def test_a_run_without_a_host_arena_says_nothing_of_it() -> None:
    outcome = simulate(small_setup(), workload(job("a")))
    assert outcome.host is None
    assert "host" not in outcome.to_dict()


def test_unknown_lengths_end_where_they_end_and_known_ones_too() -> None:
    jobs = workload(*(job(f"j{number}", number / 2, output=1 + number) for number in range(20)))
    for leap in (1, 4):
        known = simulate(small_setup(leap_tokens=leap), jobs)
        unknown = simulate(small_setup(leap_tokens=leap, known_lengths=False, admission=("expected", 0.8)), jobs)
        assert known.tokens.output == unknown.tokens.output == sum(range(1, 21))
        assert known.requests.finished == unknown.requests.finished == 20


def test_a_leap_takes_as_long_as_its_steps_and_not_past_an_arrival() -> None:
    jobs = workload(job("a", output=40), job("b", 20.0, output=40))
    plain, leaping = simulate(small_setup(), jobs), simulate(small_setup(leap_tokens=4), jobs)
    assert leaping.steps < plain.steps / 2
    assert leaping.seconds == plain.seconds == 60.0
    assert leaping.ttft_seconds == plain.ttft_seconds
    assert leaping.e2e_seconds == plain.e2e_seconds
    with pytest.raises(ConfigError, match="leap_tokens is 0"):
        simulate(small_setup(leap_tokens=0), jobs)


def test_instant_prefill_takes_no_time_and_decodes_stand_still_meanwhile() -> None:
    outcome = simulate(
        small_setup(pages=256, instant_prefill=True), workload(job("a", prompt=100), job("b", prompt=100))
    )
    # 64 of a; 36 of a and 28 of b; 64 of b; 8 of b, all at second 0; then both decode their two further tokens
    assert (outcome.seconds, outcome.steps) == (2.0, 6)
    assert [seconds for seconds, _ in outcome.ttft_seconds.cdf] == [0.0, 0.0]


def test_holding_back_decides_nothing_where_priorities_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(f"j{number}", number / 50, prompt=20, output=5 + number % 7) for number in range(150)]
    setup = small_setup(pages=64, prefix_cache=True)
    held_back = simulate(setup, workload(*jobs))
    monkeypatch.setattr(driver_module, "MOST_WAITING", 10**6)
    at_once = simulate(setup, workload(*jobs))
    assert at_once.digest == held_back.digest
    assert at_once.waiting_seconds == pytest.approx(held_back.waiting_seconds)


def test_a_senior_job_overtakes_those_who_wait() -> None:
    crowd = [job(f"j{number}", output=8, priority=1) for number in range(100)]
    outcome = simulate(
        small_setup(max_running_requests=1, ttft_limit_seconds=20.0, tpot_limit_seconds=2.0),
        workload(*crowd, job("first", 2.5, output=8, priority=0)),
        window=(8, 10),
    )
    assert [[each.request_id for each in step.segments] for step in outcome.window] == [["first"], ["first"]]


def test_equal_runs_decide_equally_and_other_ones_do_not() -> None:
    jobs = workload(*(job(f"j{number}", number / 4, prompt=30, output=9) for number in range(40)))
    setup = small_setup(pages=40, prefix_cache=True)
    digest = simulate(setup, jobs).digest
    assert simulate(setup, jobs).digest == digest
    assert simulate(replace(setup, kv_bytes=256 * 39), jobs).digest != digest
    assert simulate(replace(setup, prefix_cache=False), jobs).digest != digest
    assert simulate(setup, jobs, most_jobs=39).digest != digest
    renamed = workload(*(replace(each, id=f"k{each.id}") for each in jobs.jobs))
    assert simulate(setup, renamed).digest != digest


SCRIPT = """
import sys
from testing.replays import job, small_setup, workload
from halocline.sim.simulation import simulate
jobs = [job(f"j{number}", number / 4, prompt=30 + number % 9, output=9, abort_seconds=40.0) for number in range(80)]
print(simulate(small_setup(pages=40, prefix_cache=True), workload(*jobs)).digest)
"""


def test_the_digest_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 32


def test_the_audit_runs_when_it_is_asked_for_and_stops_a_run_that_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def audit(scheduler: Scheduler) -> list[Violation]:
        steps.append(scheduler.totals.steps)
        return [Violation("L1", "a page has two owners")] if scheduler.totals.steps == 4 else []

    monkeypatch.setattr(Scheduler, "audit", audit)
    simulate(small_setup(), workload(job("a", output=3)), audit_every=2)
    assert steps == [2, 3]
    with pytest.raises(InvariantError, match="after step 4: L1: a page has two owners"):
        simulate(small_setup(), workload(job("a", output=9)), audit_every=2)
    simulate(small_setup(), workload(job("a", output=9)))


def test_work_that_nobody_can_go_on_with_is_an_error_and_not_a_run_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "plan", lambda *_: None)
    with pytest.raises(InvariantError, match="L10: work is left and nothing can be computed at 0"):
        simulate(small_setup(), workload(job("a")))


def test_the_window_has_a_record_of_each_step_that_was_asked_for() -> None:
    outcome = simulate(small_setup(), workload(job("a"), job("b", 0.25)), window=(1, 3))
    assert [(each.step, each.start_seconds, each.seconds) for each in outcome.window] == [(1, 1.0, 1.0), (2, 2.0, 1.0)]
    first = outcome.window[0]
    assert [(each.request_id, each.start, each.tokens, each.prompt_tokens) for each in first.segments] == [
        ("a", 10, 1, 10),
        ("b", 0, 10, 10),
    ]
    assert (first.running, first.waiting, first.reason, first.moves) == (2, 0, "", 0)
    assert first.held_bytes == {"full": 6 * 256, "sliding-8": 6 * 256}  # 11 and 10 positions; a window may straddle
    assert [each.ended for each in outcome.window] == [(), ("a",)]
    assert simulate(small_setup(), workload(job("a"))).window == ()


def test_progress_is_told_at_the_end_at_the_latest() -> None:
    told: list[Progress] = []
    simulate(small_setup(), workload(job("a"), job("huge", prompt=3000)), on_progress=told.append)
    assert (told[-1].ended, told[-1].jobs, told[-1].seconds, told[-1].steps) == (2, 2, 3.0, 3)


def test_an_outcome_becomes_plain_data() -> None:
    table = simulate(small_setup(), workload(job("a")), window=(0, 1)).to_dict()
    assert table["requests"] == {"arrived": 1, "finished": 1, "rejected": 0, "failed": 0, "aborted": 0}
    assert table["ttft_seconds"]["cdf"] == [[1.0, 1.0]]
    assert table["window"][0]["segments"] == [{"request_id": "a", "start": 0, "tokens": 10, "prompt_tokens": 10}]
    assert table["pools"][0]["name"] == "full"


def test_every_policy_serves_the_same_jobs_and_none_needs_another_scheduler() -> None:
    jobs = workload(*(job(f"j{number}", prompt=40, output=6) for number in range(30)))
    means = {}
    for policy in ("shared", "static:0.8", "equal-pages", "full"):
        outcome = simulate(small_setup(pages=64, policy=policy), jobs, saturated=True, audit_every=5)
        assert outcome.requests.finished == 30, policy
        assert outcome.policy == policy
        means[policy] = outcome.concurrency.mean
    assert max(means, key=means.__getitem__) in ("shared", "equal-pages")  # two kinds of equal bytes pad nothing
    assert means["full"] < means["shared"]
    with pytest.raises(ConfigError, match="also knows equal-pages and full"):
        simulate(small_setup(policy="half"), jobs)


def test_one_pool_alone_is_no_special_case() -> None:
    outcome = simulate(small_setup(shape=small_shape(Full())), workload(job("a"), job("b")))
    assert [pool.name for pool in outcome.pools] == ["full"]
    assert outcome.seconds == 3.0
