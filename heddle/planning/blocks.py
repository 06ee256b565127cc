"""Settings to paste: what was recommended, in the words of each framework.

Names as read in November 2026, of `CHECKED`: verl and vLLM as installed, vime's
`slime/backends/vllm_utils/arguments.py`, prime-rl's `inference.py` and its guide to
`inference.vllm_extra`; of others only published scripts.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Final

from heddle.config_error import ConfigError
from heddle.planning.block_loops import (
    nemo_rl_training,
    prime_rl_training,
    router,
    skyrl_training,
    slime_training,
    verl_router,
    verl_training,
)
from heddle.planning.deployment import Deployment
from heddle.planning.exported_drafts import sglang_options, speculative_config
from heddle.planning.exports import (
    batched_tokens,
    launch_arguments,
    placed_engines,
    refuse_roles,
    serve_arguments,
    uniform_engines,
)
from heddle_core.ids import EngineShape


def blocks(plan: Deployment) -> dict[str, str]:
    """The settings by framework; without those that cannot have them."""
    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = block(plan, name)
        except ConfigError:
            continue
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
    refuse_roles(plan, framework)
    engine = plan.cluster.engine
    if engine not in ENGINES.get(framework, ("vllm",)):
        others = [name for name, engines in ENGINES.items() if engine in engines]
        raise ConfigError(
            f"{framework} has no settings with cluster.engine = {engine!r}; plan.framework may be "
            f"{', '.join(others)}"
        )
    checked = [f"# Names of {CHECKED[framework]}."] if framework in CHECKED else []
    lines = [*checked, *FRAMEWORKS[framework](plan)]
    if plan.loop is not None:
        packed = ", of prompts of like earlier length" if plan.loop.epoch_plan else ""
        lines = [f"# {plan.loop.regime}, batches of {plan.loop.batch:,} samples{packed}", *lines]
    return "\n".join(lines)


def framework_of(policy: str) -> str:
    """The framework that a policy is of; that of Heddle's own is its gateway."""
    name = policy.partition("+")[0].partition("-")[0]
    return name if name in FRAMEWORKS else "heddle"


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
    training = verl_training(plan.loop) if plan.loop else []
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
    training = skyrl_training(plan.loop) if plan.loop else []
    return [*remarks, *lines, *router(plan, f"{at}.router_init_kwargs.policy={{}}"), *training]


def _slime(plan: Deployment) -> list[str]:
    shape, count, remarks = _uniform(plan)
    lines = [
        f"--rollout-num-gpus {count * shape.gpus}",
        f"--rollout-num-gpus-per-engine {shape.gpus}",
        f"--sglang-max-running-requests {plan.cluster.max_running}",
        f"--sglang-server-concurrency {plan.cluster.max_running}",
    ]
    training = slime_training(plan.loop) if plan.loop else []
    routing = router(plan, "--router-policy {}", sglang=True)
    return [*remarks, *lines, *routing, *sglang_options(plan, shape), *training]


def _vime(plan: Deployment) -> list[str]:
    shape, count, remarks = _uniform(plan)
    lines = [
        f"--rollout-num-gpus {count * shape.gpus}",
        f"--rollout-num-gpus-per-engine {shape.gpus}",
        f"--vllm-max-num-seqs {plan.cluster.max_running}",
        f"--vllm-max-num-batched-tokens {batched_tokens(plan, shape.gpu)}",
        f"--vllm-server-concurrency {plan.cluster.max_running}",
    ]
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        lines.append(f"--vllm-speculative-config {shlex.quote(json.dumps(drafts))}")
    training = slime_training(plan.loop) if plan.loop else []
    return [*remarks, *lines, *router(plan, "--vllm-router-policy {}"), *training]


def _prime_rl(plan: Deployment) -> list[str]:
    shape, count, remarks = _uniform(plan)
    lines = [
        "[inference.parallel]",
        f"tp = {shape.tp}",
        f"dp = {count}",
        "",
        "[inference.vllm_extra]",
        f"max_num_seqs = {plan.cluster.max_running}",
        f"max_num_batched_tokens = {batched_tokens(plan, shape.gpu)}",
    ]
    drafts = speculative_config(plan, shape)
    if drafts is not None:
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in drafts.items())
        lines.append(f"speculative_config = {{ {pairs} }}")
    lines += ["", "[inference.deployment]", *router(plan, 'router_policy = "{}"')]
    lines += ["", "[orchestrator]", f"max_inflight_rollouts = {count * plan.cluster.max_running}"]
    if plan.loop is not None:
        if plan.loop.colocated:
            raise ConfigError("prime-rl: its trainer and engines do not share GPUs")
        lines += prime_rl_training(plan.loop)
    return [*remarks, *lines]


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
    training = nemo_rl_training(plan.loop) if plan.loop else []
    return [*remarks, *lines, *training]


def _vllm(plan: Deployment) -> list[str]:
    return [
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, engine.devices))} vllm serve MODEL "
        f"{shlex.join(serve_arguments(plan, engine))}"
        for engine in placed_engines(plan)
    ]


def _sglang(plan: Deployment) -> list[str]:
    return [
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, engine.devices))} "
        f"python3 -m sglang.launch_server --model-path MODEL "
        f"{shlex.join(launch_arguments(plan, engine))}"
        for engine in placed_engines(plan)
    ]


def _heddle(plan: Deployment) -> list[str]:
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
    "skyrl": "SkyRL's published scripts of 2026, no release checked",
    "slime": "slime's published scripts of 2026, no release checked",
    "vime": "vime 50336822",
    "prime-rl": "prime-rl 0051cbb6",
    "nemo-rl": "NeMo-RL's published scripts of 2026, no release checked",
    "vllm": "vLLM 0.24",
    "sglang": "InferenceX's published scripts of SGLang, no release checked",
}
"""What the names of a block were checked against; `heddle` has its own."""
ENGINES: Final = {"verl": ("vllm", "sglang"), "slime": ("vllm", "sglang"), "sglang": ("sglang",)}
"""Engines of a framework; others have vLLM's."""
