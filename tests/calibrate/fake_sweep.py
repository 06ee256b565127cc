"""A sweep of simulated engines in virtual time."""

import asyncio
from collections.abc import Callable, Sequence

from heddle_calibrate.measure.session import Measurements, SweepSpec
from heddle_calibrate.measure.sweep import measure
from heddle_core.ids import EngineId
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_sim.latency import LatencyTable

START_S = 30.0
TRANSFER_FIXED_S, TRANSFER_BYTES_PER_S = 0.1, 25e9
BLOCK_TOKENS, MAX_BATCHED_TOKENS = 16, 2048


def sweep_spec(
    *,
    tps: tuple[int, ...] = (1,),
    max_running: int = 16,
    max_context: int = 4096,
    seed: int = 1,
    served: bool = False,
) -> SweepSpec:
    return SweepSpec(
        tps=tps,
        gpu="fake",
        max_running=max_running,
        max_context=max_context,
        size="small",
        seed=seed,
        served=served,
    )


def sweep_of(
    table: Callable[[int], LatencyTable],
    wanted: SweepSpec,
    *,
    faults: Sequence[tuple[float, str]] = (),
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Measurements:
    """Measure engines that obey `table`, a function of the TP degree."""

    async def run() -> Measurements:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        launcher = SimLauncher(
            SimulationConfig(
                table=lambda shape: table(shape.tp),
                transfer_fixed_s=TRANSFER_FIXED_S,
                transfer_bytes_per_s=TRANSFER_BYTES_PER_S,
                max_batched_tokens=MAX_BATCHED_TOKENS,
                block_size=BLOCK_TOKENS,
                engine_start_s=START_S,
                faults=tuple((time_s, EngineId(name)) for time_s, name in faults),
            ),
            clock,
        )
        launcher.schedule_faults()
        return await measure(launcher, wanted, tokens=None, on_progress=on_progress)

    return run_virtual(run())
