"""Engines, and the policy over them, as files that start them need it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import ClusterProfiles
from heddle.config_error import ConfigError
from heddle_core.ids import EngineShape
from heddle_core.presets import ADAPTIVE
from heddle_rollout.speculation import Speculation

if TYPE_CHECKING:
    from heddle.search.result import Judged, SearchResult
    from heddle.setup import RunSetup

GPUS_PER_NODE: Final = 8
BY_RAY: Final = "runtime.launcher=ray"
"""How `heddle serve` starts engines on several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSplit:
    """An RL loop around the engines: its regime, the trainer, and what both reach."""

    regime: str
    rollout_gpus: int
    train_gpus: int
    """All where they are shared."""
    colocated: bool
    staleness_bound: float
    most_staleness: int
    """That the regime allows."""
    bounded: bool
    """Whether the regime has a bound of staleness to set in a framework."""
    bound_holds: bool
    """Whether nothing older is trained."""
    oldest: int
    """Of what was trained on the trace itself."""
    started_groups: int
    """Prompts under way for a batch; more than `groups` are trained in a later one."""
    train_tp: int
    train_pp: int
    train_cp: int
    groups: int
    """Prompts of a batch."""
    batch: int
    """Samples."""
    update_every: int
    """Batches between two updates of the engines."""
    mean_staleness: float
    """On the trace itself, as the next two."""
    wasted_share: float
    """Output tokens that are thrown away, of all."""
    length_bias: float
    """Mean output of a trained trajectory over that of a started one."""
    epoch_plan: str = ""
    """How prompts of an epoch are packed into batches by length; empty: they are not."""

    @property
    def packed(self) -> bool:
        return self.epoch_plan not in ("", "random")

    @property
    def on_policy(self) -> bool:
        return self.bounded and not self.most_staleness


POLICY: Final = "heddle"
"""Of verl's router, which leaves the engines to verl."""
SERVED_POLICY: Final = "heddle+fixed+keep_engines"
"""The same on engines that are there, which stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What an export writes down."""

    cluster: ClusterConfig
    """With its number of running steps."""
    profiles: ClusterProfiles
    engines: tuple[tuple[str, EngineShape], ...]
    """Names and shapes, the widest first."""
    policy: str
    """Of a router that does not start engines."""
    served_policy: str
    """Of the gateway."""
    history: str
    predictor_model: str
    tasks: frozenset[str]
    """Of the trace's trajectories."""
    uniform: Callable[[], tuple[EngineShape, float]]
    """The best engines of one shape, and their makespan in seconds.

    Raises:
        ConfigError: there are none.
    """
    makespan_s: float
    loop: LoopSplit | None = None

    @property
    def mix(self) -> dict[EngineShape, int]:
        """Engines of each shape, the widest first."""
        return dict(Counter(shape for _, shape in self.engines))

    @property
    def pools(self) -> Mapping[str, int]:
        """GPUs by type."""
        return self.profiles.pools

    @property
    def by_ray(self) -> bool:
        """Whether the gateway starts the engines on several nodes."""
        return sum(self.pools.values()) > GPUS_PER_NODE and self.cluster.attention_dp == 1

    def drafts(self) -> dict[EngineShape, Speculation]:
        """Speculative decoding, by shape; empty without."""
        found = {}
        for shape in self.mix:
            drafts = self.profiles.of(shape.gpu).drafts(shape.tp)
            if drafts is not None:
                found[shape] = drafts.speculation
        return found


def deployment_of_search(found: "SearchResult") -> Deployment:
    return deployment_of(found.setup, found.judged)


def deployment_of(setup: "RunSetup", judged: Sequence["Judged"]) -> Deployment:
    """The deployment of the first of what was judged, whose set-up is given."""
    best = judged[0]
    shapes = [shape for shape, count in best.engines for _ in range(count)]
    policy = best.candidate.policy
    mine = policy.startswith(f"{POLICY}+") or policy == POLICY
    if best.candidate.cluster.adaptive and not mine:
        policy += f"+{ADAPTIVE}"

    def uniform() -> tuple[EngineShape, float]:
        for each in judged:
            if len(each.engines) == 1:
                return each.engines[0][0], each.makespan_s.mean
        raise ConfigError(
            "all engines have one TP degree there, and none such were judged: try a policy that "
            "does not plan its engines, as verl"
        )

    return Deployment(
        cluster=best.candidate.cluster,
        profiles=setup.profiles,
        engines=tuple((f"e{number}", shape) for number, shape in enumerate(shapes)),
        policy=POLICY if mine else policy,
        served_policy=SERVED_POLICY if mine else policy,
        history=setup.history.name,
        predictor_model=setup.config.predictor_model,
        tasks=frozenset(setup.workload.scripts.trajectory("task").words),
        uniform=uniform,
        makespan_s=best.makespan_s.mean,
        loop=best.loop,
    )


def refuse_types(plan: Deployment) -> None:
    """Refuse engines that the gateway does not start.

    Raises:
        ConfigError: they are of several GPU types.
    """
    if len(plan.pools) > 1:
        raise ConfigError(
            "`heddle serve` starts engines of one GPU class, and this plan has GPUs of "
            f"{', '.join(plan.pools)}: plan one class, or start each by vLLM's command"
        )
