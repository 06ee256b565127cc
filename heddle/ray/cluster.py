"""Connection to a Ray cluster, and shares of its nodes for the engines of a run."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from heddle.config_error import ConfigError
from heddle.hardware import hardware
from heddle.signals import handlers_kept
from heddle_runtime.nodes.agent import run_agent
from heddle_runtime.nodes.connections import Address
from heddle_runtime.vllm.checks import EngineSetupError, check_engines
from heddle_runtime.vllm.settings import VllmSettings

RESERVE_S = 30.0
"""How long Ray may take to reserve what a node is said to have free."""
FREED_S = 3.0
"""How long Ray may take to count as free what tasks that have ended had."""
AGAIN_S = 1.0
"""Seconds between two attempts to find a node in place of one that died."""


def connected(option: str) -> Any:
    """The library, connected to the cluster of RAY_ADDRESS, to this machine's, or to a new one.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers; the message names `option`.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"{option} needs Ray: pip install 'heddle-rl[ray]'") from None
    if not ray.is_initialized():
        try:
            with handlers_kept():
                ray.init(log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            raise ConfigError(
                f"no Ray cluster answers at {where} ({error}): start one with `ray start --head`, "
                "or unset RAY_ADDRESS to use this machine alone"
            ) from None
    return ray


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What engines need of each node."""

    resource: str
    """Ray's name of what an engine has one of for each rank: GPU or CPU."""
    settings: VllmSettings | None
    """Of vLLM; None: engines that keep time only."""
    largest_tokens: int


class RayNode:
    """A placement group on one node, with an actor in it; implements `ReservedNode`."""

    def __init__(self, ray: Any, group: Any, needs: EngineNeeds, tps: Sequence[int]) -> None:
        """`tps`: TP degrees of the engines that begin here."""
        self.size = sum(tps)
        self.name = "?"
        self.facts: Mapping[str, Any] = {}
        """Of its machine."""
        self._ray, self._group, self._needs, self._tps = ray, group, needs, tps
        self._actor: Any = None
        self._devices: tuple[str, ...] = ()

    def check(self) -> None:
        """Start the actor, and check vLLM and the model on its node.

        Raises:
            EngineSetupError: the message names the node.
        """
        self._take(self._ray.get(self._started().check.remote(self._needs, self._tps)))

    async def find(self) -> tuple[str, ...]:
        """Wait until the actor runs, on another node if the first has died."""
        while self._actor is None:
            called = self._started().describe.remote()
            try:
                self._take(await asyncio.wrap_future(called.future()))
            except self._ray.exceptions.RayError:
                self._actor = None
                await asyncio.sleep(AGAIN_S)
        return self._devices

    async def run_agent(self, address: Address, token: bytes, connection: bytes) -> None:
        """Run an agent in the actor, to its end."""
        called = self._actor.run_agent.remote(address, token, connection)
        try:
            await asyncio.wrap_future(called.future())
        except self._ray.exceptions.RayError:
            self._actor = None
            raise

    def close(self) -> None:
        """Give back what was reserved."""
        with suppress(Exception):
            if self._actor is not None:
                self._ray.kill(self._actor)
            self._ray.util.remove_placement_group(self._group)

    def _started(self) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # All of the bundle is the actor's, so that Ray gives it the GPUs.
        amount = {"num_gpus" if self._needs.resource == "GPU" else "num_cpus": self.size}
        made = self._ray.remote(_NodeActor).options(
            **{"num_cpus": 0} | amount,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, 0),
        )
        self._actor = made.remote()
        return self._actor

    def _take(self, facts: Mapping[str, Any]) -> None:
        self.name, self.facts = facts["name"], facts
        self._devices = tuple(facts["devices"])
        if facts["fault"]:
            raise EngineSetupError(f"node {self.name}: {facts['fault']}")


class _NodeActor:
    """Runs on a node: starts an agent for the driver."""

    def describe(self) -> dict[str, Any]:
        """Facts of the node."""
        import ray

        context = ray.get_runtime_context()
        return {
            "name": f"{socket.gethostname()}-{context.get_node_id()[:6]}",
            "address": ray.util.get_node_ip_address(),
            "devices": [str(device) for device in ray.get_gpu_ids()],
            "hardware": hardware(),
            "fault": "",
        }

    def check(self, needs: EngineNeeds, tps: Sequence[int]) -> dict[str, Any]:
        """The same after the checks of engines: the first fault, or which vLLM it is."""
        facts = self.describe()
        if needs.settings is None:
            return facts
        try:
            checked = check_engines(
                needs.settings,
                tp_degrees=tps,
                largest_tokens=needs.largest_tokens,
                devices=facts["devices"],
            )
        except EngineSetupError as error:
            return {**facts, "fault": str(error)}
        installed = checked.installed
        return {
            **facts,
            "vllm": installed.release,
            "platform": installed.platform,
            "notes": list(checked.notes),
        }

    def run_agent(self, address: Address, token: bytes, connection: bytes) -> None:
        """Serve the driver until it is gone."""
        import ray

        run_agent(address, token, connection, ray.util.get_node_ip_address())


@dataclass(frozen=True, slots=True)
class RayNodes:
    """What a run has of a cluster."""

    nodes: Sequence[RayNode]
    host: str
    """Address of this machine, at which its nodes reach it."""


@contextmanager
def reserved_nodes(needs: EngineNeeds, tps: Sequence[int]) -> Iterator[RayNodes]:
    """Reserve shares of nodes for engines of these TP degrees, and check the nodes.

    Raises:
        ConfigError: Ray is missing, no cluster answers, or it has not enough.
        EngineSetupError: engines cannot run on a node.
    """
    ours = not _initialized()
    ray = connected("--launcher ray")
    nodes: list[RayNode] = []
    try:
        for share in _free_shares(ray, tps, needs.resource):
            group = ray.util.placement_group([{needs.resource: sum(share)}], strategy="STRICT_PACK")
            nodes.append(RayNode(ray, group, needs, share))
            if not group.wait(RESERVE_S):
                raise ConfigError(
                    f"--launcher ray: Ray reserved no node with {sum(share)} {needs.resource}s in "
                    f"{RESERVE_S:g} s; others use them. Free some, or ask for fewer engines"
                )
        for node in nodes:
            node.check()
        yield RayNodes(nodes, ray.util.get_node_ip_address())
    finally:
        for node in nodes:
            node.close()
        if ours:
            ray.shutdown()


def _initialized() -> bool:
    with suppress(ModuleNotFoundError):
        import ray

        return bool(ray.is_initialized())
    return False


def _free_shares(ray: Any, tps: Sequence[int], resource: str) -> list[list[int]]:
    """Shares of what is free, or of what is free a little later."""
    end_s = time.monotonic() + FREED_S
    while True:
        try:
            return shares(tps, _free(ray, resource), resource)
        except ConfigError:
            if time.monotonic() >= end_s:
                raise
        time.sleep(AGAIN_S)


def _free(ray: Any, resource: str) -> list[int]:
    """How much of a resource each node has free, the most first."""
    from ray._private.state import available_resources_per_node

    by_node = available_resources_per_node()
    return sorted((int(each.get(resource, 0)) for each in by_node.values()), reverse=True)


def shares(tps: Sequence[int], free: Sequence[int], resource: str) -> list[list[int]]:
    """Divide engines, by their TP degrees, among nodes: the widest first, on few nodes.

    `free` is by node, the most first. Returns the engines of each node that gets some.

    Raises:
        ConfigError: an engine finds no node.
    """
    left, found = list(free), [list[int]() for _ in free]
    for tp in sorted(tps, reverse=True):
        for node, there in enumerate(left):
            if there >= tp:
                left[node] -= tp
                found[node].append(tp)
                break
        else:
            degrees = ",".join(map(str, sorted(tps, reverse=True)))
            nodes = ", ".join(map(str, free)) or "none"
            raise ConfigError(
                f"--launcher ray: engines of TP {degrees} need {sum(tps)} {resource}s, each engine "
                f"on one node, and the nodes of the cluster have free: {nodes}. Add nodes, wait "
                "until others have ended, or ask for fewer or narrower engines"
            )
    return [share for share in found if share]
