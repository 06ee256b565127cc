"""SkyRL's metrics of steps and trajectories; see `step_metrics` for the source."""

import re
from collections.abc import Mapping
from typing import Final

from heddle_trace.observed.schema import PhaseName
from heddle_trace.observed.step_metrics import Metrics, StepMetrics

_EACH: Final = "generate/trajectory_time_"
_MEANS: Final[Mapping[str, PhaseName]] = {"env_setup": "env_start", "llm": "llm", "env": "tool"}
_TIMERS: Final[Mapping[str, PhaseName]] = {
    "wait_for_generation_buffer": "rollout",
    **dict.fromkeys(("postprocess_generator_output", "convert_to_training_input"), "training"),
    **dict.fromkeys(("fwd_logprobs_values_reward", "apply_reward_kl_penalty"), "training"),
    **dict.fromkeys(("compute_advantages_and_returns", "run_training"), "training"),
    "train_critic_and_policy": "training",
    "sync_weights": "update",
    **dict.fromkeys(("save_checkpoints", "save_hf_model", "update_ref_with_policy"), "other"),
}


class SkyRl(StepMetrics):
    """A rollout is what its mean trajectory took, then the wait for the longest."""

    begins = re.compile(rb"Step (\d+):")
    total = "timing/step"

    def parts(self, seen: Metrics) -> Mapping[PhaseName, float]:
        """Timers of the trainer. What the mean trajectory took by no part is unaccounted."""
        rollout_s = seen.get("timing/generate", 0.0)
        mean_s = min(seen.get(f"{_EACH}completion_mean", rollout_s), rollout_s)
        means = {name: seen.get(f"{_EACH}{key}_mean", 0.0) for key, name in _MEANS.items()}
        found: dict[PhaseName, float] = {"rollout": mean_s, "tail": rollout_s - mean_s}
        if means["llm"] and sum(means.values()) <= mean_s * 1.01:
            found = {**means, "tail": rollout_s - mean_s}
        for key, name in _TIMERS.items():
            found[name] = found.get(name, 0.0) + seen.get(f"timing/{key}", 0.0)
        return found
