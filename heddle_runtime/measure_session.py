"""What all measurements at one TP degree share: names, cached contexts, and what was found."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple, TypeAlias

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import EngineClient, StepRequest
from heddle_rollout.scripted_agent import TokenSource
from heddle_runtime.bench import Bench, Heard
from heddle_runtime.clock import RunClock
from heddle_runtime.measure_plan import SIZES, Limits, SizeName
from heddle_trace.sweep_files import (
    AbortTrial,
    BesideTrial,
    DecodeTrial,
    LifeTrial,
    LoopTrial,
    MoveTrial,
    NapTrial,
    PrefillTrial,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be measured."""

    tps: tuple[int, ...]
    gpu: str
    max_running: int
    max_context: int
    """Tokens of prompt and output together, at most."""
    size: SizeName
    seed: int


@dataclass(slots=True)
class Found:
    """What a sweep has found so far."""

    kv_capacity_tokens: dict[int, int] = field(default_factory=dict)
    decode: list[DecodeTrial] = field(default_factory=list)
    prefill: list[PrefillTrial] = field(default_factory=list)
    aborts: list[AbortTrial] = field(default_factory=list)
    moves: list[MoveTrial] = field(default_factory=list)
    lives: list[LifeTrial] = field(default_factory=list)
    naps: list[NapTrial] = field(default_factory=list)
    beside: list[BesideTrial] = field(default_factory=list)
    loops: list[LoopTrial] = field(default_factory=list)
    spoiled: int = 0
    notes: dict[str, None] = field(default_factory=dict)


Report: TypeAlias = Callable[[int, int, str], None]
"""Told before each measurement: how many are done, how many are known of, what comes."""


class Trial(NamedTuple):
    """One measurement that is still to be made."""

    what: str
    run: Callable[[], Awaitable[None]]


class Seat:
    """A trajectory whose context is used again and again, so that the engine has it cached."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        """`ids` is empty for engines that make no tokens."""
        self.trajectory, self.ids = TrajectoryId(name), ids
        self._known = 0

    def request(self, context: int, output: int) -> StepRequest:
        """A step on the first `context` tokens."""
        assert not self.ids or context <= len(self.ids), "a seat is as long as its longest step"
        shared, self._known = min(context, self._known), context
        return StepRequest(
            trajectory=self.trajectory,
            group=GroupId(self.trajectory),
            prompt_tokens=context,
            shared_tokens=shared,
            max_tokens=output,
            exact=True,
            prompt_ids=self.ids[:context],
        )

    def branch(self, kept: int, new: Sequence[int]) -> "Seat":
        """The same trajectory with other tokens after the first `kept`."""
        other = Seat(self.trajectory, (*self.ids[:kept], *new))
        self._known = other._known = min(self._known, kept)
        return other


class Session:
    """The measurements at one TP degree."""

    def __init__(
        self,
        bench: Bench,
        order: Order,
        tp: int,
        tokens: TokenSource | None,
        found: Found,
        report: Report,
    ) -> None:
        self.bench, self.order, self.tp, self.tokens, self.found = bench, order, tp, tokens, found
        self.size = SIZES[order.size]
        self.limits = Limits(max_running=1, max_context=1, kv_capacity_tokens=1)
        self.clock = RunClock(asyncio.get_running_loop())
        self.clock.thaw()
        self.place = 0
        """Of the measurement that is being made, in this session."""
        self._report, self._known = report, 0
        self._rng = Random(f"{order.seed}/{tp}")
        self._names = count()
        self._seats: list[Seat] = []

    def settle(self, engine: EngineClient) -> None:
        """Take the limits from an engine that is ready."""
        self.limits = Limits(
            max_running=self.order.max_running,
            max_context=self.order.max_context,
            kv_capacity_tokens=engine.kv_capacity_tokens,
        )

    @property
    def most(self) -> int:
        """The most sequences of the least length that run at once."""
        return self.limits.most(self.size.least_tokens)

    def expect(self, count: int) -> None:
        """Count measurements that will come."""
        self._known += count

    def tell(self, what: str) -> None:
        """Begin a measurement."""
        self._report(self.place, self._known, f"TP {self.tp}: {what}")
        self.place += 1

    async def shuffled(self, trials: Sequence[Trial]) -> None:
        """Make each measurement as often as the size says, in an order drawn by the seed."""
        chosen = [*trials] * self.size.repeats
        self._rng.shuffle(chosen)
        self.expect(len(chosen))
        for trial in chosen:
            self.tell(trial.what)
            await trial.run()

    def fresh(self, length: int) -> Seat:
        """A trajectory of its own, of which no engine has anything."""
        return Seat(f"tp{self.tp}-{next(self._names)}", self.fresh_ids(length))

    def fresh_ids(self, length: int) -> Sequence[int]:
        """Tokens that nobody has seen; none for engines that make none."""
        name = f"tp{self.tp}-{next(self._names)}"
        return self.tokens.ids(name, length) if self.tokens is not None else ()

    def seats(self, first: int, past: int) -> list[Seat]:
        """Trajectories that are used again and again, by number."""
        while len(self._seats) < past:
            self._seats.append(self.fresh(self.limits.longest(1, 0)))
        return self._seats[first:past]

    async def lay(self, engine: EngineClient, seats: Sequence[Seat], context: int) -> None:
        """Bring contexts into the prefix cache."""
        steps = [self.bench.begin(engine, seat.request(context, 1)) for seat in seats]
        await asyncio.gather(*steps)

    async def batch(self, engine: EngineClient, seats: Sequence[Seat], context: int) -> list[Heard]:
        """Decode a batch whose prompts are cached."""
        await self.lay(engine, seats, context)
        output = self.size.output
        steps = [self.bench.begin(engine, seat.request(context, output)) for seat in seats]
        return await asyncio.gather(*steps)

    def load(
        self, engine: EngineClient, seats: Sequence[Seat], context: int, output: int
    ) -> "Load":
        """Begin to decode a batch that is to go on beside something else."""
        steps = [self.bench.begin(engine, seat.request(context, output)) for seat in seats]
        return Load(engine, seats, asyncio.gather(*steps))


class Load:
    """A batch that decodes beside something else."""

    def __init__(
        self, engine: EngineClient, seats: Sequence[Seat], steps: Awaitable[list[Heard]]
    ) -> None:
        self._engine, self._seats, self._steps = engine, seats, steps

    async def end(self) -> list[Heard]:
        """Abort what still runs; returns all ends."""
        for seat in self._seats:
            self._engine.abort(seat.trajectory)
        return await self._steps
