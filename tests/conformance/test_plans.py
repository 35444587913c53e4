"""The same law without scheduler and arena: plans made by hand, on pages picked at random, straight into the model.

What fails here is in the attention; what fails only in test_generate.py is in scheduler, arena or runner.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from halocline.model.attention import ArenaAttention, choose
from halocline.model.layers import kv_layers
from testing.conformance import HandScheduler, make_arena, make_layout
from testing.models import FAMILIES
from testing.serving import PAGES, differences, generated, loaded, prompts


class _Hand:
    """Computes all prompts and their continuations in steps of random members and random chunks."""

    def __init__(self, family: str, page_tokens: str, attention: str, seed: int) -> None:
        dtype = FAMILIES[family].dtype
        self.expected = generated(family, dtype)
        self.model = copy.deepcopy(loaded(family, dtype).model)
        layers = kv_layers(self.model.config, dtype.itemsize)
        layout = make_layout(layers, PAGES[page_tokens], slabs=900)
        self.hand = HandScheduler(layout, seed)
        self.attention = ArenaAttention(make_arena(layout), layout, dtype, choose(attention))
        self.attention.attach(self.model)
        self.random = np.random.default_rng(seed)
        self.known = prompts()
        self.done = [0] * len(self.known)
        self.ends = [len(p) + len(e.tokens) for p, e in zip(self.known, self.expected, strict=True)]

    def run(self) -> list[list[int]]:
        lengths = [len(prompt) for prompt in self.known]
        step = 0
        while any(self._left(i) for i in range(len(self.known))):
            work = self._members()
            if work:
                self._step(step, work)
                step += 1
        return [tokens[length:] for tokens, length in zip(self.known, lengths, strict=True)]

    def _left(self, index: int) -> bool:
        return len(self.known[index]) < self.ends[index]

    def _members(self) -> list[tuple[int, int]]:
        chosen = [i for i in range(len(self.known)) if self._left(i) and self.random.random() < 0.7]
        return [(i, int(self.random.integers(1, 1 + len(self.known[i]) - self.done[i]))) for i in chosen]

    @torch.inference_mode()
    def _step(self, step: int, work: list[tuple[int, int]]) -> None:
        plan = self.hand.plan(step, [(f"r{i}", self.known[i], self.done[i], count) for i, count in work])
        self.attention.begin(plan)
        logits = self.model(
            input_ids=torch.from_numpy(plan.token_ids)[None],
            position_ids=torch.from_numpy(plan.positions)[None],
            use_cache=False,
        ).logits[0]
        for segment, (i, count) in enumerate(work):
            self.done[i] += count
            if self.done[i] == len(self.known[i]):
                self.known[i].append(int(logits[plan.query_starts[segment + 1] - 1].argmax()))
            self.hand.applied(f"r{i}", self.done[i])


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_hand_made_plans_give_the_tokens_of_generate(family: str, attention: str) -> None:
    at = list(FAMILIES).index(family) + (attention == "cpu")
    hand = _Hand(family, list(PAGES)[at % len(PAGES)], attention, seed=at)
    assert differences(hand.expected, hand.run()) == []
