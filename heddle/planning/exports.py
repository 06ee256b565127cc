"""Files that start what `heddle plan` recommends: for verl, vLLM and the gateway.

The suffix of a file names what it is for. Formats: verl 0.9.1's Hydra configuration and the YAML of
its `rollout.router_config_path`; a bash script of `vllm serve`, or of
`sglang.launch_server` (options as in InferenceX's scripts); the TOML of `heddle serve`.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import DEFAULT_SETTINGS
from heddle.config_files import ConfigError
from heddle.planning.block_loops import verl_training
from heddle.planning.deployment import BY_RAY, GPUS_PER_NODE, Deployment, refuse_types
from heddle.planning.exported_drafts import sglang_options, speculative_config
from heddle.policy_inputs import NONE, PRIOR, SHIPPED
from heddle_core.ids import EngineShape

FIRST_PORT: Final = 8000
ROUTER: Final = "-router"
"""Ends the name, without suffix, of the second file for verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEngine:
    """An engine of a plan, and where it runs."""

    name: str
    shape: EngineShape
    node: str
    devices: tuple[int, ...]
    """CUDA devices of its node."""
    port: int


def exported_files(path: Path) -> tuple[Path, ...]:
    """The files that an export to `path` writes.

    Raises:
        ConfigError: the suffix names no kind of export.
    """
    if path.suffix not in _KINDS:
        raise ConfigError(
            f"--export {path}: {path.suffix or 'no suffix'} names no kind of export; name a file "
            "like verl.yaml, vllm.sh or gateway.toml"
        )
    return (path, _router_file(path)) if path.suffix == ".yaml" else (path,)


def export(plan: Deployment, path: Path) -> dict[Path, str]:
    """The contents of each file of `exported_files`.

    Raises:
        ConfigError: the plan's engines cannot run there; the message has the reason.
    """
    exported_files(path)
    refuse_roles(plan.cluster, f"--export {path}")
    if plan.cluster.engine == "sglang" and path.suffix != ".sh":
        raise ConfigError(
            f"--export {path}: Heddle's router and gateway need vLLM engines, cluster.engine is "
            "'sglang': name a file like sglang.sh, which starts them by sglang.launch_server"
        )
    return _KINDS[path.suffix](plan, path)


def refuse_roles(cluster: ClusterConfig, where: str) -> None:
    """Refuse engines that only prefill, which nothing that is written connects.

    Raises:
        ConfigError: there are some.
    """
    if cluster.roles:
        raise ConfigError(
            f"{where}: the plan has engines that only prefill, and no export connects "
            "them: plan without roles"
        )


def placed_engines(plan: Deployment) -> tuple[PlacedEngine, ...]:
    """All engines of a plan on nodes of `GPUS_PER_NODE`, the widest first.

    GPUs that the plan leaves over are engines of the least TP degree, as in a run.

    Raises:
        ConfigError: an engine has more GPUs than a node, or they do not fit on the nodes.
    """
    size = {
        f"{gpu}-{number}": min(GPUS_PER_NODE, gpus - number * GPUS_PER_NODE)
        for gpu, gpus in plan.pools.items()
        for number in range(-(-gpus // GPUS_PER_NODE))
    }
    free = dict(size)
    placed = []
    for number, (name, shape) in enumerate(plan.engines):
        node = _node(shape, free)
        first = size[node] - free[node]
        free[node] -= shape.gpus
        placed.append(
            PlacedEngine(
                name=name,
                shape=shape,
                node=node,
                devices=tuple(range(first, first + shape.gpus)),
                port=FIRST_PORT + number,
            )
        )
    return tuple(placed)


def _node(shape: EngineShape, free: Mapping[str, int]) -> str:
    for node, gpus in free.items():
        if node.rpartition("-")[0] == shape.gpu and gpus >= shape.gpus:
            return node
    raise ConfigError(
        f"--export: an engine of {shape} finds no node of {GPUS_PER_NODE} GPUs with {shape.gpus} "
        "free ones: plan with TP degrees that divide a node, as in --set "
        "cluster.tp_choices=[1,2,4,8]"
    )


def uniform_engines(plan: Deployment) -> tuple[EngineShape, float]:
    """The one shape for all engines that ends first, and when, in seconds.

    Raises:
        ConfigError: there are several GPU types, or no engines of one shape.
    """
    if len(plan.pools) > 1:
        raise ConfigError(
            "all engines of verl have one shape, and this plan has GPUs of "
            f"{', '.join(plan.pools)}: plan one class, or start each by vLLM's command"
        )
    return plan.uniform()


# -- verl ------------------------------------------------------------------------------------------


def _verl(plan: Deployment, path: Path) -> dict[Path, str]:
    shape, makespan_s = uniform_engines(plan)
    router = _router_file(path)
    (gpus,) = plan.pools.values()
    mix = [f"{count} x TP {each.tp}" for each, count in plan.mix.items()]
    about = [
        "verl's part of a plan by `heddle plan`; of your own configuration this replaces only",
        "what stands here. Start with it:",
        f"  python -m verl.trainer.main_ppo --config-dir={path.absolute().parent} "
        f"--config-name={path.stem} YOUR_KEYS...",
        "",
    ]
    engines = f"{gpus // shape.gpus} engines of {shape}"
    if plan.loop is None:
        about.append(f"{engines}: trainer.nnodes * trainer.n_gpus_per_node has to be {gpus}.")
    else:
        how = "" if plan.loop.colocated else ", by verl's fully_async_policy in place of main_ppo"
        about.append(f"{engines}, and for {plan.loop.regime}{how}, among YOUR_KEYS:")
        about += [f"  {line}" for line in verl_training(plan, shape.gpus)]
    if any(each != shape for each in plan.mix):
        about += [
            f"The plan is a mix, {', '.join(mix)}, simulated to end after "
            f"{plan.makespan_s:,.1f} s.",
            f"All engines of verl have one TP degree: TP {shape.tp} ends first, after "
            f"{makespan_s:,.1f} s.",
            "A mix needs engines of your own behind `heddle serve`.",
        ]
    rollout = {
        "name": "vllm",
        "tensor_model_parallel_size": shape.tp,
        **({"data_parallel_size": shape.dp} if shape.dp > 1 else {}),
        **({"expert_parallel_size": shape.gpus} if shape.ep > 1 else {}),
        "max_num_seqs": plan.cluster.max_running,
        "max_num_batched_tokens": batched_tokens(plan, shape.gpu),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "router_config_path": str(router.absolute()),
    }
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        rollout["engine_kwargs"] = {"vllm": {"speculative_config": drafts}}
    lines = [*_comments(about), "defaults:", "  - ppo_trainer", "  - _self_", ""]
    lines += ["actor_rollout_ref:", "  rollout:", *_yaml(rollout, "    ")]
    knowledge = {
        "router_class": "heddle_verl.Router",
        "model": _kept_path(plan.cluster.model),
        "gpu": plan.profiles.classes[0].cluster.gpu,
        **_knowledge(plan, plan.policy),
    }
    if len(plan.tasks) == 1:
        (knowledge["task"],) = plan.tasks
    head = ["The router that verl.yaml names: rollout.router_config_path."]
    return {
        path: "\n".join(lines) + "\n",
        router: "\n".join([*_comments(head), *_yaml(knowledge, "")]) + "\n",
    }


def _router_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}{ROUTER}{path.suffix}")


def _yaml(values: Mapping[str, object], indent: str) -> list[str]:
    return [f"{indent}{key}: {json.dumps(value)}" for key, value in values.items()]


# -- vLLM ------------------------------------------------------------------------------------------


def _vllm(plan: Deployment, path: Path) -> dict[Path, str]:
    engines = placed_engines(plan)
    nodes = list(dict.fromkeys(engine.node for engine in engines))
    several = len(nodes) > 1
    usage = f"MODEL=FOLDER_OR_NAME bash {path.name}{' NODE' if several else ''} [OPTIONS...]"
    if several:
        usage += f"; NODE is one of {', '.join(nodes)}"
    command = "sglang.launch_server" if plan.cluster.engine == "sglang" else "vllm serve"
    about = [
        f"Engines of a plan by `heddle plan`, for {plan.profiles.model}: {_mix(plan)}.",
        f"  {usage}",
        f"Further options go to every `{command}`. Logs: $LOGS, by default this folder.",
    ]
    if plan.cluster.engine == "vllm":
        about.append("vLLM requires a key from clients if VLLM_API_KEY is set.")
    lines = ["#!/usr/bin/env bash", *_comments(about), "set -euo pipefail"]
    lines += [f"usage() {{ echo {shlex.quote(f'usage: {usage}')} >&2; exit 2; }}"]
    lines += ['[ -n "${MODEL:-}" ] || usage']
    if several:
        lines += ["[ $# -ge 1 ] || usage", 'NODE="$1"', "shift"]
    lines += [
        f'HOST="${{HOST:-{"0.0.0.0" if several else "127.0.0.1"}}}"',
        'LOGS="${LOGS:-.}"',
        "trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT",
        "trap 'exit 143' TERM INT",
        "",
    ]
    if not several:
        lines += [_served(plan, engine) for engine in engines]
    else:
        lines.append('case "$NODE" in')
        for node in nodes:
            own = [f"    {_served(plan, engine)}" for engine in engines if engine.node == node]
            lines += [f"  {shlex.quote(node)})", *own, "    ;;"]
        lines += ["  *) usage ;;", "esac"]
    lines += ["status=0", 'for engine in $(jobs -p); do wait "$engine" || status=$?; done']
    return {path: "\n".join([*lines, 'exit "$status"']) + "\n"}


def serve_arguments(plan: Deployment, engine: PlacedEngine) -> list[str]:
    """Options of `vllm serve` for an engine, beside its model and host."""
    shape, drafts = engine.shape, speculative_config(plan, engine.shape)
    return [
        *("--served-model-name", plan.profiles.model),
        *("--port", str(engine.port)),
        *("--tensor-parallel-size", str(shape.tp)),
        *(("--data-parallel-size", str(shape.dp)) if shape.dp > 1 else ()),
        *(("--enable-expert-parallel",) if shape.ep > 1 else ()),
        *("--max-num-seqs", str(plan.cluster.max_running)),
        *("--max-num-batched-tokens", str(batched_tokens(plan, shape.gpu))),
        "--enable-prefix-caching",
        # The gateway's: token endpoints, and hits of the prefix cache.
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        *("--scheduling-policy", "priority"),
        *(() if drafts is None else ("--speculative-config", json.dumps(drafts))),
    ]


def launch_arguments(plan: Deployment, engine: PlacedEngine) -> list[str]:
    """Options of `sglang.launch_server` for an engine, beside its model and host."""
    shape = engine.shape
    return [
        *("--served-model-name", plan.profiles.model),
        *("--port", str(engine.port)),
        *("--tp-size", str(shape.gpus)),
        *(("--dp-size", str(shape.dp), "--enable-dp-attention") if shape.dp > 1 else ()),
        *(("--ep-size", str(shape.ep)) if shape.ep > 1 else ()),
        *("--max-running-requests", str(plan.cluster.max_running)),
        *("--chunked-prefill-size", str(batched_tokens(plan, shape.gpu))),
        *(word for each in sglang_options(plan, shape, "--") for word in each.split()),
    ]


def _served(plan: Deployment, engine: PlacedEngine) -> str:
    devices = ",".join(map(str, engine.devices))
    command, arguments = 'vllm serve "$MODEL"', serve_arguments
    if plan.cluster.engine == "sglang":
        command = 'python3 -m sglang.launch_server --model-path "$MODEL"'
        arguments = launch_arguments
    return (
        f'CUDA_VISIBLE_DEVICES={devices} {command} --host "$HOST" '
        f'{shlex.join(arguments(plan, engine))} "$@" > "$LOGS/{engine.name}.log" 2>&1 &'
    )


# -- the gateway -----------------------------------------------------------------------------------


def _gateway(plan: Deployment, path: Path) -> dict[Path, str]:
    refuse_types(plan)
    engines = placed_engines(plan)
    nodes = list(dict.fromkeys(engine.node for engine in engines))
    tps = [engine.shape.tp for engine in engines]
    if len(nodes) > 1 and len(set(tps)) > 1 and not plan.by_ray:
        raise ConfigError(
            f"--export {path}: `heddle serve` starts engines with cluster.attention_dp on one "
            f"machine only, and these GPUs are {len(nodes)}: plan {GPUS_PER_NODE} GPUs, or one TP "
            f"degree, as in --set cluster.tp_choices=[{uniform_engines(plan)[0].tp}]"
        )
    knowledge = _knowledge(plan, plan.served_policy)
    policy = knowledge.pop("policy")
    command = f"  heddle serve -c {path.name} --policy {policy}"
    about = [f"The gateway of a plan by `heddle plan`, for {plan.profiles.model}: {_mix(plan)}."]
    if len(nodes) == 1:
        about += ["It starts these engines itself:", f"{command} --model-dir FOLDER"]
    elif plan.by_ray:
        about += ["It starts these engines on a Ray cluster:"]
        about += [f"{command} --set {BY_RAY} --model-dir FOLDER"]
    if len(set(tps)) == 1:
        hosts = dict.fromkeys(nodes, "127.0.0.1") if len(nodes) == 1 else {n: n for n in nodes}
        urls = [f"--worker http://{hosts[engine.node]}:{engine.port}" for engine in engines]
        about += ["Or it uses those of vllm.sh:", f"{command} --tp {tps[0]} {' '.join(urls)}"]
    if len(nodes) > 1 and len(set(tps)) == 1:
        about.append(f"Put the addresses of your nodes in place of {', '.join(nodes)}.")
    cluster = plan.cluster
    values: dict[str, object] = {
        "model": _kept_path(cluster.model),
        "gpu": cluster.gpu,
        "gpus": sum(engine.shape.gpus for engine in engines),
        "tp": min(tps),
        "tp_choices": sorted(set(tps)),
        "max_running": plan.cluster.max_running,
    }
    if len(set(tps)) > 1:
        values["mix"] = tps
    if plan.drafts():
        narrow = min(plan.mix, key=lambda shape: shape.tp)
        values["speculation"] = str(plan.drafts()[narrow])
    if cluster.attention_dp > 1:
        values["attention_dp"] = cluster.attention_dp
    if cluster.expert_parallel != "auto":
        values["expert_parallel"] = cluster.expert_parallel
    lines = [*_comments(about), *_toml(knowledge)]
    lines += ["", "[policy]", *_toml({"preset": policy}), "", "[cluster]", *_toml(values)]
    # Without it, `heddle serve` has engines that run no model.
    lines += ["", "[runtime]", *_toml({"engine": "vllm"})]
    return {path: "\n".join(lines) + "\n"}


def _toml(values: Mapping[str, object]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


# -- common ----------------------------------------------------------------------------------------


def _knowledge(plan: Deployment, policy: str) -> dict[str, str]:
    """Policy, history and predictor, as configurations name them."""
    history, model = plan.history, plan.predictor_model
    if history != NONE and not history.startswith(f"{PRIOR}:"):
        history = str(Path(history).absolute())
    return {
        "policy": policy,
        "history": history,
        **({} if model == SHIPPED else {"predictor_model": str(Path(model).absolute())}),
    }


def _kept_path(model: str) -> str:
    """The name of a profile, or the absolute path of its file."""
    return str(Path(model).absolute()) if model.endswith(".json") else model


def batched_tokens(plan: Deployment, gpu: str) -> int:
    """Token budget of an engine's iteration."""
    profile = plan.profiles.of(gpu).profile
    return (profile.engine or DEFAULT_SETTINGS).max_batched_tokens


def _mix(plan: Deployment) -> str:
    return ", ".join(f"{count} x {shape}" for shape, count in plan.mix.items())


def _comments(lines: Sequence[str]) -> list[str]:
    return [" ".join(f"# {line}".splitlines()).rstrip() for line in lines]


_KINDS: Final[Mapping[str, Callable[[Deployment, Path], dict[Path, str]]]] = {
    ".yaml": _verl,
    ".sh": _vllm,
    ".toml": _gateway,
}
