"""Config: every setting is checked, all problems come together, and text becomes typed values in one place."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from halocline.api.routing.settings import RouteSettings
from halocline.config import (
    Config,
    build,
    parse_admission,
    parse_page_tokens,
    parse_policy,
    read_file,
    setting_names,
)
from halocline.errors import ConfigError
from halocline.memory.retention import Full, Sliding, State
from halocline.memory.sizing import static_caps
from testing.layouts import small_layout


def problems(**settings: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(settings)
    return caught.value.problems


def test_the_defaults_are_a_valid_configuration() -> None:
    config = Config()
    assert (config.host, config.port, config.default_max_tokens) == ("127.0.0.1", 8000, 1024)
    assert config.admission_rule == ("expected", 0.9)
    assert config.policy_rule == ("shared",)
    assert config.arena_budget_bytes is None


def test_numbers_of_local_workers_are_read_from_one_word() -> None:
    assert Config().disagg_rule is None
    assert Config(disagg="1p1d").disagg_rule == (1, 1)
    assert Config(disagg="2p11d").disagg_rule == (2, 11)


def test_bytes_beside_the_arena_are_read_like_the_arenas() -> None:
    assert Config(host_bytes="1GiB").host_budget_bytes == 2**30
    assert Config(host_bytes=4096).host_budget_bytes == 4096
    assert Config().host_budget_bytes == 0


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_all_problems_are_told_at_once() -> None:
    found = problems(port=70000, admission="sometimes", policy="static", dtype="int8", max_running_requests=0)
    assert [problem.split()[0] for problem in found] == [
        "port",
        "dtype",
        "max_running_requests",
        "admission",
        "policy",
    ]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", "8000", "whole number"),
        ("port", True, "whole number"),
        ("port", -1, "from 0 to 65535"),
        ("threads", 0, "from 1"),
        ("max_model_len", 1, "from 2"),
        ("step_tokens", 1, "from 2"),
        ("drain_seconds", "soon", "a number"),
        ("drain_seconds", -1.0, "from 0"),
        ("clip_max_tokens", "yes", "true or false"),
        ("kv_bytes", "lots", "256MiB"),
        ("kv_bytes", "0MiB", "kv_bytes is 0"),
        ("kv_bytes", "1.5", "a fraction of a byte"),
        ("prefill_delay_low_bytes", "1.5", "a fraction of a byte"),
        ("prefill_delay_low_bytes", "2000000TiB", "more bytes than any machine has"),
        ("prefill_delay_seconds", float("nan"), "from 0 to 3600"),
        ("lease_seconds", float("inf"), "from 0.1"),
        ("kv_bytes", -5, "negative"),
        ("page_tokens", 24, "power of two"),
        ("page_tokens", 512, "power of two"),
        ("page_tokens", "full=16,sliding", "full=16,sliding-512=8"),
        ("page_tokens", "full=16, full=8", "names full twice"),
        ("page_tokens", "٤", "power of two"),
        ("page_tokens", "full=1_6", "power of two"),
        ("device", "tpu", "cuda:N"),
        ("device", "cuda:٣", "cuda:N"),
        ("device", "cuda:1_0", "cuda:N"),
        ("device", "cuda:x", "cuda:N"),
        ("kv_dtype", "bfloat17", "did you mean 'bfloat16'"),
        ("log_level", "chatty", "one of debug"),
        ("audit", "never", "one of idle"),
        ("model", " ", "empty"),
        ("api_key", 5, "text or absent"),
        ("api_key", "", "empty"),
        ("api_key", " \n", "empty"),
        ("role", "prefil", "did you mean 'prefill'"),
        ("disagg", "1p", "write 1p1d"),
        ("disagg", "0p1d", "write 1p1d"),
        ("disagg", "1p65d", "up to 64"),
        ("link_kind", "rdma", "one of shm, tcp"),
        ("link_host", " ", "empty"),
        ("link_token", "", "empty"),
        ("link_port", 65536, "from 0 to 65535"),
        ("lease_seconds", 0, "from 0.1"),
        ("decode_reserve_tokens", -1, "from 0"),
        ("staging_bytes", "much", "staging_bytes"),
        ("host_bytes", "some", "host_bytes"),
        ("host_bytes", -1, "negative"),
        ("admission", "expected:1.5", "quantile"),
        ("admission", "expected:.٩", "quantile"),
        ("admission", "expected:0.9_0", "quantile"),
        ("policy", "static:0", "static:0.8"),
        ("policy", "static:٣", "static:0.8"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(name: str, value: object, words: str) -> None:
    (problem,) = problems(**{name: value})
    assert name in problem
    assert words in problem


def test_an_unknown_setting_names_the_nearest_known_one() -> None:
    assert problems(kv_byte="1GiB", prot=1) == [
        "unknown setting 'kv_byte'; did you mean 'kv_bytes'?",
        "unknown setting 'prot'; did you mean 'port'?",
    ]


def test_a_whole_number_will_do_where_seconds_are_asked() -> None:
    assert Config(drain_seconds=3).drain_seconds == 3


@pytest.mark.parametrize(
    ("text", "rule"),
    [("guaranteed", ("guaranteed",)), ("expected", ("expected", 0.9)), ("expected:0.5", ("expected", 0.5))],
)
def test_admission_is_read_in_all_its_forms(text: str, rule: tuple[object, ...]) -> None:
    assert parse_admission(text) == rule


@pytest.mark.parametrize("text", ["", "expect", "expected:", "expected:0", "expected:nan", "guaranteed:1", "Expected"])
def test_other_admissions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="admission is"):
        parse_admission(text)


def test_policy_is_read_in_all_forms() -> None:
    assert parse_policy("shared") == ("shared",)
    assert parse_policy("static:0.8") == ("static", 0.8)
    assert parse_policy("static:0.8:1.5") == ("static", 0.8, 1.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "static",
        "static:",
        "static:-1",
        "static:nan",
        "static:inf",
        "shared:1",
        "equal",
        "static:0.8:",
        "static:0.8:0",
        "static:0.8:nan",
        "static:0.8:0.9:1",
        "static::0.9",
        "static:101",
        "shared:0.8:0.9",
    ],
)
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="policy is"):
        parse_policy(text)


def test_the_second_ratio_of_a_split_is_the_states_share_in_bytes() -> None:
    rule = parse_policy("static:1:0.25")
    assert rule[0] == "static"
    layout = small_layout(Full(), Sliding(6), State(), page_tokens=4, slabs=100, state_bytes=128)
    assert static_caps(layout, *rule[1:]) == (40, 40, 20)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (None, None),
        ("auto", None),
        (16, 16),
        ("256", 256),
        ("full=16, sliding-512=8", {"full": 16, "sliding-512": 8}),
    ],
)
def test_page_tokens_are_read_in_all_forms(value: str | int | None, rule: object) -> None:
    assert parse_page_tokens(value) == rule


def test_bytes_are_read_as_people_write_them() -> None:
    assert Config(kv_bytes="256MiB").arena_budget_bytes == 256 * 2**20
    assert Config(kv_bytes=12345).arena_budget_bytes == 12345


def test_later_sources_win_over_earlier_ones() -> None:
    assert build({"port": 1, "seed": 3}, {"port": 2}).port == 2


def test_a_file_spells_settings_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("kv-bytes: 64MiB\nmax_running_requests: 8\npage-tokens: full=16,sliding-512=8\n")
    config = build(read_file(path))
    assert (config.kv_bytes, config.max_running_requests) == ("64MiB", 8)
    assert config.page_tokens_rule == {"full": 16, "sliding-512": 8}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert build(read_file(path)) == Config()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- a\n- b\n", "setting: value"),
        (b"a: [", "not a YAML file"),
        (b"\xff\xfe", "not a YAML"),
        (b"a: " + b"[" * 5000, "not a YAML"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_file(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        read_file(tmp_path / "absent.yaml")


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text("model: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError, match="not a YAML file"):
        read_file(path)


@pytest.mark.parametrize("name", setting_names())
def test_every_setting_has_help_and_a_default(name: str) -> None:
    (setting,) = [each for each in fields(Config) if each.name == name]
    assert len(setting.metadata["help"]) > 10
    assert not setting.metadata["help"].endswith(".")
    assert name in Config().__dict__


@pytest.mark.parametrize(("value", "keeps"), [("on", True), ("off", False), (True, True), (False, False)])
def test_the_prefix_cache_is_on_or_off(value: str | bool, keeps: bool) -> None:
    assert Config(prefix_cache=value).keeps_prefixes is keeps


def test_the_prefix_cache_is_on_by_default_and_nothing_delays_a_prompt() -> None:
    config = Config()
    assert config.keeps_prefixes
    assert config.prefill_delay_seconds == 0
    assert config.prefill_delay_low == 0


@pytest.mark.parametrize("word", ["on", "off", "true", "false", "'on'", "'off'"])
def test_a_file_may_say_on_or_off_as_yaml_reads_them(tmp_path: Path, word: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"prefix-cache: {word}\n")
    assert build(read_file(path)).keeps_prefixes is (word.strip("'") in ("on", "true"))


@pytest.mark.parametrize("value", ["yes", "", "On", 1, None])
def test_the_prefix_cache_is_nothing_else(value: object) -> None:
    (problem,) = problems(prefix_cache=value)
    assert problem.startswith("prefix_cache is")


def test_a_prefill_delays_watermark_is_in_bytes() -> None:
    config = Config(prefill_delay_seconds=0.5, prefill_delay_tokens=4096, prefill_delay_low_bytes="1GiB")
    assert config.prefill_delay_low == 2**30
    found = problems(prefill_delay_seconds=-1.0, prefill_delay_tokens=0, prefill_delay_low_bytes="40%")
    assert [problem.split()[0].rstrip(":") for problem in found] == [
        "prefill_delay_seconds",
        "prefill_delay_tokens",
        "prefill_delay_low_bytes",
    ]


def test_blanks_around_a_key_are_no_part_of_it() -> None:
    """As from a file that ends with a line's end. No client could send them: they are lost in every header."""
    assert Config(api_key=" key\n").api_key == "key"
    routes = RouteSettings(decode=("http://a:1",), api_key="key\n", worker_api_key="\tother ")
    assert (routes.api_key, routes.worker_api_key) == ("key", "other")
    with pytest.raises(ConfigError, match="worker_api_key is empty"):
        RouteSettings(decode=("http://a:1",), worker_api_key=" ")
