"""The engines that prefill, and what a cluster with them needs."""

from heddle.cluster_config import ClusterConfig
from heddle.config_files import ConfigError
from heddle_core.ids import EngineId
from heddle_core.plans import Disaggregation, EngineSpec
from heddle_sim.profile_files import Profile


def check_roles(cluster: ClusterConfig, profile: Profile) -> None:
    """Refuse roles that do not add up to the GPUs, or that cannot hand KV over.

    Raises:
        ConfigError: the message has the remedy.
    """
    roles = cluster.role_gpus
    if roles is None:
        return
    used = roles.prefill + roles.decode
    if used != cluster.gpus:
        raise ConfigError(
            f"roles = {cluster.roles!r} are of {used} GPUs, and there are gpus = {cluster.gpus}: "
            "take GPUs of both roles that add up to that, or other gpus"
        )
    if profile.costs is not None and profile.costs.moves_by == "prefill":
        raise ConfigError(
            f"roles = {cluster.roles!r}: the engines of this profile move no KV, so that none can "
            "prefill for another: leave roles out, or take the profile of engines with kv_transfer"
        )


def disaggregation(cluster: ClusterConfig, profile: Profile) -> Disaggregation | None:
    """The engines that prefill; None where every engine does both."""
    roles = cluster.role_gpus
    if roles is None:
        return None
    tp = cluster.prefill_tp or cluster.tp
    whole = profile.shape(tp)
    shape = whole.as_role("prefill")
    return Disaggregation(
        engines=tuple(
            EngineSpec(engine=EngineId(f"p{i}"), shape=shape, max_running=cluster.max_running)
            for i in range(len(cluster.prefill_tps))
        ),
        threshold_tokens=cluster.prefill_threshold,
        prefill_s_by_shape={shape: profile.cost_estimate((tp,)).by_shape[whole].prefill_s},
    )
