"""The profiles of a cluster: one of each GPU class, all of one model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from heddle.cluster.config import ClusterConfig
from heddle.cluster.disaggregation import check_roles
from heddle.cluster.drafters import drafter_of
from heddle.cluster.speculation import drafted_cost, drafts_of
from heddle.runs.metrics import SoloTpot
from heddle.runs.tables import Floats
from heddle_calibrate.roofline.by_name import profile_by_name
from heddle_calibrate.roofline.kv_precision import with_kv_dtype
from heddle_core.defaults import SPARE_SLOTS
from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.ids import EngineShape
from heddle_sim.drafted_tables import Drafts, drafted_table, with_drafter
from heddle_sim.latency import LatencyTable
from heddle_sim.model_names import known_model
from heddle_sim.profile_files import MAX_BATCH, Profile, ProfileError
from heddle_sim.profile_parts import Costs, EngineSettings

DEFAULT_SETTINGS = EngineSettings(block_tokens=16, max_batched_tokens=8192)
"""vLLM's for a server on a large GPU; for profiles without this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassProfile:
    """The GPUs of one class as a cluster of their own, and the profile of the model there."""

    cluster: ClusterConfig
    profile: Profile

    @property
    def tps(self) -> tuple[int, ...]:
        """TP degrees that a planner may choose, as far as GPUs and memory for weights decide."""
        fitting = self.profile.tps_on(self.cluster.home_gpus)
        chosen = self.cluster.tp_choices
        return fitting if chosen is None else chosen

    def drafts(self, tp: int) -> Drafts | None:
        """Speculative decoding at a TP degree; None without it."""
        speculation = self.cluster.drafts()
        if speculation is None:
            return None
        return drafts_of(self.profile, tp, speculation, self.cluster.max_running)

    def table(self, tp: int) -> LatencyTable:
        """The ground truth at a TP degree."""
        max_batch = max(MAX_BATCH, self.cluster.max_running + SPARE_SLOTS)
        drafts = self.drafts(tp)
        if drafts is None:
            return self.profile.table(tp, max_batch=max_batch)
        decay = self.cluster.acceptance_decay
        return drafted_table(self.profile, tp, drafts, max_batch=max_batch, decay=decay)

    def cost_estimate(self, tps: Sequence[int]) -> CostModel:
        """What a policy estimates of engines at these TP degrees."""
        found = self.profile.cost_estimate(tps)
        by_shape = dict(found.by_shape)
        for shape, cost in found.by_shape.items():
            drafts = self.drafts(shape.tp)
            if drafts is not None:
                most = self.cluster.max_running
                by_shape[shape] = drafted_cost(cost, drafts, max_running=most)
        return replace(found, by_shape=by_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfiles:
    """The profile of each GPU class of a cluster.

    Raises:
        ProfileError: those of several classes are not of one model, not of their class, or their
            KV cannot move between classes.
    """

    classes: tuple[ClassProfile, ...]

    def __post_init__(self) -> None:
        first = self.classes[0].profile
        for each in self.classes[1:]:
            profile = each.profile
            if _weights(profile) != _weights(first):
                raise ProfileError(
                    f"pool of {each.cluster.gpu}: its profile is of {profile.model}, and that of "
                    f"{first.gpu} of {first.model}: a cluster serves one model"
                )
            if profile.kv_bytes_per_token != first.kv_bytes_per_token:
                raise ProfileError(
                    f"pool of {each.cluster.gpu}: a token of KV has {profile.kv_bytes_per_token:,} "
                    f"bytes there and {first.kv_bytes_per_token:,} on {first.gpu}, so that no KV "
                    "can move between them: take profiles of one precision of KV"
                )
        for each in self.classes if len(self.classes) > 1 else ():
            if each.profile.gpu.lower() != each.cluster.gpu.lower():
                raise ProfileError(
                    f"pool of {each.cluster.gpu}: {each.cluster.model} is a profile of "
                    f"{each.profile.gpu}: name that class, or give another profile"
                )

    @property
    def model(self) -> str:
        """The model that all engines serve."""
        return self.classes[0].profile.model

    @property
    def name(self) -> str:
        """The profiles by name, for manifests and reports."""
        return ", ".join(f"{each.profile.model}.{each.profile.gpu}" for each in self.classes)

    @property
    def pools(self) -> Mapping[str, int]:
        """GPUs of each class, by the name that its profile has."""
        return {each.profile.gpu: each.cluster.gpus for each in self.classes}

    def plain_pools(self) -> list[dict[str, Any]]:
        """Each pool as JSON; `tp` is of the engines of policies that do not plan."""
        return [
            {"gpu": each.profile.gpu, "gpus": each.cluster.gpus, "tp": each.cluster.tp}
            for each in self.classes
        ]

    def hardware(self) -> str:
        """GPUs by class, for people: ``96 x h800 (derived) + 32 x h20 (derived)``."""
        counts = self.pools.items()
        return " + ".join(f"{n} x {self.of(gpu).profile.gpu_label}" for gpu, n in counts)

    @property
    def layout_label(self) -> str:
        """What engines do beside TP, for people; of several classes those of the first."""
        return self.classes[0].profile.layout_label

    @property
    def marks(self) -> dict[str, str]:
        """What a reader of figures must know of the profiles: ``derived``, or nothing."""
        derived = {each.profile.gpu: each.profile.derived for each in self.classes}
        texts = [f"{gpu}: {text}" for gpu, text in derived.items() if text]
        if len(self.classes) == 1:
            return self.classes[0].profile.marks
        return {"derived": "; ".join(texts)} if texts else {}

    @property
    def only(self) -> Profile:
        """The profile of the only class.

        Raises:
            ProfileError: there are several.
        """
        if len(self.classes) > 1:
            raise ProfileError(
                f"pool: this needs GPUs of one class, and there are pools of "
                f"{', '.join(self.pools)}: give --gpu and --gpus in place of them"
            )
        return self.classes[0].profile

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token of KV, over all GPUs of an engine."""
        return self.classes[0].profile.kv_bytes_per_token

    def of(self, gpu: str) -> ClassProfile:
        """The profile of a class."""
        return next(each for each in self.classes if each.profile.gpu == gpu)

    def table(self, shape: EngineShape) -> LatencyTable:
        """The ground truth of engines of a shape."""
        found = self.of(shape.gpu)
        known = found.profile.shape(shape.tp)
        assert shape.as_role("both") == known, f"no profile of {shape} was loaded"
        return found.table(shape.tp)

    def tables(self) -> list[LatencyTable]:
        """The ground truth of all shapes that the cluster has GPUs for."""
        return [
            each.table(tp) for each in self.classes for tp in each.profile.tps_on(each.cluster.gpus)
        ]

    def solo_tpot(self) -> SoloTpot:
        """Seconds per token of a step alone on an engine."""

        def solo(gpu: str, tp: int, context_tokens: Floats) -> Floats:
            found = self.of(gpu) if len(self.classes) > 1 else self.classes[0]
            (base_s,), (per_context_s,) = found.table(tp).token_s(1)
            return np.asarray(base_s + per_context_s * context_tokens, np.float64)

        return solo

    def cost_estimate(self, shapes: Sequence[EngineShape]) -> CostModel:
        """What a policy estimates of engines of these shapes; KV moves at the slowest speed."""
        costs = [
            each.cost_estimate([s.tp for s in shapes if s.gpu == each.profile.gpu])
            for each in self.classes
        ]
        by_shape: dict[EngineShape, StepCost] = {}
        for cost in costs:
            by_shape |= cost.by_shape
        return replace(
            costs[0],
            by_shape=by_shape,
            transfer_fixed_s=max(cost.transfer_fixed_s for cost in costs),
            transfer_s_per_token=max(cost.transfer_s_per_token for cost in costs),
        )

    @property
    def costs(self) -> Costs:
        """Measured costs beside iterations; of several classes the largest of each."""
        all_costs = [each.profile.costs or NO_COSTS for each in self.classes]
        by_prefill = [costs for costs in all_costs if costs.moves_by == "prefill"]
        found = (by_prefill or all_costs)[0]
        return replace(found, dispatch_s=max(costs.dispatch_s for costs in all_costs))

    @property
    def settings(self) -> EngineSettings:
        """Settings of the engines; of several classes those that all of them have room for."""
        all_settings = [each.profile.engine or DEFAULT_SETTINGS for each in self.classes]
        return EngineSettings(
            block_tokens=max(settings.block_tokens for settings in all_settings),
            max_batched_tokens=min(settings.max_batched_tokens for settings in all_settings),
        )


NO_COSTS = Costs(dispatch_s=0.0, engines={})
"""Of a profile in which only iterations were measured."""


def capacity_tokens(profile: Profile, tp: int) -> int:
    """Tokens of context that an engine of TP degree `tp` holds, in whole blocks."""
    block = (profile.engine or DEFAULT_SETTINGS).block_tokens
    return int(profile.at(tp).kv_capacity_tokens // block * block)


def load_profiles(cluster: ClusterConfig, *, check_tp: bool = True) -> ClusterProfiles:
    """Load the profile of each GPU class of a cluster; `check_tp`: of engines that run unplanned.

    Raises:
        ProfileError: model or class is unknown, or has no TP degree that was asked for; or the
            classes do not go together.
    """
    classes = []
    for each in cluster.classes:
        try:
            if cluster.pool and each.tp_choices is not None:
                each = replace(each, tp_choices=_choices(each))
            profile = load_cluster_profile(each) if check_tp else memory_profile(each)
            classes.append(ClassProfile(cluster=each, profile=profile))
        except ProfileError as error:
            where = f"pool of {each.gpu}: " if cluster.pool else ""
            raise ProfileError(f"{where}{error}") from None
    return ClusterProfiles(classes=tuple(classes))


def _choices(cluster: ClusterConfig) -> tuple[int, ...]:
    known = layout_profile(cluster).tps_on(cluster.gpus)
    choices = tuple(tp for tp in cluster.tp_choices or () if tp in known)
    if not choices:
        raise ProfileError(
            f"none of the TP degrees in tp_choices fits: take one of {', '.join(map(str, known))}"
        )
    return choices


def _weights(profile: Profile) -> str:
    """Shape and precision of a model: by the roofline its name is that of the repository."""
    known = known_model(profile.model)
    return profile.model if known is None else known.profile


def layout_profile(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster, with the parallelism of its engines.

    Raises:
        ProfileError: model or GPU class is unknown, or has no table for that.
    """
    profile, sglang = profile_by_name(cluster.model, cluster.gpu), cluster.engine == "sglang"
    profile = with_kv_dtype(profile, cluster.kv_dtype)
    if not sglang:
        profile = profile.of_version(cluster.engine_version)
    spread, ranks = cluster.expert_parallel, cluster.attention_dp
    if profile.experts and (spread == "on" or ranks > 1):
        # Only here, because it takes a second to import.
        from heddle_calibrate.roofline.missing_layouts import with_layouts

        parallel = profile.expert_parallel if spread == "auto" else spread == "on"
        profile = with_layouts(profile, expert_parallel=parallel, attention_dp=ranks)
    if sglang:
        from heddle_calibrate.serving.sglang import of_sglang

        profile = of_sglang(profile, cluster.engine_version)
    return profile.laid_out(spread, attention_dp=ranks)


def memory_profile(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster, with the memory that others leave for KV: engines asleep, and
    a drafter.

    Raises:
        ProfileError: model or GPU class is unknown.
    """
    profile = layout_profile(cluster)
    if cluster.standby_tp:
        asleep_bytes = len(cluster.standby_tp) * cluster.standby_gib * 2**30
        profile = profile.without_memory(asleep_bytes)
    speculation = cluster.drafts()
    if speculation is not None:
        profile = with_drafter(profile, drafter_of(profile, speculation))
    return profile


def load_cluster_profile(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster and check that the model runs at its TP degrees.

    Raises:
        ProfileError: model, GPU class or TP degree is unknown.
    """
    profile = memory_profile(cluster)
    named = (cluster.tp, *cluster.mix, *(cluster.tp_choices or ()), *cluster.standby_tp)
    for tp in (*named, cluster.prefill_tp or cluster.tp):
        profile.at(tp)
    check_roles(cluster, profile)
    return profile
