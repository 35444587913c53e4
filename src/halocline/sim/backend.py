"""What stands for the device in a replay: it computes nothing, answers at once, and says what the time would be."""

from __future__ import annotations

from collections.abc import Sequence

from halocline.memory.host import HostMoves
from halocline.sim.cost import CostModel
from halocline.sim.outline import Outline
from halocline.step import Sampled, Segment, StepResult


class ReplayBackend:
    """Answers every request with its job's own content, token after token."""

    def __init__(self) -> None:
        self._answers: dict[str, Sampled] = {}
        self._lasts: dict[str, tuple[int, Sampled]] = {}

    def expect(self, request_id: str, token_id: int) -> None:
        """Answer `request_id` with `token_id`, again and again."""
        self._answers[request_id] = Sampled(request_id, token_id)

    def expect_stop(self, request_id: str, tokens: int, stop_id: int) -> None:
        """Answer with `stop_id` once `tokens` tokens of prompt and output are known."""
        self._lasts[request_id] = tokens, Sampled(request_id, stop_id)

    def forget(self, request_id: str) -> None:
        """Be told that nothing more is asked for `request_id`."""
        self._answers.pop(request_id, None)
        self._lasts.pop(request_id, None)

    def run(self, plan: Outline) -> StepResult:
        """Return one token for every segment that samples, all tokens of a leap for those that leap."""
        answers, lasts = self._answers, self._lasts
        if plan.decode_tokens > 1:
            return StepResult(plan.step, tuple(map(self._leap, plan.segments)))
        sampled = [answers[segment.request_id] for segment in plan.segments if segment.samples]
        if lasts:
            known = (segment.start + segment.tokens for segment in plan.segments if segment.samples)
            sampled = [
                answer if tokens < lasts[answer.request_id][0] else lasts[answer.request_id][1]
                for answer, tokens in zip(sampled, known, strict=True)
            ]
        return StepResult(plan.step, tuple(sampled))

    def _leap(self, segment: Segment) -> Sampled:
        """Return all tokens of a leap; the row that computes position x samples when x + 1 tokens are known."""
        name, count = segment.request_id, segment.tokens
        tokens = [self._answers[name].token_id] * count
        if name in self._lasts:
            known, stop = self._lasts[name]
            if known <= segment.start + count:
                tokens[known - segment.start - 1 :] = [stop.token_id]
        return Sampled(name, tokens[0], None, tuple(tokens[1:]))

    def close(self) -> None:
        """Nothing is held."""


class Stopwatch:
    """How long a plan takes by a cost model."""

    def __init__(
        self,
        cost: CostModel,
        *,
        instant_prefill: bool,
        stride_bytes: Sequence[int] = (),
        host_bytes_per_second: float = 25e9,
    ) -> None:
        """`stride_bytes` are the bytes of a page per pool, for copies to and from the host arena."""
        self._cost = cost
        self._instant_prefill = instant_prefill
        self._strides = stride_bytes
        self._host_bytes_per_second = host_bytes_per_second

    def seconds(self, plan: Outline) -> float:
        """Return the seconds of a step or leap.

        With instant prefill these are the seconds of its decodes alone, 0 where there are none. Copies to and from the
        host arena stand on the same stream, so they come on top.
        """
        return self._copy_seconds(plan) + (self._compute_seconds(plan) if plan.segments else 0.0)

    def _copy_seconds(self, plan: Outline) -> float:
        if not plan.offloads and not plan.loads:
            return 0.0
        copied = sum(
            sum(self._strides[move.pool] for move in work.moves)
            if isinstance(work, HostMoves)
            else len(work.host_pages) * self._strides[work.pool]
            for work in (*plan.offloads, *plan.loads)
        )
        return copied / self._host_bytes_per_second

    def _compute_seconds(self, plan: Outline) -> float:
        decodes, starts = plan.decodes, plan.starts[: plan.decodes]
        if plan.decode_tokens > 1:
            return self._cost.leap_seconds(starts, plan.decode_tokens)
        if self._instant_prefill:
            return self._cost.seconds(starts) if decodes else 0.0
        chunks = [(segment.start, segment.start + segment.tokens) for segment in plan.segments[decodes:]]
        return self._cost.seconds(starts, chunks)
