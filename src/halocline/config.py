"""Every setting, once: flags, the --config file and `LLM(...)` are three spellings of this frozen record.

Each field's metadata carries the help text that the command line and the reference print.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, text: str) -> Any:
    """Declare a setting with its default and the help text of its flag."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `halocline serve`, `generate`, `chat` and `LLM(...)` share. Checked as a whole; all problems are told at once."""

    model: str = setting("gemma3-270m", "a built-in name, a folder, a .gguf file or a Hugging Face id")
    served_model_name: str | None = setting(None, "the name that clients use (default: the model's)")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one")
    dtype: str = setting("auto", "type of the weights: auto, bfloat16, float16, float32, float64")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = setting(None, "CPU threads (default: one per core)")
    attention: str = setting("auto", "attention backend: auto, reference or cpu")
    kv_bytes: str | int = setting("auto", "bytes of the arena: auto, 256MiB, 2GiB or a number of bytes")
    kv_dtype: str = setting("auto", "type of K and V in the arena: auto (the weights'), bfloat16, float16, float32, float64")
    max_model_len: int | None = setting(None, "longest prompt plus output in tokens (default: the most that model and arena allow)")
    max_running_requests: int = setting(256, "most requests that run at the same time")
    max_waiting_requests: int = setting(4096, "most requests that may wait; one more is refused with 429")
    step_tokens: int = setting(512, "most tokens computed in one step, decodes and prefill chunks together")
    page_tokens: str | int | None = setting(None, "positions per page: a power of two for all pools, or full=16,sliding-512=8 (default: solved)")
    admission: str = setting("expected:0.9", "size of a request's grant: expected[:QUANTILE] or guaranteed")
    default_max_tokens: int = setting(1024, "limit of a request that names none, under guaranteed admission")
    policy: str = setting("shared", "shared arena, or static:R for a split that gives each window pool R times the full pool's tokens")
    clip_max_tokens: bool = setting(False, "lower a max_tokens that cannot fit instead of refusing the request")
    seed: int = setting(0, "seed of the sampling noise of requests that bring none")
    chat_template: str | None = setting(None, "file with a Jinja chat template to use instead of the model's")
    trust_remote_code: bool = setting(False, "run Python code that comes with a model folder")
    api_key: str | None = setting(None, "key that clients must send as a bearer token")
    drain_seconds: float = setting(5.0, "how long a stop waits for running requests")
    health_seconds: float = setting(30.0, "work waiting but no progress for this long is unhealthy")
    audit: str = setting("idle", "when the arena is recounted: idle, every (step) or off")
    log_level: str = setting("info", "debug, info, warning or error")
