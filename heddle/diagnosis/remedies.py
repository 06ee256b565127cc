"""Settings that would have saved time: simulated on the trajectories that were measured."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from heddle.comparison.tuning import with_policy
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.cost.prices import prices_of
from heddle.planning.blocks import block, framework_of
from heddle.planning.deployment import deployment_of
from heddle.search.policies import FIRST, OURS
from heddle.search.result import OWN_ENGINES, Judged, SearchResult, search
from heddle.search.verdict import faster
from heddle.setup import Workspace, prepare
from heddle_trace import write_trace
from heddle_trace.schema import TrajectoryRecord

POLICIES: Final = (FIRST, OURS[0], OWN_ENGINES)
"""That are tried beside the one that ran; `heddle plan` tries all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A setting, and the share of the rollout that it saves over what ran."""

    setting: str
    over: str
    """The setting that ran, with model and GPUs: as configured, since logs do not say it."""
    saving: float
    low: float | None
    high: float | None
    """95 % confidence interval of the mean; None of one simulation."""
    framework: str
    block: str
    """To paste."""


def remedies(
    config: RunConfig,
    records: list[TrajectoryRecord],
    budget_s: float | None,
    framework: str | None,
    *,
    keeps_best: bool = True,
) -> list[Remedy]:
    """Search what is better than the policy and engines of `config`, the largest saving first.

    A signal ends the search with the best so far, or is raised if `keeps_best` is False.

    Raises:
        ValueError: the trajectories cannot be replayed; the message says why.
    """
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "measured.jsonl"
        write_trace(trace, records)
        shared = Workspace()
        found = search(
            replace(config, trace=str(trace), history="prior"),
            policies=POLICIES,
            prices=prices_of(config.prices, shared.profiles(config.cluster).pools),
            budget_s=budget_s,
            workspace=shared,
            comes=config.policy.preset,
            keeps_best=keeps_best,
            framework=framework,
        )
        ran = found.as_it_comes
        if ran is None:
            return []
        tried = [_remedy(found, each, ran, shared, framework) for each in found.judged]
    better = [each for each in tried if (each.saving if each.low is None else each.low) > 0.0]
    return sorted(better, key=lambda each: -each.saving)


def _remedy(
    found: SearchResult, each: Judged, ran: Judged, shared: Workspace, framework: str | None
) -> Remedy:
    ratio = faster(each, ran)
    low, high = (None if end is None else 1.0 - 1.0 / max(end, 1e-9) for end in ratio.ends)
    candidate, at = each.candidate, ran.candidate.cluster
    name = framework or framework_of(candidate.policy)
    config = with_policy(found.setup.config, candidate.policy, candidate.cluster)
    setup = prepare(config, workspace=shared)
    try:
        text = block(deployment_of(setup, (each,)), name)
    except ConfigError as error:
        text = f"# no settings of {name} to paste: {error}"
    return Remedy(
        setting=f"{candidate.policy} with {each.setting}",
        over=f"{ran.candidate.policy} with {ran.setting}, {at.model} on {at.gpus} {at.gpu}",
        saving=1.0 - 1.0 / ratio.mean,
        low=low,
        high=high,
        framework=name,
        block=text,
    )
