"""The exception tree. A message says what happened, the numbers, and what to do.

    HaloclineError
    |- ConfigError        settings that cannot work, all of them listed at once
    |- ModelError         a model that cannot be found, read or supported
    |- RequestError       one request is at fault; carries the field and an error code for the client
    |  |- ParameterError  a field of SamplingParams is out of its range
    |  `- TooLargeError   the request can never fit: the arithmetic is in the message
    |- OverloadedError    the engine accepts no more requests now
    |- FailedError        a request was accepted and its computation failed; others go on
    |  `- LostError       another worker that was to compute its prompt is lost; a second try may well succeed
    |- LinkError          another worker cannot be understood, or what it sent is not what it should be
    |- EngineDeadError    the engine process is gone; every waiting caller gets this
    `- InvariantError     the program broke one of its own laws; carries the violations

How an error becomes an HTTP status is the api package's business, in one table.
"""

from __future__ import annotations


class HaloclineError(Exception):
    """Root of all errors that Halocline raises on purpose."""


class ConfigError(HaloclineError):
    """Settings that cannot work; `problems` lists every one of them."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class ModelError(HaloclineError):
    """A model that cannot be found, read, or served."""


class RequestError(HaloclineError):
    """One request is at fault. `param` names the field, `code` is a stable word for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class ParameterError(RequestError, ValueError):
    """A sampling field is out of its range."""


class TooLargeError(RequestError):
    """The request cannot fit an empty arena, or is longer than the model allows."""


class OverloadedError(HaloclineError):
    """The engine accepts no more requests at the moment; try again later."""


class FailedError(HaloclineError):
    """A request that was accepted has failed; the engine lives and serves others."""


class LostError(FailedError):
    """The worker that was to compute the prompt is gone or does not get on; another one may be tried."""

    code = "prefill_lost"


class LinkError(HaloclineError):
    """Another worker cannot be understood or does not fit this one; what it sent is not used."""


class EngineDeadError(HaloclineError):
    """The engine process has ended; nothing more will be computed."""


class InvariantError(HaloclineError):
    """The program found one of its own laws broken; `violations` says which."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        super().__init__("; ".join(violations))


class OverdrawnError(InvariantError):
    """One order of a commit exceeds its grant; nothing of the commit was done. `order` is its index."""

    def __init__(self, violations: list[str], order: int) -> None:
        self.order = order
        super().__init__(violations)
