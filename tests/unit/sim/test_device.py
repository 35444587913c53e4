"""Devices by their published figures, and profiles that say what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from halocline.errors import ConfigError
from halocline.sim.device import DEVICES, MEMORY_EFFICIENCY, Coefficients, device_named


def test_every_device_names_its_source_and_is_found_by_its_name() -> None:
    assert len({each.name for each in DEVICES}) == len(DEVICES)
    for each in DEVICES:
        assert device_named(each.name.upper()) is each
        assert "data sheet" in each.source
        assert 1e14 < each.flops_per_second < 1e16
        assert 5e11 < each.bytes_per_second < 1e13


def test_several_devices_are_one_with_all_their_rates() -> None:
    one, four = device_named("h100"), device_named("4xh100")
    assert four.name == "4xh100"
    assert four.flops_per_second == 4 * one.flops_per_second
    assert four.bytes_per_second == 4 * one.bytes_per_second
    assert four.memory_bytes == 4 * one.memory_bytes
    assert four.step_overhead_seconds == one.step_overhead_seconds
    assert "no cost of communication" in four.source


@pytest.mark.parametrize(("text", "guess"), [("h101", "h100"), ("0xh100", ""), ("b20", "b200"), ("", ""), ("x", "")])
def test_an_unknown_device_is_answered_with_those_there_are(text: str, guess: str) -> None:
    with pytest.raises(ConfigError, match="a100, l40s, h100, h200, b200, mi300x") as found:
        device_named(text)
    assert guess in str(found.value)


def test_a_profile_overrides_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('base = "2xh200"\nstep_overhead_seconds = 0.002\ncompute_efficiency = 0.5\n', encoding="utf-8")
    device = device_named(str(path))
    assert (device.name, device.source) == ("ours", "profile file ours.toml")
    assert (device.step_overhead_seconds, device.compute_efficiency) == (0.002, 0.5)
    assert (device.memory_efficiency, device.memory_bytes) == (MEMORY_EFFICIENCY, 2 * 141 * 10**9)


def test_a_profile_of_measurements_needs_no_rates(tmp_path: Path) -> None:
    points = tmp_path / "points.json"
    points.write_text('{"name": "lab", "source": "10 runs", "points": [[1, 0.01], [8192, 0.5]]}', encoding="utf-8")
    assert device_named(str(points)).points == ((1.0, 0.01), (8192.0, 0.5))
    assert device_named(str(points)).name == "lab"
    fit = tmp_path / "fit.toml"
    fit.write_text("[coefficients]\nstep_seconds = 0.004\ntoken_seconds = 5e-5\n", encoding="utf-8")
    assert device_named(str(fit)).coefficients == Coefficients(0.004, 5e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops_per_second = 0\nbase = 'h100'\n", "flops_per_second is 0; it must be above 0"),
        ("base = 'h100'\nmemory_efficiency = 1.5\n", "it must be above 0 and at most 1"),
        (
            "base = 'h100'\nstep_overhead = 1\n",
            "is no field of a profile; did you mean 'step_overhead_seconds'",
        ),
        ("points = [[1, 0.1]]\n", "at least two are needed"),
        ("points = [[2, 0.1], [2, 0.2]]\n", "each must be more than the one before"),
        ("points = [[1, 0.1], [2, 0.0]]\n", "each must be above 0"),
        ("points = [[1, 0.1], [2, 0.2]]\n[coefficients]\nstep_seconds = 1\n", "not both"),
        ("base = 'h101'\n", "no device is called 'h101'"),
        ("[coefficients]\nsteps = 1\n", "steps"),
        ("step_overhead_seconds = 0.1\n", "flops_per_second"),
        ("base = \n", "cannot be read"),
        ("base = " + "[" * 100_000, "cannot be read"),
    ],
)
def test_a_profile_that_cannot_work_says_why_and_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as found:
        device_named(str(path))
    assert message in str(found.value)
    assert "bad.toml" in str(found.value)


def test_a_profile_that_is_not_there_is_a_problem_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        device_named(str(tmp_path / "none.json"))
