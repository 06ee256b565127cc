"""A vLLM engine, seen from the driver; implements `EngineClient`. Imports no vllm."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, assert_never

from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import (
    EngineCapabilities,
    EngineListener,
    EngineSample,
    KvHandle,
    KvPlaced,
    StepRequest,
)
from heddle_runtime.generation import Generation
from heddle_runtime.process import wire
from heddle_runtime.process.child import ChildProcess
from heddle_runtime.process.hang import HangWatch
from heddle_runtime.process.running_steps import RunningSteps
from heddle_runtime.process.wire import Report, pack_ids
from heddle_runtime.sampling import SamplingError, checked_sampling
from heddle_runtime.token_engine import TokenEngine
from heddle_runtime.vllm.settings import VllmSettings

STOP_LIMIT_S = 20.0
"""How long an engine may take to end after `Stop`."""

State: TypeAlias = Literal["waiting", "starting", "ready", "stopping", "gone"]


@dataclass(frozen=True, slots=True)
class _PendingTransfer:
    """An export or import of KV under way."""

    trajectory: TrajectoryId
    move: int
    expires_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """How the process of an engine is started."""

    module: str
    """Runs in it."""
    environment: Mapping[str, str]
    log: Path
    start_limit_s: float
    cores: tuple[int, ...] = ()


class VllmEngine(TokenEngine):
    """One engine; made by `heddle_runtime.vllm.launcher.VllmLauncher`."""

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        settings: VllmSettings,
        *,
        changed: Callable[["VllmEngine"], None],
    ) -> None:
        """`changed` is called when the engine has become ready, or is gone and reaped."""
        super().__init__(spec, listener)
        self._settings, self._changed = settings, changed
        self._child: ChildProcess[Report] | None = None
        self._state: State = "waiting"
        self._ready: wire.Ready | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._busy_limit_s = 0.0
        """How long it may compute without a message."""
        self._watch: HangWatch | None = None
        self.drafted: tuple[int, ...] = ()
        """As in `wire.Sampled`, of the last sample."""
        self._last_id = 0
        self._running = RunningSteps()
        self._transfers: dict[int, _PendingTransfer] = {}
        self._seen: dict[TrajectoryId, str] = {}
        """Trajectories whose KV it may have, each with the salt of its KV."""
        self._sleep_done: asyncio.Future[float] | None = None
        self._killed = False

    # -- properties -------------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        """It moves KV where a connector was set up."""
        moves_kv = self._settings.kv_transfer != "none"
        return EngineCapabilities(export_kv=moves_kv, import_kv=moves_kv)

    @property
    def kv_capacity_tokens(self) -> int:
        """Size of its KV space; 0 until it is ready."""
        return self._ready.kv_capacity_tokens if self._ready is not None else 0

    @property
    def _longest(self) -> int:
        """Tokens of the longest context that it holds."""
        ready = self._ready
        return 0 if ready is None else min(ready.kv_capacity_tokens, ready.max_context)

    @property
    def facts(self) -> wire.Ready | None:
        """What it reported when it became ready: sizes, release, seconds of its start."""
        return self._ready

    @property
    def pid(self) -> int | None:
        """Its process id, also that of its process group; None before it has a process."""
        return self._child.pid if self._child is not None else None

    @property
    def gone(self) -> bool:
        return self._state == "gone"

    @property
    def starting(self) -> bool:
        """Whether its process runs and is not ready yet."""
        return self._state == "starting"

    @property
    def ending(self) -> bool:
        """Whether it was stopped or killed and is not gone yet."""
        return self._state == "stopping"

    def launch(self, spec: LaunchSpec) -> None:
        """Start the process. Ends in `engine_ready` or `engine_failed`."""
        if self._state != "waiting":
            return
        self._state, self._busy_limit_s = "starting", spec.start_limit_s
        try:
            self._child = ChildProcess(
                spec.module,
                reads=Report,
                environment=spec.environment,
                log=spec.log,
                on_report=self._on_report,
                on_exit=self._on_exit,
            )
        except OSError as error:
            reason = f"its process cannot be started: {error}"
            self._loop.call_soon(self._on_exit, reason)
            return
        self._child.send(
            wire.Boot(
                settings=self._settings,
                tp=self.spec.shape.tp,
                max_running=self.spec.max_running,
                parent=os.getpid(),
                cores=spec.cores,
            )
        )
        late = f"it was not ready after {spec.start_limit_s:g} s; see {spec.log}"
        self._limit = self._loop.call_later(spec.start_limit_s, self._give_up, late)

    def refuse(self, reason: str) -> None:
        """End an engine that no machine can take. Ends in `engine_failed`."""
        if self._state == "waiting":
            self._loop.call_soon(self._on_exit, reason)

    def fail(self) -> None:
        """Kill its processes, as a fault would. Ends in `engine_failed`."""
        if self._child is not None and self._state != "gone":
            self._child.kill()

    # -- orders -----------------------------------------------------------------------------------

    def start(self, request: StepRequest) -> None:
        if self._state != "ready" or self._ready is None:
            raise self._refused(f" is not ready: {self._reason or self._state}")
        has_step = request.trajectory in self._running
        self._check_step(request, has_step=has_step, longest=self._longest)
        sampling, salt = None, ""
        if isinstance(request.payload, Generation):
            salt = request.payload.cache_salt
            try:
                sampling = checked_sampling(request.payload.sampling)
            except SamplingError as error:
                raise self._refused(f": {request.trajectory}: {error}") from None
        dispatch = self._running.begin(self._next_id(), request.trajectory, request.payload)
        self._seen[request.trajectory] = salt
        self._send(
            wire.Start(
                id=dispatch.id,
                trajectory=request.trajectory,
                prompt=pack_ids(request.prompt_ids),
                max_tokens=request.max_tokens,
                exact=request.exact,
                sampling=sampling,
                salt=salt,
            )
        )

    def abort(self, trajectory: TrajectoryId) -> None:
        dispatch = self._running.get(trajectory)
        if dispatch is not None:
            self._send(wire.Abort(dispatch.id))

    def forget(self, trajectory: TrajectoryId) -> None:
        """Free blocks held for the trajectory; the prefix cache evicts the others by itself."""
        if self._seen.pop(trajectory, None) is not None:
            self._send(wire.Forget(trajectory))

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        """Keep KV ready for a pull; see `EngineClient.export_kv`.

        vLLM prefills again what the prefix cache has evicted, and samples one token, which is
        dropped.
        """
        if self._settings.kv_transfer == "none" or trajectory not in self._seen or not prompt_ids:
            return False
        id_ = self._next_id()
        # The real lease begins when the request has ended, so this end is never too late.
        expires_s = self._loop.time() + self._settings.kv_lease_s
        self._transfers[id_] = _PendingTransfer(trajectory, move, expires_s)
        salt = self._seen[trajectory]
        self._send(wire.Export(id_, trajectory, pack_ids(prompt_ids), salt))
        return True

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> KvPlaced | None:
        """Bring a context into the prefix cache; see `EngineClient.import_kv`."""
        if not 0 < len(prompt_ids) < self._longest:
            return KvPlaced("none", 0)
        id_ = self._next_id()
        self._transfers[id_] = _PendingTransfer(trajectory, move)
        salt = self._seen.get(trajectory, "") if kv is None else kv.params.get("salt", "")
        self._seen[trajectory] = salt
        if kv is not None and kv.source == self.spec.engine:
            kv = None  # its own KV is in its prefix cache
        params, remaining_s = None, 0.0
        if kv is not None:
            params = kv.params
            remaining_s = kv.expires_s - self._settings.kv_margin_s - self._loop.time()
        prompt = pack_ids(prompt_ids)
        self._send(wire.Import(id_, prompt, params, remaining_s, salt))
        return None

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        self._send(wire.LoadWeights(version, path, keep_kv))

    async def sleep(self, level: int = 1) -> float:
        """Free GPU memory and return the seconds it took; the engine may run no step.

        Level 1 keeps the weights in main memory, level 2 drops them. All KV is lost.

        Raises:
            EngineRefusedError: it was started without `sleep_mode`, or is not ready.
        """
        return await self._sleep(wire.Sleep(level))

    async def wake(self) -> float:
        """Allocate the memory again and return the seconds it took.

        Raises:
            EngineRefusedError: as for `sleep`.
        """
        return await self._sleep(wire.Wake())

    def stop(self) -> None:
        if self._state == "gone":
            return
        was, self._state = self._state, "stopping"
        if self._child is None:
            self._loop.call_soon(self._on_exit, "")
        elif was == "starting":
            self._child.kill()
        else:
            self._child.send(wire.Stop())
            self._set_limit(self._loop.call_later(STOP_LIMIT_S, self._child.kill))

    def kill(self) -> None:
        if self._state == "gone":
            return
        self._state = "stopping"
        self._killed = True
        if self._child is None:
            self._loop.call_soon(self._on_exit, "")
        else:
            self._child.kill(silent=True)

    # -- reports ----------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        if self._killed:
            return
        if self._watch is not None:
            self._watch.received()
        name = self.spec.engine
        match report:
            case wire.Alive():
                pass
            case wire.Progress():
                self._running.keep(report)
            case wire.Ended():
                self._listener.step_ended(name, self._running.end(report))
            case wire.Sampled():
                self._sample = EngineSample(
                    report.running, report.waiting, report.kv_used_tokens, report.preemptions
                )
                self.drafted = report.drafted
            case wire.Exported():
                transfer = self._transfers.pop(report.id)
                handle = self._handle(transfer, report)
                self._listener.kv_exported(name, transfer.trajectory, handle, transfer.move)
            case wire.Placed():
                transfer = self._transfers.pop(report.id)
                placed = KvPlaced(report.way, report.tokens)
                self._listener.kv_placed(name, transfer.trajectory, placed, transfer.move)
            case wire.WeightsLoaded():
                self._listener.weights_updated(name, report.version)
            case wire.Ready():
                self._is_ready(report)
            case wire.Slept() | wire.Woke():
                if self._sleep_done is not None and not self._sleep_done.done():
                    self._sleep_done.set_result(report.seconds)
            case wire.Broken():
                self._reason = report.reason
            case _:
                assert_never(report)

    def _is_ready(self, report: wire.Ready) -> None:
        if self._state != "starting" or self._child is None:
            return
        self._set_limit(None)
        self._watch = HangWatch(
            self._child,
            hang_s=self._settings.hang_s,
            busy_limit_s=self._busy_limit_s,
            on_hang=self._give_up,
        )
        self._state, self._ready = "ready", report
        self._changed(self)
        self._listener.engine_ready(self.spec.engine, report.kv_capacity_tokens)

    def _handle(self, transfer: _PendingTransfer, report: wire.Exported) -> KvHandle | None:
        if report.kv is None or report.kv_tokens == 0 or self._ready is None:
            return None
        return KvHandle(
            source=self.spec.engine,
            trajectory=transfer.trajectory,
            kv_tokens=report.kv_tokens,
            kv_bytes=report.kv_tokens * self._ready.kv_bytes_per_token,
            expires_s=transfer.expires_s,
            params={**report.kv, "salt": self._seen.get(transfer.trajectory, "")},
        )

    # -- its end ----------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        if self._child is not None:
            self._child.kill()

    def _on_exit(self, reason: str) -> None:
        if self._state == "gone":
            return
        expected, self._state = self._state == "stopping", "gone"
        self._set_limit(None)
        if self._watch is not None:
            self._watch.close()
        self._reason = reason = self._reason or reason
        salvaged = self._running.salvage()
        self._transfers.clear()
        if self._sleep_done is not None and not self._sleep_done.done():
            self._sleep_done.set_exception(self._refused(" is gone"))
        self._changed(self)
        if self._killed:
            return
        if expected:
            self._listener.engine_stopped(self.spec.engine)
        else:
            self._listener.engine_failed(self.spec.engine, reason, salvaged)

    # -- inside -----------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send(self, order: wire.Order) -> None:
        if self._child is not None and self._state == "ready":
            self._child.send(order)

    def _set_limit(self, limit: asyncio.TimerHandle | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = limit

    async def _sleep(self, order: wire.Sleep | wire.Wake) -> float:
        if self._state != "ready":
            raise self._refused(" is not ready")
        if not self._settings.sleep_mode:
            raise self._refused(" was started without sleep_mode")
        self._sleep_done = self._loop.create_future()
        self._send(order)
        return await self._sleep_done
