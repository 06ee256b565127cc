"""NVIDIA Dynamo's KV router: the engine with the least to prefill and the fewest blocks held."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.events import StepFinished
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne
from heddle_core.parts.placement.sent_prefixes import SentPrefixes
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View

BLOCK: Final = 16
"""Tokens."""


@dataclass(slots=True)
class _Step:
    """In flight."""

    trajectory: TrajectoryId
    engine: EngineId
    own_blocks: int
    """Beyond its group's prompt."""
    prefill_tokens: int
    """Yet to prefill; 0 when it decodes or has ended."""


@dataclass(slots=True)
class _Load:
    """What the steps in flight of an engine need."""

    blocks: int = 0
    prefill_tokens: int = 0
    prompts: dict[GroupId, tuple[int, int]] = field(default_factory=dict)
    """Steps of each group, and the blocks of its prompt."""
    prefills: deque[_Step] = field(default_factory=deque)
    prefilled_s: float = 0.0
    """When the last prefill that is over ended, by the estimate."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillAndHeld(OneByOne):
    """The linear cost of Dynamo's KV router (1.2 to 1.6), with its defaults.

    The cost of an engine is the tokens that it has yet to prefill with this step, in blocks, plus
    the blocks that its steps in flight and this one hold. It does not prefill again what it has
    prefilled or made for the trajectory, or for another sample of its prompt; it holds a prompt
    once for all samples in flight; output counts with the next step. The least cost gets the step,
    any of equals.

    When a prefill is over is estimated, one after another on each engine; Dynamo sees the first
    token. Not modelled: evictions, of which engines inform Dynamo.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._cost = context.cost
        self._random = np.random.default_rng(context.seed)
        self._cached = SentPrefixes()
        self._steps: dict[TrajectoryId, _Step] = {}
        self._loads: dict[EngineId, _Load] = {}

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return an engine with the least cost, and count the step there."""
        self._end(t)
        cached = self._cached.longest(t)
        blocks, prompt = t.context_tokens // BLOCK, t.prompt_tokens // BLOCK
        least, equal = float("inf"), list[tuple[EngineId, int]]()
        for engine in view.engines:
            load = self._load(engine, view)
            prefill = t.context_tokens - cached.get(engine.id, 0) // BLOCK * BLOCK
            held = load.blocks + blocks - (prompt if t.group in load.prompts else 0)
            cost = (load.prefill_tokens + prefill) / BLOCK + held
            if cost < least:
                least, equal = cost, []
            if cost == least:
                equal.append((engine.id, prefill))
        chosen, prefill = equal[self._random.integers(len(equal)) if len(equal) > 1 else 0]
        load = self._loads[chosen]
        samples, held = load.prompts.get(t.group, (0, prompt))
        load.prompts[t.group] = samples + 1, held
        load.blocks += blocks - prompt + (0 if samples else held)
        load.prefill_tokens += prefill
        step = self._steps[t.id] = _Step(t.id, chosen, blocks - prompt, prefill)
        load.prefills.append(step)
        return chosen

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Its KV, output included, is at its home."""
        self._end(t)
        if t.home is not None:
            self._cached.add(t, t.home)

    def finished(self, t: TrajectoryView) -> None:
        self._end(t)
        self._cached.forget(t)

    def _end(self, t: TrajectoryView) -> None:
        step = self._steps.pop(t.id, None)
        if step is None:
            return
        load = self._loads[step.engine]
        samples, held = load.prompts.pop(t.group)
        if samples > 1:
            load.prompts[t.group] = samples - 1, held
        load.blocks -= step.own_blocks + (0 if samples > 1 else held)
        self._prefilled(step, load)

    def _load(self, engine: EngineView, view: View) -> _Load:
        """Return the load of an engine, without the prefills that are over."""
        if engine.id not in self._loads:
            self._loads[engine.id] = _Load()
        load = self._loads[engine.id]
        prefill_s = self._cost.by_shape[engine.shape].prefill_s
        while load.prefills:
            step = load.prefills[0]
            if step.prefill_tokens:
                t = view.trajectories[step.trajectory]
                end_s = max(t.dispatched_s, load.prefilled_s) + prefill_s * step.prefill_tokens
                if t.phase != "running" or end_s > view.now_s:
                    break
                load.prefilled_s = end_s
                self._cached.add(t, engine.id)
                self._prefilled(step, load)
            load.prefills.popleft()
        return load

    def _prefilled(self, step: _Step, load: _Load) -> None:
        load.prefill_tokens -= step.prefill_tokens
        step.prefill_tokens = 0
