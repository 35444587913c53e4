"""The torch backend: carries out a StepPlan on a real model.

plan.offloads    pages are copied to the host arena
plan.moves       pages change place inside the arena
plan.loads       pages come back from the host arena
plan.copies      checkpoints become working states; plan.saves, after the forward, the other way round
plan.tables      become the step's attention facts, once for all layers
plan.token_ids   one packed forward, (1, T); logits only for the rows that sample
logits           one token per sampling segment, or a Failure that names its request
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halocline.errors import InvariantError
from halocline.huge_pages import Settler
from halocline.memory.layout import ArenaLayout
from halocline.model.arena_tensor import PageMover, allocate_arena
from halocline.model.attention import ArenaAttention, choose
from halocline.model.host_pages import HostPages
from halocline.model.loading import LoadedModel
from halocline.model.sampling import Sampler
from halocline.step import Backend, Segment, StepPlan, StepResult


class TorchBackend(Backend):
    """One model, one arena, one device. The caller sets torch's thread count."""

    def __init__(
        self,
        loaded: LoadedModel,
        layout: ArenaLayout,
        *,
        kv_dtype: torch.dtype | None = None,
        attention: str = "auto",
        host_bytes: int = 0,
        memory_file: int | None = None,
    ) -> None:
        """Allocate the arena and take over the model's attention.

        `kv_dtype` is the type of K and V in the arena (default: the model's) and must have the element size that
        `layout` was solved for. `host_bytes` is the quota of the host arena, 0 for none. `memory_file` as
        `allocate_arena` takes it; it stays open until `close`. Raises ModelError when an arena cannot be allocated or
        the model does not let its attention be replaced, ConfigError for an unknown `attention`.
        """
        self.layout = layout
        self._model = loaded.model
        self._device = loaded.device
        self._sampler = Sampler(loaded.eos_token_ids)
        arena = allocate_arena(layout, loaded.device, memory_file)
        self.arena = arena
        """All bytes of KV, for links to other workers: uint8, shape (arena_bytes,)."""
        self._mover = PageMover(arena, layout)
        self._host = HostPages(arena, layout, host_bytes) if host_bytes else None
        backend = choose(attention, loaded.device.type)
        self._attention = ArenaAttention(arena, layout, kv_dtype or loaded.dtype, backend)
        self._attention.attach(loaded.model)
        self._is_closed = False
        self._settler = None if memory_file is None else Settler(memory_file, arena.numpy().data)
        if self._settler is not None:  # last: who fails above has nobody who closes it
            self._settler.start()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Carry out `plan`: moves, copies, one forward, saves, sampling.

        Raises whatever the model raises; then no token is known, and no working state was saved. Raises InvariantError
        for a leap: only who drives a backend that can loop by itself asks the scheduler for one.
        """
        assert not self._is_closed, "the backend is closed"
        leaping = [segment.request_id for segment in plan.segments if segment.is_leap]
        if leaping:
            raise InvariantError([f"step {plan.step} leaps ({', '.join(leaping)}): a decode computes one token here"])
        self._arrange(plan)
        if not plan.segments:  # pages had to move, and nothing is computed
            return StepResult(plan.step, ())
        self._attention.begin(plan)
        sampling = [i for i, segment in enumerate(plan.segments) if segment.samples]
        logits = self._forward(plan, plan.query_starts[1:][sampling] - 1)
        self._mover.move(plan.saves)
        segments: list[Segment] = [plan.segments[i] for i in sampling]
        if not segments:
            return StepResult(plan.step, ())
        return StepResult(plan.step, *self._sampler.sample(logits, segments))

    def _arrange(self, plan: StepPlan) -> None:
        """Do what comes before the forward, in the plan's order."""
        if plan.offloads or plan.loads:
            assert self._host is not None, f"step {plan.step} needs a host arena, and this backend has none"
            self._host.offload(plan.offloads)
        self._mover.move(plan.moves)
        if self._host is not None:
            self._host.load(plan.loads)
        self._mover.move(plan.copies)

    def close(self) -> None:
        """Give the model's attention and the arena's memory back."""
        if not self._is_closed:
            self._is_closed = True
            if self._settler is not None:
                self._settler.close()
            self._attention.detach()
            del self._attention, self._mover, self.arena, self._host, self._settler

    def _forward(self, plan: StepPlan, rows: NDArray[np.int32]) -> Tensor:
        """Return the logits of `rows` of the packed row of tokens, shape (rows, vocab)."""
        output = self._model(
            input_ids=torch.tensor(plan.token_ids, device=self._device)[None],
            position_ids=torch.tensor(plan.positions, device=self._device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self._device),
        )
        logits: Tensor = output.logits[0]
        return logits
