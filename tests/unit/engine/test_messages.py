"""What crosses the process boundary comes out as it went in."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from halocline.cache.keys import EVERYBODY, Namespace
from halocline.engine.messages import (
    AcceptedReport,
    AdmittedReport,
    Blocked,
    Bye,
    Cancel,
    Command,
    FailedReport,
    Figures,
    Hello,
    Logprobs,
    ModelFacts,
    Outputs,
    RejectedReport,
    Report,
    Shutdown,
    Snapshot,
    StartFailed,
    Starting,
    Submit,
    TokenReport,
    decode_command,
    decode_report,
    encode,
)
from halocline.engine.wire import event_of, reports_of
from halocline.memory.facts import CapacityFacts, ConcurrencyFacts, ModelLength, PoolFacts
from halocline.params import MAX_SALT_CHARACTERS, SamplingParams
from halocline.schedule.events import Abort, Accepted, Admitted, Arrive, Failed, NewToken, Rejected
from halocline.step import TokenLogprobs
from testing.engine import FakeScheduler

PARAMS = SamplingParams(stop=("x", "é"), stop_token_ids=(3,), seed=-5, logprobs=2, max_tokens=7)
CAPACITY = CapacityFacts(
    budget_bytes=10,
    arena_bytes=8,
    slab_bytes=4,
    slabs=2,
    remainder_bytes=2,
    granule_tokens=16,
    pools=(PoolFacts("sliding-512", 15, 16, 100, 128, 5, None),),
    longest_request_tokens=99,
    max_model_len=ModelLength(99, "arena"),
    static_ratio=0.8,
    concurrency=(ConcurrencyFacts(10, 20, 3, 2, 1),),
)


@pytest.mark.parametrize(
    "command", [Submit("a", (1, 2**31), PARAMS, 2**63 - 1, -1, "salt \u00e9"), Cancel("a", "stop"), Shutdown()]
)
def test_commands_survive(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "report",
    [
        Starting("loading", 0.5),
        Hello(7, ModelFacts(name="m", max_model_len=9, vocab_size=11, details={"dtype": "bfloat16"}), CAPACITY),
        StartFailed("config", "no", ("a", "b")),
        Outputs(
            (
                AcceptedReport("a", 3, False),
                AdmittedReport("a", 48),
                RejectedReport("b", "too long", "prompt", "context_length_exceeded"),
                TokenReport("a", 5, Logprobs(-1.5, 2, ((5, -1.5), (6, -2.0)))),
                TokenReport("a", None, None, "abort"),
                FailedReport("c", "no"),
            )
        ),
        Figures(
            Snapshot(figures=FakeScheduler().figures(), blocked=Blocked("a", "slots", "64 run"), violations=("L1",))
        ),
        Bye(("L1: page 3 has two owners",)),
    ],
)
def test_reports_survive(report: Report) -> None:
    assert decode_report(encode(report)) == report


@pytest.mark.parametrize("frame", [b"", b"\x00", b"garbage", encode(Shutdown())[:-1], encode(Bye())])
def test_a_frame_that_is_no_command_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(frame)


def test_a_salt_longer_than_any_client_may_send_is_no_command() -> None:
    assert decode_command(encode(Submit("a", (1,), PARAMS, 0, 0, "s" * MAX_SALT_CHARACTERS)))
    with pytest.raises(msgspec.ValidationError, match="length <= 256"):
        decode_command(encode(Submit("a", (1,), PARAMS, 0, 0, "s" * (MAX_SALT_CHARACTERS + 1))))


def test_scalars_of_numpy_cross_as_plain_numbers() -> None:
    report = Outputs((TokenReport("a", np.int64(7), Logprobs(np.float32(-0.5), np.int32(1), ())),))  # type: ignore[arg-type]
    assert decode_report(encode(report)) == Outputs((TokenReport("a", 7, Logprobs(-0.5, 1, ())),))
    with pytest.raises(NotImplementedError, match="ndarray"):
        encode(Outputs((TokenReport("a", np.zeros(2)),)))  # type: ignore[arg-type]


def test_a_submission_is_an_arrival_and_a_cancellation_an_abort() -> None:
    assert event_of(Submit("a", (1,), PARAMS, 3, 4)) == Arrive("a", (1,), PARAMS, 3, 4, EVERYBODY)
    salted = event_of(Submit("a", (1,), PARAMS, 3, 4, "mine"))
    assert salted == Arrive("a", (1,), PARAMS, 3, 4, Namespace(salt="mine"))
    assert event_of(Cancel("a", "stop")) == Abort("a", "stop")


def test_every_update_has_a_report() -> None:
    top = ((4, -0.25),)
    updates = (
        Accepted("a", 5, True),
        Admitted("a", 16),
        NewToken("a", 4, TokenLogprobs(-0.25, 1, top), "length"),
        Rejected("b", "no", "prompt", "x"),
        Failed("c", "no"),
    )
    assert reports_of(updates) == (
        AcceptedReport("a", 5, True),
        AdmittedReport("a", 16),
        TokenReport("a", 4, Logprobs(-0.25, 1, top), "length"),
        RejectedReport("b", "no", "prompt", "x"),
        FailedReport("c", "no"),
    )
