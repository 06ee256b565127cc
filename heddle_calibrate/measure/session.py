"""State shared by all measurements at one TP degree: limits, warm contexts, progress, results."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple, TypeAlias

from heddle_calibrate.measure.cells import SIZES, Limits, SizeName
from heddle_calibrate.measure.probe import EngineProbe, StepSample
from heddle_calibrate.sweeps import (
    AbortTrial,
    ColocationTrial,
    DecodeTrial,
    LoopTrial,
    MoveTrial,
    PrefillTrial,
    ServedTrial,
    SleepTrial,
    StartStopTrial,
)
from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import EngineClient, StepRequest
from heddle_rollout.scripted_agent import TokenSource
from heddle_runtime.clock import RunClock


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpec:
    tps: tuple[int, ...]
    gpu: str
    max_running: int
    max_context: int
    """Tokens of prompt and output together, at most."""
    size: SizeName
    seed: int
    served: bool = False
    """Whether to run loops of clients as serving benchmarks do."""


@dataclass(slots=True)
class Measurements:
    """The trials of a sweep so far, under the names of `heddle_calibrate.sweeps.Sweep`."""

    kv_capacity_tokens: dict[int, int] = field(default_factory=dict)
    decode: list[DecodeTrial] = field(default_factory=list)
    prefill: list[PrefillTrial] = field(default_factory=list)
    aborts: list[AbortTrial] = field(default_factory=list)
    moves: list[MoveTrial] = field(default_factory=list)
    lives: list[StartStopTrial] = field(default_factory=list)
    naps: list[SleepTrial] = field(default_factory=list)
    beside: list[ColocationTrial] = field(default_factory=list)
    loops: list[LoopTrial] = field(default_factory=list)
    served: list[ServedTrial] = field(default_factory=list)
    spoiled: int = 0
    notes: dict[str, None] = field(default_factory=dict)


OnProgress: TypeAlias = Callable[[int, int, str], None]
"""Called before each measurement with the number done, the number known, and the next one."""


class PlannedTrial(NamedTuple):
    what: str
    run: Callable[[], Awaitable[None]]


class WarmContext:
    """A trajectory whose context is used repeatedly, so that the prefix cache holds it."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        """`ids` is empty for engines that make no tokens."""
        self.trajectory, self.ids = TrajectoryId(name), ids
        self._cached = 0

    def request(self, context: int, output: int) -> StepRequest:
        """A step on the first `context` tokens."""
        assert not self.ids or context <= len(self.ids), "the context is as long as any step on it"
        shared, self._cached = min(context, self._cached), context
        return StepRequest(
            trajectory=self.trajectory,
            group=GroupId(self.trajectory),
            prompt_tokens=context,
            shared_tokens=shared,
            max_tokens=output,
            exact=True,
            prompt_ids=self.ids[:context],
        )

    def branch(self, kept: int, new: Sequence[int]) -> "WarmContext":
        """The same trajectory with other tokens after the first `kept`."""
        other = WarmContext(self.trajectory, (*self.ids[:kept], *new))
        self._cached = other._cached = min(self._cached, kept)
        return other


class Session:
    """The measurements at one TP degree."""

    def __init__(
        self,
        probe: EngineProbe,
        spec: SweepSpec,
        tp: int,
        tokens: TokenSource | None,
        measured: Measurements,
        on_progress: OnProgress,
    ) -> None:
        self.probe, self.spec, self.tp, self.tokens = probe, spec, tp, tokens
        self.measured = measured
        self.size = SIZES[spec.size]
        self.limits = Limits(max_running=1, max_context=1, kv_capacity_tokens=1)
        self.clock = RunClock(asyncio.get_running_loop())
        self.clock.thaw()
        self.position = 0
        """Of the current measurement within this session."""
        self._on_progress, self._expected = on_progress, 0
        self._rng = Random(f"{spec.seed}/{tp}")
        self._names = count()
        self._warm: list[WarmContext] = []

    def set_limits(self, engine: EngineClient) -> None:
        self.limits = Limits(
            max_running=self.spec.max_running,
            max_context=self.spec.max_context,
            kv_capacity_tokens=engine.kv_capacity_tokens,
        )

    @property
    def most(self) -> int:
        """The most sequences of the least length that run at once."""
        return self.limits.most(self.size.least_tokens)

    def expect(self, count: int) -> None:
        """Add measurements to the known number."""
        self._expected += count

    def begin(self, what: str) -> None:
        self._on_progress(self.position, self._expected, f"TP {self.tp}: {what}")
        self.position += 1

    async def shuffled(self, trials: Sequence[PlannedTrial]) -> None:
        """Make each measurement as often as the size requires, in an order drawn by the seed."""
        chosen = [*trials] * self.size.repeats
        self._rng.shuffle(chosen)
        self.expect(len(chosen))
        for trial in chosen:
            self.begin(trial.what)
            await trial.run()

    def cold(self, length: int) -> WarmContext:
        """A new trajectory, of which no engine has anything cached yet."""
        return WarmContext(f"tp{self.tp}-{next(self._names)}", self.new_ids(length))

    def new_ids(self, length: int) -> Sequence[int]:
        """Tokens used nowhere else; none for engines that make none."""
        name = f"tp{self.tp}-{next(self._names)}"
        return self.tokens.ids(name, length) if self.tokens is not None else ()

    def warm(self, first: int, past: int) -> list[WarmContext]:
        """The contexts of these numbers, which all measurements share."""
        while len(self._warm) < past:
            self._warm.append(self.cold(self.limits.longest(1, 0)))
        return self._warm[first:past]

    async def fill_cache(
        self, engine: EngineClient, sequences: Sequence[WarmContext], context: int
    ) -> None:
        steps = [self.probe.begin(engine, each.request(context, 1)) for each in sequences]
        await asyncio.gather(*steps)

    async def batch(
        self, engine: EngineClient, sequences: Sequence[WarmContext], context: int
    ) -> list[StepSample]:
        """Decode a batch whose prompts are cached."""
        await self.fill_cache(engine, sequences, context)
        output = self.size.output
        steps = [self.probe.begin(engine, each.request(context, output)) for each in sequences]
        return await asyncio.gather(*steps)

    def load(
        self, engine: EngineClient, sequences: Sequence[WarmContext], context: int, output: int
    ) -> "BackgroundLoad":
        """Start to decode a batch that runs beside a measurement."""
        steps = [self.probe.begin(engine, each.request(context, output)) for each in sequences]
        return BackgroundLoad(engine, sequences, asyncio.gather(*steps))


class BackgroundLoad:
    """A batch that decodes beside a measurement."""

    def __init__(
        self,
        engine: EngineClient,
        sequences: Sequence[WarmContext],
        steps: Awaitable[list[StepSample]],
    ) -> None:
        self._engine, self._sequences, self._steps = engine, sequences, steps

    async def end(self) -> list[StepSample]:
        """Abort the steps that still run; returns the samples of all."""
        for each in self._sequences:
            self._engine.abort(each.trajectory)
        return await self._steps
