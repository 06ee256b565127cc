"""Settings to paste: what was recommended, in the words of each framework.

Names as read in November 2026, of `CHECKED`: those of configurations, as `block_loops` says; of
SGLang only published scripts.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Final

from heddle.cluster.config import ClusterConfig
from heddle.config_error import ConfigError
from heddle.planning.block_loops import (
    EPOCH_FILE,
    alike,
    epoch_lines,
    nemo_rl_training,
    prime_rl_training,
    router,
    skyrl_training,
    slime_training,
    synchronous_remark,
    verl_router,
    verl_training,
)
from heddle.planning.deployment import BY_RAY, GPUS_PER_NODE, Deployment, refuse_types
from heddle.planning.exported_drafts import sglang_options, speculative_config
from heddle.planning.exports import (
    PlacedEngine,
    batched_tokens,
    launch_arguments,
    placed_engines,
    refuse_roles,
    serve_arguments,
    uniform_engines,
)
from heddle_core.ids import EngineShape

if TYPE_CHECKING:
    from heddle.comparison.tuning import Variant


def blocks(plan: Deployment, named: str | None = None) -> dict[str, str]:
    """The settings by framework; without those that cannot have them.

    Raises:
        ConfigError: the framework that is `named` cannot.
    """
    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = block(plan, name)
        except ConfigError:
            if name == named:
                raise
    return found


def block(plan: Deployment, framework: str) -> str:
    """The settings for a framework.

    Raises:
        ConfigError: there is no such framework, or it cannot have them; the message has the reason.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"no settings are known for {framework!r}: take one of {', '.join(FRAMEWORKS)}"
        )
    check_engines(plan.cluster, framework)
    checked = [f"# Names of {CHECKED[framework]}."] if framework in CHECKED else []
    lines = [*checked, *FRAMEWORKS[framework](plan)]
    if plan.loop is not None:
        packed = ", of prompts of like earlier length" if plan.loop.packed else ""
        head = f"# {plan.loop.regime}, batches of {plan.loop.batch:,} samples{packed}"
        lines = [head, *synchronous_remark(plan.loop, framework), *lines]
        lines += epoch_lines(plan.loop, framework)
    return "\n".join(lines)


def check_engines(cluster: ClusterConfig, framework: str) -> None:
    """Refuse what no engines of a framework are.

    Raises:
        ConfigError: roles, or another engine.
    """
    refuse_roles(cluster, framework)
    if cluster.engine not in ENGINES.get(framework, ("vllm",)):
        others = [name for name, engines in ENGINES.items() if cluster.engine in engines]
        raise ConfigError(
            f"{framework} has no settings with cluster.engine = {cluster.engine!r}; "
            f"plan.framework may be {', '.join(others)}"
        )


def runnable(candidates: "Iterable[Variant]", framework: str | None) -> "list[Variant]":
    """Those whose engines a framework has; without one all.

    Raises:
        ConfigError: it has the engines of none.
    """
    if framework is None:
        return [*candidates]
    found, why = [], f"all engines of {framework} have one TP degree: take a policy such as verl"
    for each in candidates:
        try:
            check_engines(each.cluster, framework)
        except ConfigError as error:
            why = str(error)
        else:
            mixed = each.planned or bool(each.cluster.mix)
            found += [each] if framework in MIXED or not mixed else []
    if not found:
        raise ConfigError(f"plan.framework = {framework!r}: {why}")
    return found


def framework_of(policy: str) -> str:
    """The framework that a policy is of; that of Heddle's own is its gateway."""
    named = (name for name in FRAMEWORKS if re.match(rf"{name}\b", policy))
    return next(named, "heddle")


def _uniform(plan: Deployment) -> tuple[EngineShape, int, list[str]]:
    """The shape of all engines, their number, and what is to be said of it."""
    shape, makespan_s = uniform_engines(plan)
    (gpus,) = plan.pools.values()
    remarks = []
    if any(each != shape for each in plan.mix):
        mix = ", ".join(f"{count} x TP {each.tp}" for each, count in plan.mix.items())
        remarks.append(
            f"# {mix} needs `heddle serve`; of engines of one TP degree these are best "
            f"({makespan_s:,.0f} s)."
        )
    return shape, gpus // shape.gpus, remarks


def _verl(plan: Deployment) -> list[str]:
    shape, _, remarks = _uniform(plan)
    at, sglang = "actor_rollout_ref.rollout", plan.cluster.engine == "sglang"
    lines = [
        *([f"{at}.name=sglang"] if sglang else []),
        f"{at}.tensor_model_parallel_size={shape.tp}",
        f"{at}.max_num_seqs={plan.cluster.max_running}",
        f"{at}.max_num_batched_tokens={batched_tokens(plan, shape.gpu)}",
        f"{at}.enable_prefix_caching=True",
    ]
    drafts = speculative_config(plan, shape)
    if drafts is not None and sglang:
        options = (each.split() for each in sglang_options(plan, shape))
        keys = {name.removeprefix("--sglang-").replace("-", "_"): x for name, x in options}
        lines += [f"+{at}.engine_kwargs.sglang.{key}={value}" for key, value in keys.items()]
    elif drafts is not None:
        lines.append(f"+{at}.engine_kwargs.vllm.speculative_config='{_hydra(drafts)}'")
    training = verl_training(plan, shape.gpus) if plan.loop else []
    return [*remarks, *lines, *verl_router(plan, f"{at}.router_config_path"), *training]


def _skyrl(plan: Deployment) -> list[str]:
    shape, count, remarks = _uniform(plan)
    at = "generator.inference_engine"
    lines = [
        f"{at}.num_engines={count}",
        f"{at}.tensor_parallel_size={shape.tp}",
        f"{at}.max_num_seqs={plan.cluster.max_running}",
        f"{at}.max_num_batched_tokens={batched_tokens(plan, shape.gpu)}",
        f"{at}.enable_prefix_caching=true",
    ]
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        lines.append(f"{at}.speculative_config='{_hydra(drafts)}'")
    training = skyrl_training(plan.loop, shape.gpus) if plan.loop else []
    return [
        *remarks,
        *lines,
        *router(plan, "skyrl", f"{at}.router_init_kwargs.policy={{}}"),
        *training,
    ]


def _slime(plan: Deployment) -> list[str]:
    shape, _, remarks = _uniform(plan)
    own = ["--sglang-max-running-requests {}", "--router-policy {}"]
    return [*remarks, *_as_slime(plan, "slime", *own), *sglang_options(plan, shape)]


def _vime(plan: Deployment) -> list[str]:
    shape, _, remarks = _uniform(plan)
    lines = _as_slime(plan, "vime", "--vllm-max-num-seqs {}", "--vllm-router-policy {}")
    lines.append(f"--vllm-max-num-batched-tokens {batched_tokens(plan, shape.gpu)}")
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        lines.append(f"--vllm-speculative-config {shlex.quote(json.dumps(drafts))}")
    return [*remarks, *lines]


def _as_slime(plan: Deployment, name: str, slots: str, policy: str) -> list[str]:
    shape, count, _ = _uniform(plan)
    number = slots.format(plan.cluster.max_running)
    gpus, loop = count * shape.gpus, plan.loop
    parts = (gpus,) if loop is None or loop.colocated else (gpus, loop.train_gpus)
    of_node = alike(shape.gpus, *parts) or GPUS_PER_NODE
    return [
        *([f"--num-gpus-per-node {of_node}"] if of_node < GPUS_PER_NODE else []),
        f"--rollout-num-gpus {gpus}",
        f"--rollout-num-gpus-per-engine {shape.gpus}",
        number,
        f"{number.partition('-m')[0]}-server-concurrency {plan.cluster.max_running}",
        *router(plan, name, policy),
        *(slime_training(loop, shape.gpus) if loop else []),
    ]


def _prime_rl(plan: Deployment) -> list[str]:
    shape, count, remarks = _uniform(plan)
    loop, gpus = plan.loop, count * shape.gpus
    if loop is not None and loop.colocated:
        raise ConfigError("prime-rl: its trainer and engines do not share GPUs")
    parts = (gpus,) if loop is None else (gpus, loop.train_gpus)
    # Each node has a server, whose engines are its data-parallel ranks.
    own = min(gpus, alike(shape.gpus, *parts) or gpus)
    slots = count * plan.cluster.max_running
    lines = [
        "[inference.vllm]",
        f"tensor_parallel_size = {shape.tp}",
        f"data_parallel_size = {own // shape.gpus}",
        f"max_num_seqs = {plan.cluster.max_running}",
        f"max_num_batched_tokens = {batched_tokens(plan, shape.gpu)}",
    ]
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in drafts.items())
        lines.append(f"speculative_config = {{ {pairs} }}")
    lines += ["", "[inference.router]", *router(plan, "prime-rl", 'policy = "{}"')]
    lines += ["", "[orchestrator.concurrency]"]
    lines += [f"min_inflight = {slots}", f"max_inflight = {slots}"]
    return [*remarks, *lines, *prime_rl_training(loop, gpus, shape.gpus)]


def _nemo_rl(plan: Deployment) -> list[str]:
    shape, _, remarks = _uniform(plan)
    at = "policy.generation"
    lines = [
        f"{at}.vllm_cfg.tensor_parallel_size={shape.tp}",
        f"++{at}.vllm_kwargs.max_num_seqs={plan.cluster.max_running}",
        f"++{at}.vllm_kwargs.max_num_batched_tokens={batched_tokens(plan, shape.gpu)}",
    ]
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        lines.append(f"++{at}.vllm_kwargs.speculative_config='{_hydra(drafts)}'")
    training = nemo_rl_training(plan.loop, shape.gpus) if plan.loop else []
    return [*remarks, *lines, *training]


def _vllm(plan: Deployment) -> list[str]:
    return _started(plan, "vllm serve MODEL", serve_arguments)


def _sglang(plan: Deployment) -> list[str]:
    return _started(plan, "python3 -m sglang.launch_server --model-path MODEL", launch_arguments)


def _started(
    plan: Deployment, command: str, arguments: Callable[[Deployment, PlacedEngine], list[str]]
) -> list[str]:
    """A command for each engine; where there are several nodes, those of each under its name."""
    lines = []
    engines = placed_engines(plan)
    for node, own in groupby(engines, key=lambda engine: engine.node):
        lines += [f"# on {node}:"] if node != engines[0].node or node != engines[-1].node else []
        lines += [
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, each.devices))} {command} "
            f"{shlex.join(arguments(plan, each))}"
            for each in own
        ]
    return lines


def _heddle(plan: Deployment) -> list[str]:
    refuse_types(plan)
    engines = placed_engines(plan)
    tps = [engine.shape.tp for engine in engines]
    words = [
        *("heddle", "serve", "--engine", "vllm", "--model-dir", "MODEL"),
        *("--model", plan.cluster.model, "--gpu", plan.profiles.classes[0].cluster.gpu),
        *("--engines", str(len(tps)), "--tp"),
        str(tps[0]) if len(set(tps)) == 1 else ",".join(map(str, tps)),
        *("--max-running", str(plan.cluster.max_running), "--policy", plan.served_policy),
    ]
    if plan.drafts():
        narrow = min(plan.mix, key=lambda shape: shape.tp)
        words += ["--set", f"cluster.speculation={plan.drafts()[narrow]}"]
    if plan.loop is not None and plan.loop.packed:
        words += ["--set", f"serve.epoch_file={EPOCH_FILE}"]
    if plan.by_ray:
        return ["# On a Ray cluster of these nodes:", shlex.join([*words, "--set", BY_RAY])]
    return [shlex.join(words)]


def _hydra(config: Mapping[str, object]) -> str:
    return "{" + ",".join(f"{key}:{json.dumps(value)}" for key, value in config.items()) + "}"


FRAMEWORKS: Final[Mapping[str, Callable[[Deployment], list[str]]]] = {
    "verl": _verl,
    "skyrl": _skyrl,
    "slime": _slime,
    "vime": _vime,
    "prime-rl": _prime_rl,
    "nemo-rl": _nemo_rl,
    "vllm": _vllm,
    "sglang": _sglang,
    "heddle": _heddle,
}
"""What makes the settings, by framework."""
CHECKED: Final = {
    "verl": "verl 0.9.1",
    "skyrl": "SkyRL 0.3.0",
    "slime": "slime 0.4.0",
    "vime": "vime 50336822",
    "prime-rl": "prime-rl 0.9.0",
    "nemo-rl": "NeMo-RL 0.7.0",
    "vllm": "vLLM 0.24",
    "sglang": "InferenceX's published scripts of SGLang, no release checked",
}
"""What the names of a block were checked against; `heddle` has its own."""
MIXED: Final = frozenset({"vllm", "sglang", "heddle"})
"""Frameworks whose engines may have several TP degrees."""
ENGINES: Final = {"verl": ("vllm", "sglang"), "slime": ("vllm", "sglang"), "sglang": ("sglang",)}
"""Engines of a framework; others have vLLM's."""
