"""From a configuration to engines on the nodes of a Ray cluster."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.engines import check_available, vllm_settings
from heddle.ray.cluster import EngineNeeds, RayNodes, reserved_nodes
from heddle.ray.fake_engine import fake_speed
from heddle.setup import RunSetup
from heddle_core.ids import EngineShape
from heddle_rollout.clock import Clock
from heddle_runtime.nodes.launcher import NodeLauncher
from heddle_runtime.vllm.settings import VllmSettings, installed_vllm


@contextmanager
def nodes_for(
    config: RunConfig, largest_tokens: int, planned_tps: Sequence[int]
) -> Iterator[RayNodes | None]:
    """Reserve nodes for the engines of a run, for as long as the block lasts; None: none wanted.

    Raises:
        ConfigError: the cluster has not enough, or the settings do not go with one.
        EngineSetupError: engines cannot run on a node.
    """
    if config.runtime.launcher == "local":
        yield None
        return
    _check(config)
    cluster, fake = config.cluster, config.runtime.engine == "fake"
    installed = installed_vllm()
    on_gpus = not fake and installed is not None and installed.platform == "cuda"
    needs = EngineNeeds(
        resource="GPU" if on_gpus else "CPU",
        settings=None if fake else vllm_settings(config),
        largest_tokens=largest_tokens,
    )
    tps = (*(cluster.mix or (cluster.tp,) * cluster.engines), *cluster.prefill_tps)
    with reserved_nodes(needs, tps) as nodes:
        widest = max(node.size for node in nodes.nodes)
        beyond = [tp for tp in planned_tps if tp > widest]
        if beyond:
            rest = [tp for tp in planned_tps if tp <= widest]
            raise ConfigError(
                f"the policy may start engines of TP {max(beyond)}, and no node has more than "
                f"{widest} {needs.resource}s for this run: leave that degree out with "
                f"--set cluster.tp_choices={rest}"
            )
        yield nodes


def _check(config: RunConfig) -> None:
    """Refuse what goes with one machine only."""
    runtime, cluster = config.runtime, config.cluster
    if runtime.engine == "http":
        raise ConfigError(
            "--launcher ray starts engines, and --engine http takes those that run already: leave "
            "one of them out"
        )
    if runtime.engines_per_gpu > 1:
        raise ConfigError(
            "--launcher ray gives each engine GPUs of its own: leave runtime.engines_per_gpu out"
        )
    if cluster.pool or cluster.attention_dp > 1 or (cluster.roles and runtime.engine == "fake"):
        raise ConfigError(
            "--launcher ray starts engines of one GPU class without attention data parallelism, "
            "and fake ones without roles: leave cluster.pool, cluster.attention_dp and "
            "cluster.roles out"
        )
    if runtime.engine == "fake" and cluster.host_kv != "none":
        raise ConfigError(
            "--launcher ray starts fake engines without KV in host memory: leave "
            "cluster.host_kv out"
        )
    check_available(config)


def node_facts(nodes: RayNodes) -> dict[str, Any]:
    """Facts of the nodes for the manifest."""
    shown: list[Mapping[str, Any]] = [
        {"name": node.name, "size": node.size, "hardware": node.facts["hardware"]}
        for node in nodes.nodes
    ]
    found: dict[str, Any] = {"launcher": "ray", "nodes": shown}
    first = nodes.nodes[0].facts
    if "vllm" in first:
        noted = [f"node {node.name}: {n}" for node in nodes.nodes for n in node.facts["notes"]]
        found |= {"vllm": first["vllm"], "platform": first["platform"], "notes": noted}
    return found


def open_nodes(setup: RunSetup, nodes: RayNodes, logs: Path, clock: Clock) -> NodeLauncher:
    """Return a launcher of the engines of a run, inside a running event loop."""
    runtime = setup.config.runtime
    if runtime.engine == "vllm":
        return NodeLauncher(
            vllm_settings(setup.config),
            nodes.nodes,
            host=nodes.host,
            log_dir=logs,
            start_limit_s=runtime.start_limit_s,
        )
    simulation = setup.simulation

    def speed(shape: EngineShape) -> dict[str, Any]:
        # As in a simulation: engines that start before the first dispatch take no time of the run.
        start_s = 0.0 if clock.frozen else simulation.start_s(shape)
        return fake_speed(simulation, shape, start_s=start_s, time_scale=runtime.time_scale)

    return NodeLauncher(
        VllmSettings(model_dir=""),
        nodes.nodes,
        host=nodes.host,
        log_dir=logs,
        start_limit_s=runtime.start_limit_s,
        module="heddle.ray.fake_engine",
        simulated=speed,
    )
