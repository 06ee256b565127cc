"""The router benchmark: its requests, its mock engines and its tables."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from campaigns.faults.gateway_bench import Bench, set_up
from heddle_core.events import EngineReady
from heddle_runtime.vllm_http.launcher import HttpLauncher
from tests.gateway.served import NO_AIOHTTP, run

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)
BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import bench_gateway  # noqa: E402
from gateway import hostile, load, mock_engine, prompts, routers, soak  # noqa: E402

sys.path.remove(BENCHMARKS)  # it has a folder named verl


@asynccontextmanager
async def mocks(count: int = 1) -> AsyncIterator[list[tuple[mock_engine.MockEngine, int]]]:
    """Mock engines in this process, and their ports."""
    async with asyncio.TaskGroup() as tasks:
        engines = [mock_engine.MockEngine() for _ in range(count)]
        servers = [await mock_engine.listen(engine, 0) for engine in engines]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        serving = [tasks.create_task(server.serve_forever()) for server in servers]
        try:
            yield list(zip(engines, ports, strict=True))
        finally:
            for each in serving:
                each.cancel()
            for engine in engines:
                for transport in list(engine.connections):
                    transport.abort()
            await asyncio.sleep(0.05)  # both ends of a connection close it in their turn


@asynccontextmanager
async def gateway_over(ports: list[int]) -> AsyncIterator[tuple[Bench, int]]:
    """A gateway over mock engines, and its port."""
    from heddle_gateway.app import listening
    from heddle_gateway.engine_urls import RegisteredEngines
    from heddle_gateway.front import Front
    from heddle_gateway.openai_api import ServedModel
    from heddle_gateway.rendering import RenderingEngines

    launcher = HttpLauncher()
    setup = set_up("verl+given+keep_engines", engines=len(ports), slots=64)
    bench = Bench(setup, launcher=launcher)
    front = Front(gateway=bench.gateway, model=ServedModel(context_tokens=1 << 20))
    front.engine_urls = engines = RegisteredEngines(
        launcher,
        bench.gateway,
        front.model,
        shapes=list(setup.context.cost.by_shape),
        max_running=setup.context.max_running,
    )
    front.renderer = RenderingEngines(launcher)
    serving = asyncio.create_task(bench.gateway.run())
    try:
        for port in ports:
            await engines.add(f"http://127.0.0.1:{port}", {})
        while len(bench.events(EngineReady)) < len(ports):
            await asyncio.sleep(0.01)
        async with listening(front, host="127.0.0.1", port=0) as port:
            yield bench, port
    finally:
        await bench.gateway.close(1.0)
        await serving
        await launcher.close()


def test_each_prompt_of_a_session_goes_on_with_the_output_of_the_step_before():
    steps = [
        json.loads(prompts.ids_json(7, step, first_tokens=64)) for step in range(prompts.STEPS)
    ]
    assert len(steps[0]) == 64
    for before, after in pairwise(steps):
        known = [*before, *prompts.OUTPUT_IDS]
        assert after[: len(known)] == known
        assert len(after) > len(known)
    assert steps[0][1:] == json.loads(prompts.ids_json(8, 0, first_tokens=64))[1:]


def test_a_chat_body_has_its_size_and_names_its_step():
    for stream in (False, True):
        body = prompts.chat_body(123, 5, stream=stream)
        assert len(body) == prompts.TEXT_BYTES
        assert json.loads(body)["stream"] is stream
        assert prompts.session_and_step(body) == (123, 5)


def test_sessions_of_the_benchmark_are_trajectories_whose_contexts_grow():
    async def main() -> None:
        async with mocks(2) as engines, gateway_over([p for _, p in engines]) as (bench, port):
            router = routers.heddle("verl", "1")
            for to in (
                router.chat(port),
                load.Address(port, routers.GENERATE, partial(prompts.token_ids_body, tokens=32)),
            ):
                found = await load.closed_loop(to, concurrency=2, for_s=0.3)
                assert len(found.seconds) > prompts.STEPS
            opened = await load.open_loop(router.chat(port), per_s=50, for_s=0.2, seed=1)
            assert opened.at(0.5) <= opened.at(0.99)
            agents = [
                a for s in bench.gateway.sessions._sessions.values() for a in s.lanes.values()
            ]
            assert not any(agent._rewritten for agent in agents)

    run(main())


def test_a_burst_is_taken_in_while_engines_hold_and_answered_when_they_do_not():
    async def main() -> None:
        async with mocks() as [(engine, port)], gateway_over([port]) as (bench, front):
            engine.control("/mock/hold")

            async def taken_in() -> int:
                return len(list(bench.gateway.sessions.under_way))

            async def release() -> None:
                assert len(engine.held) <= 64 < await taken_in()
                engine.control("/mock/now")

            to = routers.heddle("verl", "1").chat(front)
            found = await load.burst(
                to, requests=80, count_admitted=taken_in, release=release, limit_s=20.0
            )
            assert (found.admitted, found.refused) == (80, 0)

    run(main())


def test_streams_stay_open_and_bring_their_events():
    async def main() -> None:
        async with mocks() as [(engine, port)], gateway_over([port]) as (_, front):
            engine.control("/mock/paced?interval_s=0.05&events=1000")
            to = routers.heddle("verl", "1").streams(front)
            found = await load.open_streams(
                to, streams=8, watch_s=0.3, on_watch=lambda: None, limit_s=20.0
            )
            assert found.open == 8
            assert found.events_per_s > 0
            engine.control("/mock/now")

    run(main())


def test_an_answer_that_is_none_ends_a_measurement():
    async def main() -> None:
        async with mocks() as [(_, port)]:
            nowhere = load.Address(port, "/no/such", prompts.chat_body)
            with pytest.raises(load.LoadError, match="status 404"):
                await load.closed_loop(nowhere, concurrency=1, for_s=0.1)

    run(main())


def test_a_table_has_medians_spreads_and_what_routers_add():
    alone = {"chat_per_s": 900.0, "chat_p50_ms": 0.5}
    found = [{"chat_per_s": v, "chat_p50_ms": p} for v, p in ((100, 1.5), (300, 2.5), (200, 0.75))]
    rounds = [bench_gateway.added(each, alone) for each in found]
    lines = [*bench_gateway.tables({"mine": rounds})]
    assert lines[2] == "| mine | 200 (100 to 300) | - | - | - |"
    assert lines[6] == "| mine | 1.00 (0.25 to 2.00) | - | - | - |"
    assert lines[10] == "| mine |" + " - |" * 8
    heads = [line for line in lines if line.startswith("| router")]
    assert sum(line.count("|") - 2 for line in heads) == len(bench_gateway.COLUMNS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rounds", "0"), "--rounds must be 1 or more"),
        (("--seconds", "nan"), "--seconds must be from 0.1 to 60"),
        (("--router-core", "100000"), "--router-core 100000: choose one of"),
        (("--peer-venv", "no-such"), "--peer-venv no-such: it has no bin/python"),
    ],
)
def test_options_that_measure_nothing_are_refused(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(sys, "argv", ["bench_gateway.py", *options])
    with pytest.raises(SystemExit) as end:
        bench_gateway.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_environments_without_peers_are_named(tmp_path: Path):
    found, missing = routers.find_peers([])
    assert not found
    assert missing == list(routers.VERSIONS)


@pytest.mark.parametrize("requests", [2_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_memory_is_flat_after_the_first_tenth(requests: int):
    """1,000,000 requests are 125,000 sessions; a few are only to show that the script works."""
    lines: list[str] = []
    found = soak.soak(requests, policy="heddle", core=0, load_core=0, on_line=lines.append)
    assert len(lines) == len(found) == soak.TENTHS
    assert min(found) > 20.0
    assert requests == 2_000 or soak.growth(found) <= soak.MOST_GROWTH


@pytest.mark.parametrize(
    ("idle", "rounds"), [(200, 1), pytest.param(10_000, 3, marks=pytest.mark.soak)]
)
def test_hostile_clients_get_no_gigabyte_and_others_get_their_answers(idle: int, rounds: int):
    """Statuses and replies are checked as they come."""
    hostile.raise_file_limit()
    found = hostile.hostile(idle=idle, rounds=rounds, core=0)
    assert found.held_mb > found.start_mb > 50.0
    assert found.held_mb <= found.peak_mb < hostile.MOST_MB
    assert min(len(found.alone.seconds), len(found.beside.seconds)) > hostile.CLIENTS


def test_a_hostile_client_with_another_status_and_another_reply_are_found():
    async def main() -> None:
        async with mocks() as [(_, port)]:
            with pytest.raises(load.LoadError, match=r"short: b'HTTP/1.1 200 .* 400 was due"):
                await hostile.attacked(port, "deep nesting, short")
            with pytest.raises(load.LoadError, match="session 7, step 0: status 200"):
                await hostile.hold_sessions(port, iter([7]), load.Latencies)

    run(main())
