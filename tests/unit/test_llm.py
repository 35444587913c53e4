"""LLM and AsyncLLM: a real engine process and a tiny random model; vLLM's shapes, input order, no process left over."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from halocline import LLM, AsyncLLM, SamplingParams
from halocline.engine.front import FrontEnd
from halocline.errors import ConfigError, EngineDeadError, ModelError, ParameterError, TooLargeError
from testing.models import BOS, reference_tokens, save_tiny, tiny_model, tiny_prompt, tiny_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS = {"kv_bytes": "2MiB", "dtype": "float64", "threads": 1, "step_tokens": 64, "max_running_requests": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "gemma3", chat=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as made:
        yield made


def engine_processes() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "halocline.engine.process" in " ".join(child.cmdline())]


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop a process for a while, so that no answer can be complete however fast the machine is."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def wait_until_gone(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_outputs_come_in_the_order_of_the_prompts_with_generates_tokens(llm: LLM) -> None:
    prompts = [tiny_prompt(tokens, seed=tokens) for tokens in (30, 3, 17, 9, 24, 5, 40, 11, 2, 13)]
    model = tiny_model("gemma3")
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.finished
        assert output.prompt is None
        (completion,) = output.outputs
        assert completion.token_ids == reference_tokens(model, prompt, 12)
        assert (completion.index, completion.finish_reason) == (0, "length")


def test_a_text_prompt_keeps_its_text_and_its_tokens(llm: LLM) -> None:
    (output,) = llm.generate("the quick brown", GREEDY, use_tqdm=False)
    tokenizer = tiny_tokenizer()
    assert output.prompt == "the quick brown"
    assert output.prompt_token_ids == tokenizer.encode("the quick brown")
    known = [token for token in output.outputs[0].token_ids if token < len(tokenizer)]
    assert output.outputs[0].text == tokenizer.decode(known, skip_special_tokens=True)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in (1, 5, 3)]
    outputs = llm.generate([[7, 8], [7, 8], [7, 8]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    longest = outputs[1].outputs[0].token_ids
    assert all(output.outputs[0].token_ids == longest[: len(output.outputs[0].token_ids)] for output in outputs)


def test_n_completions_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    (first,) = llm.generate([4, 5, 6], params, use_tqdm=False)
    (again,) = llm.generate([4, 5, 6], params, use_tqdm=False)
    tokens = [tuple(each.token_ids) for each in first.outputs]
    assert [each.index for each in first.outputs] == [0, 1, 2]
    assert len(set(tokens)) == 3
    assert [tuple(each.token_ids) for each in again.outputs] == tokens


def test_log_probabilities_are_those_of_the_model(llm: LLM) -> None:
    prompt = tiny_prompt(9)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, logprobs=3), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    with torch.inference_mode():
        expected = tiny_model("gemma3")(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    place = completion.logprobs[0]
    assert len(place) == 3
    best = expected.topk(3)
    for rank, (token, logprob) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), start=1):
        assert place[token].rank == rank
        assert place[token].logprob == pytest.approx(logprob, abs=1e-5)
        assert place[token].decoded_token is not None


def test_outputs_say_how_much_of_the_prompt_was_cached(llm: LLM) -> None:
    prompt = tiny_prompt(100, seed=100)

    def found(given: Any, params: SamplingParams = GREEDY) -> tuple[int | None, list[int]]:
        (output,) = llm.generate(given, params, use_tqdm=False)
        return output.num_cached_tokens, output.outputs[0].token_ids

    cold, right = found(prompt)
    hot, again = found(prompt)
    assert cold == 0
    assert hot is not None
    assert 0 < hot < len(prompt)
    assert right == again == reference_tokens(tiny_model("gemma3"), prompt, 12)
    assert found({"prompt_token_ids": prompt, "cache_salt": "mine"}) == (0, right), "another salt, another prefix"
    assert found({"prompt_token_ids": prompt, "cache_salt": "mine"}) == (hot, right)
    several = SamplingParams(n=3, temperature=0.0, max_tokens=2, ignore_eos=True)
    assert found({"prompt_token_ids": prompt, "cache_salt": "three"}, several)[0] == 0, "one of them computed it"


def test_conversations_are_kept_apart_by_a_salt_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 4}]

    def found(**salt: str) -> int | None:
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, **salt)
        return output.num_cached_tokens

    assert found() == 0
    assert (found() or 0) > 0
    assert found(cache_salt="mine") == 0


def test_a_salt_that_cannot_be_used_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="cache_salt") as caught:
        llm.generate([{"prompt": "x", "cache_salt": 7}, {"prompt": "y"}], GREEDY, use_tqdm=False)
    assert caught.value.param == "cache_salt"


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate([3, 4, 5], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[len(text) // 2]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate([3, 4, 5], params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "one arena"}]
    expected = tiny_tokenizer(chat=True).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "arena"}]}]
    assert llm.chat(parts, GREEDY, use_tqdm=False)[0].prompt_token_ids == one[0].prompt_token_ids
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert tiny_tokenizer().decode(one[0].prompt_token_ids) == expected
    assert [output.outputs[0].token_ids for output in two] == [one[0].outputs[0].token_ids] * 2


def test_no_prompts_make_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_more_prompts_than_slots_are_all_served(llm: LLM) -> None:
    prompts = [[3 + number % 100, 4] for number in range(60)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_a_prompt_that_cannot_fit_is_named_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(TooLargeError) as caught:
        llm.generate([[5], [6] * 2000], SamplingParams(max_tokens=4), use_tqdm=False)
    assert "prompt 1 of 2" in caught.value.__notes__
    assert llm.generate([5], GREEDY, use_tqdm=False)[0].finished


def test_ctrl_c_stops_the_generation_and_not_the_engine(llm: LLM) -> None:
    prompts = [[5, number] for number in range(3, 11)]
    endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    (engine,) = engine_processes()[-1:]
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    # A shell that starts the suite in the background lets it ignore Ctrl-C; Python takes that over.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with standing_still(engine):
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, endless, use_tqdm=False)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert llm.generate([5], GREEDY, use_tqdm=False)[0].finished


def test_capacity_is_known(llm: LLM) -> None:
    assert llm.capacity is not None
    assert llm.capacity.arena_bytes <= 2 * 2**20
    assert [pool.name for pool in llm.capacity.pools] == ["full", "sliding-12"]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"kv_byte": "1GiB"}, ConfigError, "did you mean 'kv_bytes'"),
        ({"dtype": "int8", "admission": "x"}, ConfigError, "dtype is 'int8'.*admission is 'x'"),
        ({"kv_bytes": "1KiB"}, ConfigError, "KiB"),
        ({"model": "gemma3-270n"}, ModelError, "did you mean 'gemma3-270m'"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len is 1000000"),
        ({"step_tokens": 8}, ConfigError, "step_tokens is 8"),
    ],
)
def test_settings_that_cannot_work_raise_and_leave_no_process(
    folder: Path, settings: dict[str, object], error: type[Exception], words: str
) -> None:
    before = engine_processes()
    with pytest.raises(error, match=words):
        LLM(**{"model": str(folder), **SETTINGS, **settings})
    assert engine_processes() == before


def test_a_wrong_sampling_field_raises_with_its_range() -> None:
    with pytest.raises(ParameterError, match=r"top_p is 2; it must be a number from 0 to 1"):
        SamplingParams(top_p=2)


def test_closing_twice_is_closing_once_and_ends_the_engine(folder: Path) -> None:
    before = set(engine_processes())
    llm = LLM(str(folder), **SETTINGS)
    (engine,) = set(engine_processes()) - before
    llm.close()
    llm.close()
    assert wait_until_gone(engine)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_a_program_that_forgets_to_close_leaves_no_engine(folder: Path) -> None:
    program = (
        "import sys, psutil\n"
        "from halocline import LLM\n"
        f"llm = LLM({str(folder)!r}, **{SETTINGS!r})\n"
        "print(psutil.Process().children()[0].pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert wait_until_gone(int(done.stdout))
    assert "Traceback" not in done.stderr


def test_a_program_that_is_killed_leaves_no_engine(folder: Path) -> None:
    program = (
        "import os, signal, psutil\n"
        "from halocline import LLM\n"
        f"llm = LLM({str(folder)!r}, **{SETTINGS!r})\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert wait_until_gone(int(done.stdout))


def test_a_fork_of_a_program_ends_by_itself_and_is_told_to_make_its_own(folder: Path) -> None:
    program = (
        "import os, sys\n"
        "from halocline import LLM\n"
        "from halocline.errors import EngineDeadError\n"
        f"llm = LLM({str(folder)!r}, **{SETTINGS!r})\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        llm.generate('x')\n"
        "    except EngineDeadError as error:\n"
        "        print(error, flush=True)\n"
        "    sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.getpid(), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    told, parent = done.stdout.splitlines()
    code, pid = parent.split()
    assert code == "7", "the fork ended as it wanted to"
    assert f"belongs to process {pid}" in told


def test_starting_twice_at_once_is_starting_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    async def opened(prepared: object, engine: object) -> SimpleNamespace:
        await asyncio.sleep(0)
        return SimpleNamespace(client=SimpleNamespace(close=partial(asyncio.sleep, 0)))

    monkeypatch.setattr("halocline.llm.begin_engine", lambda: begun.append(None))
    monkeypatch.setattr("halocline.llm.prepare", lambda config: SimpleNamespace(memory=None))
    monkeypatch.setattr("halocline.llm.open_front", opened)
    llm = AsyncLLM(str(folder), **SETTINGS)

    async def twice() -> None:
        await asyncio.gather(llm.start(), llm.start())
        await llm.close()

    for runs in (1, 2):  # event loops in turn
        asyncio.run(twice())
        assert len(begun) == runs


@pytest.mark.parametrize("prompt", ["\ud800", b"abc", {"prompt": "\udfff"}])
def test_what_is_no_prompt_raises_before_it_is_tokenized(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(prompt)


def test_parameters_of_another_kind_raise(llm: LLM) -> None:
    for wrong in ({"max_tokens": 3}, [{"max_tokens": 3}], 3):
        with pytest.raises(ParameterError, match="give a SamplingParams"):
            llm.generate("a", wrong)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="messages holds half"):
        llm.chat([{"role": "user", "content": "\ud800"}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def async_llm(folder: Path) -> AsyncIterator[AsyncLLM]:
    """One engine for the tests below, of which the last kills it: starting one takes seconds."""
    async with AsyncLLM(str(folder), **SETTINGS) as llm:
        yield llm


async def collected(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[tuple[str, int]]:
    return [(output.outputs[0].text, len(output.outputs[0].token_ids)) async for output in llm.generate(prompt, params)]


@pytest.mark.asyncio(loop_scope="module")
async def test_async_streams_grow_finish_and_stop_early(async_llm: AsyncLLM) -> None:
    seen = await collected(async_llm, tiny_prompt(6), GREEDY)
    assert all(later.startswith(earlier) for (earlier, _), (later, _) in itertools.pairwise(seen))
    assert seen[-1][1] == 12
    assert len(seen) > 2

    endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    stream = async_llm.generate([BOS, 5], endless, request_id="mine")
    first = await anext(stream)
    await stream.aclose()
    assert (first.request_id, first.finished) == ("mine", False)
    # What the left stream held is free again: a request that needs the whole arena is served.
    assert (await collected(async_llm, tiny_prompt(6), GREEDY))[-1] == seen[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_aborted_request_ends_with_what_there_is_and_says_so(async_llm: AsyncLLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, n=2)
    seen = []
    async for output in async_llm.generate([BOS, 5], endless, request_id="mine"):
        seen.append(output)
        with pytest.raises(ParameterError, match="'mine' is in use"):
            await anext(async_llm.generate([BOS, 5], endless, request_id="mine"))
        await async_llm.abort("mine")
    assert seen[-1].finished
    assert [each.finish_reason for each in seen[-1].outputs] == ["abort", "abort"]
    assert all(len(each.token_ids) < 300 for each in seen[-1].outputs)
    await async_llm.abort("nobody")
    assert (await collected(async_llm, tiny_prompt(6), GREEDY))[-1][1] == 12


def test_the_engines_seed_repeats_a_batch_however_long_each_text_is_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_loop = FrontEnd._off_loop

    async def slow(front: FrontEnd, encode: Any, characters: int) -> tuple[int, ...]:
        await asyncio.sleep(0.2 if characters > 5 else 0.0)
        return await off_loop(front, encode, characters)

    def batch() -> list[list[int]]:
        with LLM(str(folder), **SETTINGS, seed=5) as llm:
            outputs = llm.generate(["a longer text", "b"], SamplingParams(max_tokens=12, n=2))
        return [each.token_ids for output in outputs for each in output.outputs]

    once = batch()
    monkeypatch.setattr(FrontEnd, "_off_loop", slow)
    assert batch() == once
    assert len({tuple(each) for each in once}) == len(once)


async def test_async_use_before_the_start_and_after_the_end_is_an_error(folder: Path) -> None:
    llm = AsyncLLM(str(folder), **SETTINGS)
    with pytest.raises(EngineDeadError, match="async with"):
        await collected(llm, [5], GREEDY)
    await llm.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engines_death_reaches_the_caller(async_llm: AsyncLLM) -> None:
    (engine,) = engine_processes()[-1:]
    await collected(async_llm, [5, 6], GREEDY)
    with standing_still(engine):
        waiting = asyncio.ensure_future(collected(async_llm, [5, 6], GREEDY))
        await asyncio.sleep(0.1)  # it is on its way, and cannot be answered
        os.kill(engine, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await waiting
