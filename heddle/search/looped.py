"""What to run of a comparison of training regimes, in the form of a search's answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from heddle.command_config import plan_settings
from heddle.comparison.tuning import Variant
from heddle.loops.result import RegimeResult, plans
from heddle.planning.blocks import blocks
from heddle.planning.deployment import Deployment, LoopSplit, deployment_of
from heddle.search.interval import PredictionInterval
from heddle.search.result import Judged, engines_of
from heddle.search.verdict import command_of, plain_setting

if TYPE_CHECKING:
    from heddle.loops.result import LoopComparison


def split_of(row: RegimeResult, *, packed: str) -> LoopSplit:
    """The loop of a regime; `packed` as of `LoopSplit.epoch_plan`."""
    setup, regime = row.setup, row.setup.regime
    return LoopSplit(
        regime=setup.name,
        rollout_gpus=setup.config.run.cluster.gpus,
        train_gpus=setup.train_gpus,
        colocated=setup.config.colocated,
        staleness_bound=regime.staleness.bound,
        most_staleness=regime.staleness.most,
        bounded=regime.staleness.counted_by != "nothing"
        and (regime.staleness.most > 0 or not regime.carries),
        bound_holds=regime.bounds_staleness,
        oldest=max(row.staleness),
        started_groups=regime.groups + (regime.sampling.extra_groups if regime.carries else 0),
        train_tp=setup.layout.tp,
        train_pp=setup.layout.pp,
        train_cp=setup.layout.cp,
        epoch_plan=packed,
        groups=regime.groups,
        batch=regime.groups * regime.samples,
        update_every=regime.update.every,
        mean_staleness=row.mean_staleness,
        wasted_share=row.wasted_share,
        length_bias=row.length_bias,
    )


def judged_of(row: RegimeResult) -> Judged:
    """A regime with its engines; the interval is of the mean batch over the seeds."""
    setup, config = row.setup, row.setup.config
    low_s, high_s = row.step_s.ends
    return Judged(
        candidate=Variant(
            name=setup.label,
            policy=config.run.policy.preset,
            cluster=config.run.cluster,
            swept=False,
            baseline=False,
            planned=plans(setup),
            regime=setup.name,
            train_gpus=setup.train_gpus,
            epoch_plan=config.epoch_plan,
        ),
        makespan_s=PredictionInterval(mean=row.step_s.mean, low=low_s, high=high_s),
        times=tuple(run.mean_step_s for run in row.runs),
        engines=engines_of(setup.run),
        loop=split_of(row, packed=config.epoch_plan),
    )


def deployment_of_loop(result: "LoopComparison") -> Deployment:
    return deployment_of(result.best.setup.run, [judged_of(row) for row in result.ranking])


def recommended(result: "LoopComparison", words: Sequence[str] | None) -> dict[str, Any]:
    """The best regime as JSON; `words` as of `command_of`, without which there is no command."""
    best = result.best
    config = best.setup.config.run
    framework = plan_settings(config).framework
    judged = judged_of(best)
    cost = best.setup.cost(best.step_s.mean)
    command = None if words is None else command_of(judged, words, seeds=len(best.runs))
    return {
        **plain_setting(judged, best.setup.gpus_by_class, cost),
        "command": command,
        "export": blocks(deployment_of_loop(result), framework),
    }
