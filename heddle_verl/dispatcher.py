"""Holds the steps of verl's requests until the policy dispatches them. No Ray here.

A driver runs for as long as the training. Trajectories come at any time; those of which no end is
announced end after `idle_s` without a request. All methods run in one event loop.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heddle.epochs.file import EpochLog
from heddle_core.commands import Cancel, Command, Dispatch
from heddle_core.events import Event, TrajectoryArrived
from heddle_core.ids import EngineId, RolloutId, TrajectoryId
from heddle_core.journal import Sink
from heddle_core.plans import EngineSpec
from heddle_rollout.core import Core, RecordedCore
from heddle_rollout.driver import ROLLOUT, Driver
from heddle_runtime.clock import RunClock
from heddle_verl.engines import Abort, FrameworkEngine, FrameworkLauncher
from heddle_verl.settings import Prepared
from heddle_verl.steps import EngineCall, RequestAgent, SampleIdentity, StepPrompt

DRAIN_S = 30.0
"""Seconds without dispatches after `redistribute`, unless all running steps end earlier: as long as
verl's rollouter waits for that."""
QUIET_S = 1.0
"""Seconds without dispatches after the last of them has ended: somebody may wait for that."""

log = logging.getLogger(__name__)


class StepFailedError(RuntimeError):
    """A step that no engine will run; the message has the reason."""


class _Priorities:
    """The priority of each step until it is dispatched."""

    def __init__(self) -> None:
        self._priorities: dict[TrajectoryId, float] = {}

    def take(self, event: Event, commands: Sequence[Command]) -> None:
        """A `Sink`: the commands are about to be executed."""
        for command in commands:
            if isinstance(command, Dispatch):
                self._priorities[command.trajectory] = command.priority

    def pop(self, trajectory: TrajectoryId) -> int:
        """vLLM's priority: an integer, lower first. Ours may be a time of a few seconds."""
        return -round(1000.0 * self._priorities.pop(trajectory, 0.0))


class Dispatcher:
    """The requests and the engines of verl under one driver; made inside a running event loop."""

    def __init__(
        self, prepared: Prepared, *, abort: Abort | None = None, sink: Sink | None = None
    ) -> None:
        """`abort` ends a request on an engine early; without it no step is preempted.

        `sink` takes the journal.
        """
        settings, context = prepared.settings, prepared.setup.context
        loop = asyncio.get_running_loop()
        self._clock = RunClock(loop)
        priorities = _Priorities()
        core: Core = RecordedCore(prepared.setup.controller(), priorities.take)
        if sink is not None:
            core = RecordedCore(core, sink)
        self._prompts: dict[TrajectoryId, str] = {}
        """Prompts in the epoch file of trajectories that have not arrived; none without a file."""
        self._writes_lengths = bool(settings.epoch_file)
        if self._writes_lengths:
            core = RecordedCore(core, EpochLog(Path(settings.epoch_file), self._prompt_of))
        self._launcher = FrameworkLauncher(
            context.cost.by_shape[context.shape],
            loop.time,
            kv_tokens=prepared.kv_tokens,
            priority=priorities.pop,
            abort=abort,
        )
        self._driver = Driver(
            core,
            self._launcher,
            self._clock,
            report_interval_s=0.0,
            on_error=self._on_error,
            handlers={Cancel: self._cancel},
        )
        self._shape, self._max_running = context.shape, context.max_running
        # A proxy reports before its client goes on; a client's own release waits for nothing.
        self._late_releases = abort is None
        self._task, self._idle_s = settings.task, settings.idle_s
        self._sessions: dict[str, list[RequestAgent]] = {}
        """Unfinished trajectories by verl's request id; several if its calls overlap."""
        self._requests: dict[TrajectoryId, str] = {}
        self._idle: dict[RequestAgent, float] = {}
        """When each idle one became so; the longest first."""
        self._announced: dict[str, RolloutId] = {}
        self._numbers = {"engines": 0, "trajectories": 0, "rollouts": 0, "redistributions": 0}
        self._pause: asyncio.TimerHandle | None = None
        self._sweep_is_due = False
        self._error: BaseException | None = None
        self._driver.start()
        self._driver.open_rollout(ROLLOUT)

    # -- engines ----------------------------------------------------------------------------------

    def add_engines(self, handles: Mapping[str, Any]) -> None:
        """Take engines in; those that are here already stay."""
        for address, handle in handles.items():
            if address in self._launcher.engines:
                continue
            name = EngineId(f"e{self._next('engines')}")
            self._launcher.give(name, address, handle)
            self._driver.attach(
                EngineSpec(engine=name, shape=self._shape, max_running=self._max_running)
            )

    def remove_engines(self, addresses: Sequence[str]) -> None:
        """Let engines go; their steps go on elsewhere, or end where they are if none can."""
        for address in addresses:
            engine = self._launcher.engines.pop(address, None)
            if engine is not None:
                engine.remove()

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Steps that clients have been let run, by engine."""
        return {address: engine.in_flight for address, engine in self._launcher.engines.items()}

    @property
    def waiting(self) -> int:
        """Steps that have not been dispatched."""
        sessions = [s for each in self._sessions.values() for s in each]
        return sum(s.call is not None and s.call.granted is None for s in sessions)

    @property
    def idle(self) -> int:
        """Trajectories without a step."""
        return len(self._idle)

    # -- steps ------------------------------------------------------------------------------------

    def request(self, request_id: str, prompt: StepPrompt, identity: SampleIdentity) -> EngineCall:
        """Request a step of a trajectory, the first or the next; await its `waiter`."""
        if self._error is not None:
            raise StepFailedError(f"Heddle's router has failed: {self._error}") from self._error
        here = self._sessions.setdefault(request_id, [])
        for session in here:
            if session.free(late_releases=self._late_releases):
                self._idle.pop(session, None)
                return session.begin(prompt)
        # Its own id in the whole run: a request id may come again after its trajectory has ended.
        name = TrajectoryId(f"{request_id}/{self._next('trajectories')}")
        session = RequestAgent(name, prompt, identity, task=self._task, on_idle=self._on_idle)
        rollout = self._announced.get(identity.rollout, ROLLOUT) if not here else ROLLOUT
        here.append(session)
        self._requests[name] = request_id
        if self._writes_lengths:
            self._prompts[name] = identity.prompt
        self._driver.admit(session, rollout)
        assert session.call is not None
        return session.call

    def dispatch_ended(
        self, call: EngineCall, dispatch: str, tokens: int, *, aborted: bool
    ) -> bool:
        """A client reports the end of a dispatch; returns whether its step goes on elsewhere."""
        engine: FrameworkEngine | None = call.engine
        if call.granted is None or call.granted.request_id != dispatch:
            return True  # its engine counts as dead since, and another has the step
        if engine is None:
            call.released = True
            return False
        ours = aborted and engine.aborted_by_us(call.session.id)
        engine.ended(call.session.id, tokens=tokens, finished=not ours)
        if call.session.ending and not ours:
            self._drop(call.session)
        self._resume_if_drained()
        return ours

    def engine_died(self, call: EngineCall, dispatch: str, reason: str) -> None:
        """A client reports that the process of its engine has ended; the step goes on elsewhere."""
        engine: FrameworkEngine | None = call.engine
        if engine is not None and call.granted and call.granted.request_id == dispatch:
            self._launcher.engines.pop(engine.address, None)
            engine.died(reason)

    def failed(self, call: EngineCall, error: str) -> None:
        """A client reports that its step cannot go on; its trajectory ends."""
        self._drop(call.session)
        if call.session.call is not call:
            # It waits for the end of the step before it.
            call.released = True
            call.session.end("cancelled")
        elif call.engine is not None:
            call.engine.ended(call.session.id, tokens=0, finished=True, error=error)
        else:
            # Its arrival may be due at this moment, and comes first.
            self._clock.call_after(0.0, self._withdraw, call, error)
        self._resume_if_drained()

    def _withdraw(self, call: EngineCall, error: str) -> None:
        if call.engine is not None:
            call.engine.ended(call.session.id, tokens=0, finished=True, error=error)
        else:
            self._driver.cancel(Cancel(trajectory=call.session.id, reason=error))

    def release(self, address: str, request_id: str) -> None:
        """A client that calls an engine itself has ended; its tokens are estimated."""
        for session in self._sessions.get(request_id, ()):
            call = session.call
            granted = call.granted if call is not None else None
            if call is None or granted is None or granted.address != address or call.released:
                continue
            call.released = True
            if call.engine is not None:
                call.engine.ended(session.id, tokens=None, finished=True)
            if session.ending:
                self._drop(session)
            self._resume_if_drained()
            return

    # -- trajectories -----------------------------------------------------------------------------

    def announce(self, rollout: str, trajectories: int, weights_version: int) -> None:
        """A rollout of so many trajectories begins; their identities name it."""
        name = RolloutId(f"{rollout}/{self._next('rollouts')}")
        self._driver.open_rollout(name, trajectories=trajectories, weights_version=weights_version)
        self._announced[rollout] = name

    def conclude(self, rollout: str) -> None:
        """No more trajectories of an announced rollout will come."""
        name = self._announced.pop(rollout, None)
        # Not one that has all of its trajectories: the release of the last step may come later.
        if name is not None and name in self._driver.accepting_rollouts:
            self._driver.close_rollout(name)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Trajectories have ended. The release of a last step may come later."""
        for request_id in request_ids:
            for session in list(self._sessions.get(request_id, ())):
                call = session.call
                if call is None or call.released:
                    self._end(session)
                elif call.granted is None:
                    self.failed(call, "its agent loop has ended")
                else:
                    session.end("completed")

    def redistribute(self, *, end_idle: bool) -> int:
        """The KV of all engines is void, and running steps are about to be aborted.

        Nothing is dispatched until they have ended: what aborts them waits for that. Returns the
        number of trajectories that were ended, which are idle ones if `end_idle`.
        """
        ended = list(self._idle) if end_idle else []
        for session in ended:
            self._end(session)
        self._driver.update_weights(self._next("redistributions") + 1, "")
        if any(engine.in_flight for engine in self._launcher.engines.values()):
            for engine in self._launcher.engines.values():
                engine.paused = True
            self._resume_after(DRAIN_S)
        return len(ended)

    def drained(self) -> None:
        """Somebody has seen that no step runs: dispatch again."""
        if self._pause is not None and not any(self.in_flight.values()):
            self._resume()

    # -- inside -----------------------------------------------------------------------------------

    def _prompt_of(self, arrived: TrajectoryArrived) -> str:
        return self._prompts.pop(arrived.trajectory, "")

    def _next(self, kind: str) -> int:
        number = self._numbers[kind]
        self._numbers[kind] = number + 1
        return number

    def _resume_if_drained(self) -> None:
        if self._pause is not None and not any(self.in_flight.values()):
            self._resume_after(QUIET_S)

    def _resume_after(self, delay_s: float) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.get_running_loop().call_later(delay_s, self._resume)

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for engine in self._launcher.engines.values():
            engine.resume()

    def _on_idle(self, session: RequestAgent) -> None:
        if session.id in self._requests:
            self._idle[session] = self._clock.now_s
            self._sweep_later()

    def _sweep_later(self) -> None:
        if self._idle and not self._sweep_is_due:
            self._sweep_is_due = True
            self._clock.call_at(next(iter(self._idle.values())) + self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """End what has been idle for too long."""
        self._sweep_is_due = False
        now_s = self._clock.now_s
        for session, since_s in list(self._idle.items()):
            # The same sum as when the sweep was scheduled: no rounding may put it off again.
            if since_s + self._idle_s > now_s:
                break
            self._end(session)
        self._sweep_later()

    def _end(self, session: RequestAgent) -> None:
        self._drop(session)
        session.end("completed")

    def _drop(self, session: RequestAgent) -> None:
        self._idle.pop(session, None)
        request_id = self._requests.pop(session.id, None)
        here = self._sessions.get(request_id, []) if request_id is not None else []
        if session in here:
            here.remove(session)
        if request_id is not None and not here:
            self._sessions.pop(request_id, None)

    def _cancel(self, command: Cancel) -> None:
        """The core gives a trajectory up: its client fails."""
        request_id = self._requests.get(command.trajectory)
        for session in list(self._sessions.get(request_id or "", ())):
            if session.id == command.trajectory:
                self._drop(session)
                if session.call is not None:
                    session.call.fail(
                        StepFailedError(
                            f"request {request_id}: {command.reason}. Give the tokens of KV that "
                            "an engine has as kv_tokens, or a profile of it"
                        )
                    )
        self._driver.cancel(command)

    def _on_error(self, error: BaseException) -> None:
        log.error("Heddle's router has failed", exc_info=error)
        self._error = error
        for sessions in self._sessions.values():
            for session in sessions:
                if session.call is not None:
                    session.call.fail(StepFailedError(f"Heddle's router has failed: {error}"))
