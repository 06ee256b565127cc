"""The engine contract, on engines that make no tokens: the simulator's engine keeps their time."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import simpy
from heddle_runtime.fake_engine import FakeEngine, FakeLauncher, ModelEnd

from heddle_core.plans import EngineSpec
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import VirtualTimeLoop
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable
from tests.runtime.contract import Bench, EngineContract, Recorder

TABLE = LatencyTable(
    model="m",
    gpu="g",
    tp=1,
    base_s=[0.01] * 9,
    per_context_s=[0.0] * 9,
    prefill_tokens=[0.0, 1000.0],
    prefill_knots_s=[0.0, 0.1],
    prefill_pair_s=0.0,
    host_per_prefill_s=0.0,
    kv_capacity_tokens=64_000,
    kv_bytes_per_token=1024,
)


def model(
    env: simpy.Environment, spec: EngineSpec, on_end: Callable[[ModelEnd], None]
) -> SimEngine:
    return SimEngine(env, spec.engine, TABLE, max_running=spec.max_running, on_end=on_end)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    loop = VirtualTimeLoop()

    async def launcher() -> FakeLauncher:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        return FakeLauncher(clock, model, transfer=lambda size: 0.01, start_s=1.0)

    fakes = loop.run_until_complete(launcher())

    def fail(engine: FakeEngine) -> None:
        fakes._fail(engine.spec.engine)

    yield Bench(
        loop=loop,
        launcher=fakes,
        recorder=Recorder(),
        gpu="g",
        makes_tokens=False,
        fail=fail,
        weights="",
    )
    loop.run_until_complete(fakes.close())
    loop.close()


class TestFakeEngine(EngineContract):
    pass
