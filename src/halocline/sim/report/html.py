"""The report as one page that needs nothing else: no network, no other file.

plotly.js comes along inside (4.8 MB). A content security policy forbids the page to fetch anything at all. What comes
out of files reaches the page as escaped text, and the plots' data as JSON in which no `<` is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from halocline.sim.report.figures import lines
from halocline.sim.report.plots import plots
from halocline.sim.report.summary import remarks


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a report's record."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    outcomes = document["outcomes"]
    drawn = plots(outcomes)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_file("report.html.jinja"))
    return template.render(
        document=document,
        outcomes=outcomes,
        lines=lines(outcomes),
        remarks=remarks(document),
        plots=drawn,
        data=_inert({plot.key: asdict(plot) for plot in drawn}),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        script=_file("report.js"),
    )


def _file(name: str) -> str:
    return resources.files("halocline.sim.report").joinpath(name).read_text(encoding="utf-8")


def _inert(value: object) -> str:
    """Return JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
