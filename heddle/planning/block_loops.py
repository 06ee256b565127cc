"""Routers, training and epochs of a recommendation, in the words of each framework.

Names as read in November 2026: verl 0.9.1's `fully_async_policy`, SkyRL 0.3.0's `train/config`,
slime 0.4.0's `utils/arguments.py` and vime's, prime-rl 0.9.0's `configs` (pulls 3105, 3202, 3285),
and NeMo-RL 0.7.0's `algorithms/grpo.py` with its guide to asynchronous GRPO.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from heddle.planning.deployment import GPUS_PER_NODE, Deployment, LoopSplit

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
EPOCH_FILE: Final = "/shared/epoch.jsonl"
GATEWAY: Final = "# its router is the gateway: heddle serve --set serve.epoch_file={file}"
CUSTOM: Final = """\
# custom.yaml: {{heddle_epoch_file: {file}, heddle_plan: {plan}}}
--rollout-shuffle --custom-config-path custom.yaml
--data-source-path heddle.epochs.slime."""
EPOCHS: Final[Mapping[str, str]] = {
    "verl": """\
data.custom_cls.path=pkg://heddle_verl.epochs
data.custom_cls.name=EpochDataset
data.shuffle=false
data.dataloader_num_workers=0
+data.heddle.epoch_file={file}
+data.heddle.plan={plan}
+actor_rollout_ref.rollout.agent.agent_loop_manager_class=heddle_verl.agent_loops_tq.ManagerTQ""",
    "skyrl": f"""{GATEWAY}
trainer.override_entrypoint=heddle.epochs.skyrl
data.heddle.epoch_file={{file}}
data.heddle.plan={{plan}}""",
    "slime": f"""{CUSTOM}SlimeDataSource
--rollout-all-samples-process-path heddle.epochs.slime.write_lengths""",
    "vime": f"{GATEWAY}\n{CUSTOM}VimeDataSource\n--router-policy consistent_hash",
    "heddle": "",
}
"""What makes batches of prompts of like length."""
VERL: Final = "trainer.nnodes={train_nodes} trainer.n_gpus_per_node={train}"
VERL_ASYNC: Final = (
    "rollout.nnodes={own_nodes} rollout.n_gpus_per_node={own} data.train_batch_size=0 "
    "actor_rollout_ref.actor.ppo_mini_batch_size={groups} async_training.require_batches=1 "
    "async_training.trigger_parameter_sync_step={every} async_training.staleness_threshold={bound} "
    "async_training.concurrent_samples_per_replica={concurrent}"
)
SKYRL: Final = "trainer.placement.colocate_all={shared}" + "".join(
    f" trainer.placement.{role}_num_nodes={{train_nodes}}"
    f" trainer.placement.{role}_num_gpus_per_node={{train}}"
    for role in ("policy", "ref")
)
SKYRL_ASYNC: Final = (
    " trainer.train_batch_size={groups} trainer.policy_mini_batch_size={groups} "
    "trainer.fully_async.enabled=true trainer.fully_async.max_staleness_steps={most} "
    "trainer.fully_async.num_parallel_generation_workers={workers}"
)
NEMO_RL: Final = (
    "cluster.num_nodes={all_nodes} cluster.gpus_per_node={all} "
    "policy.generation.colocated.enabled={shared}"
)
NEMO_RL_SPLIT: Final = (
    " policy.generation.colocated.resources.num_nodes={part_nodes}"
    " policy.generation.colocated.resources.gpus_per_node={part}"
)
NEMO_RL_ASYNC: Final = (
    " policy.generation.vllm_cfg.async_engine=true loss_fn.use_importance_sampling_correction=true"
    " grpo.async_grpo.enabled=true grpo.async_grpo.max_trajectory_age_steps={most}"
)


def routes(framework: str | None, policy: str) -> bool:
    """Whether a framework's own router places as a policy does."""
    if framework in (None, "heddle"):
        return True
    if framework == "verl":
        return policy.startswith("verl") and "+" not in policy
    return policy in ROUTERS and (framework != "slime" or ROUTERS[policy] in OF_SGLANG)


def router(plan: Deployment, framework: str, key: str) -> list[str]:
    """The policy of a framework's router under a key; where it has none, that it has none."""
    if not routes(framework, plan.policy):
        return [f"# No router here is policy {plan.policy}: `heddle serve` is."]
    return [key.format(ROUTERS[plan.policy])]


def verl_router(plan: Deployment, key: str) -> list[str]:
    """verl's own router for its own policies, Heddle's for others and where lengths are kept."""
    packed = plan.loop is not None and plan.loop.packed and plan.loop.colocated
    if routes("verl", plan.policy) and not packed:
        return []
    gpu = plan.profiles.classes[0].cluster.gpu
    kept = f", ends: announced, epoch_file: {EPOCH_FILE}" if packed else ""
    return [
        f"# heddle.yaml: {{router_class: heddle_verl.Router, model: {plan.cluster.model}, "
        f"gpu: {gpu}, policy: {plan.policy}{kept}}}",
        f"{key}=heddle.yaml",
    ]


def node_gpus(tp: int, *parts: int) -> int | None:
    """GPUs of a node: a multiple of the TP degree that divides each part; None: there is none."""
    sizes = (n for n in range(GPUS_PER_NODE, 0, -1) if n % tp == 0)
    return next((n for n in sizes if not any(gpus % n for gpus in parts)), None)


def alike(tp: int, *parts: int) -> int | None:
    """The same where small parts share one node."""
    return sum(parts) if sum(parts) <= GPUS_PER_NODE else node_gpus(tp, *parts)


def _filled(lines: Sequence[str], loop: LoopSplit, tp: int, slots: int = 1) -> list[str]:
    """Lines with the numbers of a loop whose engines have `tp` GPUs; comments without them."""
    parts = (loop.train_gpus,) if loop.colocated else (loop.rollout_gpus, loop.train_gpus)
    train_tp = math.lcm(loop.train_tp, tp) if loop.colocated else loop.train_tp
    sizes = {
        "train": (node_gpus(train_tp, loop.train_gpus), loop.train_gpus),
        "own": (node_gpus(tp, loop.rollout_gpus), loop.rollout_gpus),
        "all": ((each := alike(tp, *parts)), sum(parts)),
        "part": (each and min(each, loop.rollout_gpus), loop.rollout_gpus),
    }
    known = {name: size for name, (size, _) in sizes.items() if size}
    known |= {f"{name}_nodes": gpus // size for name, (size, gpus) in sizes.items() if size}
    bounds = {"bound": f"{loop.staleness_bound:g}", "most": loop.most_staleness}
    values = {
        **known,
        **(bounds if loop.bounded else {}),
        "shared": str(loop.colocated).lower(),
        "groups": loop.groups,
        "every": loop.update_every,
        "workers": loop.groups * (loop.most_staleness + 1),
        # Of prompts, as all that verl's asynchronous trainer counts.
        "concurrent": -(-slots * loop.groups // loop.batch),
    }
    found = []
    for line in lines:
        head, _, key = line.partition("{")
        if key and key[:-1] not in values:
            why = f"{loop.regime} has no bound" if key[:-1] in bounds else no_nodes(tp, *parts)
            line = f"# yours, as {why}: {head}"
        found.append(line.format(**values))
    return found


def no_nodes(tp: int, *parts: int) -> str:
    gpus = " and ".join(map(str, parts))
    return f"{gpus} GPUs are no whole nodes of at most {GPUS_PER_NODE} at TP {tp}"


def verl_training(plan: Deployment, tp: int) -> list[str]:
    """verl: of `main_ppo` where GPUs are shared, else of `fully_async_policy`."""
    assert plan.loop is not None, "called for a loop"
    shared = plan.loop.colocated
    words = [f"actor_rollout_ref.hybrid_engine={shared}", *VERL.split()]
    words += [] if shared else VERL_ASYNC.split()
    return _filled(words, plan.loop, tp, plan.cluster.max_running)


def skyrl_training(loop: LoopSplit, tp: int) -> list[str]:
    return _filled((SKYRL + ("" if loop.on_policy else SKYRL_ASYNC)).split(), loop, tp)


def slime_training(loop: LoopSplit, tp: int) -> list[str]:
    """slime and vime."""
    lines = ["--actor-num-nodes {train_nodes}", "--actor-num-gpus-per-node {train}"]
    lines += ["--colocate"] if loop.colocated else []
    if loop.started_groups > loop.groups:
        lines += [f"--over-sampling-batch-size {loop.started_groups}", "--partial-rollout"]
    elif not loop.on_policy and not loop.colocated:
        lines += ["# by train_async.py, which is one batch ahead"]
    return _filled(lines, loop, tp)


def nemo_rl_training(loop: LoopSplit, tp: int) -> list[str]:
    words = NEMO_RL + ("" if loop.colocated else NEMO_RL_SPLIT)
    return _filled((words + ("" if loop.on_policy else NEMO_RL_ASYNC)).split(), loop, tp)


def prime_rl_training(loop: LoopSplit | None, gpus: int, tp: int) -> list[str]:
    """prime-rl, whose trainer and engines never share GPUs: by default all are of one node."""
    train_gpus = 0 if loop is None else loop.train_gpus
    each = alike(tp, gpus, *([train_gpus] if train_gpus else []))
    found = [] if loop is None else ["", "[orchestrator]"]
    found += [] if loop is None else _filled(["max_off_policy_steps = {most}"], loop, tp)
    if each is None:
        return [*found, "", f"# nodes are yours, as {no_nodes(tp, gpus, train_gpus)}"]
    several = ['type = "multi_node"', f"gpus_per_node = {each}"] if each < gpus + train_gpus else []
    if several:
        found += ["", "[inference.deployment]", *several, f"num_nodes = {gpus // each}"]
    if loop is not None:
        of, size = ("nodes", each) if several else ("gpus", 1)
        found += ["", "[deployment]", *several]
        found += [f"num_train_{of} = {train_gpus // size}", f"num_infer_{of} = {gpus // size}"]
    return [*found, "# SLURM starts several nodes: add [slurm]."] if several else found


def synchronous_remark(loop: LoopSplit, framework: str) -> list[str]:
    """That a framework has no such regime where rollout and training share GPUs."""
    if not loop.colocated or loop.on_policy or framework not in ("verl", "skyrl", "nemo-rl"):
        return []
    return [f"# Synchronous, and so slower than {loop.regime}: a batch has only its own prompts."]


def epoch_lines(loop: LoopSplit, framework: str) -> list[str]:
    """What makes batches of prompts of like length; a comment where nothing does."""
    if not loop.packed:
        return []
    synchronous = {"verl": loop.colocated, "skyrl": loop.on_policy}
    if not synchronous.get(framework, framework in EPOCHS):
        return ["# Here nothing makes batches of prompts of like length: their order is random."]
    return EPOCHS[framework].format(file=EPOCH_FILE, plan=loop.epoch_plan).splitlines()
