"""What other engines call our flags: for the error when someone types theirs, and for docs/migrate.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag of another engine: the flag here that does its work, or None, and a remark."""

    engine: str
    flag: str
    here: str | None
    remark: str


_HOST = "host memory for what retracted requests and the prefix cache keep; bytes, not GiB"
FOREIGN = (
    Foreign("vLLM", "--gpu-memory-utilization", "--kv-bytes", "bytes of the arena, not a fraction of the device"),
    Foreign("vLLM", "--kv-cache-memory-bytes", "--kv-bytes", "the same meaning"),
    Foreign("vLLM", "--kv-cache-dtype", "--kv-dtype", "bfloat16, float16, float32; no 8-bit types yet"),
    Foreign("vLLM", "--max-num-seqs", "--max-running-requests", "the same meaning"),
    Foreign("vLLM", "--max-num-batched-tokens", "--step-tokens", "the same meaning"),
    Foreign("vLLM", "--block-size", "--page-tokens", "a power of two; one number or one per pool"),
    Foreign("vLLM", "--tensor-parallel-size", None, "one device for now"),
    Foreign("vLLM", "--enable-prefix-caching", "--prefix-cache", "on by default"),
    Foreign("vLLM", "--no-enable-prefix-caching", "--prefix-cache", "write --prefix-cache off"),
    Foreign("vLLM", "--enable-chunked-prefill", None, "always on"),
    Foreign("vLLM", "--disable-hybrid-kv-cache-manager", "--policy", "static:R is the split to compare with"),
    Foreign("vLLM", "--enforce-eager", None, "nothing is compiled"),
    Foreign("vLLM", "--swap-space", "--host-bytes", _HOST),
    Foreign("vLLM", "--kv-offloading-size", "--host-bytes", _HOST),
    Foreign("vLLM", "--uvicorn-log-level", "--log-level", "one level for everything"),
    Foreign("vLLM", "--disable-log-requests", "--log-level", "prompts are never logged"),
    Foreign("SGLang", "--model-path", "--model", "the same meaning; or the first argument of `serve`"),
    Foreign("SGLang", "--mem-fraction-static", "--kv-bytes", "bytes of the arena, not a fraction of the device"),
    Foreign("SGLang", "--max-total-tokens", "--kv-bytes", "tokens of a hybrid model have no one size in bytes"),
    Foreign("SGLang", "--context-length", "--max-model-len", "the same meaning"),
    Foreign("SGLang", "--max-running-requests", "--max-running-requests", "the same name and meaning"),
    Foreign("SGLang", "--max-queued-requests", "--max-waiting-requests", "the same meaning"),
    Foreign("SGLang", "--chunked-prefill-size", "--step-tokens", "counts decodes too: the tokens of a whole step"),
    Foreign("SGLang", "--max-prefill-tokens", "--step-tokens", "one budget for the step"),
    Foreign("SGLang", "--page-size", "--page-tokens", "a power of two; one number or one per pool"),
    Foreign("SGLang", "--swa-full-tokens-ratio", "--policy", "static:R; by default there is no split"),
    Foreign("SGLang", "--mamba-full-memory-ratio", "--policy", "the S of static:R:S; by default there is no split"),
    Foreign("SGLang", "--schedule-conservativeness", "--admission", "expected:QUANTILE or guaranteed"),
    Foreign("SGLang", "--attention-backend", "--attention", "auto, cpu, blocked or reference"),
    Foreign("SGLang", "--random-seed", "--seed", "the same meaning"),
    Foreign("SGLang", "--enable-hierarchical-cache", "--host-bytes", _HOST),
    Foreign("SGLang", "--hicache-size", "--host-bytes", _HOST),
    Foreign("SGLang", "--disable-radix-cache", "--prefix-cache", "write --prefix-cache off"),
    Foreign(
        "SGLang", "--enable-prefill-delayer", "--prefill-delay-seconds", "off by default; the watermark is in bytes"
    ),
    Foreign("SGLang", "--tp-size", None, "one device for now"),
)


def explain(argument: str) -> str | None:
    """Say what to type instead of another engine's flag; None when `argument` is not one, or is ours as well."""
    flag = argument.partition("=")[0]
    found = next((each for each in FOREIGN if each.flag == flag and each.here != flag), None)
    if found is None:
        return None
    instead = f"use {found.here}" if found.here else "there is no such flag here"
    return f"{flag} is {found.engine}'s name: {instead} ({found.remark})"
