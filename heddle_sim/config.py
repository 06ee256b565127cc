"""The simulated engines: starts, stops, failures, samples, and KV that moves between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import simpy

from heddle_core.commands import Dispatch, Migrate, Preempt, StartEngine, StopEngine
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineReported,
    EngineStopped,
    Event,
    MigrationFinished,
    MoveWay,
)
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_sim.engine import SimEngine, StepResult
from heddle_sim.latency import LatencyTable
from heddle_sim.transfer import Transfer, Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the simulated cluster does; every time in seconds."""

    table: Callable[[str, int], LatencyTable]
    """True iteration times for a GPU class and a TP degree."""
    transfer_fixed_s: float
    transfer_bytes_per_s: float
    moves_by: Literal["kv", "prefill"] = "kv"
    """How a context gets to its new engine: its KV is moved, or it is prefilled there, beside what
    that engine is doing, in one of `SPARE_SLOTS`."""
    max_batched_tokens: int = 8192
    block_size: int = 16
    prefix_caching: bool = True
    tool_capacity: int | None = None
    """Tool calls that run at once; None: as many as asked for, as on a serverless platform."""
    engine_start_s: float = 60.0
    """From StartEngine to EngineReady once the rollout is under way; before its first dispatch the
    engines of a plan count as standing ready, as frameworks keep them between rollouts."""
    engine_start_s_at: Mapping[int, float] = field(default_factory=dict)
    """TP degree -> the same, where it is known for that degree."""
    dispatch_s: float = 0.0
    """From a dispatch until its engine sees it."""
    prediction_s: float = 0.0
    """Latency of the prediction service."""
    planning_s: float | None = None
    """Seconds that a search for a plan takes; None: what the problem charges."""
    report_interval_s: float = 5.0
    """Between samples of an engine's counters; 0 switches them off."""
    report_delay_s: float = 0.05
    """Age of a sample when it is delivered: no router sees counters of this very instant."""
    faults: tuple[tuple[float, EngineId], ...] = ()
    """(time_s, engine): this engine dies then, if it lives."""
    speed: Callable[[EngineId], float] = lambda _: 1.0
    """Relative speed of an engine; a tiny spread breaks ties in conformance scenarios."""

    def start_s(self, tp: int) -> float:
        """Seconds that an engine of TP degree `tp` takes to start."""
        return self.engine_start_s_at.get(tp, self.engine_start_s)


SPARE_SLOTS = 4
"""That engines have beyond their steps for contexts that are prefilled for a move."""


def after(env: simpy.Environment, delay_s: float, act: Callable[[], None]) -> None:
    """Call `act` after `delay_s` of simulated time."""
    callbacks = env.timeout(delay_s).callbacks
    assert callbacks is not None
    callbacks.append(lambda _: act())


class Cluster:
    """Engines by name. Dead and stopped ones are gone; names are never used twice."""

    def __init__(
        self,
        env: simpy.Environment,
        world: World,
        *,
        deliver: Callable[[Event], None],
        on_end: Callable[[EngineId, StepResult], None],
        on_salvage: Callable[[TrajectoryId, int], None],
    ) -> None:
        self.engines: dict[EngineId, SimEngine] = {}
        self._env, self._world = env, world
        self._deliver, self._on_end, self._on_salvage = deliver, on_end, on_salvage
        self._stopping: dict[EngineId, None] = {}
        self._under_way = False
        self._told_idle: dict[EngineId, float] = {}
        """Seconds an engine had been busy when it was last reported idle; -1 when it was not."""
        self._moves: dict[TrajectoryId, tuple[Transfer, Migrate]] = {}
        self._transfers = Transfers(
            env, fixed_s=world.transfer_fixed_s, bytes_per_s=world.transfer_bytes_per_s
        )
        self._prefills: dict[tuple[EngineId, TrajectoryId], Migrate] = {}
        """Moves that are a prefill on their target."""
        for time_s, name in world.faults:
            after(env, time_s, partial(self._fail, name))
        if world.report_interval_s > 0:
            after(env, world.report_interval_s, self._sample)

    def start(self, command: StartEngine) -> None:
        """Begin to start an engine; EngineReady follows."""
        if self._under_way:
            after(self._env, self._world.start_s(command.shape.tp), lambda: self._ready(command))
        else:
            self._ready(command)

    def stop(self, command: StopEngine) -> None:
        """Let an engine drain, or abort what runs there; EngineStopped follows."""
        self._stopping[command.engine] = None
        engine = self.engines.get(command.engine)
        if engine is not None and not command.drain:
            for trajectory in engine.trajectories():
                engine.abort(trajectory)
        self._stop_if_drained(command.engine)

    def dispatch(
        self,
        command: Dispatch,
        group: GroupId,
        *,
        prompt_tokens: int,
        shared_tokens: int,
        output_tokens: int,
    ) -> None:
        """Start a step; `on_end` is called when it ends."""
        self._under_way = True
        self.engines[command.engine].start(
            command.trajectory,
            group,
            prompt_tokens=prompt_tokens,
            shared_tokens=shared_tokens,
            output_tokens=output_tokens,
        )

    def preempt(self, command: Preempt) -> None:
        """Abort a running step; `on_end` is called once the current iteration is over."""
        self.engines[command.engine].abort(command.trajectory)

    def forget(self, trajectory: TrajectoryId, *, but: EngineId) -> None:
        """Drop KV of a rewritten history on all engines but the one that trims its own."""
        for name, engine in self.engines.items():
            if name != but:
                engine.release(trajectory)

    def migrate(self, command: Migrate, group: GroupId) -> None:
        """Move a KV prefix, or only the home when no KV is left to move."""
        source = self.engines.get(command.source)
        kv_tokens = source.export_kv(command.trajectory) if source is not None else 0
        if source is None or kv_tokens == 0:
            self._migrated(command, group, 0)
            return
        if self._world.moves_by == "prefill":
            self._prefill(command, group, kv_tokens)
            return
        move = self._transfers.move(
            command.source,
            command.target,
            kv_tokens * source.table.kv_bytes_per_token,
            lambda: self._migrated(command, group, kv_tokens),
        )
        self._moves[command.trajectory] = (move, command)

    def tool_returned(self, trajectory: TrajectoryId) -> None:
        """Give up a transfer that still waits for its engines: the step it would hold up can run.

        Migration is opportunistic: what has not begun by the end of the tool call would delay the
        trajectory by other transfers' time, not only by its own.
        """
        move, command = self._moves.get(trajectory, (None, None))
        if move is not None and command is not None and self._transfers.withdraw(move):
            self._report_migration(command, ok=False, kv_tokens=0)

    def _migrated(self, command: Migrate, group: GroupId, kv_tokens: int) -> None:
        source, target = self.engines.get(command.source), self.engines.get(command.target)
        ok = target is not None and (source is not None or kv_tokens == 0)
        placed = 0
        if ok and source is not None and target is not None:
            placed = target.import_kv(command.trajectory, group, kv_tokens)
            source.release(command.trajectory)
        self._report_migration(command, ok=ok, kv_tokens=placed)

    def _prefill(self, command: Migrate, group: GroupId, kv_tokens: int) -> None:
        """Prefill a context on its new engine, for a token that nobody wants."""
        target = self.engines.get(command.target)
        if target is None or kv_tokens >= target.kv_capacity_tokens:
            self._migrated(command, group, 0)
            return
        self._prefills[command.target, command.trajectory] = command
        target.start(
            command.trajectory,
            group,
            prompt_tokens=kv_tokens,
            shared_tokens=kv_tokens,
            output_tokens=1,
        )

    def _prefilled(self, command: Migrate, *, ok: bool) -> None:
        source, target = self.engines.get(command.source), self.engines.get(command.target)
        if ok and source is not None:
            source.release(command.trajectory)
        placed = target.export_kv(command.trajectory) if ok and target is not None else 0
        self._report_migration(command, ok=ok, kv_tokens=placed, way="prefill")

    def _report_migration(
        self, command: Migrate, *, ok: bool, kv_tokens: int, way: MoveWay = "kv"
    ) -> None:
        self._moves.pop(command.trajectory, None)
        self._deliver(
            MigrationFinished(
                time_s=self._env.now,
                trajectory=command.trajectory,
                source=command.source,
                target=command.target,
                ok=ok,
                kv_tokens=kv_tokens,
                way=way if kv_tokens > 0 else "none",
            )
        )

    def _ready(self, command: StartEngine) -> None:
        name, world = command.engine, self._world
        table = world.table(command.shape.gpu, command.shape.tp)
        spare = SPARE_SLOTS if world.moves_by == "prefill" else 0
        self.engines[name] = SimEngine(
            self._env,
            name,
            table,
            max_running=min(command.max_running + spare, len(table.base_s) - 1),
            max_batched_tokens=world.max_batched_tokens,
            block_size=world.block_size,
            prefix_caching=world.prefix_caching,
            on_end=partial(self._ended, name),
            speed=world.speed(name),
            arrival_s=world.dispatch_s,
        )
        self._deliver(
            EngineReady(
                time_s=self._env.now,
                engine=name,
                shape=command.shape,
                kv_capacity_tokens=table.kv_capacity_tokens,
                max_running=command.max_running,
            )
        )

    def _ended(self, name: EngineId, result: StepResult) -> None:
        move = self._prefills.pop((name, result.trajectory), None)
        if move is not None:
            self._prefilled(move, ok=result.finished)
        else:
            self._on_end(name, result)
        if name in self._stopping:
            self._stop_if_drained(name)

    def _stop_if_drained(self, name: EngineId) -> None:
        engine = self.engines.get(name)
        if engine is not None and engine.drained:
            del self.engines[name]
            del self._stopping[name]
            self._deliver(EngineStopped(time_s=self._env.now, engine=name))

    def _fail(self, name: EngineId) -> None:
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        self._stopping.pop(name, None)
        self._transfers.drop(name)
        made = engine.fail()
        lost = {t: self._prefills.pop((name, t), None) for t, _ in made}
        salvaged = tuple((t, tokens) for t, tokens in made if lost[t] is None)
        for trajectory, tokens in salvaged:
            self._on_salvage(trajectory, tokens)
        self._deliver(
            EngineFailed(
                time_s=self._env.now, engine=name, reason="injected fault", salvaged=salvaged
            )
        )
        for move in filter(None, lost.values()):
            self._prefilled(move, ok=False)

    def _sample(self) -> None:
        if self._env.peek() == float("inf"):
            return  # nothing else will ever happen: let the driver see that
        time_s = self._env.now + self._world.report_delay_s
        reports = []
        for name, engine in self.engines.items():
            idle = not engine.running and not engine.waiting
            if idle and self._told_idle.get(name) == engine.busy_s:
                continue  # nothing has run since it was last reported idle
            self._told_idle[name] = engine.busy_s if idle else -1.0
            reports.append(
                EngineReported(
                    time_s=time_s,
                    engine=name,
                    running=engine.running,
                    waiting=engine.waiting,
                    kv_used_tokens=engine.kv_used_tokens,
                    preemptions=engine.preemptions,
                )
            )
        if reports:
            after(self._env, self._world.report_delay_s, partial(self._report, reports))
        after(self._env, self._world.report_interval_s, self._sample)

    def _report(self, reports: list[EngineReported]) -> None:
        for report in reports:
            if report.engine in self.engines:
                self._deliver(report)
