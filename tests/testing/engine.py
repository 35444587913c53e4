"""A fake scheduler and backend behind the real engine loop, and tokenizers of 256 bytes: no weights, no downloads.

The fake answers every prompt with `reply` (in which {prompt} stands for the prompt's text) and then end-of-sequence; a
request that ignores end-of-sequence gets the reply over and over. A prompt that ends in LONG gets it 24 times, one that
ends in FAIL fails. A prompt that was answered before is cached, up to its last whole page, for those with the same
salt. Token ids: 0 pad, 1 eos, 2 bos, byte b is b + 3.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from halocline.cache.keys import Namespace
from halocline.engine.core import EngineParts
from halocline.engine.messages import ModelFacts, Spec
from halocline.engine.pieces import BYTE_CHARACTERS
from halocline.errors import ConfigError, ModelError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.figures import ArenaFigures, PoolFigures
from halocline.memory.layout import LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding
from halocline.memory.sizing import Limits, capacity_facts
from halocline.schedule.events import (
    Abort,
    Accepted,
    Admitted,
    Arrive,
    Event,
    Failed,
    FinishReason,
    NewToken,
    Reason,
    Rejected,
    Update,
)
from halocline.schedule.figures import CacheFigures, SchedulerFigures, Totals
from halocline.schedule.rules import Rules
from halocline.schedule.scheduler import Scheduler
from halocline.step import Failure, Sampled, Segment, StepPlan, StepResult, TokenLogprobs
from halocline.units import KIB, ceil_div

PAD, EOS, BOS, FIRST_BYTE = 0, 1, 2, 3
VOCAB = 259
PAGE_TOKENS, PAGE_BYTES = 16, 1024


def ids_of(text: str | bytes) -> list[int]:
    """Return the byte tokens of `text`."""
    return [byte + FIRST_BYTE for byte in (text.encode() if isinstance(text, str) else text)]


def text_of(ids: Sequence[int]) -> str:
    """Return the text of byte tokens, special ones skipped."""
    return bytes(each - FIRST_BYTE for each in ids if each >= FIRST_BYTE).decode(errors="replace")


@dataclass
class _Sequence:
    arrive: Arrive
    max_tokens: int
    history: list[int] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return ceil_div(len(self.arrive.prompt) + self.max_tokens, PAGE_TOKENS)


class FakeScheduler:
    """First come, first served; a request holds the pages of its whole life while it runs."""

    def __init__(
        self,
        *,
        pages: int = 4096,
        slots: int = 64,
        waiting: int = 4096,
        model_len: int = 2048,
        prefix_cache: bool = True,
    ) -> None:
        self.pages, self.slots, self.max_waiting, self.model_len = pages, slots, waiting, model_len
        self.waiting: dict[str, _Sequence] = {}
        self.running: dict[str, _Sequence] = {}
        self.is_stuck = False
        self.has_broken_figures = False
        self.step = 0
        self.violations: list[str] = []
        self.totals = Totals()
        self.prefix_cache = prefix_cache
        self.answered: set[tuple[Namespace, tuple[int, ...]]] = set()
        self.lookups = {"whole": 0, "too short": 0, "not keyed": 0}
        self.looked_up_tokens = self.hit_tokens = 0
        self.news: list[Update] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def used_pages(self) -> int:
        return sum(each.pages for each in self.running.values())

    def handle(self, event: Event) -> Sequence[Update]:
        if isinstance(event, Abort):
            gone = self.waiting.pop(event.request_id, None) or self.running.pop(event.request_id, None)
            return (NewToken(event.request_id, None, None, event.reason),) if gone else ()
        return (self._arrive(event),)

    def _arrive(self, event: Arrive) -> Update:
        name, length = event.request_id, len(event.prompt)
        if not event.prompt:
            return Rejected(name, "the prompt is empty", "prompt")
        room = self.model_len - length
        wanted = event.params.max_tokens or room
        if room < 1 or wanted > room:
            message = f"{length} prompt tokens + {wanted} new tokens exceed max_model_len {self.model_len}"
            return Rejected(name, message, "prompt" if room < 1 else "max_tokens", "context_length_exceeded")
        if len(self.waiting) >= self.max_waiting:
            return Rejected(name, f"{len(self.waiting)} requests wait already", None, "overloaded")
        self.waiting[name] = _Sequence(event, wanted, list(event.prompt))
        return Accepted(name, wanted)

    def plan(self, now: float) -> StepPlan | None:
        del now
        for name, sequence in list(self.waiting.items()):
            fits = len(self.running) < self.slots and self.used_pages + sequence.pages <= self.pages
            if self.is_stuck or not fits:
                break
            self.running[name] = self.waiting.pop(name)
            self.news.append(self._admit(sequence.arrive))
        if not self.running:
            return None
        self.step += 1
        segments = tuple(self._segment(each) for each in self.running.values())
        none = np.zeros(0, np.int64)
        return StepPlan(self.step, (), segments, none, none, np.zeros(len(segments) + 1, np.int32), ())

    def _admit(self, arrive: Arrive) -> Admitted:
        most = (len(arrive.prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        hit = self.prefix_cache and (arrive.namespace, arrive.prompt) in self.answered
        self.lookups["too short" if most == 0 else "whole" if hit else "not keyed"] += 1
        self.looked_up_tokens += len(arrive.prompt)
        self.hit_tokens += most * hit
        return Admitted(arrive.request_id, most * hit)

    def _segment(self, sequence: _Sequence) -> Segment:
        arrive, length = sequence.arrive, len(sequence.arrive.prompt)
        start = len(sequence.history) - 1
        params = arrive.params
        return Segment(arrive.request_id, start, 1, True, params, arrive.seed, sequence.history, length, False)

    def apply(self, result: StepResult) -> Sequence[Update]:
        updates, self.news = self.news, []
        for sampled in result.sampled:
            sequence = self.running[sampled.request_id]
            sequence.history.append(sampled.token_id)
            finish = self._finish(sequence)
            if finish is not None:
                del self.running[sampled.request_id]
                self.answered.add((sequence.arrive.namespace, sequence.arrive.prompt))
            updates.append(NewToken(sampled.request_id, sampled.token_id, sampled.logprobs, finish))
        for failure in result.failures:
            del self.running[failure.request_id]
            updates.append(Failed(failure.request_id, failure.message))
        return updates

    def _finish(self, sequence: _Sequence) -> FinishReason | None:
        params, token = sequence.arrive.params, sequence.history[-1]
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        made = len(sequence.history) - len(sequence.arrive.prompt)
        return "length" if made >= sequence.max_tokens else None

    def fail_step(self, message: str) -> Sequence[Update]:
        failed = list(self.running)
        self.running.clear()
        self.news.clear()
        return [Failed(name, message) for name in failed]

    def take_updates(self) -> Sequence[Update]:
        return ()

    def reasons(self) -> dict[str, Reason]:
        detail = f"{self.used_pages} of {self.pages} pages are used"
        return {name: Reason("queue" if i else "memory", detail) for i, name in enumerate(self.waiting)}

    def figures(self) -> SchedulerFigures:
        assert not self.has_broken_figures, "a defect in the figures"
        used, total = self.used_pages * PAGE_BYTES, self.pages * PAGE_BYTES
        pool = PoolFigures(
            "full", 0, used, 0, 0, 0, 0, 0, 0, used // PAGE_BYTES * PAGE_TOKENS, self.pages * PAGE_TOKENS
        )
        totals = replace(self.totals, steps=self.step)
        arena = ArenaFigures(total, total - used, 0, (pool,))
        cache = CacheFigures(
            looked_up_tokens=self.looked_up_tokens,
            hit_tokens=self.hit_tokens,
            lookups=dict(self.lookups),
            shortened=0,
            resumed_tokens=0,
            waited=0,
            evicted_pages=(0,),
            nodes=len(self.answered),
            cached_bytes=0,
        )
        return SchedulerFigures(
            len(self.waiting), 0, len(self.running), 0, totals, arena, cache if self.prefix_cache else None
        )

    def audit(self) -> list[Violation]:
        return [Violation("L1", message) for message in self.violations]


class FakeBackend:
    """Replies by rote."""

    def __init__(self, reply: str | bytes = "Hello.", *, step_seconds: float = 0.0) -> None:
        self.reply, self.step_seconds = reply, step_seconds
        self.before_step: Callable[[StepPlan], None] | None = None
        self.is_closed = False

    def run(self, plan: StepPlan) -> StepResult:
        if self.before_step is not None:
            self.before_step(plan)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        pairs = [(segment, self._next(segment)) for segment in plan.segments]
        good = tuple(self._sample(segment, token) for segment, token in pairs if token is not None)
        bad = tuple(
            Failure(segment.request_id, "the logits are not numbers") for segment, token in pairs if token is None
        )
        return StepResult(plan.step, good, bad)

    def _next(self, segment: Segment) -> int | None:
        prompt = segment.history[: segment.prompt_tokens]
        if text_of(prompt).endswith("FAIL"):
            return None
        reply = self.reply.encode() if isinstance(self.reply, str) else self.reply
        reply = reply.replace(b"{prompt}", text_of(prompt).encode())
        if text_of(prompt).endswith("LONG"):
            reply *= 24
        done = len(segment.history) - segment.prompt_tokens
        if segment.params.ignore_eos:
            return reply[done % len(reply)] + FIRST_BYTE
        return reply[done] + FIRST_BYTE if done < len(reply) else EOS

    def _sample(self, segment: Segment, token: int) -> Sampled:
        count = segment.params.logprobs
        if count is None:
            return Sampled(segment.request_id, token)
        others = [
            (each, -2.0 - each / 100) for each in range(FIRST_BYTE + 65, FIRST_BYTE + 65 + count) if each != token
        ]
        top = tuple([(token, -0.5), *others][:count])
        return Sampled(segment.request_id, token, TokenLogprobs(-0.5, 1, top))

    def close(self) -> None:
        self.is_closed = True


def build(settings: dict[str, Any], progress: Callable[[str, float | None], None]) -> EngineParts:
    """Build the fake in an engine process; `settings` may ask for misfortunes."""
    progress("loading a fake", 0.5)
    match settings.get("misfortune"):
        case "config":
            raise ConfigError(["kv_bytes is too small", "step_tokens is too small"])
        case "model":
            raise ModelError("no such model: 'nowhere'")
        case "defect":
            raise ValueError("a defect while building")
        case "vanish":
            os._exit(7)
    scheduler = FakeScheduler(
        pages=settings.get("pages", 4096),
        slots=settings.get("slots", 64),
        waiting=settings.get("waiting", 4096),
        model_len=settings.get("model_len", 2048),
        prefix_cache=settings.get("prefix_cache", True),
    )
    scheduler.is_stuck = settings.get("stuck", False)
    scheduler.has_broken_figures = settings.get("figures") == "broken"
    backend = FakeBackend(settings.get("reply", "Hello."), step_seconds=settings.get("step_seconds", 0.0))
    model = ModelFacts(
        name="fake",
        max_model_len=scheduler.model_len,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_running_requests=scheduler.slots,
        max_waiting_requests=scheduler.max_waiting,
    )
    return EngineParts(scheduler, backend, model)


def build_on_arena(settings: dict[str, Any], progress: Callable[[str, float | None], None]) -> EngineParts:
    """Build the real scheduler and arena (Gemma's mix of layers, made small) before the fake backend."""
    del progress
    layers = [LayerKV(i, Full() if i % 6 == 5 else Sliding(32), 1, 8, 8) for i in range(12)]
    layout = solve_layout(layers, settings.get("kv_bytes", 512 * KIB))
    limits = Limits(settings.get("step_tokens", 256), settings.get("slots", 64), None, None)
    capacity = capacity_facts(layout, None, limits)
    rules = Rules(
        step_tokens=limits.step_tokens,
        max_running_requests=limits.max_running_requests,
        max_model_len=capacity.max_model_len.tokens,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=settings.get("prefix_cache", True),
    )
    backend = FakeBackend(settings.get("reply", "Hello."), step_seconds=settings.get("step_seconds", 0.0))
    model = ModelFacts(
        name="fake",
        max_model_len=rules.max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_running_requests=rules.max_running_requests,
        max_waiting_requests=rules.max_waiting_requests,
    )
    return EngineParts(Scheduler(Arena(layout), rules), backend, model, capacity)


def fake_spec(builder: str = "build", **settings: Any) -> Spec:
    """Return the spec of an engine process that runs the fake; `build_on_arena`: with the real scheduler and arena."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return Spec(
        builder=f"testing.engine:{builder}", settings=settings, python_path=(tests,), audit="every", log_level="warning"
    )


def byte_tokenizer(*, chat: bool = False, fallback: bool = False) -> Any:
    """Return a transformers tokenizer of single bytes: byte-level, or with sentencepiece's byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
    name_of = "<0x{:02X}>".format if fallback else BYTE_CHARACTERS.__getitem__
    vocabulary = (
        special | {name_of(byte): FIRST_BYTE + byte for byte in range(256)} | ({"▁": VOCAB} if fallback else {})
    )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=fallback))
    if fallback:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    if chat:
        wrapped.chat_template = (
            "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    return wrapped


def fake_chat(*, is_fallback: bool = False, template: str | None = None) -> Any:
    """Return the real `model.chat.ChatTemplate` around the tokenizer of bytes."""
    from halocline.model.chat import ChatTemplate

    tokenizer = byte_tokenizer(chat=True)
    return ChatTemplate(tokenizer, template or tokenizer.chat_template, is_fallback=is_fallback)
