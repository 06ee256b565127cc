"""How to split GPUs between rollout and training: every split estimated, the best simulated.

An estimate takes milliseconds and knows the cost model of policies, not the simulator's latency
table. With `G` groups of a batch and staleness bound `eta`, a continuous regime has
``(eta + 1) G`` groups under way, each for a time ``L``, so that by Little's law a step takes

    S = max(train + update, (L + serial training + update) / (eta + 1), work of the engines)

where ``L`` grows with the number of trajectories that share an engine, which falls with ``S``. A
regime of rounds takes the end of its last trajectory, found by a small simulation of each engine's
group (`heddle_core.estimate.simulate_group`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from heddle.config_files import ConfigError
from heddle.cost.objective import Objective, check_objective, objective_value
from heddle.cost.prices import RunCost
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.result import RegimeResult, plans
from heddle.loops.setup import LoopSetup, prepare_loop, regime_of
from heddle.setup import Workspace
from heddle.workload import CapacityError
from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray, Work
from heddle_core.estimate.simulate_group import simulate_group
from heddle_core.loop.regime import Regime
from heddle_sim.training import TrainingError

SCHEMA = "heddle.loop-plan/1"
MOST_GROUPS = 256
"""Groups of the trace that lengths are taken from."""
ROUNDS = 12
"""Batches that a round's end is the mean of, if the trace has so many."""
_PASSES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Estimated step of one regime at one split and TP degree; seconds."""

    setup: LoopSetup
    step_s: float
    rollout_s: float
    """Until a batch is generated: of a round, else the mean time of a group over the batches under
    way."""
    train_s: float
    update_s: float
    limit: Literal["rollout", "training"]
    """Which of the two a step waits for."""

    @property
    def cost_per_1k_samples(self) -> RunCost:
        """All GPUs, for as long as a thousand trained samples take."""
        samples = self.setup.regime.groups * self.setup.regime.samples
        return self.setup.cost(1000.0 * self.step_s / samples)

    def value(self, objective: Objective) -> float:
        """What the objective makes least: seconds of a step, or dollars of a thousand samples."""
        return objective_value(objective, self.step_s, self.cost_per_1k_samples)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        setup, cluster = self.setup, self.setup.config.run.cluster
        return {
            "regime": setup.name,
            "rollout_gpus": cluster.gpus,
            "train_gpus": setup.train_gpus,
            "tp": cluster.tp,
            "trainer": {"tp": setup.layout.tp, "pp": setup.layout.pp},
            "estimated_step_s": self.step_s,
            "estimated_gpu_hours_per_1k_samples": self.cost_per_1k_samples.gpu_hours,
            "estimated_dollars_per_1k_samples": self.cost_per_1k_samples.dollars,
            "rollout_s": self.rollout_s,
            "train_s": self.train_s,
            "update_s": self.update_s,
            "limit": self.limit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """The report of `heddle plan --regimes`."""

    estimates: tuple[StepEstimate, ...]
    """Every split and degree of every regime, the best by the objective first."""
    simulated: tuple[RegimeResult, ...]
    """The first of them, in their order."""
    objective: Objective = "makespan"

    @property
    def best(self) -> tuple[StepEstimate, RegimeResult]:
        """The best by the objective, as simulated."""
        pairs = zip(self.estimates, self.simulated, strict=False)
        return min(pairs, key=lambda pair: pair[1].value(self.objective))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        first, (best, result) = self.estimates[0].setup, self.best
        pairs = zip_longest(self.estimates, self.simulated)
        return {
            "schema": SCHEMA,
            "cluster": {
                "gpus": first.gpus,
                "gpu": first.run.profile.gpu,
                "model": first.config.run.cluster.model,
                **first.run.profile.marks,
            },
            "prices": first.prices.plain(first.gpus_by_class),
            "objective": self.objective,
            "estimates": [{**each.plain(), **_simulated(row)} for each, row in pairs],
            "best": best.plain(),
            **{f"best_{name}": value for name, value in _simulated(result).items()},
        }


def _simulated(row: RegimeResult | None) -> dict[str, float | None]:
    cost = None if row is None else row.cost_per_1k_samples
    return {
        "simulated_step_s": None if row is None else row.step_s.mean,
        "simulated_dollars_per_1k_samples": None if cost is None else cost.dollars,
    }


def plan_loop(
    configs: Sequence[LoopConfig],
    *,
    simulate: int = 3,
    objective: Objective = "makespan",
    jobs: int | None = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoopPlan:
    """Estimate every regime of each configuration; simulate the `simulate` best by `objective`.

    Settings whose trainer or engines do not fit are left out, unless none fits.

    Raises:
        ConfigError: a regime that cannot be estimated, or a policy that plans its engines; with
            objective cost, a GPU class without a price.
        ValueError: one of the packages' errors for bad input.
    """
    shared, estimates = Workspace(), []
    failed: ValueError | None = None
    for config in configs:
        for name in config.regimes:
            check_estimated(name, regime_of(config, name))
            try:
                setup = prepare_loop(config, name, workspace=shared)
                check_objective(objective, setup.prices, setup.gpus_by_class)
                estimates.append(estimate_step(setup))
            except (TrainingError, CapacityError) as error:
                failed = error
    if not estimates:
        assert failed is not None
        raise failed
    estimates.sort(key=lambda e: e.value(objective))
    chosen = [replace(e.setup.requested, regimes=(e.setup.name,)) for e in estimates[:simulate]]
    found = compare_regimes(chosen, jobs=jobs, on_progress=on_progress)
    return LoopPlan(estimates=tuple(estimates), simulated=found.tried, objective=objective)


def check_estimated(name: str, regime: Regime) -> None:
    """Refuse a regime whose step is not estimated.

    Raises:
        ConfigError: redundant samples, discarded groups, or GPUs that change sides.
    """
    if (
        regime.sampling.extra_samples
        or regime.sampling.extra_groups
        or regime.batching.rest != "keep"
        or regime.staleness.late == "drop"
        or regime.staleness.growth
        or regime.split.hybrid is not None
    ):
        raise ConfigError(
            f"the step of regime {name} is not estimated, since samples are redundant or dropped, "
            "or GPUs change sides: find its split by `heddle loop --sweep loop.train_gpus=best "
            "--tp best`"
        )


def estimate_step(setup: LoopSetup) -> StepEstimate:
    """Estimate the step of a loop.

    Raises:
        ConfigError: as `check_estimated`.
    """
    check_estimated(setup.name, setup.regime)
    regime = setup.regime
    if plans(setup):
        raise ConfigError(
            f"policy {setup.config.run.policy.preset} chooses TP degrees itself, and only engines "
            "of one degree are estimated: take verl here, and `heddle loop --sweep "
            "loop.train_gpus=best` for yours"
        )
    cluster = setup.config.run.cluster
    profile = setup.run.profile
    cost = profile.cost_estimate([cluster.tp]).by_shape[profile.shape(cluster.tp)]
    groups = _lengths(setup)
    batch = _taken(groups, regime.groups, regime.samples, 0)
    tokens = [int(t) for t in batch.context_tokens + batch.output_tokens + batch.appended_tokens]
    train_s = setup.world.train_s(tokens, False)
    switch_s = setup.world.to_training_s + setup.world.to_rollout_s
    update_s = setup.world.update_s
    engines = cluster.engine_count
    accumulates = regime.batching.accumulate_from is not None
    last = min(regime.batching.accumulate_from or regime.groups, regime.groups)
    serial_s = train_s * last / regime.groups
    if regime.update.mode == "drain":
        rollout_s = _round_s(groups, setup, cost, engines)
        if regime.staleness.counted_by == "batch":
            step_s = max(rollout_s + (serial_s if accumulates else 0.0), train_s) + update_s
        else:
            step_s = max(rollout_s + serial_s, train_s) + switch_s + update_s
    else:
        in_flight = (regime.staleness.bound + 1.0) * regime.update.every
        update_s /= regime.update.every
        rollout_s = _steady_s(groups, setup, cost, engines, in_flight, serial_s + update_s)
        step_s = max(rollout_s, train_s + update_s)
    return StepEstimate(
        setup=setup,
        step_s=step_s,
        rollout_s=rollout_s,
        train_s=train_s,
        update_s=update_s,
        limit="training" if step_s <= train_s + update_s else "rollout",
    )


@dataclass(frozen=True, slots=True)
class _Groups:
    """Samples of some groups of the trace: arrays of groups by samples, and rows of `Work`."""

    work: Work
    groups: int
    samples: int


def _lengths(setup: LoopSetup) -> _Groups:
    regime = setup.regime
    chosen = list(setup.data.groups.values())[: max(MOST_GROUPS, ROUNDS * regime.groups)]
    rows: list[tuple[float, ...]] = []
    for scripts in chosen:
        for script in scripts[: regime.samples]:
            output = sum(step.output_tokens for step in script.steps)
            last, first = script.steps[-1], script.steps[0]
            appended = last.prompt_tokens + last.output_tokens - first.prompt_tokens - output
            tool_s = sum(step.tool_s or 0.0 for step in script.steps)
            rows.append((output, first.prompt_tokens, max(0, appended), tool_s))
    output, context, appended, tool_s = np.array(rows, dtype=np.float64).T
    work = Work(
        output_tokens=np.maximum(output, 1.0),
        context_tokens=context,
        appended_tokens=appended,
        prefill_tokens=context + appended,
        tool_s=tool_s,
    )
    return _Groups(work, len(chosen), regime.samples)


def _taken(groups: _Groups, count: int, samples: int, number: int) -> Work:
    """A batch of the trace; from its begin again where it ends."""
    first = number * count
    index = [
        (first + group) % groups.groups * samples + sample
        for group in range(count)
        for sample in range(samples)
    ]
    return groups.work.take(np.array(index))


def _round_s(groups: _Groups, setup: LoopSetup, cost: StepCost, engines: int) -> float:
    """End of a batch that starts at once, dealt out over the engines; mean of some batches."""
    regime, most = setup.regime, setup.config.run.cluster.max_running
    ends = []
    for number in range(max(1, min(ROUNDS, groups.groups // regime.groups))):
        batch = _taken(groups, regime.groups, regime.samples, number)
        parts = [batch.take(slice(e, None, engines)) for e in range(min(engines, len(batch)))]
        ends.append(
            max(
                simulate_group(
                    part.take(np.argsort(-part.output_tokens)), cost, max_running=most
                ).end_s
                for part in parts
            )
        )
    return float(np.mean(ends))


def _steady_s(
    groups: _Groups,
    setup: LoopSetup,
    cost: StepCost,
    engines: int,
    in_flight: float,
    serial_s: float,
) -> float:
    """Step of a continuous regime as its engines allow: the fixed point of Little's law."""
    regime, work = setup.regime, groups.work
    cluster, staleness = setup.config.run.cluster, regime.staleness
    context = float(np.average(work.mean_context_tokens(), weights=work.output_tokens))
    prefill_s = cost.prefill_s * float(work.prefill_tokens.sum() / work.output_tokens.sum())
    batch = regime.groups * regime.samples
    slots = min(cluster.max_running, cost.kv_capacity_tokens / context)
    mean_tokens = float(work.output_tokens.mean())

    def tpot_s(running: float) -> float:
        return cost.iteration_s(running, running * context) + prefill_s * running

    def durations(tpot: float) -> FloatArray:
        return work.output_tokens * tpot + work.tool_s

    step_s = batch * mean_tokens * tpot_s(slots) / (slots * engines)
    least_s = step_s
    for _ in range(_PASSES):
        # Samples that decode at once on an engine, by Little's law.
        running = min(slots, batch * mean_tokens * tpot_s(slots) / (step_s * engines))
        for _ in range(8):
            running = min(slots, batch * mean_tokens * tpot_s(running) / (step_s * engines))
        took = durations(tpot_s(max(running, 1.0)))
        group_s = float(took.reshape(groups.groups, -1).max(axis=1).mean())
        if staleness.counted_by == "nothing":
            assert staleness.max_concurrent is not None
            found = float(took.mean()) * batch / staleness.max_concurrent
        else:
            found = (group_s + serial_s) / in_flight
            if staleness.max_concurrent is not None:
                found = max(found, float(took.mean()) * batch / staleness.max_concurrent)
        found = max(found, least_s)
        step_s = 0.5 * (step_s + found)
    return step_s
