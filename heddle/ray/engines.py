"""`vllm serve` on the nodes of a Ray cluster, one for each engine; they are used by their URLs."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.engines import check_available, vllm_settings
from heddle.hardware import hardware
from heddle.ray.cluster import connected, is_connected
from heddle_runtime.process.guard import STOP_S
from heddle_runtime.vllm.checks import EngineSetupError, check_engines
from heddle_runtime.vllm.serve import serve_arguments, serve_environment
from heddle_runtime.vllm.settings import VllmSettings, installed_vllm

COMMAND = "heddle_runtime.vllm.command"
"""The module that runs vLLM's command."""
RESERVE_S = 120.0
"""How long Ray may take to find nodes for all engines and to start a process on each."""
RETRY_S = 0.5
TAIL_BYTES = 2000
"""Of an engine's log in the message about its end."""
SOURCES = str(Path(__file__).resolve().parents[2])
"""Where this package is: an actor may have found it by other means than its processes would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    settings: VllmSettings
    tp: int
    max_running: int
    largest_tokens: int
    key: str
    options: tuple[str, ...]
    """Further ones of `vllm serve`."""
    module: str
    start_limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngines:
    """Engines of a run that are ready."""

    urls: tuple[str, ...]
    tps: tuple[int, ...]
    key: str
    """That their clients need."""
    facts: Mapping[str, Any]
    """For the manifest."""


@contextmanager
def ray_engines(
    config: RunConfig,
    largest_tokens: int,
    planned_tps: Sequence[int] = (),
    options: Sequence[str] = (),
) -> Iterator[RayEngines | None]:
    """Start the engines of a run, for as long as the block lasts; None: they are started elsewhere.

    `largest_tokens` is the largest context; `planned_tps` are the TP degrees that the policy may
    choose. `options` go to each `vllm serve`.

    Raises:
        ConfigError: Ray is missing, the cluster has not enough, or the settings do not go with one.
        EngineSetupError: an engine cannot run on its node, or does not become ready.
    """
    if config.runtime.launcher == "local":
        yield None
        return
    _check(config, planned_tps)
    ours = not is_connected()
    ray = connected("runtime.launcher = ray")
    actors: list[Any] = []
    try:
        tps, orders = _orders(config, largest_tokens, tuple(options))
        _place(ray, tps, orders, actors)
        try:
            yield _started(ray, tps, orders[0].key, actors)
        finally:
            with suppress(Exception):
                stopping = [actor.stop.remote() for actor in actors]
                ray.wait(stopping, num_returns=len(actors), timeout=2 * STOP_S)
    finally:
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)
        if ours:
            ray.shutdown()


def _check(config: RunConfig, planned_tps: Sequence[int]) -> None:
    """Refuse what `vllm serve` on nodes does not have."""
    runtime, cluster = config.runtime, config.cluster
    if runtime.engine != "vllm":
        raise ConfigError(
            "runtime.launcher = ray starts vLLM on the nodes of a cluster: --engine "
            f"{runtime.engine} does not go with it"
        )
    if runtime.engines_per_gpu > 1 or runtime.pin_s:
        raise ConfigError(
            "runtime.launcher = ray: leave runtime.engines_per_gpu and runtime.pin_s out"
        )
    if cluster.pool or cluster.attention_dp > 1 or cluster.roles or cluster.failures:
        raise ConfigError(
            "runtime.launcher = ray starts engines of one GPU class and role: leave cluster.pool, "
            "cluster.attention_dp, cluster.roles and cluster.failures out"
        )
    if planned_tps:
        raise ConfigError(
            f"runtime.launcher = ray starts all engines before the policy runs, and "
            f"{config.policy.preset} may start others: take "
            f"{config.policy.preset}+fixed+keep_engines"
        )
    check_available(config)


def _orders(
    config: RunConfig, largest_tokens: int, options: tuple[str, ...]
) -> tuple[tuple[int, ...], list[EngineOrder]]:
    """TP degrees and orders, the widest engine first: so they fit the fewest nodes."""
    cluster, key = config.cluster, secrets.token_urlsafe(24)
    tps = tuple(sorted(cluster.mix or (cluster.tp,) * cluster.engine_count, reverse=True))
    orders = [
        EngineOrder(
            settings=vllm_settings(config),
            tp=tp,
            max_running=cluster.max_running,
            largest_tokens=largest_tokens,
            key=key,
            options=options,
            module=COMMAND,
            start_limit_s=config.runtime.start_limit_s,
        )
        for tp in tps
    ]
    return tps, orders


def _place(ray: Any, tps: Sequence[int], orders: Sequence[EngineOrder], actors: list[Any]) -> None:
    """Append an actor for each engine, once all have nodes; those made so far if they do not."""
    installed = installed_vllm()
    resource = "GPU" if installed is not None and installed.platform == "cuda" else "CPU"
    there = int(ray.cluster_resources().get(resource, 0))
    degrees = ",".join(map(str, tps))
    needs = f"runtime.launcher = ray: engines of TP {degrees} need {sum(tps)} {resource}s"
    if sum(tps) > there:
        raise ConfigError(f"{needs}, and the cluster has {there}: add nodes, or take fewer engines")
    for order in orders:
        amount = {"num_cpus": 0} | {f"num_{resource.lower()}s": order.tp}
        actors.append(ray.remote(_EngineActor).options(max_concurrency=2, **amount).remote(order))
    _, waiting = ray.wait(
        [actor.node.remote() for actor in actors], num_returns=len(actors), timeout=RESERVE_S
    )
    if waiting:
        raise ConfigError(
            f"{needs}, each engine on one node, and Ray found no node for {len(waiting)} of them "
            f"in {RESERVE_S:g} s: free some, add nodes, or take narrower engines"
        )


def _started(ray: Any, tps: tuple[int, ...], key: str, actors: Sequence[Any]) -> RayEngines:
    try:
        started = [_sound(facts) for facts in ray.get([actor.start.remote() for actor in actors])]
        for facts in ray.get([actor.ready.remote() for actor in actors]):
            _sound(facts)
    except ray.exceptions.RayError as error:
        raise EngineSetupError(f"Ray could not start an engine: {error}") from None
    shown = [{name: each[name] for name in ("node", "url", "log", "hardware")} for each in started]
    first = started[0]
    return RayEngines(
        urls=tuple(each["url"] for each in started),
        tps=tps,
        key=key,
        facts={
            "launcher": "ray",
            "nodes": shown,
            "vllm": first["vllm"],
            "platform": first["platform"],
            "notes": list(dict.fromkeys(note for each in started for note in each["notes"])),
        },
    )


def _sound(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    if facts["fault"]:
        raise EngineSetupError(f"node {facts['node']}: {facts['fault']}")
    return facts


class _EngineActor:
    """Runs on a node, with the cores or GPUs of one engine, and ends the engine with itself."""

    def __init__(self, order: EngineOrder) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._url, self._log = "", Path()

    def node(self) -> str:
        import ray

        return f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"

    def start(self) -> dict[str, Any]:
        """Check what the engine needs and start it; return its facts, or its fault."""
        import ray

        order, host = self._order, ray.util.get_node_ip_address()
        try:
            checked = check_engines(
                order.settings,
                tp_degrees=(order.tp,),
                largest_tokens=order.largest_tokens,
                devices=[str(device) for device in ray.get_gpu_ids()],
            )
        except EngineSetupError as error:
            return {"node": self.node(), "fault": str(error)}
        platform = checked.installed.platform
        port, kv_port = _free_ports(host)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._log = Path(tempfile.gettempdir()) / f"heddle-vllm-{os.getpid()}.log"
        command = [sys.executable, "-m", "heddle_runtime.process.guard"]
        command += [sys.executable, "-m", order.module]
        command += serve_arguments(
            order.settings, platform, tp=order.tp, max_running=order.max_running
        )
        command += ["--host", host, "--port", str(port), *order.options]
        variables = serve_environment(platform, host=host, kv_port=kv_port, key=order.key)
        paths = [SOURCES, *filter(None, [variables.get("PYTHONPATH")])]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**variables, "PYTHONPATH": os.pathsep.join(paths)},
            )
        return {
            "node": self.node(),
            "fault": "",
            "url": self._url,
            "log": str(self._log),
            "hardware": hardware(),
            "vllm": checked.installed.release,
            "platform": platform,
            "notes": list(checked.notes),
        }

    def ready(self) -> dict[str, Any]:
        """Wait until the engine answers; return its fault if it does not."""
        assert self._process is not None, "it was started"
        until_s = time.monotonic() + self._order.start_limit_s
        fault = f"vllm serve did not answer within {self._order.start_limit_s:g} s"
        while time.monotonic() < until_s:
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=RETRY_S):
                return {"node": self.node(), "fault": ""}
            if self._process.poll() is not None:
                fault = f"vllm serve ended with status {self._process.returncode}"
                break
            time.sleep(RETRY_S)
        said = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        return {"node": self.node(), "fault": f"{fault}; {self._log} ends with:\n{said}"}

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(2 * STOP_S)


def _free_ports(host: str) -> tuple[int, int]:
    """Two ports of an address of this machine that are free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one, socket.socket(family) as other:
        one.bind((host, 0))
        other.bind((host, 0))
        return one.getsockname()[1], other.getsockname()[1]
