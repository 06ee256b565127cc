"""The engine contract, on simulated engines whose time follows the event loop's."""

import asyncio
from collections.abc import Iterator

import pytest

from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import VirtualTimeLoop
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimEngineClient, SimLauncher
from heddle_sim.latency import LatencyTable
from tests.rollout.contract import PROMPT, Bench, EngineContract, Recorder, ids, request

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


CONFIG = SimulationConfig(
    table=lambda shape: TABLE,
    transfer_fixed_s=0.01,
    transfer_bytes_per_s=1e12,
    engine_start_s=1.0,
)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    loop = VirtualTimeLoop()

    async def launcher() -> SimLauncher:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        return SimLauncher(CONFIG, clock)

    engines = loop.run_until_complete(launcher())

    def fail(engine: SimEngineClient) -> None:
        engines.fail(engine.spec.engine)

    yield Bench(
        loop=loop,
        launcher=engines,
        recorder=Recorder(),
        gpu="g",
        makes_tokens=False,
        fail=fail,
        weights="",
    )
    loop.run_until_complete(engines.close())
    loop.close()


class TestSimEngineClient(EngineContract):
    pass


def test_a_paused_engine_begins_no_iteration_until_it_goes_on(bench: Bench) -> None:
    async def main() -> None:
        engine = await bench.engine()
        assert isinstance(engine, SimEngineClient)
        engine.start(request("paused", ids("paused", PROMPT), 10))
        await asyncio.sleep(0.06)
        engine.pause()
        began_s = bench.loop.time()
        await asyncio.sleep(50.0)
        assert bench.recorder.of(engine) == []
        assert engine.sample().running == 1
        engine.resume()
        end = await bench.recorder.end_of("paused")
        assert end.tokens == 10
        assert bench.loop.time() - began_s == pytest.approx(50.07)

    bench.run(main())
