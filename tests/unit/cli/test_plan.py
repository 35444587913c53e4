"""`halocline plan`: one page that fits 100 columns, one JSON object, and every mistake answered in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halocline.cli.main import main
from halocline.compose import lay_out_layers
from halocline.config import Config
from halocline.plan import resolve_shape
from halocline.units import GIB


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_one_page_says_it_all_and_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "gemma-3-27b", "--kv-bytes", "60GiB", "--lengths", "4096+256,12000+343")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out  # nothing had to be cut off
    facts = lay_out_layers(Config(), resolve_shape("gemma-3-27b").layers, 131_072, 60 * GIB).facts
    assert facts.size_line() in out
    assert facts.length_line() in out
    words = " ".join(out.split())
    assert "sliding-1024 52 6.5 MiB 16 5 0.00% 425,984 B 416 MiB" in words
    # 12,342 positions: 772 full pages of 1.25 MiB and 65 of 6.5 MiB; at full length 772 of both.
    assert "12,000 + 343 965 MiB (772) 422 MiB (65) 1.35 GiB 5.84 GiB 4.31x" in words
    assert "mix of these" in out
    assert "no static split suits all of these" in words


def test_the_draft_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "gpt-oss-120b",
        "--draft",
        "gpt-oss-20b",
        "--kv-bytes",
        "8GiB",
        "--lengths",
        "900+100",
        "--policy",
        "shared",
    )
    assert code == 0
    assert out.index("gpt-oss-120b\n") < out.index("gpt-oss-120b + gpt-oss-20b")
    assert out.count("requests at once") == 2
    assert "static:best" not in out


def test_json_is_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gemma3-270m", "--kv-bytes", "256MiB", "--json")
    told = json.loads(out)
    assert code == 0
    # The worked example of the documents: 18 requests of 2,048 + 128 tokens in 256 MiB.
    row = [each["lengths"] for each in told["rows"]].index([[2048, 128]])
    held = dict(zip(told["policies"], told["arenas"][0]["held"][row], strict=True))
    assert held["shared"] == {"policy": "shared", "requests": 18}
    assert held["full"]["requests"] == 6
    assert told["arenas"][0]["facts"]["slabs"] == 1092


def test_a_host_arena_is_planned_by_the_engines_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("gemma3-270m", "--kv-bytes", "256MiB", "--host-bytes", "100MB", "--lengths", "2048+128,100+20")
    code, out, _ = run(capsys, *arguments, "--policy", "shared")
    assert code == 0
    assert "host arena 95.2 MiB = 406 slabs of 240 KiB (quota 95.4 MiB)" in out
    assert "on the host" in out
    told = json.loads(run(capsys, *arguments, "--policy", "shared", "--json")[1])
    host = told["arenas"][0]["host"]
    # 2,175 positions are 136 full pages of 48 KiB and, of 511 before the next one, 33 sliding ones of 240 KiB.
    assert host["costs"][0]["bytes_by_pool"] == [136 * 48 * 1024, 33 * 240 * 1024]
    assert host["retracted"][0] == 406 // (136 / 5 + 33)
    assert host["costs"][0]["held_tokens"] == host["costs"][0]["prefixes"] * 2048
    assert "host" not in json.loads(run(capsys, "gemma3-270m", "--kv-bytes", "256MiB", "--json")[1])["arenas"][0]


def test_without_bytes_it_says_that_capacity_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gemma-3-27b", "--lengths", "4096+256")
    assert code == 0
    assert "needs --kv-bytes" in " ".join(out.split())
    assert "requests at once" not in out


def test_the_servers_file_of_settings_is_a_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: gpt-oss-20b\nkv_bytes: 4GiB\npolicy: static:0.5\npage_tokens: 32\nport: 9000\n")
    code, out, _ = run(capsys, "--config", str(path), "--lengths", "900+100", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["policies"][:2] == ["static:0.5", "shared"]
    facts = told["arenas"][0]["facts"]
    assert {pool["page_tokens"] for pool in facts["pools"]} == {32}
    assert sum(pool["cap_slabs"] for pool in facts["pools"]) == facts["slabs"]
    code, out, _ = run(
        capsys, "--config", str(path), "--lengths", "900+100", "--json", "--policy", "equal-pages,shared"
    )
    told = json.loads(out)
    assert told["policies"] == ["equal-pages", "shared"]
    assert {pool["cap_slabs"] for pool in told["arenas"][0]["facts"]["pools"]} == {None}


def test_more_requests_than_slots_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("gpt-oss-20b", "--kv-bytes", "8GiB", "--lengths", "64+64", "--policy", "shared")
    assert "at most 256 requests at once" in run(capsys, *arguments)[1]
    more = run(capsys, *arguments, "--max-running-requests", "8000", "--step-tokens", "16384")[1]
    assert "at most" not in more


def test_models_of_the_table_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list")
    words = " ".join(out.split())
    assert code == 0
    assert "gemma-3-27b" in words
    assert "mimo-v2-flash-like" in words
    assert "27.0 B" in words
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gemma-3-28b",), "did you mean 'gemma-3-27b'"),
        (("gemma-3-27b", "--kv-bytes", "60MiB"), "starts with kv_bytes"),
        (("gemma-3-27b", "--kv-bytes", "a lot"), "kv_bytes"),
        (("gemma-3-27b", "--lengths", "long"), "4096+256"),
        (("gemma-3-27b", "--kv-bytes", "60GiB", "--lengths", "131072+1"), "longer than max_model_len 131072"),
        (("gemma-3-27b", "--policy", "half"), "policy is 'half'"),
        (("gemma-3-27b", "--draft", "nobody"), "unknown model 'nobody'"),
        (("gemma-3-27b", "--page-tokens", "sliding-99=16"), "sliding-99"),
        (("gemma-3-27b", "--kv-dtype", "int8"), "kv_dtype"),
        (("gemma-3-27b", "--port", "1"), "--port"),
    ],
)
def test_mistakes_are_sentences(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert all(line.startswith("halocline: ") for line in err.splitlines())
