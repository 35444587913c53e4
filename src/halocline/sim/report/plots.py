"""The report's plots as plain data for plotly.js: traces and layouts, no code.

Every text that comes out of a file or a flag is escaped here: plotly.js reads its labels as a kind of HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from halocline.sim.report.figure import Outcome, value_at
from halocline.sim.report.figures import REASONS
from halocline.units import GIB, MIB

Trace = dict[str, Any]

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a4fbf", "#666666")
"""One per policy; told apart also by people who see few colours (after Okabe and Ito)."""
POOL_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a4fbf", "#b8860b")
HOLE_COLOUR, FREE_COLOUR = "#444444", "rgba(160,160,160,0.18)"
HELD_OPACITY, CACHED_OPACITY = 0.9, 0.4
ROW_PIXELS, PLAIN_PIXELS, FRAME_PIXELS = 190, 340, 110
LEAST_SECONDS = 1e-4
"""Where a logarithmic axis of seconds begins at the least: a wait of nothing has no logarithm."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot and what it shows, in words."""

    key: str
    title: str
    words: str
    traces: list[Trace]
    layout: dict[str, Any]
    is_narrow: bool = False
    """Whether it may stand beside others."""

    @property
    def height(self) -> int:
        """Height in pixels."""
        return int(self.layout["height"])


def plots(outcomes: Sequence[Outcome]) -> list[Plot]:
    """Return the plots that these runs have data for."""
    made = [
        arena_over_time(outcomes),
        host_over_time(outcomes),
        concurrency_over_time(outcomes),
        waiting_over_time(outcomes),
        *cdfs(outcomes),
    ]
    return [plot for plot in made if plot.traces]


def arena_over_time(outcomes: Sequence[Outcome]) -> Plot:
    """Every byte of the arena over time, by kind; a row per run."""
    shown = [each for each in outcomes if value_at(each, ("series", "held_bytes"))]
    words = (
        "Means over each interval, stacked: what requests hold (and lock) of each pool, holes (free pages in slabs of "
        "a pool), what the prefix cache keeps because nobody needs the bytes, and free slabs. Together they "
        "are the arena."
    )
    largest = max((each["kv_bytes"] for each in shown), default=0)
    traces, layout = _stacked([(str(each["policy"]), each["series"]) for each in shown], largest, "held")
    return Plot("arena", "The arena over time, by kind", words, traces, layout)


def host_over_time(outcomes: Sequence[Outcome]) -> Plot:
    """Every byte of the host arena over time, by kind; a row per run that has one."""
    shown = [each for each in outcomes if value_at(each, ("host", "series", "time_seconds"))]
    words = (
        "Means over each interval, stacked: copies of retracted requests by pool, holes, the second level of the "
        "prefix cache by pool, and free slabs. Together they are the quota's whole slabs."
    )
    largest = max((each["host"]["bytes"] for each in shown), default=0)
    traces, layout = _stacked([(str(each["policy"]), each["host"]["series"]) for each in shown], largest, "retracted")
    return Plot("host", "The host arena over time, by kind", words, traces, layout)


def _stacked(rows: Sequence[tuple[str, Any]], largest: int, kind: str) -> tuple[list[Trace], dict[str, Any]]:
    """Stack the bytes of an arena: of `kind`, holes, cached, free; `rows` are names and series."""
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    pools = list(dict.fromkeys(pool for _, series in rows for pool in series[f"{kind}_bytes"]))
    colours = {pool: POOL_COLOURS[index % len(POOL_COLOURS)] for index, pool in enumerate(pools)}
    traces: list[Trace] = []
    named: set[str] = set()
    for row, (_, series) in enumerate(rows, start=1):
        layers = [
            (f"{pool} {kind}", values, colours[pool], HELD_OPACITY) for pool, values in series[f"{kind}_bytes"].items()
        ]
        layers.append(("holes", series["hole_bytes"], HOLE_COLOUR, HELD_OPACITY))
        layers += [
            (f"{pool} cached", values, colours[pool], CACHED_OPACITY) for pool, values in series["cached_bytes"].items()
        ]
        layers.append(("free", series["free_bytes"], FREE_COLOUR, 1.0))
        for label, values, colour, opacity in layers:
            points = _steps(series, [value / unit for value in values])
            area = _area(*points, label, row, f"%{{y:.2f}} {name}")
            traces.append(area | _fill(colour, opacity) | {"showlegend": label not in named})
            named.add(label)
    return traces, _rows([policy for policy, _ in rows], name)


def concurrency_over_time(outcomes: Sequence[Outcome]) -> Plot:
    """Requests that hold memory over time, a line per run."""
    traces: list[Trace] = []
    for index, outcome in enumerate(outcomes):
        series = outcome.get("series") or {}
        if not series.get("running"):
            continue
        line = {"color": RUN_COLOURS[index % len(RUN_COLOURS)], "width": 1.6, "shape": "hv"}
        traces.append(_line(*_steps(series, series["running"]), str(outcome["policy"]), line, "%{y:.1f}"))
    words = "Requests that hold memory at once, prefilling or decoding; means over each interval."
    layout = _layout(PLAIN_PIXELS, _axis("seconds"), _axis("requests", rangemode="tozero"))
    return Plot("concurrency", "Concurrency over time", words, traces, layout | {"hovermode": "x unified"})


def waiting_over_time(outcomes: Sequence[Outcome]) -> Plot:
    """Who waits over time by the reason of the first in line; a row per run."""
    shown = [each for each in outcomes if _has_waited(each)]
    codes = [code for code in REASONS if any(_has_waited(each, code) for each in shown)]
    codes += sorted({code for each in shown for code in each["series"]["waiting_by_reason"]} - {*codes, *REASONS})
    traces: list[Trace] = []
    named: set[str] = set()
    for row, outcome in enumerate(shown, start=1):
        series = outcome["series"]
        for index, code in enumerate(codes):
            if not _has_waited(outcome, code):
                continue
            points = _steps(series, series["waiting_by_reason"][code])
            area = _area(*points, code, row, "%{y:.1f}")
            fill = _fill(POOL_COLOURS[(index + 3) % len(POOL_COLOURS)], HELD_OPACITY)
            traces.append(area | fill | {"showlegend": code not in named})
            named.add(code)
    words = "Requests that wait, all under the reason of the first in line: the others wait behind it. " + "; ".join(
        f"{code}: {REASONS[code]}" for code in codes if code in REASONS
    )
    layout = _rows([str(each["policy"]) for each in shown], "requests")
    return Plot("waiting", "Who waits, and why", words + ".", traces, layout)


def cdfs(outcomes: Sequence[Outcome]) -> list[Plot]:
    """Return the latency distributions, a line per run and the limit of the goodput where there is one."""
    made = []
    for key, name, words, limit in (
        ("ttft_seconds", "TTFT", "Time from arrival to the first token", "ttft_limit_seconds"),
        (
            "tpot_seconds",
            "TPOT",
            "Time from first to last token, over the tokens after the first",
            "tpot_limit_seconds",
        ),
        ("e2e_seconds", "E2E", "Time from arrival to the last token", ""),
    ):
        traces: list[Trace] = []
        for index, outcome in enumerate(outcomes):
            points = value_at(outcome, (key, "cdf")) or []
            if not points:
                continue
            times = [max(seconds, LEAST_SECONDS) for seconds, _ in points]
            line = {"color": RUN_COLOURS[index % len(RUN_COLOURS)], "width": 1.8, "shape": "hv"}
            shares = [100 * share for _, share in points]
            hover = "%{y:.1f} % within %{x:.3g} s"
            traces.append(_line(times, shares, str(outcome["policy"]), line, hover))
        layout = _layout(PLAIN_PIXELS, _axis("seconds", type="log", dtick="D2"), _axis("% of requests", range=[0, 101]))
        layout["legend"] = {"x": 0.02, "y": 0.98, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"}
        limits = {value_at(each, ("goodput", limit)) for each in outcomes} - {None}
        layout["shapes"] = [_limit(float(seconds)) for seconds in sorted(limits)]
        more = "; the dotted line is the limit of the goodput." if limits else "."
        made.append(Plot(key, name, words + more, traces, layout, is_narrow=True))
    return made


def _steps(series: Mapping[str, Any], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return where each interval begins and its value, and the end of the last one: a step line needs it."""
    times, lasts = series["time_seconds"], series["interval_seconds"]
    return [*times, times[-1] + lasts[-1]], [*values, values[-1]]


def _has_waited(outcome: Outcome, code: str | None = None) -> bool:
    by_reason: Mapping[str, Sequence[float]] = value_at(outcome, ("series", "waiting_by_reason")) or {}
    return any(any(values) for name, values in by_reason.items() if code in (None, name))


def _area(times: Sequence[float], values: Sequence[float], label: str, row: int, hover: str) -> Trace:
    axis = "" if row == 1 else str(row)
    return _line(times, values, label, {"width": 0, "shape": "hv"}, hover) | {
        "stackgroup": f"run {row}",
        "legendgroup": escape(label),
        "xaxis": "x",
        "yaxis": f"y{axis}",
    }


def _line(times: Sequence[float], values: Sequence[float], label: str, line: Mapping[str, Any], hover: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [_short(each) for each in times],
        "y": [_short(each) for each in values],
        "name": escape(label),
        "line": dict(line),
        "hovertemplate": f"{hover}<extra>{escape(label)}</extra>",
    }


def _short(value: float) -> float:
    """Return a number with as many digits as a plot can show: the page has tens of thousands of them."""
    return float(f"{value:.6g}")


def _fill(colour: str, opacity: float) -> Trace:
    if not colour.startswith("#"):
        return {"fillcolor": colour}
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return {"fillcolor": f"rgba({red},{green},{blue},{opacity})"}


def _rows(names: Sequence[str], unit: str) -> dict[str, Any]:
    """Return a layout with one row per run above a common axis of time; `names` stand at the rows' upper left."""
    rows = max(1, len(names))
    gap = 0.12 / rows
    layout = _layout(ROW_PIXELS * rows + FRAME_PIXELS, _axis("seconds"), {})
    layout["annotations"] = []
    for index, name in enumerate(names):
        top = 1 - index / rows
        axis = "" if index == 0 else str(index + 1)
        layout[f"yaxis{axis}"] = _axis(unit, domain=[top - 1 / rows + gap, top - gap / 2], rangemode="tozero")
        layout["annotations"].append(
            {
                "text": f"<b>{escape(name)}</b>",
                "xref": "paper",
                "yref": "paper",
                "x": 0.005,
                "y": top - gap / 2,
                "xanchor": "left",
                "yanchor": "top",
                "showarrow": False,
                "bgcolor": "rgba(255,255,255,0.75)",
                "font": {"color": "#111111"},
            }
        )
    layout["xaxis"]["anchor"] = "y" if rows == 1 else f"y{rows}"
    return layout | {"hovermode": "x"}


def _layout(height: int, x: Mapping[str, Any], y: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 48},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "xaxis": dict(x),
        "yaxis": dict(y),
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "zeroline": False, **more}


def _limit(seconds: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": seconds,
        "x1": seconds,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "#888888", "width": 1.5, "dash": "dot"},
    }
