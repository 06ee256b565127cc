"""Simulated engines that die, hang and stall, and whose reports come late, twice or not at all.

What is disturbed stays inside the contract of `heddle_rollout.engines`: a step ends once, and an
engine whose connection has lost a report has failed.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from campaigns.faults.tokens import TokenLedger
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.clock import Clock
from heddle_rollout.engines import (
    EngineListener,
    KvHandle,
    KvPlaced,
    StepRequest,
    StepResult,
)
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimEngineClient, SimLauncher


class EngineFault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to an engine at a time, if it runs then."""

    kind: Literal["death", "hang", "stall"]
    engine: str
    at_s: float
    seconds: float = 0.0
    """Until a hung engine is declared dead, or a stalled one goes on."""


class ReportFault(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one report of an engine."""

    kind: Literal["late", "twice", "lost", "failed_move"]
    number: int
    """Of all reports of all engines, in order."""
    seconds: float = 0.0
    """How late; until the repetition; or until the engine is declared dead."""


class Disturbances(msgspec.Struct, frozen=True, kw_only=True):
    """All faults of one run."""

    engines: tuple[EngineFault, ...] = ()
    reports: tuple[ReportFault, ...] = ()
    speeds: dict[str, float] = {}
    """Of engines that are slower or faster than others, by the first of their ids."""

    def speed(self, engine: EngineId) -> float:
        """Relative speed of an engine."""
        return self.speeds.get(engine.partition("+")[0], 1.0)


class DisturbedLauncher:
    """Starts simulated engines that disturbances happen to; implements `Launcher`."""

    def __init__(
        self,
        config: SimulationConfig,
        clock: Clock,
        disturbances: Disturbances,
        tokens: TokenLedger,
        **options: Any,
    ) -> None:
        self._inner = SimLauncher(replace(config, speed=disturbances.speed), clock, **options)
        self.clock, self.tokens = clock, tokens
        self._faults = disturbances.engines
        self._reports: Mapping[int, ReportFault] = {f.number: f for f in disturbances.reports}
        self._number = 0

    def start(self, spec: EngineSpec, listener: EngineListener) -> Any:
        reports = DisturbedReports(spec.engine, listener, self)
        return RecordedEngine(self._inner.start(spec, reports), self.tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next_report(self) -> ReportFault | None:
        """What happens to the report that comes now."""
        self._number += 1
        return self._reports.get(self._number)

    def schedule_faults(self) -> None:
        """Schedule what happens to engines."""
        for fault in self._faults:
            self.clock.call_at(fault.at_s, self._happen, fault)

    def _happen(self, fault: EngineFault) -> None:
        name = EngineId(fault.engine)
        engine = self._inner.engine(name)
        if engine is None:
            return
        match fault.kind:
            case "death":
                self._inner.fail(name)
            case "hang":
                engine.pause()
                self.clock.call_after(fault.seconds, self._inner.fail, name)
            case "stall":
                engine.pause()
                self.clock.call_after(fault.seconds, engine.resume)


class RecordedEngine:
    """An engine whose requests the ledger of tokens sees; implements `EngineClient`."""

    def __init__(self, inner: SimEngineClient, tokens: TokenLedger) -> None:
        self._inner, self._tokens = inner, tokens

    def start(self, request: StepRequest) -> None:
        """See `EngineClient`; a refused request is none."""
        self._inner.start(request)
        self._tokens.started(self._inner.spec.engine, request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class DisturbedReports:
    """The reports of one engine on their way, in order; implements `EngineListener`."""

    def __init__(
        self, engine: EngineId, listener: EngineListener, launcher: DisturbedLauncher
    ) -> None:
        self._engine, self._listener, self._launcher = engine, listener, launcher
        self._queue: deque[tuple[Callable[[], None], StepResult | None]] = deque()
        """Reports that wait for an earlier one, and the ends of steps among them."""
        self._held = False
        self._dead = False

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        self._report(lambda: self._listener.engine_ready(engine, kv_capacity_tokens))

    def step_ended(self, engine: EngineId, result: StepResult) -> None:
        def deliver() -> None:
            self._launcher.tokens.ended(engine, result)
            self._listener.step_ended(engine, result)

        self._report(deliver, result)

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        self._report(
            lambda: self._listener.kv_exported(engine, trajectory, kv, move),
            failed=lambda: self._listener.kv_exported(engine, trajectory, None, move),
        )

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        nothing = KvPlaced("none", 0)
        self._report(
            lambda: self._listener.kv_placed(engine, trajectory, placed, move),
            failed=lambda: self._listener.kv_placed(engine, trajectory, nothing, move),
        )

    def weights_updated(self, engine: EngineId, version: int) -> None:
        self._report(lambda: self._listener.weights_updated(engine, version))

    def engine_stopped(self, engine: EngineId) -> None:
        self._report(lambda: self._listener.engine_stopped(engine))

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        """See `EngineListener`: what is on its way is lost, but for half of its tokens."""
        lost = [result for _, result in self._queue if result is not None]
        self._queue.clear()
        self._dead = True
        half = [
            (r.trajectory, msgspec.structs.replace(r, tokens=r.tokens // 2, finished=False))
            for r in lost
        ]
        everything = [*half, *salvaged]
        for _, result in everything:
            self._launcher.tokens.ended(engine, result)
        self._listener.engine_failed(engine, reason, everything)

    def _report(
        self,
        deliver: Callable[[], None],
        result: StepResult | None = None,
        *,
        failed: Callable[[], None] | None = None,
    ) -> None:
        fault, clock = self._launcher.next_report(), self._launcher.clock
        if fault is not None and fault.kind == "failed_move" and failed is not None:
            deliver = failed
        if fault is not None and fault.kind in ("late", "lost"):
            self._held = True
            self._queue.append((deliver, result))
            then = self._fail if fault.kind == "lost" else self._release
            clock.call_after(fault.seconds, then)
            return
        if self._held:
            self._queue.append((deliver, result))
            return
        if fault is not None and fault.kind == "twice":
            self._again(deliver, result, fault.seconds)
        deliver()

    def _again(
        self, deliver: Callable[[], None], result: StepResult | None, seconds: float
    ) -> None:
        """Repeat a report; the end of a step only after its engine has died."""
        clock = self._launcher.clock
        if result is None:
            clock.call_after(seconds, deliver)
            return

        def repeat() -> None:
            self._launcher.fail(self._engine)
            if self._dead:
                self._listener.step_ended(self._engine, result)

        clock.call_after(seconds, repeat)

    def _fail(self) -> None:
        """Declare the engine dead; one that has stopped meanwhile is reported so."""
        self._launcher.fail(self._engine)
        if not self._dead:
            self._release()

    def _release(self) -> None:
        self._held = False
        while self._queue and not self._held:
            deliver, _ = self._queue.popleft()
            deliver()
