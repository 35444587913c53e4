"""Small replays whose every time is known: a step takes one second, whatever it computes."""

from __future__ import annotations

from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Retention, Sliding
from halocline.sim.device import Coefficients, Device
from halocline.sim.setup import Setup
from halocline.sim.shapes import Shape
from halocline.sim.workload import Job, Workload

EVERY_STEP_A_SECOND = Device("clock", 1.0, 1.0, 1, "a test", coefficients=Coefficients(step_seconds=1.0))
PAGE_TOKENS, WINDOW_TOKENS = 4, 8


def small_shape(*retentions: Retention) -> Shape:
    """Return a shape with one layer of each retention, 64 bytes a position (256 a page of four)."""
    layers = tuple(LayerKV(index, retention, 1, 16, 16) for index, retention in enumerate(retentions))
    return Shape("small", layers, 1000, 1000, None, "made for a test")


HYBRID = small_shape(Full(), Sliding(WINDOW_TOKENS))


def small_setup(pages: int = 64, **changes: object) -> Setup:
    """Return a setup with an arena of so many pages of four positions; every pool's page is one slab."""
    plain = {
        "shape": HYBRID,
        "kv_bytes": 256 * pages,
        "policy": "shared",
        "device": EVERY_STEP_A_SECOND,
        "page_tokens": PAGE_TOKENS,
        "step_tokens": 64,
        "max_running_requests": 8,
        "admission": ("guaranteed",),
        "prefix_cache": False,
    }
    return Setup(**(plain | changes))  # type: ignore[arg-type]


def job(name: str, arrive_seconds: float = 0.0, prompt: int = 10, output: int = 3, **changes: object) -> Job:
    """Return a job with a prompt of its own."""
    content = sum(ord(letter) * 131**at for at, letter in enumerate(name)) % 2**30
    return Job(name, arrive_seconds, ((content, prompt),), output, content + 1, **changes)  # type: ignore[arg-type]


def workload(*jobs: Job) -> Workload:
    """Return these jobs as a workload."""
    return Workload("small", "made for a test", jobs)
