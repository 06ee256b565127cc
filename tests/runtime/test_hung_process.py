"""Processes of engines that hang, with the launcher, the process, the socket and the loop real."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_runtime.process.child import group_members
from heddle_runtime.process.hang import LOOKS
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings
from tests.rollout.contract import LIMIT_S, PROMPT, Recorder, grown, ids, request, until
from tests.runtime.computing_process import SECONDS
from tests.runtime.counting_process import next_token

HANG_S = 2.0
OUTPUT = 2000


@asynccontextmanager
async def launched(
    folder: Path, *, module: str = "counting_process", **settings: Any
) -> AsyncIterator[tuple[Callable[[], VllmEngine], Recorder]]:
    """A way to start engines, which end afterwards."""
    launcher = VllmLauncher(
        VllmSettings(model_dir=str(folder), **settings), module=f"tests.runtime.{module}"
    )
    recorder = Recorder()
    names = iter(range(9))

    def start() -> VllmEngine:
        spec = EngineSpec(
            engine=EngineId(f"e{next(names)}"), shape=EngineShape("cpu", 1), max_running=4
        )
        return launcher.start(spec, recorder)

    try:
        yield start, recorder
    finally:
        await launcher.close()


def made_alone(context: list[int], count: int, weights: str) -> list[int]:
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens, weights))
    return tokens[len(context) :]


async def reported(engine: VllmEngine, trajectory: str) -> None:
    """Wait until some tokens of a step have come."""

    def made() -> bool:
        step = engine._running.get(TrajectoryId(trajectory))
        return step is not None and bool(step.made)

    await until(made)


@pytest.mark.parametrize("module", ["counting_process", "forking_process"])
def test_a_stopped_engine_fails_and_every_token_is_made_once(tmp_path, module):
    async def main() -> None:
        async with (
            launched(tmp_path, module=module, hang_s=HANG_S) as (start, recorder),
            launched(tmp_path) as (start_other, others),
        ):
            doomed = start()
            await recorder.take("ready")
            context = ids("stopped", PROMPT)
            doomed.start(request("stopped", context, OUTPUT))
            await reported(doomed, "stopped")
            pid = doomed.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            reason, salvaged = await recorder.take("failed")
            assert reason == (
                f"it has hung: no message for {HANG_S:g} s, and a signal has stopped it"
            )
            assert group_members(pid) == []
            end = salvaged["stopped"]
            assert 0 < end.tokens < OUTPUT
            other = start_other()
            await others.take("ready")
            other.start(request("stopped", grown(context, end), OUTPUT - end.tokens))
            rest = await others.end_of("stopped")
            assert [*end.output_ids, *rest.output_ids] == made_alone(context, OUTPUT, str(tmp_path))

    asyncio.run(main())


def test_an_idle_engine_that_is_stopped_fails_too(tmp_path):
    async def main() -> None:
        async with launched(tmp_path, hang_s=HANG_S) as (start, recorder):
            engine = start()
            await recorder.take("ready")
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            reason, salvaged = await recorder.take("failed")
            assert "it has hung" in reason
            assert salvaged == {}
            assert group_members(engine.pid) == []

    asyncio.run(main())


def test_an_idle_engine_and_one_that_computes_in_silence_have_not_hung(tmp_path):
    """Loading takes more than `hang_s` of CPU time, so that silence alone does not count."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / SECONDS).write_text(str(1.3 * HANG_S))

    async def main() -> None:
        async with launched(tmp_path, module="computing_process", hang_s=HANG_S) as (
            start,
            recorder,
        ):
            engine = start()
            await recorder.take("ready")
            looks = 0

            def enough() -> bool:
                nonlocal looks
                looks += 1
                return looks > 2 * LOOKS

            async with asyncio.timeout(LIMIT_S):
                while not enough():
                    await asyncio.sleep(HANG_S / LOOKS)
            engine.update_weights(3, str(weights))
            assert await recorder.take("updated", unless=lambda _: True) == 3
            engine.start(request("after", ids("after", PROMPT), 8))
            assert (await recorder.end_of("after")).tokens == 8

    asyncio.run(main())
