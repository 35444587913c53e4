"""The plan's figures: those of the engine for every shape, worked ones by hand, and refusals with what would do."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from halocline.compose import lay_out, lay_out_layers
from halocline.config import Config
from halocline.errors import ConfigError
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.plan import POLICIES, Resolved, plan, read_rows, resolve, shapes, single_row
from halocline.sim.shapes import Shape, shape_named
from halocline.units import GIB, MIB

SIZES = (4 * GIB, 60 * GIB)
SERVED = [shape for shape in shapes() if not any(isinstance(layer.retention, State) for layer in shape.layers)]


def table(name: str) -> Resolved:
    return Resolved(shape_named(name), "bfloat16")


def config_of(shape: Shape) -> PreTrainedConfig:
    """Return a configuration whose layers are those of the shape, shuffled as a model has them: kinds in turn."""
    locals_ = [layer for layer in shape.layers if layer.retention != Full()]
    full = [layer for layer in shape.layers if layer.retention == Full()]
    one = shape.layers[0]
    common: dict[str, Any] = {
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": 4 * one.kv_heads,
        "num_key_value_heads": one.kv_heads,
        "head_dim": one.k_dim,
        "max_position_embeddings": shape.max_model_len,
        "dtype": "bfloat16",
    }
    types = ["sliding_attention"] * len(locals_)
    for number in range(len(full)):
        types.insert(number * len(shape.layers) // len(full), "full_attention")
    if locals_ and isinstance(locals_[0].retention, Chunked):
        types = [word.replace("sliding", "chunked") for word in types]
        return transformers.Llama4TextConfig(
            **common, layer_types=types, attention_chunk_size=locals_[0].retention.chunk_tokens
        )
    window = locals_[0].retention.window_tokens if locals_ and isinstance(locals_[0].retention, Sliding) else 1
    return transformers.Gemma3TextConfig(**common, layer_types=types, sliding_window=window)


@pytest.mark.parametrize("kv_bytes", SIZES, ids=lambda size: f"{size // GIB}GiB")
@pytest.mark.parametrize("shape", SERVED, ids=lambda shape: shape.name)
def test_the_calculators_layout_is_the_engines(shape: Shape, kv_bytes: int) -> None:
    config = Config(kv_bytes=kv_bytes, policy="static:0.8", dtype="bfloat16")
    engine = lay_out(config, config_of(shape), kv_bytes)
    arena = plan(config, table(shape.name), policies=("shared",)).arenas[0]
    assert arena.facts == engine.facts
    assert arena.slab_bytes == engine.layout.slab_bytes
    for own, pool in zip(arena.pools, engine.layout.pools, strict=True):
        assert (own.name, own.layers, own.page_tokens) == (pool.name, len(pool.layers), pool.page_tokens)
        assert (own.page_bytes, own.stride_bytes) == (pool.page_bytes, pool.stride_bytes)
        assert (own.pages_per_slab, own.padding_bytes) == (pool.pages_per_slab, pool.padding_bytes)


@pytest.mark.parametrize("kind", ["gemma4_text"])
def test_the_calculators_layout_of_a_configuration_class_is_the_engines(kind: str) -> None:
    config = Config(kv_bytes=8 * GIB, dtype="bfloat16")
    found = plan(config, resolve(f"transformers:{kind}", config), policies=("shared",))
    assert found.arenas[0].facts == lay_out(config, CONFIG_MAPPING[kind](), 8 * GIB).facts


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
def test_what_is_compared_begins_with_what_a_server_prints(shape: Shape) -> None:
    for policy in ("shared", "static:0.8"):
        config = Config(kv_bytes=60 * GIB, policy=policy)
        found = plan(config, Resolved(shape, "bfloat16"), policies=(policy, "static:0.8"))
        facts = lay_out_layers(config, shape.layers, shape.max_model_len, 60 * GIB).facts
        printed = [
            (row.prompt_tokens, row.output_tokens, row.requests, row.static_requests) for row in facts.concurrency
        ]
        shown = [
            (*row.lengths[0], *(held.requests for held in cells))
            for row, cells in zip(found.rows, found.arenas[0].held, strict=True)
        ]
        assert shown == printed


# ---- worked by hand


def test_gemma_3_27b_in_60_gib_is_the_worked_example() -> None:
    found = plan(Config(kv_bytes=60 * GIB), table("gemma-3-27b"), rows=[single_row(8192, 256)])
    arena = found.arenas[0]
    assert arena.facts is not None
    full, sliding = arena.pools
    assert (full.position_bytes, sliding.position_bytes) == (10 * 8_192, 52 * 8_192) == (81_920, 425_984)
    assert (full.stride_bytes, sliding.stride_bytes) == (16 * 81_920, 16 * 425_984)
    assert arena.slab_bytes == 26 * full.stride_bytes == 5 * sliding.stride_bytes == 34_078_720
    assert (arena.facts.slabs, arena.facts.remainder_bytes) == (1_890, 60 * GIB - 1_890 * 34_078_720)
    # 8,192 + 256 - 1 = 8,447 positions: 528 full pages; a window of 1,024 in pages of 16: 64 and the page it straddles.
    cost = arena.costs[0]
    assert cost.pages == (528, 65)
    assert cost.total_bytes == 528 * 1_310_720 + 65 * 6_815_744 == 1_135_083_520
    assert cost.full_bytes == 528 * (1_310_720 + 6_815_744) == 4_290_772_992
    # A prompt that goes on at a page's border reads 1,023 positions before it: 64 pages.
    assert (full.tail_bytes, sliding.tail_bytes) == (0, 64 * 6_815_744)
    held = {policy: each.requests for policy, each in zip(found.policies, arena.held[0], strict=True)}
    # 56: ceil(528 x 56 / 26) + ceil((65 x 56 + 1 floor) / 5) = 1,138 + 729 = 1,867 of 1,890 slabs; 57: 1,158 + 742.
    assert held["shared"] == held["static:best"] == 56
    # static:0.8: x full slabs of 416 tokens and 0.8 x as many tokens in slabs of 80: 1,524 of 1,890 slabs are window's,
    # and the 366 others hold 366 x 26 // 528 requests.
    assert held["static:0.8"] == 366 * 26 // 528 == 18
    assert held["full"] == 15


def test_gpt_oss_120b_keeps_as_many_bytes_of_a_position_in_both_kinds() -> None:
    found = plan(Config(kv_bytes=8 * GIB, page_tokens=16), table("gpt-oss-120b"), rows=[single_row(4096, 256)])
    full, sliding = found.arenas[0].pools
    assert full.position_bytes == sliding.position_bytes == 18 * 8 * (64 + 64) * 2 == 36_864
    cost = found.arenas[0].costs[0]
    # 4,351 positions: 272 pages; a window of 128 in pages of 16: 8 and one more.
    assert cost.pages == (272, 9)
    assert cost.total_bytes == (272 + 9) * 16 * 36_864
    assert cost.full_bytes == 2 * 272 * 16 * 36_864


def test_chunks_and_states_have_tails_of_their_own() -> None:
    scout = plan(Config(kv_bytes=60 * GIB, page_tokens=16), table("llama-4-scout")).arenas[0]
    assert scout.pools[1].tail_bytes == 511 * scout.pools[1].stride_bytes
    qwen = plan(Config(kv_bytes=60 * GIB), table("qwen3-next-80b")).arenas[0]
    state = qwen.pools[1]
    assert (state.page_bytes, state.position_bytes) == (77_266_944, None)
    assert state.tail_bytes == state.stride_bytes


# ---- drafts


def test_a_draft_lives_in_the_same_arena() -> None:
    config = Config(kv_bytes=60 * GIB)
    found = plan(config, table("gpt-oss-120b"), table("gpt-oss-20b"), rows=[single_row(4096, 256)])
    alone, both = found.arenas
    assert alone == plan(config, table("gpt-oss-120b"), rows=[single_row(4096, 256)]).arenas[0]
    assert [pool.layers for pool in both.pools] == [18 + 12, 18 + 12]
    # 30 layers of each kind instead of 18: three fifths of the requests, but for rounding.
    assert both.held[0][0].requests == pytest.approx(0.6 * alone.held[0][0].requests, abs=1)
    assert any("draft gpt-oss-20b" in note for note in found.notes)


def test_a_draft_with_a_window_of_its_own_is_one_more_pool() -> None:
    found = plan(Config(kv_bytes=60 * GIB), table("gpt-oss-120b"), table("gemma-3-270m"), policies=("shared",))
    assert [pool.name for pool in found.arenas[1].pools] == ["full", "sliding-128", "sliding-512"]


# ---- without an arena, and without room


def test_without_bytes_there_are_costs_and_no_capacity() -> None:
    found = plan(Config(), table("gemma-3-27b"), rows=read_rows("4096+256"))
    arena = found.arenas[0]
    assert (arena.facts, arena.held, arena.compromise, found.kv_bytes) == (None, (), None, None)
    assert arena.costs[0].pages == (272, 65)


def test_a_too_small_arena_is_told_what_would_do_and_that_does() -> None:
    for settings in ({"kv_bytes": 60 * MIB}, {"kv_bytes": GIB, "max_model_len": 100_000}, {"kv_bytes": 4096}):
        with pytest.raises(ConfigError) as caught:
            plan(Config(**settings), table("gemma-3-27b"))  # type: ignore[arg-type]
        *problems, hint = caught.value.problems
        assert any("full" in problem and "sliding-1024" in problem for problem in problems)
        enough = int(hint.split("kv_bytes ")[1].split(" ")[0])
        assert plan(Config(**{**settings, "kv_bytes": enough}), table("gemma-3-27b"), policies=("shared",))  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            plan(Config(**{**settings, "kv_bytes": enough * 7 // 8}), table("gemma-3-27b"))  # type: ignore[arg-type]


def test_settings_that_no_size_mends_get_no_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(Config(kv_bytes=GIB, max_running_requests=600), table("gemma-3-270m"))
    assert len(caught.value.problems) == 1
    assert "step_tokens" in caught.value.problems[0]


def test_requests_that_are_never_served_are_refused_or_left_out() -> None:
    config = Config(kv_bytes=60 * GIB, max_model_len=8192)
    with pytest.raises(ConfigError, match=r"9,000 \+ 1: 9001 tokens are longer than max_model_len 8192 \(as set\)"):
        plan(config, table("gemma-3-27b"), rows=[single_row(9000, 1)])
    mixed = read_rows("4096+256,4000+200")[2]
    long = type(mixed)(mixed.label, (*mixed.lengths, (9000, 1)))
    kept = plan(config, table("gemma-3-27b"), rows=[long]).rows[0]
    assert (kept.lengths, kept.label) == (mixed.lengths, "mix of these, 1 too long left out")
    with pytest.raises(ConfigError, match="131073 tokens are longer"):
        plan(Config(), table("gemma-3-27b"), rows=[single_row(131_072, 1)])


# ---- splits


def test_no_one_split_suits_short_and_long_requests() -> None:
    found = plan(Config(kv_bytes=60 * GIB), table("gemma-3-27b"), rows=read_rows("256+64,32768+512"))
    arena = found.arenas[0]
    assert arena.compromise is not None
    best = found.policies.index("static:best")
    by_row = {held[best].policy: held for held in arena.held}
    assert len(by_row) == 3
    # What the compromise holds is what such a server would hold.
    ratio = arena.compromise.policy
    same = plan(Config(kv_bytes=60 * GIB), table("gemma-3-27b"), rows=found.rows, policies=("shared", ratio)).arenas[0]
    shares = [split.requests / shared.requests for shared, split in same.held]
    assert min(shares) == pytest.approx(arena.compromise.worst_share)
    assert 0.3 < arena.compromise.worst_share < 0.8


def test_policies_hold_no_more_than_the_shared_arena_and_the_default_split_less() -> None:
    found = plan(Config(kv_bytes=60 * GIB), table("gemma-3-27b"))
    for cells in found.arenas[0].held:
        shared, split, best, equal, full = (each.requests for each in cells)
        assert split <= best <= shared
        assert equal <= shared
        assert full <= shared
    assert found.policies == POLICIES


def test_a_policy_that_is_none_is_refused_even_without_an_arena() -> None:
    with pytest.raises(ConfigError, match="policy is 'half'"):
        plan(Config(), table("gemma-3-27b"), policies=("half",))


def test_the_plan_is_json() -> None:
    found = plan(
        Config(kv_bytes=GIB),
        table("gpt-oss-20b"),
        table("gemma-3-270m"),
        rows=read_rows("300+20,900+50:2"),
        policies=("shared", "full"),
    )
    told = json.loads(json.dumps(found.to_dict()))
    assert [row["requests"] for row in told["rows"]] == [1, 1, 3]
    assert told["arenas"][0]["costs"][0]["total_bytes"] == found.arenas[0].costs[0].total_bytes
    assert told["arenas"][0]["held"][0][0] == {"policy": "shared", "requests": found.arenas[0].held[0][0].requests}
    sizes = [
        arena["facts"]["slabs"] * arena["slab_bytes"] + arena["facts"]["remainder_bytes"] for arena in told["arenas"]
    ]
    assert sizes == [GIB, GIB]


# ---- lengths


def test_lengths_are_read_with_their_mix() -> None:
    assert [row.lengths for row in read_rows("5+1")] == [((5, 1),)]
    short, long, mix = read_rows(" 5+1, 9+2:3 ")
    assert (short.lengths, long.lengths) == (((5, 1),), ((9, 2),))
    assert (mix.label, mix.lengths) == ("mix of these", ((5, 1), (9, 2), (9, 2), (9, 2)))


@pytest.mark.parametrize(
    "text", ["", "5", "0+1", "1+0", "-1+5", "a+b", "5+1:0", "99999999999+1", "5+1:99999999", "nowhere.csv"]
)
def test_absurd_lengths_are_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"4096\+256"):
        read_rows(text)


def test_every_wrong_length_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_rows("0+1,5+5,x")
    assert len(caught.value.problems) == 2


def test_a_trace_gives_its_mix_and_three_of_its_lengths(tmp_path: Any) -> None:
    path = tmp_path / "small.csv"
    lines = [f"2023-11-16 18:15:{second:02}.0000000,{100 * (second + 1)},{second + 1}" for second in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    mix, median, long, longest = read_rows(str(path))
    assert len(mix.lengths) == 20
    assert mix.label == "small: 20 requests, mean 1,050 + 10"
    assert (median.lengths, long.lengths, longest.lengths) == (((1100, 11),), ((2000, 20),), ((2000, 20),))
    generated = read_rows("poisson:requests=30,prompt=500,output=20,seed=3")
    assert [len(row.lengths) for row in generated] == [30, 1, 1, 1]
    totals = [sum(pair) for pair in mix.lengths]
    assert all(first <= second for first, second in pairwise(totals))
