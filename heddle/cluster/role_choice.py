"""How many GPUs to give to engines that prefill: a closed form, and its neighbours to simulate.

A step of a decode engine with more new tokens than the threshold is prefilled elsewhere. The
GPU-seconds of these tokens, over those of all prefill and decode, are the share of the GPUs that
prefill. Waiting is left out, so that the neighbours of the share are simulated too.
"""

from dataclasses import replace

import numpy as np

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import memory_profile
from heddle.cluster.roles import RoleGpus
from heddle_trace.table import Scripts


def prefilled_tokens(scripts: Scripts, threshold_tokens: int) -> int:
    """New tokens of all steps that have more of them than the threshold.

    Samples of a group share their first prompt, which counts once.
    """
    new = scripts.step("prompt_tokens").values - scripts.step("shared_tokens").values
    starts = scripts.first
    _, first_of_group = np.unique(scripts.trajectory("group").values, return_index=True)
    counted = np.ones(len(new), dtype=bool)
    counted[starts] = False
    counted[starts[first_of_group]] = True
    return int(new[counted & (new > threshold_tokens)].sum())


def prefill_share(scripts: Scripts, cluster: ClusterConfig) -> float:
    """Share of the GPU-seconds that go into prefill on engines of their own, by estimate."""
    profile = memory_profile(cluster)
    tp, prefill_tp = cluster.tp, cluster.prefill_tp or cluster.tp
    prefill = profile.cost_estimate((prefill_tp,)).by_shape[profile.shape(prefill_tp)]
    decode = profile.cost_estimate((tp,)).by_shape[profile.shape(tp)]
    tokens = prefilled_tokens(scripts, cluster.prefill_threshold)
    prefill_s = tokens * prefill.prefill_s * profile.shape(prefill_tp).gpus
    batch = max(1.0, min(cluster.max_running, len(scripts) / cluster.engine_count))
    output = scripts.step("output_tokens").values
    context = float(np.average(scripts.step("prompt_tokens").values + output / 2.0, weights=output))
    token_s = decode.iteration_s(batch, batch * context) / batch
    decode_s = float(output.sum()) * token_s * profile.shape(tp).gpus
    return prefill_s / (prefill_s + decode_s)


def role_choices(scripts: Scripts, cluster: ClusterConfig) -> tuple[RoleGpus, ...]:
    """Splits of the GPUs to simulate: the nearest to the closed form, and one on either side.

    Empty where the GPUs do not suffice for an engine of each role.
    """
    each, gpus = cluster.engine_gpus, cluster.gpus
    prefill_each = (cluster.prefill_tp or cluster.tp) * cluster.attention_dp
    possible = [
        RoleGpus(prefill=prefill, decode=gpus - prefill)
        for prefill in range(prefill_each, gpus - each + 1, prefill_each)
        if (gpus - prefill) % each == 0
    ]
    if cluster.mix or not possible:
        return ()
    wanted = prefill_share(scripts, replace(cluster, roles="")) * gpus
    nearest = min(range(len(possible)), key=lambda k: abs(possible[k].prefill - wanted))
    return tuple(possible[max(nearest - 1, 0) : nearest + 2])
