"""The boundary with Gemma 3 270M: fifteen sliding and three full layers, W = 512, in float32.

As `test_boundary`, with four lives of different lengths. All prompts are longer than the window, so that of their
window pages only the tail travels, from floor_P(L - 511) on. In pages of 16 tokens a life takes 33 window pages, each a
slab, and 37 to 39 full ones, five to a slab: the first three 99 slabs and ceil(113 / 5) = 23, with the floor's one 123.
Which of them fit together is counted from the layout, in the order in which they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from halocline.config import Config
from halocline.memory.retention import Full, Sliding
from halocline.model.sources import resolve
from testing.boundary import Prefills
from testing.layouts import layers_of
from testing.pair import metrics, page_exact_bytes, worker
from testing.pressure import Asked, Pressure
from testing.reference import Reference, _generate, compare
from testing.rooms import Cut, Life, senior_beside

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = "gemma3-270m"
WINDOW = 512
LAYERS = layers_of((3, Full()), (15, Sliding(WINDOW)), heads=1, dim=256, dtype_bytes=4)
LIVES = [Life(530, 60), Life(545, 76), Life(518, 70), Life(556, 66)]
"""The most senior first."""
TEXT = Path(__file__).parents[2] / "LICENSE"
BOS = 2
SENIOR_PROMPT, SENIOR_TOKENS = 100, 300
"""At most, and at least."""
PATIENCE_SECONDS = 300.0
CUTS = {"16": Cut(LAYERS, 16), "64+16": Cut(LAYERS, {"full": 64, "sliding-512": 16})}
LESS, EXACT, NEXT = (3, -1), (3, 0), (4, -1)
"""Lives that fit a room just so, and the slabs that are added to it: two, three and three come back."""


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    """What `generate` makes of four passages of one text, past any end of sequence."""
    folder = resolve(MODEL, quiet=True).folder
    text = transformers.AutoTokenizer.from_pretrained(folder).encode(TEXT.read_text(), add_special_tokens=False)
    starts = [sum(life.prompt_tokens for life in LIVES[:number]) for number in range(len(LIVES))]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    made = []
    for start, life in zip(starts, LIVES, strict=True):
        prompt = [BOS, *text[start : start + life.prompt_tokens - 1]]
        assert len(prompt) == life.prompt_tokens, "the text is too short"
        made += _generate(model, [prompt], life.new_tokens)
    return made


@pytest.fixture(scope="module")
def prefills() -> Iterator[Prefills]:
    made = Prefills()
    with made.stack:
        yield made


def config(link_kind: str, **own: object) -> Config:
    base = Config(model=MODEL, dtype="float32", threads=1, audit="every", log_level="error", lease_seconds=60.0)
    return replace(base, link_kind=link_kind, max_running_requests=8, **own)


@pytest.mark.parametrize(
    ("link_kind", "pages", "ratio", "just"),
    [
        ("shm", "16", None, LESS),
        ("shm", "16", None, EXACT),
        ("shm", "16", "0.87", EXACT),
        ("tcp", "64+16", None, NEXT),
    ],
)
def test_as_many_come_back_as_the_layout_says(
    prefills: Prefills,
    references: list[Reference],
    link_kind: str,
    pages: str,
    ratio: str | None,
    just: tuple[int, int],
) -> None:
    fit, more = just
    cut = CUTS[pages]
    room = cut.room(cut.smallest(LIVES[:fit], ratio).layout.slabs + more, ratio)
    count = room.come_back(LIVES)
    assert count == (fit - 1 if more < 0 else fit)
    life = senior_beside(room, LIVES, SENIOR_PROMPT, SENIOR_TOKENS)
    senior = Asked(references[0].prompt[: life.prompt_tokens], life.new_tokens)
    juniors = [Asked(each.prompt, len(each.tokens)) for each in references]
    settings = {
        "role": "decode",
        "kv_bytes": room.layout.budget_bytes,
        "page_tokens": cut.setting,
        "policy": room.policy,
        "prefix_cache": "off",
        "decode_reserve_tokens": 0,
        "max_model_len": life.positions + 1,
    }
    prefill = prefills.at(config(link_kind, role="prefill", kv_bytes="128MiB", page_tokens=16))
    with worker(config(link_kind, **settings)) as decode:
        made = Pressure(prefill, decode, room, senior, juniors, PATIENCE_SECONDS)
        made.check_room()
        seen = made.run()
        assert made.left(seen) == room.left(room.lives(LIVES[:count]))
        verdicts = [compare(*pair) for pair in zip(references, made.end(), strict=True)]
        assert "different" not in verdicts
        assert "equal" in verdicts, "nothing but ties"
        # Pages travel as the sender has them, of 16 tokens; the tail begins where they do.
        exact = sum(page_exact_bytes(prefill, len(each.prompt), 0, WINDOW) for each in (senior, *juniors))
        assert metrics(decode)["halocline_transfer_received_page_bytes_total"] == exact
