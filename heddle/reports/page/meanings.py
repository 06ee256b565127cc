"""What columns of the page mean, in a sentence each; docs/run-directory.md defines the figures."""

from collections.abc import Mapping
from typing import Final


def _spreads(name: str, unit: str, of: str) -> dict[str, str]:
    """Meanings of a figure's mean, median and 99th percentile."""
    words = {"mean": "Mean", "p50": "Median", "p99": "99th percentile"}
    return {f"{name}_{key}{unit}": f"{word} of {of}." for key, word in words.items()}


FIGURES: Final[Mapping[str, str]] = {
    "arrived": "Trajectories that arrived.",
    "completed": "Trajectories that ended by themselves.",
    "truncated": "Trajectories cut off at a limit of tokens or steps.",
    "failed": "Trajectories that ended with a failure.",
    "cancelled": "Trajectories cancelled by the rollout.",
    "makespan_s": "From the first arrival to the end of the last trajectory.",
    "throughput_tok_s": "Output tokens of all trajectories over the makespan.",
    "gpu_hours": "All GPUs over the makespan, busy or not; of a loop until its last training.",
    "dollars": "GPU-hours times the price of each GPU class.",
    **_spreads("completion", "_s", "the ends of trajectories since the first arrival"),
    **_spreads("duration", "_s", "the seconds from a trajectory's own arrival to its end"),
    "tool_s": "Seconds in tools, summed over trajectories.",
    **_spreads("queueing", "_s", "the seconds from a runnable step to its first prefill"),
    "queueing_trajectory_mean_s": "Mean over trajectories of the seconds that their steps waited.",
    "queueing_longest_s": "Seconds that the trajectory with the most output tokens waited.",
    "engine_queued_mean_s": "Mean seconds of a step in the engine's own queue.",
    **_spreads("ttft", "_s", "the seconds from dispatch to first token"),
    **_spreads("tpot", "_ms", "the milliseconds per output token after the first"),
    "interference_factor": "Decode seconds over those that the same tokens take alone in a batch.",
    "interference_reference": "Whence the time alone: the profile, or the best seen in the run.",
    "prefix_hit": "Share of prompt tokens found in a prefix cache.",
    "prefix_hit_resumed": "The same without the first dispatch of each trajectory.",
    "utilisation": "GPU-seconds of engines with a dispatch over those of all engines.",
    "engines": "Engines that were ready at some time.",
    "engine_failures": "Engines that failed.",
    "dispatches": "Steps sent to engines; a step that is preempted or lost is sent again.",
    "dispatches_lost": "Dispatches that ended with the failure of their engine.",
    "steps": "Steps of all trajectories.",
    "journal_rows": "Events and commands in the journal.",
    "migrations": "Moves of a trajectory to another engine.",
    "migrations_ok": "Moves whose KV arrived.",
    "migrated_kv_tokens": "Tokens of KV that were moved.",
    "prefilled_elsewhere": "Steps whose prefill ran on an engine that only prefills.",
    "predictions": "Requests to a prediction service.",
    "predictions_late": "Requests answered after the tool of their step had ended, or never.",
    "preemptions": "Preemptions by the policy or by an engine.",
    "preemptions_policy": "Steps that the policy took from an engine.",
    "preemptions_engine": "Steps whose KV an engine dropped and prefilled again.",
    "filled_*": "Values that the trace lacks and a rule filled in.",
    "dropped_over_capacity": "Trajectories left out: no engine has KV for them.",
    "output_tokens": "Output tokens of all trajectories.",
    "late_max_s": "Largest lateness of a call of a clock in real time.",
    "late_mean_s": "Mean lateness of the calls of a clock in real time.",
    "late_per_trajectory_s": "Lateness of all calls, for each trajectory.",
    "late_share": "The larger of the two, largest and for each trajectory, over the makespan.",
    "comparable": "Whether the clock was so little late that the times may be compared.",
    "other_cpus": "CPUs that other processes kept busy while the engines ran, on average.",
    "machine_cpus": "CPUs of the machine.",
    "finished_so_far": "Trajectories that had ended when the journal broke off.",
    "seconds_so_far": "Seconds until the journal broke off.",
}
"""Figures of a summary."""

LOOP_FIGURES: Final[Mapping[str, str]] = {
    "rl_steps": "Trainings in the run.",
    "rl_step_s": "Mean seconds between the ends of two trainings.",
    "samples_per_s": "Trained trajectories a second.",
    "staleness_mean": "Mean weight updates between the start of a trajectory and its training.",
    "staleness_max": "Most weight updates between the start of a trajectory and its training.",
    "wasted_tokens": "Output tokens of trajectories that were never trained.",
    "batch": "Number of the batch.",
    "end_s": "End of its training since the start of the loop.",
    "step_s": "From the end of the training before to the end of this one.",
    "rollout_s": "The trainer waited for trajectories.",
    "reward_s": "The trainer waited only for rewards of its batch.",
    "training_s": "The trainer trained.",
    "update_s": "The trainer waited for a weight update, or for GPUs.",
    "mean_staleness": "Mean weight updates between start and training of the batch's trajectories.",
    "most_staleness": "The most of them.",
    "trajectories": "Trajectories of the batch.",
    "tokens": "Output tokens of the batch.",
    "longest_over_mean": "Output tokens of the batch's longest trajectory, over their mean.",
    "mean_reward": "Mean reward of the batch's trajectories.",
}
"""Figures of a loop, and columns of its steps."""

COLUMNS: Final[Mapping[str, str]] = {
    "row": "Policy and setting; runs that differ in their seed alone are one row.",
    "interval_ends": "Ends of the 95 % prediction interval of one rollout of other prompts.",
    "over_least": "Mean makespan over the least of all policies.",
    "narrowest_s": "Mean makespan of the policy at the least TP degree that was tried.",
    "engines_of": "Engines at the first plan, by TP degree.",
    "bar": "Bars are as long as the makespan; the full part is the bound.",
    "of_bound": "Bound over makespan: 1 is the best that any policy can reach.",
    "against_first": "Throughput over that of the first row.",
    "last": "The trajectory that ends last; the rollout waits for it.",
    "arrival": "From the first arrival to the arrival of this trajectory.",
    "waiting": "From runnable to the first prefill, all steps: queues of policy and engine.",
    "prefill": "Prefill of prompts, without what the prefix cache had.",
    "decode": "From the first token of each step to its last.",
    "tokens_made": "Output tokens after the first of each dispatch.",
    "tpot": "Decode seconds over these tokens.",
    "tool": "In tools, with the wait for a free place of the tool.",
    "lost": "In dispatches that an engine's failure ended.",
    "rest": "In none of these, such as messages between processes of real engines.",
    "of:name": "Trajectory: group and sample.",
    "of:finished": "End, since the first arrival.",
    "of:steps": "Steps of the trajectory.",
    "of:output": "Output tokens of the trajectory.",
    "of:waited": "Seconds from runnable to the first prefill, all steps.",
    "of:prefill": "Seconds in prefill.",
    "of:decode": "Seconds from the first token of each step to its last.",
    "of:tool": "Seconds in tools.",
    "of:preemptions": "Steps that the policy took from an engine.",
    "of:recomputes": "How often an engine dropped its KV and prefilled it again.",
    "of:migrations": "Moves to another engine whose KV arrived.",
    "of:home": "Engine of its last dispatch.",
    "of:outcome": "How it ended.",
}
"""Other columns."""

MEANINGS: Final = {**FIGURES, **LOOP_FIGURES, **COLUMNS}
