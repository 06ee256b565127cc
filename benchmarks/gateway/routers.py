"""The routers that are compared: how each is started, and which endpoint takes which body."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gateway.load import Address, MakeBody
from gateway.processes import free_port
from gateway.prompts import chat_body, completion_body, sglang_body, token_ids_body

PROMPT_IDS = 16_384
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE, SGLANG = "/inference/v1/generate", "/generate"
MOST_STREAMS = 4_096
_LITELLM_KEY = "sk-bench"
_CHAT_STREAM = partial(chat_body, stream=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A program in front of engines."""

    name: str
    version: str
    command: Callable[[int, Sequence[int], Path], Sequence[str]]
    """Of its port, the engines' ports and a folder of its own."""
    health: str
    ids_path: str
    make_ids: MakeBody
    stream_path: str = CHAT
    make_stream: MakeBody = _CHAT_STREAM
    headers: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    load: str = ""
    """Path of the count of requests that it has taken in; empty: those that engines hold."""

    def chat(self, port: int) -> Address:
        """Where chat bodies of 2 KiB go."""
        return Address(port, CHAT, chat_body, self.headers)

    def ids(self, port: int) -> Address:
        """Where token ids go."""
        return Address(port, self.ids_path, self.make_ids, self.headers)

    def streams(self, port: int) -> Address:
        """Where streams are opened."""
        return Address(port, self.stream_path, self.make_stream, self.headers)


def direct() -> Router:
    """The first mock engine itself."""
    make_ids = partial(token_ids_body, tokens=PROMPT_IDS)
    return Router(
        name="mock engine",
        version="",
        command=lambda port, engines, folder: (),
        health="/health",
        ids_path=GENERATE,
        make_ids=make_ids,
        stream_path=GENERATE,
        make_stream=partial(token_ids_body, tokens=512, stream_tokens=100_000),
    )


def heddle(policy: str, version: str) -> Router:
    """`heddle serve` under a policy."""

    def command(port: int, engines: Sequence[int], folder: Path) -> Sequence[str]:
        workers = [word for port in engines for word in ("--worker", f"http://127.0.0.1:{port}")]
        slots = MOST_STREAMS // len(engines)
        return (
            *(sys.executable, "-m", "heddle.cli", "serve", "--policy", policy, *workers),
            *("--port", str(port), "--set", "serve.max_open=16384", "--out", str(folder)),
            *("--set", f"cluster.max_running={slots}"),
        )

    mine = direct()
    return Router(
        name=f"heddle serve, {policy}",
        version=version,
        command=command,
        health="/health",
        ids_path=mine.ids_path,
        make_ids=mine.make_ids,
        stream_path=mine.stream_path,
        make_stream=mine.make_stream,
        load="/load",
    )


def bare() -> Router:
    """The calls of `heddle serve` alone, by its HTTP code."""
    mine, root = direct(), Path(__file__).parents[2]
    return Router(
        name="the same calls alone",
        version="this HTTP code",
        command=lambda port, engines, folder: (
            *(sys.executable, "-m", "gateway.bare", str(port)),
            *map(str, engines),
        ),
        health="/health",
        ids_path=mine.ids_path,
        make_ids=mine.make_ids,
        stream_path=mine.stream_path,
        make_stream=mine.make_stream,
        environment={"PYTHONPATH": f"{root}:{root / 'benchmarks'}"},
    )


def _launch_router(
    python: str, module: str, policy: str
) -> Callable[[int, Sequence[int], Path], Sequence[str]]:
    """The command of both routers in Rust, one of which was made from the other."""

    def command(port: int, engines: Sequence[int], folder: Path) -> Sequence[str]:
        return (
            *(python, "-m", f"{module}.launch_router", "--worker-urls", *_urls(engines)),
            *("--policy", policy, "--port", str(port), "--log-level", "error"),
            *("--max-concurrent-requests", "16384", "--queue-size", "16384"),
            *("--prometheus-port", str(free_port())),
        )

    return command


def vllm_router(python: str, version: str) -> Router:
    """The router of vllm-project, sticky to sessions."""
    return Router(
        name="vllm-router, sticky_least_loaded",
        version=version,
        command=_launch_router(python, "vllm_router", "sticky_least_loaded"),
        health="/health",
        ids_path=COMPLETIONS,
        make_ids=partial(completion_body, tokens=PROMPT_IDS),
    )


def sglang_router(python: str, version: str) -> Router:
    return Router(
        name="sglang-router, round_robin",
        version=version,
        command=_launch_router(python, "sglang_router", "round_robin"),
        health="/health",
        ids_path=SGLANG,
        make_ids=partial(sglang_body, tokens=PROMPT_IDS),
    )


def litellm(python: str, version: str) -> Router:
    """LiteLLM's proxy with one worker."""

    def command(port: int, engines: Sequence[int], folder: Path) -> Sequence[str]:
        config = folder / f"litellm-{port}.json"  # which is YAML too
        backends = [
            {
                "model_name": "mock",
                "litellm_params": {
                    "model": "hosted_vllm/mock",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for url in _urls(engines)
        ]
        settings = {"master_key": _LITELLM_KEY}
        config.write_text(json.dumps({"model_list": backends, "general_settings": settings}))
        program = str(Path(python).with_name("litellm"))
        return (program, "--config", str(config), "--port", str(port), "--num_workers", "1")

    return Router(
        name="LiteLLM, 1 worker",
        version=version,
        command=command,
        health="/health/liveliness",
        ids_path=COMPLETIONS,
        make_ids=partial(completion_body, tokens=PROMPT_IDS),
        headers=f"Authorization: Bearer {_LITELLM_KEY}\r\n".encode(),
        environment={"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


_PEERS: dict[str, Callable[[str, str], Router]] = {
    "vllm-router": vllm_router,
    "sglang-router": sglang_router,
    "litellm": litellm,
}
VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "litellm": "1.109.1"}
"""Releases that the results were made with."""


def find_peers(folders: Sequence[Path]) -> tuple[list[Router], list[str]]:
    """Return the peers of some virtual environments, and the names of those that are in none."""
    found: dict[str, Router] = {}
    for folder in folders:
        python = str(folder / "bin" / "python")
        for name, make in _PEERS.items():
            look = f"import importlib.metadata as m; print(m.version('{name}'))"
            done = subprocess.run([python, "-c", look], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found.setdefault(name, make(python, done.stdout.strip()))
    return [found[name] for name in _PEERS if name in found], [n for n in _PEERS if n not in found]


def _urls(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]
