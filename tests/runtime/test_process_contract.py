"""The engine contract on processes without a model, and what can go wrong with a process.

Everything but vLLM itself is real here: the launcher, the process, the socket, the loop.
"""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineClient, EngineRefusedError
from heddle_runtime.generation import Generation, GenerationEnd
from heddle_runtime.process.child import group_members
from heddle_runtime.vllm.engine import LaunchSpec, VllmEngine
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings
from tests.patience import PATIENCE_S
from tests.rollout.contract import (
    ATTEMPTS,
    LONG_OUTPUT,
    PROMPT,
    Bench,
    EngineContract,
    Recorder,
    grown,
    ids,
    request,
    until,
)
from tests.runtime.counting_process import next_token
from tests.runtime.vllm_bench import murder

MARGIN_S = 5.0
SALVAGED_OUTPUT = 1500
"""Enough to be still at it when the first tokens have come."""

DRIVER = """
import asyncio
from heddle_core.ids import EngineShape
from heddle_core.plans import EngineSpec
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings
from heddle_runtime.process.child import group_members
from tests.rollout.contract import Recorder, until
from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings
from heddle_runtime.process.child import group_members
from tests.rollout.contract import Recorder, until

async def main():
    recorder = Recorder()
    settings = VllmSettings(model_dir={folder!r})
    launcher = VllmLauncher(settings, module="tests.runtime.forking_process")
    spec = EngineSpec(engine="f", shape=EngineShape("cpu", 2), max_running=1)
    engine = launcher.start(spec, recorder)
    await recorder.take("ready")
    await until(lambda: len(group_members(engine.pid)) == 2)
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def process_bench(folder: Path, module: str) -> Iterator[Bench]:
    model = folder / "model"
    model.mkdir()
    settings = VllmSettings(model_dir=str(model), kv_transfer="nixl", kv_margin_s=MARGIN_S)
    loop = asyncio.new_event_loop()

    async def launcher() -> tuple[VllmLauncher, Recorder]:
        made = VllmLauncher(
            settings, log_dir=folder / "logs", module=module, start_limit_s=PATIENCE_S
        )
        return made, Recorder()

    made, recorder = loop.run_until_complete(launcher())
    try:
        yield Bench(
            loop=loop,
            launcher=made,
            recorder=recorder,
            gpu="cpu",
            makes_tokens=True,
            fail=murder,
            weights=str(model),
        )
    finally:
        loop.run_until_complete(made.close())
        loop.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("counting")
    with process_bench(folder, "tests.runtime.counting_process") as bench:
        yield bench


class TestProcessEngine(EngineContract):
    pass


def made_alone(context: list[int], count: int, weights: str) -> list[int]:
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens, weights))
    return tokens[len(context) :]


def test_tokens_are_those_of_an_undisturbed_run_after_aborts(bench):
    async def main() -> None:
        engine = await bench.engine()
        context = ids("cut in three", PROMPT)
        expected = [*context, *made_alone(context, 300, bench.weights)]
        while len(context) < PROMPT + 300:
            left = PROMPT + 300 - len(context)
            engine.start(request("cut in three", context, left))
            await asyncio.sleep(0.2)
            engine.abort(TrajectoryId("cut in three"))
            context = grown(context, await bench.recorder.end_of("cut in three"))
        assert context == expected

    bench.run(main())


def test_an_abort_that_loses_the_race_ends_as_finished(bench):
    async def main() -> None:
        engine = await bench.engine()
        for attempt in range(1, ATTEMPTS):
            name = f"race{attempt}"
            engine.start(request(name, ids(name, 64), 2))
            # The event loop stands still: the engine is done before the abort is sent.
            time.sleep(0.3 * attempt)
            engine.abort(TrajectoryId(name))
            if (await bench.recorder.end_of(name)).finished:
                return
        pytest.fail("every abort came before the end of its step")

    bench.run(main())


def test_salvaged_tokens_go_on_elsewhere_and_none_is_made_twice(bench):
    async def main() -> None:
        doomed, other = await bench.begin(), await bench.engine()
        context = ids("salvage", PROMPT)
        came = list[int]()
        payload = Generation(on_tokens=came.extend)
        step = msgspec.structs.replace(
            request("salvage", context, SALVAGED_OUTPUT), payload=payload
        )
        doomed.start(step)
        await until(lambda: bool(came))
        bench.fail(doomed)
        _, salvaged = await bench.recorder.take("failed")
        end = salvaged["salvage"]
        assert 0 < end.tokens < SALVAGED_OUTPUT
        context = grown(context, end)
        other.start(request("salvage", context, SALVAGED_OUTPUT - end.tokens))
        rest = await bench.recorder.end_of("salvage")
        expected = made_alone(ids("salvage", PROMPT), SALVAGED_OUTPUT, bench.weights)
        assert [*end.output_ids, *rest.output_ids] == expected

    bench.run(main())


def test_a_pull_is_never_begun_after_its_lease(bench):
    """The trap: the source has given the blocks to others, and would send those."""

    async def main() -> None:
        source, target = await bench.engine(0), await bench.engine(1)
        context = ids("lease", PROMPT)
        source.start(request("lease", context, 8))
        context = grown(context, await bench.recorder.end_of("lease"))
        source.export_kv(TrajectoryId("lease"), context)
        _, handle = await bench.recorder.take("exported")
        assert handle.expires_s > bench.loop.time() + 50
        # Whatever lies there now would be taken for this trajectory's KV.
        Path(handle.params["params"]["file"]).write_text("[]")
        late = msgspec.structs.replace(handle, expires_s=bench.loop.time() + MARGIN_S - 0.01)
        target.import_kv(TrajectoryId("lease"), GroupId("lease"), context, late)
        _, placed = await bench.recorder.take("placed")
        assert placed == ("prefill", len(context) // 32 * 32)
        target.start(request("lease", context, 8))
        end = await bench.recorder.end_of("lease")
        assert list(end.output_ids) == made_alone(context, 8, bench.weights)
        assert end.cached_tokens > 0

    bench.run(main())


def test_a_pull_from_an_engine_that_died_becomes_a_prefill(bench):
    async def main() -> None:
        source, target = await bench.begin(), await bench.engine()
        context = ids("orphan", PROMPT)
        source.start(request("orphan", context, 8))
        context = grown(context, await bench.recorder.end_of("orphan"))
        source.export_kv(TrajectoryId("orphan"), context)
        _, handle = await bench.recorder.take("exported")
        source.kill()
        Path(handle.params["params"]["file"]).unlink()
        target.import_kv(TrajectoryId("orphan"), GroupId("orphan"), context, handle)
        _, placed = await bench.recorder.take("placed")
        assert placed.way == "prefill"
        assert placed.tokens > 0

    bench.run(main())


def test_an_engine_that_cannot_start_says_why(bench, tmp_path):
    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path / "missing")),
            module="tests.runtime.counting_process",
        )
        spec = EngineSpec(engine=EngineId("x"), shape=EngineShape("cpu", 1), max_running=1)
        launcher.start(spec, bench.recorder)
        assert await bench.recorder.take("failed") == ("no such model", {})
        await launcher.close()

    bench.run(main())


def test_an_engine_that_breaks_at_start_is_quoted(bench, tmp_path):
    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path)), module="tests.runtime.no_such_module"
        )
        spec = EngineSpec(engine=EngineId("x"), shape=EngineShape("cpu", 1), max_running=1)
        launcher.start(spec, bench.recorder)
        reason, _ = await bench.recorder.take("failed")
        assert "exit status 1" in reason
        assert "no_such_module" in reason
        await launcher.close()

    bench.run(main())


def test_an_engine_that_waits_for_a_dead_thread_at_start_is_quoted(bench, tmp_path):
    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path)), module="tests.runtime.waiting_process"
        )
        spec = EngineSpec(engine=EngineId("w"), shape=EngineShape("cpu", 1), max_running=1)
        engine = launcher.start(spec, bench.recorder)
        reason, _ = await bench.recorder.take("failed")
        assert reason == "OSError: the port is taken"
        with pytest.raises(EngineRefusedError, match=f"w is not ready: {reason}"):
            engine.start(request("w", ids("w", PROMPT), 1))
        await launcher.close()

    bench.run(main())


def test_an_engine_that_is_killed_leaves_no_temporary_files(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        settings = VllmSettings(model_dir=str(tmp_path))
        launcher = VllmLauncher(
            settings, log_dir=tmp_path / "logs", module="tests.runtime.forking_process"
        )
        spec = EngineSpec(engine=EngineId("t"), shape=EngineShape("cpu", 2), max_running=1)
        engine = launcher.start(spec, bench.recorder)
        await bench.recorder.take("ready")
        (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("heddle-engine-"))
        environment = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
        assert f"TMPDIR={folder}".encode() in environment
        assert any(part.startswith(b"TORCHINDUCTOR_CACHE_DIR=") for part in environment)
        (folder / "vllm_dist_0").write_text("left by a process that was killed")
        murder(engine)
        await bench.recorder.take("failed")
        assert not folder.exists()
        await launcher.close()

    bench.run(main())


def test_an_engine_that_is_stopped_while_it_starts_leaves_no_shared_memory(bench, tmp_path):
    shared = Path("/dev/shm", f"vllm_{tmp_path.name}")

    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path)), module="tests.runtime.sharing_process"
        )
        spec = EngineSpec(engine=EngineId("s"), shape=EngineShape("cpu", 2), max_running=1)
        engine = launcher.start(spec, bench.recorder)
        await until(lambda: shared.exists() and b"/dev/shm/vllm_" in maps_of(engine))
        engine.stop()
        await bench.recorder.take("stopped")
        assert not shared.exists()
        await launcher.close()

    def maps_of(engine: VllmEngine) -> bytes:
        return b"".join(Path(f"/proc/{p}/maps").read_bytes() for p in group_members(engine.pid))

    try:
        bench.run(main())
    finally:
        shared.unlink(missing_ok=True)


def test_an_engine_has_as_many_of_the_least_used_cores_as_ranks(bench, tmp_path, monkeypatch):
    """Also one that takes the place of two."""
    pinned: dict[EngineId, tuple[int, ...]] = {}
    launch = VllmEngine.launch

    def noted(engine: VllmEngine, spec: LaunchSpec) -> None:
        pinned[engine.spec.engine] = spec.cores
        launch(engine, spec)

    monkeypatch.setattr(VllmEngine, "launch", noted)

    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path)),
            cores=[4, 7],
            module="tests.runtime.counting_process",
        )

        async def started(name: str, tp: int) -> VllmEngine:
            spec = EngineSpec(engine=EngineId(name), shape=EngineShape("cpu", tp), max_running=1)
            engine = launcher.start(spec, bench.recorder)
            await bench.recorder.take("ready")
            return engine

        for engine in [await started("one", 1), await started("other", 1)]:
            engine.stop()
            await bench.recorder.take("stopped")
        await started("wide", 2)
        assert pinned == {"one": (4,), "other": (7,), "wide": (4, 7)}
        await launcher.close()

    bench.run(main())


def test_a_port_that_was_found_is_kept_for_its_engine(bench, tmp_path):
    """From before its process starts until it is gone; the engine itself can bind it."""

    def bound(port: int, *, again: bool) -> bool:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
            try:
                sock.bind(("127.0.0.1", port))
                sock.listen()
            except OSError:
                return False
            return True

    async def main() -> None:
        settings = VllmSettings(model_dir=str(tmp_path), kv_transfer="nixl")
        launcher = VllmLauncher(settings, module="tests.runtime.counting_process")
        spec = EngineSpec(engine=EngineId("p"), shape=EngineShape("cpu", 1), max_running=1)
        engine = launcher.start(spec, bench.recorder)
        await bench.recorder.take("ready")
        environ = Path(f"/proc/{engine.pid}/environ").read_bytes().decode()
        port = int(environ.partition("VLLM_NIXL_SIDE_CHANNEL_PORT=")[2].partition("\0")[0])
        assert not bound(port, again=False)
        assert bound(port, again=True)
        await launcher.close()
        assert bound(port, again=False)

    bench.run(main())


def test_weights_that_cannot_be_loaded_end_the_engine(bench):
    async def main() -> None:
        engine = await bench.begin()
        engine.update_weights(1, "/nowhere")
        reason, _ = await bench.recorder.take("failed")
        assert reason
        assert engine.gone

    bench.run(main())


@pytest.mark.parametrize("end", ["stop", "kill", "murder", "close"])
def test_nothing_is_left_of_an_engine_that_has_ended(bench, end, tmp_path):
    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path)), module="tests.runtime.forking_process"
        )
        spec = EngineSpec(engine=EngineId("f"), shape=EngineShape("cpu", 2), max_running=1)
        engine = launcher.start(spec, bench.recorder)
        await bench.recorder.take("ready")
        pid = engine.pid
        assert pid is not None
        await until(lambda: len(group_members(pid)) == 2)
        match end:
            case "stop":
                engine.stop()
                await bench.recorder.take("stopped")
            case "kill":
                engine.kill()
            case "murder":
                murder(engine)
                await bench.recorder.take("failed")
        await launcher.close()
        assert engine.gone
        assert group_members(engine.pid) == []

    bench.run(main())


def test_an_engine_dies_with_its_driver(tmp_path):
    """Killed, the driver can end nothing any more; engines see its socket close."""

    async def main() -> None:
        driver = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            DRIVER.format(folder=str(tmp_path)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert driver.stdout is not None
        group = int(await driver.stdout.readline())
        assert len(group_members(group)) == 2
        driver.send_signal(signal.SIGKILL)
        await driver.wait()
        await until(lambda: not group_members(group))

    asyncio.run(main())


def test_an_engine_stops_while_it_is_starting(bench, tmp_path):
    async def main() -> None:
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(tmp_path)), module="tests.runtime.counting_process"
        )
        spec = EngineSpec(engine=EngineId("s"), shape=EngineShape("cpu", 1), max_running=1)
        launcher.start(spec, bench.recorder).stop()
        await bench.recorder.take("stopped")
        second = launcher.start(spec, bench.recorder)
        await asyncio.sleep(0.05)
        second.stop()
        await bench.recorder.take("stopped")
        assert isinstance(second, VllmEngine)
        assert second.gone
        await launcher.close()
        assert bench.recorder.reports == []

    bench.run(main())


def test_steps_of_a_length_the_wire_takes_in_pieces(bench):
    async def main() -> None:
        engine = await bench.engine()
        context = ids("large", 24_000)
        for i in range(6):
            engine.start(request(f"large{i}", context, 2))
        for i in range(6):
            end = await bench.recorder.end_of(f"large{i}")
            assert list(end.output_ids) == made_alone(context, 2, bench.weights)

    bench.run(main())


def test_tokens_of_a_payload_are_reported_as_they_come_and_its_end_is_told(bench):
    async def main() -> None:
        engine = await bench.engine()
        context, came = ids("payload", PROMPT), list[int]()
        payload = Generation(sampling={"temperature": 0.0}, on_tokens=came.extend)
        step = msgspec.structs.replace(request("payload", context, 300), payload=payload)
        engine.start(step)
        await until(lambda: bool(came))
        engine.abort(TrajectoryId("payload"))
        end = await bench.recorder.end_of("payload")
        assert not end.finished
        assert came == list(end.output_ids)[: len(came)]
        assert list(end.output_ids) == made_alone(context, end.tokens, bench.weights)
        assert end.extras == GenerationEnd(finish_reason="abort")
        left = msgspec.structs.replace(
            request("payload", grown(context, end), 300 - end.tokens), payload=payload
        )
        engine.start(left)
        end = await bench.recorder.end_of("payload")
        assert end.extras == GenerationEnd(finish_reason="length")
        engine.start(request("plain", context, 4))
        assert (await bench.recorder.end_of("plain")).extras is None

    bench.run(main())


def test_a_salt_separates_prefixes_and_moves_with_them(bench):
    async def main() -> None:
        source, target = await bench.begin(), await bench.begin()
        name, context = TrajectoryId("salted"), ids("salted", PROMPT)

        async def found(engine: EngineClient, salt: str, tokens: list[int]) -> int:
            payload = Generation(cache_salt=salt)
            step = msgspec.structs.replace(request("salted", tokens, 4), payload=payload)
            engine.start(step)
            return (await bench.recorder.end_of("salted")).cached_tokens

        assert await found(source, "a", context) == 0
        assert await found(source, "b", context) == 0
        assert await found(source, "a", context) >= PROMPT - 64
        assert source.export_kv(name, context)
        _, handle = await bench.recorder.take("exported")
        target.import_kv(name, GroupId("salted"), context, handle)
        _, placed = await bench.recorder.take("placed")
        assert placed.way == "kv"
        assert await found(target, "b", [*context, 300]) == 0
        assert await found(target, "a", [*context, 300]) == placed.tokens

    bench.run(main())


@pytest.mark.parametrize("sampling", [{"heat": 1}, {"n": 2}])
def test_sampling_that_vllm_would_ignore_is_refused(bench, sampling):
    async def main() -> None:
        engine = await bench.engine()
        step = request("refused", ids("refused", 64), 4)
        with pytest.raises(EngineRefusedError, match=next(iter(sampling))):
            engine.start(msgspec.structs.replace(step, payload=Generation(sampling=sampling)))

    bench.run(main())


def test_a_long_step_reports_its_progress_only_to_the_client(bench):
    async def main() -> None:
        engine = await bench.engine()
        engine.start(request("quiet", ids("quiet", 64), LONG_OUTPUT))
        await asyncio.sleep(0.6)
        assert bench.recorder.of(engine) == []
        engine.abort(TrajectoryId("quiet"))
        await bench.recorder.end_of("quiet")

    bench.run(main())
