"""One figure of a report: where it stands in a run's record, and how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halocline.units import format_bytes

Outcome = Mapping[str, Any]
"""One run, as `halocline.sim.outcome.Outcome.to_dict` writes it."""
Show = Callable[[Any], str]
NONE = "-"
"""Printed where a run has no such figure: a server that is only looked at from outside has no arena to report."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report."""

    group: str
    label: str
    path: tuple[str, ...]
    """Where it stands in an outcome: key below key."""
    show: Show
    unit: str
    """Of the number in the record; what is printed names its own."""
    meaning: str

    @property
    def title(self) -> str:
        """The label with its group before it, unless that begins it."""
        return self.label if self.label.startswith(self.group) else f"{self.group}: {self.label}"

    def text(self, outcome: Outcome) -> str:
        """Return the figure as it is printed."""
        value = value_at(outcome, self.path)
        return NONE if value is None else self.show(value)


def value_at(outcome: Outcome, path: Sequence[str]) -> Any:
    """Return what stands at `path`; None where a key of it is missing."""
    value: Any = outcome
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def count(value: float) -> str:
    """Print a whole number with thousands apart."""
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    """Print a number with two digits behind the point."""
    return f"{value:,.2f}"


def share(value: float) -> str:
    """Print a share of one as percent."""
    return f"{100 * value:.1f} %"


def small_share(value: float) -> str:
    """Print a share of one that is usually far below a percent."""
    return f"{100 * value:.2f} %"


def seconds(value: float) -> str:
    """Print seconds with three significant digits; below one as milliseconds."""
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def size(value: float) -> str:
    """Print bytes with a binary unit."""
    return format_bytes(round(value))


def digest(value: str) -> str:
    """Print the beginning of a digest."""
    return value[:12]


def span(value: Sequence[float]) -> str:
    """Print from when to when, in whole seconds."""
    return f"{value[0]:,.0f}-{value[1]:,.0f} s"


def yes_no(value: bool) -> str:
    """Print an answer."""
    return "yes" if value else "no"
