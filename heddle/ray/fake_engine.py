"""The process of an engine that keeps time only, on another machine: a simulated engine there.

python -m heddle.ray.fake_engine DESCRIPTOR
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import KvHandle, KvPlaced, StepRequest, StepResult
from heddle_runtime.clock import RunClock
from heddle_runtime.process import wire
from heddle_runtime.process.async_channel import AsyncChannel
from heddle_runtime.process.connection import connect
from heddle_runtime.process.wire import Channel, ClosedError, Order
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimEngineClient, SimLauncher
from heddle_sim.latency import LatencyTable

NAME, TOKEN = EngineId("engine"), 3
"""Inside its process an engine has no other name, and all of its tokens are one."""


class FakeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast an engine is: a part of `SimulationConfig`, for one shape."""

    table: LatencyTable
    gpu: str
    block_size: int
    max_batched_tokens: int
    prefix_caching: bool
    dispatch_s: float
    start_s: float
    time_scale: float
    """Real seconds for a second of the table."""


def fake_speed(
    simulation: SimulationConfig, shape: EngineShape, *, start_s: float, time_scale: float
) -> dict[str, Any]:
    """Describe the engines of a shape, for their `Boot`; they take `start_s` to start."""
    speed = FakeSpeed(
        table=simulation.table(shape),
        gpu=shape.gpu,
        block_size=simulation.block_size,
        max_batched_tokens=simulation.max_batched_tokens,
        prefix_caching=simulation.prefix_caching,
        dispatch_s=simulation.dispatch_s,
        start_s=start_s,
        time_scale=time_scale,
    )
    described: dict[str, Any] = msgspec.to_builtins(speed)
    return described


class FakeEngine:
    """Executes the driver's orders on a simulated engine; implements its `EngineListener`."""

    def __init__(self, channel: Channel[Order], boot: wire.Boot) -> None:
        """Made inside a running event loop."""
        speed = msgspec.convert(boot.simulated, FakeSpeed)
        self._speed = speed
        simulation = SimulationConfig(
            table=lambda shape: speed.table,
            transfer_fixed_s=0.0,
            transfer_bytes_per_s=1.0,
            moves_by="prefill",
            max_batched_tokens=speed.max_batched_tokens,
            block_size=speed.block_size,
            prefix_caching=speed.prefix_caching,
            dispatch_s=speed.dispatch_s,
            engine_start_s=speed.start_s,
        )
        self.over = asyncio.Event()
        self._ids: dict[TrajectoryId, int] = {}
        self._channel = AsyncChannel(channel, on_message=self._execute, on_close=self.over.set)
        clock = RunClock(asyncio.get_running_loop(), speed=1.0 / speed.time_scale)
        clock.thaw()
        shape = EngineShape(speed.gpu, speed.table.tp, dp=speed.table.dp)
        spec = EngineSpec(engine=NAME, shape=shape, max_running=boot.max_running)
        self._engine: SimEngineClient = SimLauncher(simulation, clock).start(spec, self)

    def _execute(self, order: Order) -> None:
        match order:
            case wire.Start():
                trajectory = TrajectoryId(order.trajectory)
                self._ids[trajectory] = order.id
                self._engine.start(
                    StepRequest(
                        trajectory=trajectory,
                        group=GroupId(order.group),
                        prompt_tokens=len(order.prompt) // 4,
                        shared_tokens=order.shared_tokens,
                        max_tokens=order.max_tokens,
                        exact=order.exact,
                    )
                )
            case wire.Abort(id=id_):
                for trajectory in [each for each, mine in self._ids.items() if mine == id_]:
                    self._engine.abort(trajectory)
            case wire.Forget(trajectory=name):
                self._engine.forget(TrajectoryId(name))
            case wire.Import():
                self._import(order)
            case wire.LoadWeights(version=version, path=path, keep_kv=keep_kv):
                self._engine.update_weights(version, path, keep_kv=keep_kv)
            case wire.Stop():
                self.over.set()
            case _:
                raise AssertionError(f"{type(order).__name__} is of engines with a model")

    def _import(self, order: wire.Import) -> None:
        """Prefill a context, as an engine does that cannot pull its KV."""
        # The simulated engine reports the move by its number, which here is that of the order.
        trajectory = TrajectoryId(order.trajectory)
        tokens = len(order.prompt) // 4
        kv = KvHandle(
            source=NAME, trajectory=trajectory, kv_tokens=tokens, kv_bytes=0, expires_s=float("inf")
        )
        group = GroupId(order.group)
        placed = self._engine.import_kv(trajectory, group, (), kv, move=order.id)
        if placed is not None:
            self.kv_placed(NAME, trajectory, placed, order.id)

    # -- reports of the simulated engine -----------------------------------------------------------

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        """It takes orders from now on."""
        self._channel.send(
            wire.Ready(
                kv_capacity_tokens=kv_capacity_tokens,
                block_tokens=self._speed.block_size,
                kv_bytes_per_token=self._speed.table.kv_bytes_per_token,
                max_context=kv_capacity_tokens,
                release="",
                import_s=0.0,
                load_s=0.0,
            )
        )

    def step_ended(self, engine: EngineId, result: StepResult) -> None:
        """Report a step; its times are those of the table."""
        self._channel.send(
            wire.Ended(
                id=self._ids.pop(result.trajectory),
                tokens=wire.pack_ids([TOKEN] * result.tokens),
                finished=result.finished,
                prefill_s=result.prefill_s,
                decode_s=result.decode_s,
                cached_tokens=result.cached_tokens,
                recomputes=result.recomputes,
            )
        )

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        """Report an import."""
        self._channel.send(wire.Placed(move, placed.way, placed.tokens))

    def weights_updated(self, engine: EngineId, version: int) -> None:
        """Report new weights."""
        self._channel.send(wire.WeightsLoaded(version))

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        """No driver orders that."""

    def engine_stopped(self, engine: EngineId) -> None:
        """The process ends instead."""

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        """The process ends instead."""


def main() -> None:
    """Run an engine; the argument is the descriptor of the socket to the driver."""
    try:
        channel, boot = connect(int(sys.argv[1]), Order, wire.Boot)
    except ClosedError:
        return

    async def run() -> None:
        await FakeEngine(channel, boot).over.wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
