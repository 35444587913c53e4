"""The calculator: how a model's memory would be cut and what it would hold, by the engine's own code, without weights.

resolve_shape("gemma-3-27b")         what a model keeps: a name of the table, a config, a folder, a GGUF file
plan(config, resolve(...), ...)      pools and slabs, bytes per request, requests at once under each policy
"""

from __future__ import annotations

from halocline.plan.figures import NOMINAL_BYTES, POLICIES, ArenaPlan, Plan, plan
from halocline.plan.host import HostCost, HostPlan
from halocline.plan.models import DEFAULTS_OF, Resolved, resolve, resolve_shape
from halocline.sim.room import BEST_STATIC, Row
from halocline.sim.rows import read_rows, single_row
from halocline.sim.shapes import shapes

__all__ = [
    "BEST_STATIC",
    "DEFAULTS_OF",
    "NOMINAL_BYTES",
    "POLICIES",
    "ArenaPlan",
    "HostCost",
    "HostPlan",
    "Plan",
    "Resolved",
    "Row",
    "plan",
    "read_rows",
    "resolve",
    "resolve_shape",
    "shapes",
    "single_row",
]
