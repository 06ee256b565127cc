"""The servers that are compared: `vllm serve` on CPU, and `heddle serve` in front of it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from heddle_runtime.process.child import group_members, unlink_shared_memory
from heddle_runtime.vllm.command import PARENT
from tests.app.gateways import gateway
from tests.gateway.corpus.groups import MODEL, Group
from tests.gateway.corpus.limits import CONTEXT
from tests.runtime.vllm_bench import no_vllm

START_LIMIT_S: Final = 600.0
_KILL_GROUP: Final = 'read -r line; kill -s KILL -- "-$1"'
"""Of a shell: waits until whoever holds the other end of its input is gone."""
_FORKING: Final = "tests.gateway.corpus.forking_vllm"
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The engine computes in its own process: one less to start, and to wait for in each iteration.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def lacking() -> str:
    """Why `vllm serve` cannot be started here; "" if it can."""
    names = ("uvicorn", "prometheus_fastapi_instrumentator", "jmespath", "watchfiles")
    missing = [name for name in names if find_spec(name) is None]
    return no_vllm() or (f"vllm serve needs {', '.join(missing)}" if missing else "")


class Engine:
    """One `vllm serve` on CPU; its log is in `folder`."""

    def __init__(self, group: Group, model: Path, folder: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"vllm-{port}.log"
        command = [sys.executable, "-m", _FORKING, PARENT, str(os.getpid())]
        command += ["serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", MODEL, "--generation-config", "vllm"]
        command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
        command += ["--kv-cache-memory-bytes", str(32 << 20), "--block-size", "32"]
        command += ["--enforce-eager", "--enable-scale-out", *group.options]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        # The first process dies with this one, but vLLM's engine would outlive both.
        self._watcher = subprocess.Popen(
            ("sh", "-c", _KILL_GROUP, "sh", str(self.pid)),
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of its first process, and of the group of all."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ended, or took too long; names its log.
        """
        until_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"vllm serve ended: see {self.log}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not start in {START_LIMIT_S:g} s: see {self.log}")

    def close(self) -> None:
        """End all of its processes."""
        self._watcher.kill()
        self._watcher.communicate()
        unlink_shared_memory(group_members(self._process.pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        until_s = time.monotonic() + 20.0
        while group_members(self._process.pid) and time.monotonic() < until_s:
            self._process.poll()
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def engines(group: Group, folder: Path) -> Iterator[list[Engine]]:
    """Start the engines of a group one after the other, and end them."""
    model = group.make_model(folder)
    with ExitStack() as stack:
        started: list[Engine] = []
        for _ in range(group.engines):
            engine = Engine(group, model, folder)
            stack.callback(engine.close)
            engine.wait_until_ready()
            started.append(engine)
        yield started


@contextmanager
def gateway_before(group: Group, folder: Path) -> Iterator[tuple[str, str]]:
    """Give the URL of an engine, and that of a gateway in front of the group's engines."""
    with engines(group, folder) as each:
        workers = [word for engine in each for word in ("--worker", engine.url)]
        with gateway(folder, *workers) as served:
            yield each[0].url, served.url


@contextmanager
def nothing_before(group: Group, folder: Path) -> Iterator[tuple[str, str]]:
    """Give the URL of an engine, and that of another, or its own again if the group has one."""
    with engines(group, folder) as each:
        yield each[0].url, each[-1].url
