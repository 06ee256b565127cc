"""The gateway without HTTP: sessions in front of a driver, in one asyncio event loop."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from heddle_core.commands import Cancel, Command, Dispatch, StartEngine
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineStopped,
    Event,
    StepPreempted,
    TrajectoryFinished,
    WeightsUpdated,
)
from heddle_core.ids import EngineId, RolloutId, TrajectoryId
from heddle_gateway.agent import GatewayAgent
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError, no_engine, past_deadline, too_long, unavailable
from heddle_gateway.identity import Identity
from heddle_gateway.saved import SavedState
from heddle_gateway.sessions import ClientSessions, SessionLimits
from heddle_gateway.timed_core import TimedCore
from heddle_rollout.core import Core, RecordedCore
from heddle_rollout.driver import ROLLOUT, Driver, RolloutError
from heddle_rollout.engines import Launcher
from heddle_rollout.services import Predictions, Solver
from heddle_runtime.clock import RunClock

SWEEP_S = 0.25
DRAIN_S = 5.0
"""Seconds that the end of a run waits for engines to hand over the tokens of running steps."""
MOST_DEATHS = 3
"""Engines that may die under one step before its first token: it may be what kills them."""
MOST_DEATHS_EVER = 8
"""Engines that may die under one step."""


class Gateway:
    """Takes steps of clients in, and has the driver run them."""

    def __init__(
        self,
        core: Core,
        launcher: Launcher,
        clock: RunClock,
        *,
        predictions: Predictions | None = None,
        solver: Solver | None = None,
        sessions: SessionLimits | None = None,
        saved: SavedState | None = None,
        make_agent: Callable[..., GatewayAgent] = GatewayAgent,
        engine_wait_s: float = 300.0,
        on_note: Callable[[str], None] = lambda note: None,
        report_interval_s: float,
        report_delay_s: float = 0.0,
    ) -> None:
        """Made inside a running event loop. Steps that wait for `engine_wait_s` without any engine
        end with an error. `on_note` gets messages for the owner of the engines. `Driver` gets the
        rest.
        """
        self._loop, self._clock = asyncio.get_running_loop(), clock
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._engine_wait_s, self._on_note = engine_wait_s, on_note
        self._engineless_since_s: float | None = self._loop.time()
        self._paused_since_s: float | None = None
        self._paused_s, self._weights_version = 0.0, 0
        self.pauses = 0
        """Calls of `pause` so far."""
        self._started = self._closing = self._draining = False
        self._void_version: int | None = None
        """Version to announce at the end of the pause; None: KV is as it was."""
        self._rollouts: dict[RolloutId, int | None] = {}
        """Open ones, each with the trajectories that it may still take; None: any number."""
        self.engines: dict[EngineId, int] = {}
        """Those that are ready, with the steps that each may run at once."""
        self.dispatches = self.preemptions = self.engine_deaths = self.engines_given_up = 0
        self.on_engine_left: Callable[[EngineId], None] = lambda engine: None
        """Called when an engine has stopped, or has failed and is not started again."""
        self.url_of: Callable[[str], str] = lambda engine: ""
        self.engine_at: Callable[[str], EngineId | None] = lambda url: None
        """The ready engine of a URL; both know engines by URL only."""
        self.on_decision: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that each decision of the core took."""
        self._recalled: set[str] = set()
        """Names of engines that were taken back."""
        self.sessions = ClientSessions(
            sessions or SessionLimits(),
            now=self._session_time_s,
            soon=self._loop.call_soon,
            admit=self._admit,
            cancel=self._cancel,
            begin_tool=lambda trajectory, tool: self.driver.begin_tool(trajectory, tool),
            check_open=self._check_open,
            abort_dispatch=lambda trajectory: self.driver.abort_step(trajectory),
            make_agent=make_agent,
            saved=saved,
            url_of=lambda engine: self.url_of(engine),
            engine_at=lambda url: self.engine_at(url),
        )
        self.driver = Driver(
            RecordedCore(TimedCore(core, lambda s: self.on_decision(s)), self._observe),
            launcher,
            clock,
            predictions=predictions,
            solver=solver,
            report_interval_s=report_interval_s,
            report_delay_s=report_delay_s,
            on_idle=self._on_idle,
            on_error=self._on_error,
        )

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `close`.

        Raises:
            BaseException: the error of the core, an agent or a service that ended the run.
        """
        if self._closing:
            return
        self._started = True
        self.driver.start()
        self.open_rollout(ROLLOUT)
        sweeping = self._loop.create_task(self._sweep())
        sweeping.add_done_callback(self._swept)
        try:
            await asyncio.shield(self._over)
        finally:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
            self.driver.close()

    async def drain(self, limit_s: float) -> None:
        """Begin no more steps, and wait until no step is under way, `limit_s` at most."""
        self._draining = True
        until_s = self._loop.time() + limit_s
        while any(self.sessions.under_way) and self._loop.time() < until_s:
            await asyncio.sleep(SWEEP_S / 10)

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """End: steps get an error that clients may repeat, engines hand over running steps."""
        if self._closing:
            return
        self._closing = True
        for step in self.sessions.under_way:
            step.fail(unavailable("the gateway is ending"))
        if self._started and not self._over.done():
            self.driver.interrupt(drain_s * self._clock.speed)
            with suppress(BaseException):
                await asyncio.shield(self._over)

    @property
    def failed(self) -> bool:
        """Whether an error has ended the run."""
        return self._over.done() and self._over.exception() is not None

    @property
    def ready(self) -> bool:
        """Whether an engine takes work."""
        takes_work = any(engine.name not in self._recalled for engine in self.engines)
        return takes_work and not (self._draining or self._closing or self.failed)

    def _on_idle(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_error(self, error: BaseException) -> None:
        for step in self.sessions.under_way:
            step.fail(ApiError(500, "the gateway has failed", kind="server_error"))
        if not self._over.done():
            self._over.set_exception(error)

    # -- steps -------------------------------------------------------------------------------------

    def submit(
        self, who: Identity, step: ClientStep, *, has_reply: bool | None = None, model: str = ""
    ) -> ClientStep:
        """Begin a step or attach to an equal one; see `ClientSessions.submit`.

        Raises:
            ApiError: the gateway ends.
        """
        if self._closing or self.failed:
            raise unavailable("the gateway is ending")
        return self.sessions.submit(who, step, has_reply=has_reply, model=model)

    def abort_all(self, reason: str) -> int:
        """End every step under way with its tokens so far; return how many there were."""
        steps = list(self.sessions.under_way)
        for step in steps:
            self.sessions.abort(step, reason)
        return len(steps)

    def _check_open(self) -> None:
        if self._draining:
            raise unavailable("the gateway is ending, and begins no more steps")

    def _admit(self, agent: GatewayAgent) -> None:
        rollout = next(reversed(self._rollouts), None)
        if rollout is None:
            raise unavailable("no rollout is open")
        left = self._rollouts[rollout]
        if left is not None:
            self._rollouts[rollout] = left - 1
            if left == 1:
                del self._rollouts[rollout]
        try:
            self.driver.admit(agent, rollout)
        except RolloutError as error:
            raise unavailable(str(error)) from None

    def _cancel(self, trajectory: TrajectoryId, reason: str) -> None:
        self.driver.cancel(Cancel(trajectory=trajectory, reason=reason))

    # -- rollouts and weights ----------------------------------------------------------------------

    def open_rollout(
        self, rollout: RolloutId, *, trajectories: int | None = None, weights_version: int = 0
    ) -> None:
        """Open a rollout; sessions that begin from now on are its trajectories.

        Raises:
            RolloutError: it was open before, or cannot have so many trajectories.
        """
        self._weights_version = max(self._weights_version, weights_version)
        self.driver.open_rollout(
            rollout, trajectories=trajectories, weights_version=weights_version
        )
        if trajectories != 0:
            self._rollouts[rollout] = trajectories

    def close_rollout(self, rollout: RolloutId) -> None:
        """Admit no more sessions to a rollout; those in it go on.

        Raises:
            RolloutError: it is not open, or is the one of the whole run.
        """
        if rollout == ROLLOUT:
            raise RolloutError(f"rollout {rollout} is open as long as the gateway runs")
        self.driver.close_rollout(rollout)
        self._rollouts.pop(rollout, None)

    @property
    def paused(self) -> bool:
        """Whether dispatches are held back."""
        return self._paused_since_s is not None

    def pause(self) -> None:
        """Begin no dispatch until `resume`; running steps go on, and sessions do not get older."""
        self.pauses += 1
        if self._paused_since_s is None:
            self._paused_since_s = self._loop.time()
            self.driver.pause()

    def resume(self, weights_version: int | None = None) -> None:
        """Go on after a pause, under other weights if a version is given: KV is void then."""
        if weights_version is None:
            weights_version = self._void_version
        self._void_version = None
        if weights_version is not None:
            self._weights_version = weights_version
            self.driver.deliver(WeightsUpdated(time_s=self._clock.now_s, version=weights_version))
        if self._paused_since_s is not None:
            self._paused_s += self._loop.time() - self._paused_since_s
            self._paused_since_s = None
            self.driver.resume()

    def void_kv(self, *, new_weights: bool) -> None:
        """Announce, at the end of a pause if there is one, that engines hold no KV of before."""
        version = self._weights_version + new_weights
        self._void_version = max(version, self._void_version or 0)
        if not self.paused:
            self.resume()

    @property
    def weights_version(self) -> int:
        """Announced last."""
        return self._weights_version

    async def drained(self, limit_s: float) -> bool:
        """Wait until no step runs, for `limit_s` at most; return whether none does."""
        until_s = self._loop.time() + limit_s
        while self.driver.computes and self._loop.time() < until_s:
            await asyncio.sleep(SWEEP_S / 10)
        return not self.driver.computes

    # -- engines -----------------------------------------------------------------------------------

    def recall(self, engine: EngineId, *, drain: bool) -> None:
        """Take back an engine that joined, as `Driver.recall` does."""
        self._recalled.add(engine.name)
        self.driver.recall(engine, drain=drain)

    def life_of(self, engine: EngineId) -> EngineId | None:
        """The present id of a ready engine, by its name; None while none is ready."""
        return next((each for each in self.engines if each.name == engine.name), None)

    # -- inside ------------------------------------------------------------------------------------

    def _session_time_s(self) -> float:
        """Seconds, those of pauses left out."""
        now_s = self._loop.time() if self._paused_since_s is None else self._paused_since_s
        return now_s - self._paused_s

    def _swept(self, sweeping: asyncio.Task[None]) -> None:
        """End the run with an error of the sweep, which asyncio would only log."""
        error = None if sweeping.cancelled() else sweeping.exception()
        if error is not None:
            self.driver.service_failed(error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sessions.sweep()
            for step in self.sessions.under_way:
                if step.deadline_s is not None and self._loop.time() > step.deadline_s:
                    self.sessions.fail(step, past_deadline())
            since_s = self._engineless_since_s
            if since_s is not None and self._loop.time() - since_s > self._engine_wait_s:
                error = no_engine(self._engine_wait_s)
                for step in self.sessions.under_way:
                    self.sessions.fail(step, error)

    def _observe(self, event: Event, commands: Sequence[Command]) -> None:
        """See each event, before its commands are executed."""
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatched(command)
            elif isinstance(command, Cancel):
                step = self.sessions.step_of(command.trajectory)
                if step is not None:
                    step.fail(too_long(command.reason))
        match event:
            case TrajectoryFinished():
                self.sessions.closed(event.trajectory)
            case StepPreempted():
                self.preemptions += 1
            case EngineReady():
                self.engines[event.engine] = event.max_running
                self._engineless_since_s = None
            case EngineFailed():
                self._engine_gone(event.engine)
                self._failed(event, commands)
            case EngineStopped():
                self._engine_gone(event.engine)
                self._recalled.discard(event.engine.name)
                self.on_engine_left(event.engine)

    def _dispatched(self, command: Dispatch) -> None:
        self.dispatches += 1
        step = self.sessions.step_of(command.trajectory)
        if step is not None:
            step.engine = str(command.engine)
            if step.dispatched_s is None:
                step.dispatched_s = self._session_time_s()

    def _engine_gone(self, engine: EngineId) -> None:
        self.engines.pop(engine, None)
        if not self.engines:
            self._engineless_since_s = self._loop.time()

    def _failed(self, event: EngineFailed, commands: Sequence[Command]) -> None:
        name = event.engine.name
        if name not in self._recalled:
            self.engine_deaths += 1
            for trajectory, tokens in event.salvaged:
                self._died_under(trajectory, tokens)
        starts = [c.engine.name for c in commands if isinstance(c, StartEngine)]
        if name in starts:
            return
        if name not in self._recalled:
            self.engines_given_up += 1
            self._on_note(
                f"engine {name} is given up: it has failed too often "
                f"(cluster.restarts, cluster.restart_window_s); {event.reason}"
            )
        self._recalled.discard(name)
        self.on_engine_left(event.engine)

    def _died_under(self, trajectory: TrajectoryId, tokens: int) -> None:
        step = self.sessions.step_of(trajectory)
        if step is None or not step.attempts.connected:
            return
        step.engine_deaths += 1
        step.deaths_in_prefill += tokens == 0
        if step.deaths_in_prefill >= MOST_DEATHS or step.engine_deaths >= MOST_DEATHS_EVER:
            message = f"{step.engine_deaths} engines died while this step ran"
            error = ApiError(502, message, kind="server_error", code="engine_died")
            # The event that tells it is under way.
            self._loop.call_soon(self.sessions.fail, step, error)
