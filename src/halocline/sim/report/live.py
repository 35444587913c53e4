"""What the clients of a live server saw, as an outcome: the same keys as a simulated one, as far as they apply.

What a client cannot see is left out: steps, digest, moves, padding, and whether it is memory that others wait for.
Where the server is a Halocline, its /metrics give the bytes of the arena, and the counts between the first look and the
last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from halocline.sim.gauge import FREE, HOLES, POOLS, RUNNING, WAITING, Gauge, Integrals
from halocline.sim.live import Seen, Target
from halocline.sim.record import latency, percentile
from halocline.sim.scrape import arena_of
from halocline.sim.workload import Workload

COUNTERS = {
    "retractions": "retractions",
    "moves": "moves",
    "computed": "computed_tokens",
    "recomputed": "recomputed_tokens",
}
SHOWN_ERRORS = 20


def outcome_of(seen: Seen, target: Target, workload: Workload) -> dict[str, Any]:
    """Return the outcome of a live run."""
    saturated = target.concurrency is not None
    gauge = seen.gauge
    middle = gauge.middle if saturated and gauge.middle.seconds else gauge.run
    first, last = (gauge.pressed_at, gauge.drained_at) if middle is gauge.middle else (0.0, seen.seconds)
    counts = {name: seen.counts[name] for name in ("rejected", "failed", "aborted")}
    made: dict[str, Any] = {
        "policy": urlsplit(target.url).netloc or target.url,
        "model": target.model,
        "workload": workload.name,
        "device": "live server",
        "loop": "saturated" if saturated else "open",
        "seconds": seen.seconds,
        "digest": None,
        "middle_seconds": [first, min(last, seen.seconds)],
        "requests": {"arrived": seen.ended, "finished": len(seen.answers), **counts, "short": seen.short},
        "concurrency": {
            "mean": _mean(middle),
            "peak": gauge.peak_running,
        },
        **_latencies(seen, target),
        **_tokens(seen),
        "series": _series(gauge),
        "pools": [],
        "window": [],
        "errors": dict(seen.errors.most_common(SHOWN_ERRORS)),
        "latest_seconds": seen.latest_seconds,
    }
    return made | _arena(seen, made["tokens"])


def _mean(integrals: Integrals) -> float:
    return integrals.running / integrals.seconds if integrals.seconds else 0.0


def _latencies(seen: Seen, target: Target) -> dict[str, Any]:
    answers, limits = seen.answers, (target.ttft_limit_seconds, target.tpot_limit_seconds)
    ttft = [each.first_token_seconds for each in answers]
    tpot = [each.token_seconds for each in answers if each.output_tokens > 1]
    good = sum(
        each.first_token_seconds <= limits[0] and (each.output_tokens < 2 or each.token_seconds <= limits[1])
        for each in answers
    )
    asked = seen.ended - seen.counts["aborted"]
    within = percentile(ttft, 0.95) <= limits[0] and percentile(tpot, 0.95) <= limits[1]
    return {
        "goodput": {
            "share": good / asked if asked else 0.0,
            "requests_per_second": good / seen.seconds if seen.seconds else 0.0,
            "ttft_limit_seconds": limits[0],
            "tpot_limit_seconds": limits[1],
            "is_met": bool(within and len(answers) == asked),
        },
        "ttft_seconds": asdict(latency(ttft)),
        "tpot_seconds": asdict(latency(tpot)),
        "e2e_seconds": asdict(latency([each.total_seconds for each in answers])),
    }


def _tokens(seen: Seen) -> dict[str, Any]:
    """Return the counts of the finished requests, by the server's usage; cached ones only where it tells."""
    prompt = sum(each.prompt_tokens for each in seen.answers)
    tokens = {"prompt": prompt, "output": sum(each.output_tokens for each in seen.answers)}
    told = [each for each in seen.answers if each.cached_tokens is not None]
    if not told:
        return {"tokens": tokens}
    tokens["cached"] = sum(each.cached_tokens or 0 for each in told)
    looked_up = sum(each.prompt_tokens for each in told)
    return {"tokens": tokens, "hit_rate": tokens["cached"] / looked_up if looked_up else 0.0}


def _series(gauge: Gauge) -> dict[str, Any]:
    means, pools = gauge.series.means(), gauge.pools
    series: dict[str, Any] = {
        "time_seconds": gauge.series.starts.tolist(),
        "interval_seconds": gauge.series.seconds.tolist(),
        "running": means[:, RUNNING].tolist(),
        "waiting": means[:, WAITING].tolist(),
    }
    if pools:
        series["free_bytes"], series["hole_bytes"] = means[:, FREE].tolist(), means[:, HOLES].tolist()
        for at, kind in ((POOLS, "held_bytes"), (POOLS + len(pools), "cached_bytes")):
            series[kind] = {pool: means[:, at + index].tolist() for index, pool in enumerate(pools)}
    return series


def _arena(seen: Seen, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return what a Halocline's /metrics told; nothing of another server, or one whose engine is gone."""
    before, after = arena_of(seen.before), arena_of(seen.after)
    if before is None or after is None:
        return {}
    gauge = seen.gauge
    lasts = gauge.series.seconds
    means = (gauge.series.means() * lasts[:, None]).sum(axis=0) / max(float(lasts.sum()), 1e-300)
    pools = gauge.pools
    held, cached = (dict(zip(pools, row.tolist(), strict=True)) for row in means[POOLS:].reshape(2, len(pools)))
    counted = {name: _counted(seen.before, seen.after, f"halocline_{key}_total") for name, key in COUNTERS.items()}
    tokens |= {name: counted.pop(name) for name in ("computed", "recomputed")}
    return {
        "kv_bytes": int(after.total),
        "arena": {
            "bytes": int(after.total),
            "held_share": sum(held.values()) / after.total,
            "cached_share": sum(cached.values()) / after.total,
            "holes_share": float(means[HOLES]) / after.total,
            "free_share": float(means[FREE]) / after.total,
            "held_bytes": held,
            "cached_bytes": cached,
        },
        **counted,
    }


def _counted(before: Mapping[str, float], after: Mapping[str, float], name: str) -> int:
    return int(after.get(name, 0.0) - before.get(name, 0.0))
