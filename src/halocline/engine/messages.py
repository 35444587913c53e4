"""What the two sides of the process boundary say to each other: plain tagged structs, packed with msgpack.

    front end                                                  engine process
    Spec  --- one JSON line on the lifeline pipe ------------->  how to build scheduler and backend
          <-- Starting* , then Hello | StartFailed ------------
    Submit, Cancel, Shutdown ---------------------------------->
          <-- Outputs (once per step), Figures (bounded rate) --
          <-- Bye ---------------------------------------------

Whoever speaks to an engine imports this module and nothing else of the engine's inside.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from halocline.memory.facts import CapacityFacts
from halocline.params import MAX_SALT_CHARACTERS, SamplingParams
from halocline.schedule.events import FinishReason
from halocline.schedule.figures import SchedulerFigures


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine process builds what it runs."""

    builder: str
    """`module:function`; called with (settings, progress), returns `engine.core.EngineParts`."""
    settings: dict[str, Any] = {}
    """JSON-able; what it means is the builder's business. May hold secrets: it never stands on a command line."""
    folder_setting: str = ""
    """Where it is not empty, the builder is also told, under this name, the private folder of the process: what is put
    there goes with the process, however it ends."""
    python_path: tuple[str, ...] = ()
    """Folders put first on the module search path of the process."""
    audit: Literal["idle", "every", "off"] = "idle"
    """When the memory is recounted."""
    log_level: str = "info"


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """One more sequence to continue."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int = 0
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    """Prefixes are shared with sequences of the same salt only."""
    prefill_at: str = ""
    """Link address of the worker that is to compute the prompt; empty: this engine does."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits for this sequence any more, or its text is complete (`reason` "stop")."""

    request_id: str
    reason: FinishReason = "abort"


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End now: what still runs is dropped, memory is recounted a last time."""


Command = Submit | Cancel | Shutdown


class AcceptedReport(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The sequence is valid and will run; `max_tokens` is the limit that applies to it."""

    request_id: str
    max_tokens: int
    clipped: bool


class AdmittedReport(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """The sequence is being computed; said once, before its first token."""

    request_id: str
    cached_tokens: int
    """Tokens of its prompt that the prefix cache had, and that need no computing."""


class RejectedReport(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The sequence can never run."""

    request_id: str
    message: str
    param: str | None
    code: str


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one output position."""

    token_logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), best first."""


class TokenReport(msgspec.Struct, frozen=True, array_like=True, tag="token"):
    """One more token of a sequence; with a finish reason it is the last (on abort there is no token)."""

    request_id: str
    token_id: int | None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class FailedReport(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The sequence ended in an error."""

    request_id: str
    message: str
    code: str = "failed"
    """"prefill_lost": another worker may be tried."""


SequenceReport = AcceptedReport | AdmittedReport | RejectedReport | TokenReport | FailedReport


class Blocked(msgspec.Struct, frozen=True):
    """The most senior request that waits, and why."""

    request_id: str
    code: str
    detail: str


class TransferFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has exchanged with others since the start, and what is on its way now."""

    sessions: dict[str, int] = {}
    """Transfers now, by state."""
    totals: dict[str, int] = {}
    """Counts and bytes since the start, by the names of `engine.metrics`."""
    peers: int = 0
    """Workers that are connected now."""
    landing_bytes: int = 0
    """Bytes of this arena that are waiting for pages of others."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself: the one source of /metrics and /health."""

    figures: SchedulerFigures | None = None
    """Requests by state, totals since the start, the arena's bytes; None until the engine has spoken."""
    counters: dict[str, int] = {}
    """The step loop's own counts since the start: prompt_tokens, defects, audits, violations."""
    refusals: dict[str, int] = {}
    """Count of requests refused at the door, by code, since the start."""
    waiting: dict[str, int] = {}
    """Requests that wait now, by the code of their reason."""
    has_work: bool = False
    stalled_seconds: float = 0.0
    """How long there has been work without anything admitted, computed or freed."""
    blocked: Blocked | None = None
    transfers: TransferFigures | None = None
    """Everything about other workers; None where there are none."""
    violations: tuple[str, ...] = ()
    """The latest broken laws that an audit reported, the newest last."""


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """How far the start has come, in words for people."""

    text: str
    fraction: float | None = None
    """0 to 1 where it is known."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end must know of the model that an engine serves."""

    name: str
    max_model_len: int
    """Longest prompt plus output in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_running_requests: int = 256
    max_waiting_requests: int = 4096
    details: dict[str, Any] = {}
    """For display only: dtype, device, attention backend, folder."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to the other workers of a group."""

    role: Literal["both", "prefill", "decode"]
    address: str
    """Where it takes links: `tcp://host:port`, `nixl://host:port` or `shm:///path`; empty where it takes none."""
    epoch: str
    """A random id of this process's life: a worker that was started again is another one."""
    fingerprint: str
    """Of the model: workers of a group have the same."""

    def words(self) -> dict[str, str]:
        """Return it as /health says it."""
        return {"role": self.role, "epoch": self.epoch, **({"link": self.address} if self.address else {})}


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The engine is ready."""

    pid: int
    model: ModelFacts
    capacity: CapacityFacts | None
    """What log, command line and API print about the arena; None where there is none, as in fakes."""
    link: LinkFacts | None = None
    """None for a server that belongs to no group."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine could not be built."""

    kind: Literal["config", "model", "other"]
    message: str
    problems: tuple[str, ...] = ()


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything that one turn of the engine brought, for all sequences, in order."""

    reports: tuple[SequenceReport, ...]


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """The engine's figures, sent at a bounded rate and when it becomes idle."""

    snapshot: Snapshot


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """A clean end, after `Shutdown`; `violations` is what the last recount found (empty: nothing)."""

    violations: tuple[str, ...] = ()


Report = Starting | Hello | StartFailed | Outputs | Figures | Bye


class TokenText(msgspec.Struct, frozen=True):
    """One output token whose text has been released."""

    token_id: int
    text: str
    """The token by itself; a token that is part of a character shows the replacement character."""
    data: bytes | None
    """Its bytes, where the tokenizer tells."""
    start: int
    """Characters of the output that stand before its text; the tokens of one character share its place."""
    logprobs: Logprobs | None = None


class TextDelta(msgspec.Struct, frozen=True):
    """What is new in one sequence: text that can never change any more, and the tokens behind it."""

    text: str
    tokens: tuple[TokenText, ...]
    """Tokens whose text is released now, none of a found stop string; for log-probabilities."""
    token_ids: tuple[int, ...]
    """All tokens that arrived, released or not, the end-of-sequence token included."""
    logprobs: tuple[Logprobs | None, ...] = ()
    """One for each of `token_ids`."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the text; None for the model's own end of sequence."""


def _plain(value: Any) -> object:
    """Return a NumPy or torch scalar as Python's own; a backend may well hand one over as a token id."""
    try:
        return value.item()
    except (AttributeError, ValueError) as error:
        raise NotImplementedError(f"a {type(value).__name__} cannot cross the process boundary") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """Pack one message."""
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Unpack what a front end sent. Raises msgspec.DecodeError when it is no command."""
    return _commands.decode(frame)


def decode_report(frame: bytes) -> Report:
    """Unpack what an engine sent. Raises msgspec.DecodeError when it is no report."""
    return _reports.decode(frame)
