"""Routers and training of a recommendation, in the words of each framework.

Names as read in November 2026: verl's `fully_async_policy`, SkyRL's `trainer.fully_async`, slime
and vime (`--actor-num-gpus-per-node`, `--colocate`), prime-rl's `deployment`, and NeMo-RL 0.8's
guide to asynchronous GRPO.
"""

from collections.abc import Mapping
from typing import Final

from heddle.planning.deployment import Deployment, LoopSplit

ROUTERS: Final[Mapping[str, str]] = {
    "verl": "consistent_hash",
    "verl-2026": "consistent_hash",
    "verl-margin": "consistent_hash",
    "sticky_least_loaded": "consistent_hash",
    "slime": "power_of_two",
    "slime-2026": "cache_aware",
}
"""The policy of vllm-router that places most nearly as a preset does."""
OF_SGLANG: Final = frozenset({"power_of_two", "cache_aware"})
"""Those that SGLang's router has, too."""
NODE: Final = 8


def router(plan: Deployment, key: str, *, sglang: bool = False) -> list[str]:
    """The policy of a framework's router under a key; where it has none, that it has none."""
    name = ROUTERS.get(plan.policy)
    if name is None or (sglang and name not in OF_SGLANG):
        return [f"# No router here is policy {plan.policy}: `heddle serve` is."]
    return [key.format(name)]


def verl_router(plan: Deployment, key: str) -> list[str]:
    """verl's own router for its own policies, Heddle's for others."""
    if plan.policy.startswith("verl") and "+" not in plan.policy:
        return []
    gpu = plan.profiles.classes[0].cluster.gpu
    return [
        f"# heddle.yaml: {{router_class: heddle_verl.Router, model: {plan.cluster.model}, "
        f"gpu: {gpu}, policy: {plan.policy}}}",
        f"{key}=heddle.yaml",
    ]


def _nodes(gpus: int) -> tuple[int, int]:
    """Nodes, and GPUs of each: as many as divide them."""
    each = next(n for n in range(NODE, 0, -1) if gpus % n == 0)
    return gpus // each, each


def verl_training(loop: LoopSplit) -> list[str]:
    """verl: of `main_ppo` where GPUs are shared, else of `fully_async_policy`."""
    if loop.colocated:
        return ["actor_rollout_ref.hybrid_engine=True"]
    found = ["actor_rollout_ref.hybrid_engine=False"]
    for side, gpus in (("trainer", loop.train_gpus), ("rollout", loop.rollout_gpus)):
        nodes, each = _nodes(gpus)
        found += [f"{side}.nnodes={nodes}", f"{side}.n_gpus_per_node={each}"]
    return [*found, f"async_training.staleness_threshold={loop.most_staleness}"]


def skyrl_training(loop: LoopSplit) -> list[str]:
    if loop.colocated:
        return ["trainer.placement.colocate_all=true"]
    nodes, each = _nodes(loop.train_gpus)
    return [
        "trainer.placement.colocate_all=false",
        f"trainer.placement.policy_num_nodes={nodes}",
        f"trainer.placement.policy_num_gpus_per_node={each}",
        f"trainer.fully_async.max_staleness_steps={loop.most_staleness}",
    ]


def slime_training(loop: LoopSplit) -> list[str]:
    """slime and vime; their `train_async.py` is one batch ahead."""
    nodes, each = _nodes(loop.train_gpus)
    return [
        f"--actor-num-nodes {nodes}",
        f"--actor-num-gpus-per-node {each}",
        *(["--colocate"] if loop.colocated else []),
    ]


def prime_rl_training(loop: LoopSplit) -> list[str]:
    """prime-rl, whose trainer and engines never share GPUs."""
    return [
        f"max_off_policy_steps = {loop.most_staleness}",
        "",
        "[deployment]",
        f"num_train_gpus = {loop.train_gpus}",
        f"num_infer_gpus = {loop.rollout_gpus}",
    ]


def nemo_rl_training(loop: LoopSplit) -> list[str]:
    at = "policy.generation.colocated"
    if loop.colocated:
        return [f"{at}.enabled=true"]
    nodes, each = _nodes(loop.rollout_gpus)
    found = [
        f"{at}.enabled=false",
        f"{at}.resources.num_nodes={nodes}",
        f"{at}.resources.gpus_per_node={each}",
    ]
    if loop.most_staleness:
        found += [
            "grpo.async_grpo.enabled=true",
            f"grpo.async_grpo.max_trajectory_age_steps={loop.most_staleness}",
        ]
    return found
