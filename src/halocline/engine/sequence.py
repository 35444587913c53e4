"""One sequence as text: detokenizer and stop finder in a row, and the tokens released together with their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halocline.engine.detokenize import TextMaker
from halocline.engine.messages import Logprobs, TextDelta, TokenReport, TokenText
from halocline.engine.stops import StopFinder
from halocline.params import SamplingParams
from halocline.schedule.events import FinishReason


@dataclass(slots=True)
class _Held:
    """A token whose text, characters [start, end) of the output, has not been released yet."""

    report: TokenReport
    start: int
    end: int


class SequenceText:
    """Takes tokens as they come and says what may be shown."""

    def __init__(self, maker: TextMaker, prompt: Sequence[int], params: SamplingParams) -> None:
        self._maker = maker
        self._detokenizer = maker.start(prompt)
        self._stops = StopFinder(params.stop)
        self._stop_token_ids = params.stop_token_ids
        self._min_tokens = params.min_tokens
        self._shows_tokens = params.logprobs is not None
        self._inside: list[TokenReport] = []
        """Tokens of a character that is not complete."""
        self._held: deque[_Held] = deque()
        self._made_characters = 0
        self._shown_characters = 0
        self.completion_tokens = 0
        """Tokens computed, the end-of-sequence token and those of a stop string included."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def take(self, reports: Iterable[TokenReport]) -> TextDelta:
        """Take a batch of tokens; after a finish reason nothing more may come."""
        assert self.finish_reason is None, f"tokens after the finish reason {self.finish_reason}"
        shown: list[str] = []
        token_ids: list[int] = []
        logprobs: list[Logprobs | None] = []
        for report in reports:
            if report.token_id is not None:
                self.completion_tokens += 1
                token_ids.append(report.token_id)
                logprobs.append(report.logprobs)
            shown.append(self._take(report))
            if self.finish_reason is not None:
                break
        text = "".join(shown)
        self._shown_characters += len(text)
        assert self._shown_characters <= self._made_characters, (
            f"{self._shown_characters} characters are shown of {self._made_characters}"
        )
        tokens = self._release()
        return TextDelta(text, tokens, tuple(token_ids), tuple(logprobs), self.finish_reason, self.stop_reason)

    def _take(self, report: TokenReport) -> str:
        text = ""
        is_silent = report.token_id is None or report.finish_reason == "stop"
        if not is_silent and report.token_id is not None:
            text = self._check(self._push(report, report.token_id))
        if report.finish_reason is None or self.finish_reason is not None:
            return text
        text += self._check(self._flush())
        if self.finish_reason is None:
            text += self._stops.flush()
            self.finish_reason = report.finish_reason
            if report.finish_reason == "stop" and report.token_id in self._stop_token_ids:
                self.stop_reason = report.token_id
        return text

    def _push(self, report: TokenReport, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if self._shows_tokens:
            self._inside.append(report)
        self._place(text, is_whole=not self._detokenizer.is_inside_character)
        return text

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        self._place(text, is_whole=True)
        return text

    def _place(self, text: str, *, is_whole: bool) -> None:
        """Give the tokens of a character that is complete now their place in the output."""
        start = self._made_characters
        self._made_characters += len(text)
        if is_whole or text:
            whole = self._inside if is_whole else self._inside[:-1]
            self._held.extend(_Held(report, start, self._made_characters) for report in whole)
            self._inside = [] if is_whole else self._inside[-1:]

    def _check(self, text: str) -> str:
        if self.finish_reason is not None or (self.completion_tokens <= self._min_tokens):
            return text
        shown = self._stops.push(text)
        if self._stops.found is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.found
        return shown

    def _release(self) -> tuple[TokenText, ...]:
        """Return the tokens whose text is shown whole; of a text that was cut, also the one with the cut inside."""
        released: list[TokenText] = []
        is_cut = self.finish_reason is not None
        while self._held:
            first = self._held[0]
            if first.end > self._shown_characters and not (is_cut and first.start < self._shown_characters):
                break
            released.append(self._text_of(self._held.popleft()))
        return tuple(released)

    def _text_of(self, held: _Held) -> TokenText:
        report = held.report
        assert report.token_id is not None, "a token without an id has no text"
        text, data = self._maker.token(report.token_id)
        return TokenText(report.token_id, text, data, held.start, report.logprobs)
