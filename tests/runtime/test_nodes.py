"""Engines on nodes, over TCP: agents in processes of their own on this machine, without Ray."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.processes import descendants, wait_until_gone
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_runtime.nodes.connections import (
    HANDSHAKE_S,
    Address,
    Listener,
    RefusedError,
    connect,
    new_id,
)
from heddle_runtime.nodes.launcher import NodeLauncher
from heddle_runtime.process.child import group_members
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.settings import VllmSettings
from tests.rollout.contract import PROMPT, Bench, EngineContract, Recorder, grown, ids, request
from tests.runtime.test_process_contract import made_alone
from tests.runtime.vllm_bench import murder

HOST = "127.0.0.1"
AGENT = """
import sys
from heddle_runtime.nodes.agent import run_agent
port, token, connection = sys.argv[1:]
run_agent(("127.0.0.1", int(port)), bytes.fromhex(token), bytes.fromhex(connection), "127.0.0.1")
"""


class LocalNode:
    """A "node" whose agent is a process here; implements `ReservedNode`."""

    def __init__(self, name: str, size: int, *, found: int = 99) -> None:
        self.name, self.size = name, size
        self.process: asyncio.subprocess.Process | None = None
        self._found = found
        """How often there is one."""

    async def find(self) -> tuple[str, ...]:
        self._found -= 1
        if self._found < 0:
            await asyncio.get_running_loop().create_future()
        return ()

    async def run_agent(self, address: Address, token: bytes, connection: bytes) -> None:
        words = (str(address[1]), token.hex(), connection.hex())
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, *words)
        await self.process.wait()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)


def settings(folder: Path) -> VllmSettings:
    return VllmSettings(model_dir=str(folder), kv_transfer="nixl", progress_s=0.02)


def launcher_on(folder: Path, *nodes: LocalNode, start_limit_s: float = 60.0) -> NodeLauncher:
    return NodeLauncher(
        settings(folder),
        nodes,
        host=HOST,
        log_dir=folder / "logs",
        start_limit_s=start_limit_s,
        module="tests.runtime.counting_process",
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("nodes")
    loop = asyncio.new_event_loop()

    async def opened() -> tuple[NodeLauncher, Recorder]:
        return launcher_on(folder, LocalNode("a", 4), LocalNode("b", 4)), Recorder()

    launcher, recorder = loop.run_until_complete(opened())
    try:
        yield Bench(
            loop=loop,
            launcher=launcher,
            recorder=recorder,
            gpu="cpu",
            makes_tokens=True,
            fail=murder,
            weights=str(folder),
        )
    finally:
        loop.run_until_complete(launcher.close())
        loop.close()


class TestNodeEngine(EngineContract):
    pass


def spec(name: str, tp: int = 1) -> EngineSpec:
    return EngineSpec(engine=EngineId(name), shape=EngineShape("cpu", tp), max_running=4)


async def begun(launcher: NodeLauncher, recorder: Recorder, name: str) -> VllmEngine:
    engine = launcher.start(spec(name), recorder)
    await recorder.take("ready")
    return engine


def test_the_death_of_a_node_fails_its_engines_and_their_tokens_go_on_elsewhere(tmp_path):
    async def main() -> None:
        nodes, recorder = (LocalNode("a", 1), LocalNode("b", 1)), Recorder()
        launcher = launcher_on(tmp_path, *nodes)
        first = await begun(launcher, recorder, "e0")
        other = await begun(launcher, recorder, "e1")
        agents = {node.process.pid: node for node in nodes if node.process is not None}
        stat = Path(f"/proc/{first.pid}/stat").read_text()
        doomed = agents[int(stat.rpartition(")")[2].split()[1])]
        context = ids("moved", PROMPT)
        first.start(request("moved", context, 400))
        while not first._running.get(TrajectoryId("moved")).made:
            await asyncio.sleep(0.01)
        pid = first.pid
        assert pid is not None
        doomed.kill()
        reason, salvaged = await recorder.take("failed")
        assert reason == f"node {doomed.name} died, or its connection broke"
        end = salvaged["moved"]
        assert 0 < end.tokens < 400
        other.start(request("moved", grown(context, end), 400 - end.tokens))
        rest = await recorder.end_of("moved")
        assert [*end.output_ids, *rest.output_ids] == made_alone(context, 400, str(tmp_path))
        assert wait_until_gone([pid]) == []
        await launcher.close()

    asyncio.run(main())


def test_another_node_takes_the_place_of_one_that_died(tmp_path):
    async def main() -> None:
        node, recorder = LocalNode("a", 1), Recorder()
        launcher = launcher_on(tmp_path, node)
        await begun(launcher, recorder, "e0")
        node.kill()
        await recorder.take("failed")
        again = await begun(launcher, recorder, "e0+1")
        again.start(request("again", ids("again", PROMPT), 8))
        assert (await recorder.end_of("again")).tokens == 8
        await launcher.close()

    asyncio.run(main())


def test_an_engine_that_fits_no_node_fails_with_the_reason(tmp_path):
    async def main() -> None:
        nodes, recorder = (LocalNode("a", 1), LocalNode("b", 1)), Recorder()
        launcher = launcher_on(tmp_path, *nodes)
        launcher.start(spec("wide", 2), recorder)
        reason, _ = await recorder.take("failed")
        assert reason == "no node has 2 free, as TP 2 needs on one node"
        await launcher.close()

    asyncio.run(main())


def test_an_engine_that_waits_for_a_node_fails_after_its_limit(tmp_path):
    async def main() -> None:
        launcher = launcher_on(tmp_path, LocalNode("a", 1, found=0), start_limit_s=0.05)
        recorder = Recorder()
        launcher.start(spec("late"), recorder)
        reason, _ = await recorder.take("failed")
        assert "no node has 1 free" in reason
        await launcher.close()

    asyncio.run(main())


def test_nothing_is_left_after_the_end(tmp_path):
    async def main() -> None:
        others, recorder = descendants(), Recorder()
        launcher = launcher_on(tmp_path, LocalNode("a", 2))
        engine = await begun(launcher, recorder, "e0")
        assert engine.pid in descendants()
        os.kill(engine.pid, signal.SIGTERM)
        reason, _ = await recorder.take("failed")
        assert reason == "killed by SIGTERM"
        await begun(launcher, recorder, "e1")
        await launcher.close()
        assert wait_until_gone([p for p in descendants() if p not in others]) == []
        assert group_members(engine.pid) == []

    asyncio.run(main())


@pytest.mark.parametrize("wrong", ["token", "connection"])
def test_a_peer_without_the_token_or_an_expected_connection_is_refused(wrong):
    async def main() -> None:
        token, expected = os.urandom(32), new_id()
        listener = Listener(HOST, token)
        came: list[socket.socket] = []
        listener.expect(expected, came.append)
        mine = os.urandom(32) if wrong == "token" else token
        connection = new_id() if wrong == "connection" else expected
        with pytest.raises(RefusedError, match="another token"):
            await connect(listener.address, mine, connection)
        assert came == []
        # The right one is still awaited, and comes once.
        (await connect(listener.address, token, expected)).close()
        assert len(came) == 1
        came[0].close()
        with pytest.raises(RefusedError):
            await connect(listener.address, token, expected)
        listener.close()

    asyncio.run(main())


def test_a_driver_without_the_token_is_refused_by_a_node():
    async def main() -> None:
        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(32))
            await reader.readexactly(80)
            writer.write(bytes(32))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(lie, HOST, 0) as server:
            address = server.sockets[0].getsockname()
            with pytest.raises(RefusedError, match="does not have the token"):
                await connect(address, os.urandom(32), new_id())

    asyncio.run(main())


def test_garbage_and_silence_do_not_disturb_the_others():
    async def main() -> None:
        token, expected = os.urandom(32), new_id()
        listener = Listener(HOST, token)
        came: list[socket.socket] = []
        listener.expect(expected, came.append)
        with (
            socket.create_connection(listener.address),
            socket.create_connection(listener.address) as noisy,
        ):
            noisy.sendall(b"\x80\x04pickle" * 100)
            (await connect(listener.address, token, expected)).close()
        assert len(came) == 1
        came[0].close()
        listener.close()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_listener_that_closes_closes_connections_without_a_proof():
    async def main() -> None:
        listener = Listener(HOST, os.urandom(32))
        reader, writer = await asyncio.open_connection(*listener.address)
        assert await reader.read(1), "its nonce"
        listener.close()
        async with asyncio.timeout(HANDSHAKE_S / 2):
            while await reader.read(64):
                pass
        writer.close()

    asyncio.run(main())


def test_the_output_of_an_engine_that_broke_is_with_the_driver(tmp_path):
    async def main() -> None:
        recorder = Recorder()
        launcher = NodeLauncher(
            settings(tmp_path),
            [LocalNode("a", 1)],
            host=HOST,
            log_dir=tmp_path / "logs",
            module="tests.runtime.no_such_module",
        )
        launcher.start(spec("e0"), recorder)
        reason, _ = await recorder.take("failed")
        assert "exit status 1" in reason
        assert "no_such_module" in (tmp_path / "logs" / "e0.log").read_text()
        await launcher.close()

    asyncio.run(main())
