"""What is shown of a replay: table, JSON and page are made of one list, and nothing out of a file can do harm."""

from __future__ import annotations

import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halocline.errors import ConfigError, FailedError
from halocline.sim.outcome import REASONS, Concurrency, PoolShape, Rejections
from halocline.sim.report import figures, html, summary
from halocline.sim.report.figure import seconds, value_at
from halocline.sim.report.host_figures import HOST, host_figures
from halocline.sim.report.json import as_json, check_writable, write
from halocline.sim.report.plots import plots
from testing.outcomes import GIB, POINTS, arena_use, document, host_use, outcome

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>[red]&amp;</textarea>"


class Page(HTMLParser):
    """What a browser would make of a page: elements with attributes, text, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif data.strip():
            self.text.append(data.strip())

    @property
    def data(self) -> dict[str, Any]:
        """The plots' data."""
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "plots"))


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html.page(document()))


def printed(record: dict[str, Any], width: int | None = None) -> list[str]:
    console = Console(width=width or 1000, file=io.StringIO())
    for table in summary.tables(record, width):
        console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def cells_of(record: dict[str, Any]) -> dict[str, list[str]]:
    """Return the table's cells by the name of their line."""
    rows = (line.split("│") for line in printed(record) if "│" in line)
    return {title.strip(): [cell.strip() for cell in cells] for title, *cells in rows}


def test_the_table_has_a_column_per_policy_and_a_line_per_figure() -> None:
    record = document(outcome(), outcome("static:0.8", running=9.0), outcome("full", retractions=5))
    lines = printed(record)
    assert any(re.findall(r"[\w:.]+", line) == ["shared", "static:0.8", "full"] for line in lines)
    cells = cells_of(record)
    assert cells["concurrency: mean"] == ["36.00", "9.00", "36.00"]
    assert cells["memory: retractions"] == ["17", "17", "5"]
    assert cells["TPOT p50"] == ["25 ms"] * 3
    assert cells["arena: full held"] == ["6 GiB"] * 3
    assert cells["waiting: memory"] == ["1,234 s"] * 3
    assert "waiting: slots" not in cells, "nobody waited for that"


def test_every_line_of_the_table_is_whole_where_no_terminal_sets_a_width() -> None:
    many = [outcome(f"static:0.{number}") for number in range(1, 9)]
    lines = printed(document(*many))
    assert "…" not in "".join(lines)
    assert any(line.count("00ff00ff00ff") == 8 for line in lines)


def test_a_narrow_terminal_gets_several_tables_and_no_figure_is_cut() -> None:
    record = document(*(outcome(f"static:0.{number}") for number in range(1, 6)))
    lines = printed(record, 80)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert [line.count("36.00") for line in lines if "36.00" in line] == [3, 2]
    heads = " ".join(lines)
    assert all(f"static:0.{number}" in heads for number in range(1, 6))


def test_a_figure_that_no_run_has_has_no_line() -> None:
    record = document()
    for each in record["outcomes"]:
        del each["arena"], each["moves"]
    assert not [line for line in printed(record) if "memory: moves" in line or "arena: slabs" in line]
    del record["outcomes"][0]["retractions"]
    assert any(line.split("│")[1].strip() == "-" for line in printed(record) if "retractions" in line)


def test_what_was_while_memory_was_short_is_no_zero_where_it_never_was() -> None:
    calm = outcome("full", concurrency=Concurrency(4.0, 9, None), arena=arena_use(held_share_while_waiting=None))
    cells = cells_of(document(outcome(), calm))
    assert cells["concurrency: while memory is short"] == ["37.00", "-"]
    assert cells["arena: held while memory is short"] == ["97.0 %", "-"]
    assert not [title for title in cells_of(document(calm)) if "short" in title]


def test_every_figure_stands_where_an_outcome_has_it() -> None:
    made = outcome().to_dict()
    listed = (*figures.REQUESTS, *figures.LATENCIES, *figures.TOKENS, *figures.ARENA, *figures.RUN)
    live_only = {("requests", "short"), ("latest_seconds",)}
    missing = [each.path for each in listed if value_at(made, each.path) is None and each.path not in live_only]
    assert not missing
    assert len({each.title for each in listed}) == len(listed)


def test_every_reason_of_the_scheduler_has_its_meaning() -> None:
    assert set(figures.REASONS) == set(REASONS)


def test_mean_bytes_are_weighted_with_the_intervals() -> None:
    made = outcome().to_dict()
    made["series"]["interval_seconds"] = [0.0] * (POINTS - 1) + [5.0]
    made["series"]["held_bytes"] = {"full": [9.0 * GIB] * (POINTS - 1) + [2.0 * GIB]}
    assert figures.mean_bytes(made)["held"] == {"full": 2.0 * GIB}
    assert figures.mean_bytes({}) == {}


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 ms"), (0.0254, "25.4 ms"), (1.0, "1 s"), (123.4, "123 s"), (999.6, "1,000 s")]
)
def test_seconds_are_printed_with_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_the_json_record_is_what_was_measured_and_how() -> None:
    record = document(command="halocline replay x --seed 3")
    read = json.loads(as_json(record))
    assert read == json.loads(json.dumps(record))
    assert read["command"].endswith("--seed 3")
    assert read["outcomes"][1]["policy"] == "static:0.8"
    assert read["outcomes"][0]["series"]["held_bytes"]["full"][1] == 5 * GIB
    assert len(as_json(record).splitlines()) < 100, "a key of a run is a line, however long its series"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    write(path, "new\n")
    assert path.read_text() == "new\n"
    assert path.stat().st_mode & 0o444 == 0o444 & ~os.umask(os.umask(0)), "readable as other files are"

    def breaks(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", breaks)
    with pytest.raises(KeyboardInterrupt):
        write(path, "half")
    assert path.read_text() == "new\n"
    assert os.listdir(tmp_path) == ["report.json"], "no temporary file is left"


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, "text\n")
        assert pipe.is_fifo(), "a device such as /dev/null would be gone, too, for whoever may replace it"
        assert os.read(reader, 100) == b"text\n"
    finally:
        os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]


def test_what_is_no_text_is_written_as_what_stands_for_it(tmp_path: Path) -> None:
    for path in (tmp_path / "report.html", tmp_path / os.fsdecode(b"\xff.html")):
        write(path, os.fsdecode(b"of \xff\xc3\xa9.jsonl\n"))
        assert path.read_text(encoding="utf-8") == "of \\udcff\u00e9.jsonl\n"


def test_a_device_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("root would lose the device"))
    check_writable(Path("/dev/full"))
    with pytest.raises(FailedError, match="cannot write /dev/full: No space left on device"):
        write(Path("/dev/full"), "text\n")


def test_a_link_stays_and_names_the_new_text(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to("reports/1.html")
    for text in ("new\n", "newer\n"):
        check_writable(link)
        write(link, text)
        assert link.is_symlink()
        assert (tmp_path / "reports" / "1.html").read_text() == text
    assert os.listdir(tmp_path / "reports") == ["1.html"]


def test_a_place_that_is_gone_when_the_work_is_done_is_told(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="No such file or directory"):
        write(tmp_path / "gone" / "report.json", "")


@pytest.mark.parametrize("name", ["absent/report.html", ".", "file/report.html"])
def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        check_writable(tmp_path / name)


def test_the_page_loads_nothing_from_anywhere(page: Page) -> None:
    """No element of the page refers to anything outside it, and its policy forbids the scripts to fetch."""
    loading = {"src", "href", "data", "action", "poster", "srcset", "background", "formaction"}
    refers = [(tag, name) for tag, attrs in page.elements for name in attrs if name in loading]
    assert refers == []
    assert not [tag for tag, _ in page.elements if tag in {"link", "iframe", "object", "embed", "base", "img"}]
    policies = [attrs["content"] or "" for tag, attrs in page.elements if tag == "meta" and "http-equiv" in attrs]
    assert len(policies) == 1
    assert "default-src 'none'" in policies[0]
    assert "http" not in policies[0]
    style = re.search(r"<style>(.*?)</style>", html.page(document()), re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import|https?:", style.group(1))


def test_no_button_of_a_plot_sends_data_anywhere(page: Page) -> None:
    """plotly.js shows one by default that uploads the chart."""
    ours = page.scripts[2][1]
    assert "showSendToCloud: false" in ours
    assert 'plotlyServerURL: ""' in ours
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|sendBeacon|WebSocket", ours)


def test_the_page_has_the_plots_the_figures_and_how_to_repeat_them(page: Page) -> None:
    assert list(page.data) == ["arena", "concurrency", "waiting", "ttft_seconds", "tpot_seconds", "e2e_seconds"]
    places = {attrs.get("id") for tag, attrs in page.elements if tag == "div"}
    assert places >= {f"plot-{key}" for key in page.data}
    for text in ("36.00", "static:0.8", "halocline replay trace.jsonl", "16 GiB", "sliding-1024", "TTFT p95"):
        assert text in page.text, text


def test_the_scripts_of_the_page_end_where_they_should(page: Page) -> None:
    kinds = [attrs.get("type") for attrs, _ in page.scripts]
    assert kinds == ["application/json", None, None]
    assert page.scripts[1][1].lstrip().startswith("/**\n* plotly.js")
    assert page.scripts[2][1].rstrip().endswith("})();")


def test_text_out_of_files_is_inert_on_the_page_and_in_the_table() -> None:
    pools = (PoolShape(EVIL, 16, 1, 1, 1, None),)
    one = outcome(EVIL, model=EVIL, workload=EVIL, pools=pools)
    record = document(one, one, command=f"halocline replay {EVIL}", trace=EVIL)
    for each in record["outcomes"]:
        each["series"]["held_bytes"] = each["series"]["cached_bytes"] = {EVIL: [1.0] * POINTS}
        each["waiting_seconds"] = {EVIL: 1.0}
    page = Page(html.page(record))
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in page.elements]
    assert EVIL in page.text, "it is shown as it is"
    labels = [trace["name"] for plot in page.data.values() for trace in plot["traces"]]
    assert not [label for label in labels if "<" in label], "plotly.js reads labels as HTML"
    assert "<" not in page.scripts[0][1], "nothing can end the script that has the data"
    heads = [line for line in printed(record) if "┃" in line]
    assert [line.count(EVIL) for line in heads] == [2], "names are not the table's markup"
    assert any(line.startswith(f"{EVIL} on {EVIL}") for line in printed(record))
    assert any(line.startswith(f"waiting: {EVIL}") for line in printed(record))


def test_the_arenas_areas_add_up_to_the_arena(page: Page) -> None:
    traces = [trace for trace in page.data["arena"]["traces"] if trace["stackgroup"] == "run 1"]
    assert len(traces) == 6, "two pools held, two cached, holes and free"
    totals = [sum(values) for values in zip(*(trace["y"] for trace in traces), strict=True)]
    assert totals == pytest.approx([16.0] * (POINTS + 1)), "GiB"
    assert traces[0]["x"][-1] == 10.0 * POINTS, "the last interval is drawn to its end"


def test_the_runs_of_a_report_share_the_legend_of_the_arena(page: Page) -> None:
    traces = page.data["arena"]["traces"]
    assert [trace["showlegend"] for trace in traces] == [True] * 6 + [False] * 6
    assert {trace["yaxis"] for trace in traces} == {"y", "y2"}
    names = [note["text"] for note in page.data["arena"]["layout"]["annotations"]]
    assert names == ["<b>shared</b>", "<b>static:0.8</b>"]


def test_latencies_are_drawn_with_the_limit_that_goodput_has(page: Page) -> None:
    ttft = page.data["ttft_seconds"]
    assert [trace["y"][-1] for trace in ttft["traces"]] == [100.0, 100.0]
    assert [shape["x0"] for shape in ttft["layout"]["shapes"]] == [10.0]
    assert page.data["e2e_seconds"]["layout"]["shapes"] == []


def test_a_run_without_an_arena_has_a_page_without_its_plot() -> None:
    record = document(outcome())
    del record["outcomes"][0]["series"], record["outcomes"][0]["arena"]
    assert [plot.key for plot in plots(record["outcomes"])] == ["ttft_seconds", "tpot_seconds", "e2e_seconds"]
    Page(html.page(record))


# ---- why requests were rejected


def test_why_requests_were_rejected_is_said_beside_the_table_and_on_the_page() -> None:
    why = Rejections(17_761, "the longest that fits the arena", "line 17: a prompt of 111853 tokens is <b>too long</b>")
    record = document(outcome(rejections=why), outcome("full"))
    (line,) = summary.remarks(record)
    assert line == (
        "shared rejected 4 of 600 requests: max_model_len is 17,761 tokens (the longest that fits the arena); the "
        "first was told, line 17: a prompt of 111853 tokens is <b>too long</b>"
    )
    assert line in Page(html.page(record)).text
    assert summary.remarks(document()) == []
    assert not [text for text in Page(html.page(document())).text if "rejected 4" in text]


# ---- the host arena


def test_a_host_arena_has_its_lines_and_a_run_without_one_says_nothing_of_it() -> None:
    cells = cells_of(document(outcome(host=host_use()), outcome("static:0.8")))
    assert cells["host: quota"] == ["8 GiB", "-"]
    assert cells["host: held"] == ["68.8 %", "-"]
    assert cells["host: requests offloaded"] == ["17", "-"]
    assert cells["host: tokens restored"] == ["111,222", "-"]
    assert cells["host: hit rate, device"] == ["20.0 %", "-"]
    assert cells["host: hit rate, host"] == ["10.5 %", "-"]
    assert cells["host: sliding-1024 retracted"] == ["512 MiB", "-"]
    assert not [line for line in printed(document()) if "host" in line]


def test_without_a_host_arena_the_record_and_the_page_do_not_name_one() -> None:
    assert '"host"' not in as_json(document())
    page = Page(html.page(document()))
    assert "host" not in page.data
    assert not [text for text in page.text if text.startswith(("host", "The host"))]


def test_every_figure_of_the_host_stands_where_an_outcome_has_it() -> None:
    made = outcome(host=host_use()).to_dict()
    assert not [each.path for each in HOST if value_at(made, each.path) is None]
    assert len({each.title for each in host_figures([made])}) == len(HOST) + 4


def test_the_host_arenas_areas_add_up_to_it() -> None:
    page = Page(html.page(document(outcome(host=host_use()), outcome("static:0.8"))))
    drawn = page.data["host"]
    assert [trace["name"] for trace in drawn["traces"]] == [
        *("full retracted", "sliding-1024 retracted", "holes", "full cached", "sliding-1024 cached", "free"),
    ]
    assert sum(trace["y"][3] for trace in drawn["traces"]) == pytest.approx(8)
    assert "The host arena over time, by kind" in page.text
