"""Planners: which engines exist, at which TP degree."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from statistics import NormalDist
from typing import Final, Literal, TypeAlias

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.equal_progress import equal_progress_s
from heddle_core.estimate.group_cost import work_of
from heddle_core.estimate.history import History
from heddle_core.estimate.ordered import Cost
from heddle_core.estimate.paper_cost import mean_decoded_context
from heddle_core.ids import EngineId, EngineShape
from heddle_core.loop.epoch import epoch_of
from heddle_core.plans import EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import PolicyContext, TrajectoryView
from heddle_core.solve.group_plan import check_classes, shapes_of
from heddle_core.solve.joint import JointProblem, Solver
from heddle_core.solve.tail import first_search_at


class FixedPlan:
    """Engines e0, e1, ... of one shape in each pool, or of the shapes in `context.mix`.

    Raises ValueError unless they use all GPUs, since the rest would idle unseen.
    """

    needs_all = False

    def __init__(self, context: PolicyContext) -> None:
        pools, shape = dict(context.pools), context.shape
        shapes = context.mix or context.uniform
        used = {gpu: sum(s.gpus for s in shapes if s.gpu == gpu) for gpu in pools}
        known = all(s.gpu in pools for s in shapes)
        if context.mix and (used != pools or not known):
            raise ValueError(
                f"engines of {', '.join(map(str, shapes))} use {_counts(used)}, "
                f"not the {_counts(pools)} that there are"
            )
        if shape.gpus < 1 or used != pools or not known:
            raise ValueError(
                f"{_counts(pools)} do not divide into engines of "
                f"{', '.join(map(str, (shape, *context.other_shapes)))}; "
                "choose a TP degree that divides the number of GPUs"
            )
        self._plan = ResourcePlan(engines=_engines(shapes, context))

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the same plan for any trajectories; homes are left to the placement part."""
        return self._plan


def _engines(shapes: Sequence[EngineShape], context: PolicyContext) -> tuple[EngineSpec, ...]:
    return tuple(
        EngineSpec(engine=EngineId(f"e{i}"), shape=shape, max_running=context.max_running)
        for i, shape in enumerate(shapes)
    )


def _counts(pools: Mapping[str, int]) -> str:
    return " and ".join(f"{gpus} {gpu} GPUs" for gpu, gpus in pools.items())


class GivenEngines:
    """Plans no engine: a framework starts and stops them.

    Each that becomes ready takes its share of unfinished trajectories.
    """

    needs_all = False

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        return ResourcePlan(engines=())


LIBRA_SHARES: Final[Mapping[int, float]] = {4: 0.5, 2: 0.25, 1: 0.25}
"""Of a node's 8 GPUs one engine at TP 4, one at TP 2 and two at TP 1 (Libra, August 2026)."""


class SharesPlan(FixedPlan):
    """`context.mix` if it is given, else half of the GPUs at TP 4, a quarter at TP 2 and TP 1 each.

    Widest first. A degree that the model cannot run at is replaced by the next wider one that it
    can, or by the widest. GPUs that a share has left over go to the next share, and those that the
    last one leaves over to narrower engines.
    """

    def __init__(
        self, context: PolicyContext, *, shares: Mapping[int, float] = LIBRA_SHARES
    ) -> None:
        """Divide the GPUs.

        Raises:
            ValueError: they cannot all be used.
        """
        super().__init__(replace(context, mix=context.mix or mix_of(context, shares)))


def mix_of(context: PolicyContext, shares: Mapping[int, float]) -> tuple[EngineShape, ...]:
    """Shapes of engines on all GPUs, by these shares of the GPUs of each class.

    Raises:
        ValueError: some would be left over.
    """
    return tuple(
        shape
        for unplanned in (context.shape, *context.other_shapes)
        for shape in _of_class(context, unplanned, shares)
    )


def _of_class(
    context: PolicyContext, unplanned: EngineShape, shares: Mapping[int, float]
) -> tuple[EngineShape, ...]:
    """The same on the GPUs of one class; `unplanned` is its engines' shape without a choice."""
    gpu = unplanned.gpu
    gpus = context.pools[gpu]
    choices = [s for s in context.shape_choices if s.gpu == gpu and s.gpus <= gpus]
    of_width = {s.gpus: s for s in choices or [unplanned]}
    known = sorted(of_width)
    tps: list[int] = []
    given = 0.0
    for degree in sorted(shares, reverse=True):
        given += shares[degree] * gpus
        tp = next((tp for tp in known if tp >= degree), known[-1])
        tps += [tp] * max(0, int((given - sum(tps)) // tp))
    for tp in reversed(known):
        tps += [tp] * ((gpus - sum(tps)) // tp)
    if sum(tps) < gpus:
        raise ValueError(
            f"engines of TP {', '.join(map(str, known))} leave {gpus - sum(tps)} of {gpus} {gpu} "
            f"GPUs over: take a multiple of {known[0]} GPUs, or name the engines as cluster.mix"
        )
    return tuple(of_width[width] for width in sorted(tps, reverse=True))


Assignment: TypeAlias = Literal["planner", "placement", "auto", "ranked"]

RANKED: Final = 0.25
"""Log spread of predictions, over that of history's lengths, from which on they rank trajectories.
Predictions from prompts alone spread half as much as lengths do (`paper_quality`: 0.4 to 0.6);
equal predictions do not spread."""

CHARGED_S: Mapping[Solver, float] = {"exact": 0.1, "anneal": 5.0, "portfolio": 2.0, "libra-dp": 0.5}
"""Seconds of solver time that the simulator lets pass: for annealing the paper's (Table 2), for the
rest what `benchmarks/bench_planners.py` took at 6,400 trajectories on 64 GPUs, rounded up."""


class SearchedPlan:
    """Plans once all trajectories of a rollout have arrived, from what is predicted of them.

    The driver has the problem solved, and the simulator charges the time.
    """

    needs_all = True

    def __init__(
        self,
        context: PolicyContext,
        *,
        solver: Solver,
        cost: Cost = "context",
        assignment: Assignment = "auto",
        least_full_slots: float = 0.0,
    ) -> None:
        """Homes come from the plan (`planner`) or from the placement part (`placement`).

        `auto`: from the plan if predictions spread as lengths do. Otherwise groups cut by length
        would put average trajectories on the engines meant for many short ones. `ranked`: from the
        plan unless predictions are ties, whose order is that of arrival.

        Only engines are planned whose KV holds the mean context in at least the share
        `least_full_slots` of their slots; where none of a class does, those with the most KV.
        """
        self._context = context
        self._assignment: Assignment = assignment
        self._solver: Solver = solver
        self._cost: Cost = cost
        self._least_full_slots = least_full_slots

    def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> JointProblem:
        """Return the problem; the driver has it solved."""
        context = self._context
        history = context.history
        lengths = estimated_lengths(history, remaining)
        appended = history.appended_per_output if history else 0.0
        return JointProblem(
            solver=self._solver,
            cost=self._cost,
            trajectories=tuple(t.id for t in ts),
            output_tokens=tuple(lengths),
            context_tokens=tuple(t.context_tokens for t in ts),
            appended_per_output=appended,
            tool_s_per_output=history.tool_s_per_output if history else 0.0,
            by_shape=self._roomy(_mean_context_tokens(ts, lengths, appended)),
            pools=context.pools,
            max_running=context.max_running,
            seed=context.seed,
            homes=self._plan_gives_homes(remaining),
            charged_s=CHARGED_S[self._solver],
        )

    def _plan_gives_homes(self, remaining: Sequence[float]) -> bool:
        history = self._context.history
        match self._assignment:
            case "planner" | "placement":
                return self._assignment == "planner"
            case "auto":
                return history is None or history.predictions_vary(remaining)
            case "ranked":
                if history is None:
                    return len(remaining) < 2 or max(remaining) > min(remaining)
                return history.predictions_vary(remaining, share=RANKED)

    def _roomy(self, context_tokens: float) -> dict[EngineShape, StepCost]:
        """Shapes to choose from, with their costs: those with KV for `least_full_slots`."""
        context = self._context
        costs = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        slots_tokens = self._least_full_slots * context.max_running * context_tokens
        least: dict[str, float] = {}
        """Tokens of KV that an engine of a class must have."""
        for shape, cost in costs.items():
            most = max(least.get(shape.gpu, 0.0), float(cost.kv_capacity_tokens))
            least[shape.gpu] = min(slots_tokens, most)
        return {s: cost for s, cost in costs.items() if cost.kv_capacity_tokens >= least[s.gpu]}


def _mean_context_tokens(
    ts: Sequence[TrajectoryView], lengths: Sequence[float], appended_per_output: float
) -> float:
    """Context of a sequence, the mean over all tokens to decode; 0 without trajectories."""
    if not ts:
        return 0.0
    work = work_of(
        lengths,
        context_tokens=[t.context_tokens for t in ts],
        appended_tokens=appended_per_output * np.asarray(lengths),
    )
    return mean_decoded_context(work)


def estimated_lengths(history: History | None, remaining: Sequence[float]) -> list[float]:
    """Output tokens to plan with: predictions, spread as history was where they are means."""
    if history is None:
        return [max(1.0, r) for r in remaining]
    return [float(length) for length in history.lengths(remaining)]


_ONE_SHAPE = 0.01
"""Share of the makespan that one shape has to gain over two, which end earlier than estimated: long
trajectories move to the wide engines. Of 96 rollouts of 512 to 1,600 trajectories plans end
0.8 % earlier in the mean than with a share of -0.02; 0.005 to 0.03 are the same."""

MOVES: Final = 5.0
"""Mean steps of a trajectory from which on two shapes pay: with fewer it ends before it has moved.
Of traces with 10 tool calls they gain a tenth, of those with 3 they lose as much."""
WIDENED_LATE_S: Final = 20.0
"""How much later engines are widened than estimated, beside their start: it is not known who is
long, and they merge one after the other. Without it, mixes that pay on search are not chosen."""
LONGEST: Final = (1 / 6, 1 / 2, 5 / 6)
"""Quantiles of how long the longest trajectory is: engines are chosen for all of them."""
_MIDDLE: Final = 1
"""Place of the median among them."""

_SHARES = (0.125, 0.25, 0.5)
"""Of the GPUs that may have wide engines beside narrow ones."""

_SPREAD = 0.65
_MEDIANS = (100.0, 300.0, 1_000.0, 3_000.0, 10_000.0)
ASSUMED_HISTORIES = tuple(
    History(
        output_quantiles=tuple(
            median * math.exp(_SPREAD * NormalDist().inv_cdf((i + 0.5) / 50)) for i in range(50)
        ),
        appended_per_output=0.6,
        tool_s_per_output=0.0,
        step_output_tokens=512.0,
        longest_output_tokens=median * math.exp(_SPREAD * NormalDist().inv_cdf(1.0 - 0.5 / 1000)),
        trajectories=1000,
    )
    for median in _MEDIANS
)
"""Without a history, lengths are log-normal and their median is unknown. In five published traces
of agents the median is 113 to 3,593 tokens, and the 99th percentile 3.9 to 4.9 medians: a standard
deviation of logarithms of 0.58 to 0.68."""

Mix: TypeAlias = Mapping[EngineShape, int]
"""Engines by shape."""


class EqualProgressPlan:
    """The engines that end first if all trajectories advance alike: of one shape, or of two.

    The `portfolio` cuts a mix of shapes for lengths, by ranks. Where ranks are wrong, long
    trajectories are held on narrow engines and short ones crowd the wide ones: on synthetic math
    its mix loses to the best single shape. So it plans only where predictions vary as lengths did.
    Here nothing is taken for known but the distribution of lengths, by history. Without one, the
    shape is taken whose makespan is nearest to the least one over lengths of several scales.
    Engines change from one rollout to the next only where that saves more than their start takes.
    Of several GPU classes each has a shape of its own: all combinations are tried, and beside the
    best of them two shapes on one class at a time.

    `TailConsolidation` widens the engines later, when it is seen who is long.
    """

    needs_all = True

    def __init__(self, context: PolicyContext, *, mixes: bool = True) -> None:
        """Without `mixes`, engines of one shape only."""
        self._context, self._mixes = context, mixes
        self._mixed = SearchedPlan(context, solver="portfolio")
        self._last: Mix = {}

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the engines without homes, or the portfolio's problem."""
        context = self._context
        if not ts or self._lengths_known(remaining):
            return self._mixed.plan(ts, remaining)
        by_shape = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        fitting = self._fitting(by_shape)
        if not fitting:
            return self._mixed.plan(ts, remaining)
        filled = [
            [_filled(shape, shapes, context.pools[gpu]) for shape in shapes]
            for gpu, shapes in fitting.items()
        ]
        single = [_joined(mixes) for mixes in product(*filled)]
        makespan_s: float | None = None
        history = context.history
        if history is not None:
            history = history.of_prompts({epoch_of(t.group)[0] for t in ts})
        if history is None:
            by_history = (self._by_longest(each, single, ts) for each in ASSUMED_HISTORIES)
            mix = single[_least_regret(list(chain.from_iterable(by_history)))]
        else:
            mixes = single
            if len(fitting) > 1:
                others = single[_least_regret(self._by_longest(history, single, ts))]
            else:
                others = {}
            for gpu, shapes in fitting.items() if self._moves_hide(history, ts) else ():
                beside = {shape: n for shape, n in others.items() if shape.gpu != gpu}
                partly = (m for wide in shapes for m in _partly(wide, shapes, context.pools[gpu]))
                mixes = [*mixes, *({**beside, **mix} for mix in partly)]
            by_longest = self._by_longest(history, mixes, ts)
            chosen, ends_s = _least_regret(by_longest, single=len(single)), by_longest[_MIDDLE]
            if self._last in mixes:
                last = mixes.index(self._last)
                start_s = context.start_s(max(mixes[chosen], key=_gpus))
                chosen = last if ends_s[last] <= ends_s[chosen] + start_s else chosen
            self._last = mix = mixes[chosen]
            makespan_s = ends_s[chosen]
        widest_first = sorted(mix, key=lambda shape: -shape.gpus)
        engines = _engines([shape for shape in widest_first for _ in range(mix[shape])], context)
        return ResourcePlan(engines=engines, estimated_makespan_s=makespan_s)

    def _moves_hide(self, history: History, ts: Sequence[TrajectoryView]) -> bool:
        """Whether trajectories reach wide engines: by moves, of which each takes a tool's time.

        A trajectory is known to be long when it has had more steps than others.
        """
        mean_tokens = history.mean_output_tokens()
        context = sum(t.context_tokens for t in ts) / len(ts)
        context += 0.5 * mean_tokens * (1.0 + history.appended_per_output)
        tool_s = history.tool_s_per_output * history.step_output_tokens
        steps = mean_tokens / history.step_output_tokens
        return (
            self._mixes and steps >= MOVES and tool_s >= self._context.cost.transfer_s(int(context))
        )

    def _fitting(self, by_shape: Iterable[EngineShape]) -> dict[str, list[EngineShape]]:
        """Shapes of each class that its pool has GPUs for, narrowest first."""
        check_classes(self._context.pools, self._context.shape_choices)
        found = {
            gpu: sorted((s for s in shapes_of(gpu, by_shape) if s.gpus <= gpus), key=_gpus)
            for gpu, gpus in self._context.pools.items()
        }
        return {gpu: shapes for gpu, shapes in found.items() if shapes}

    def _lengths_known(self, remaining: Sequence[float]) -> bool:
        history = self._context.history
        if len(remaining) < 2:
            return False
        if history is None:  # only an oracle spreads its predictions so
            return ASSUMED_HISTORIES[0].predictions_vary(remaining)
        return history.lengths_known(remaining)

    def _by_longest(
        self,
        history: History,
        mixes: Sequence[Mix],
        ts: Sequence[TrajectoryView],
    ) -> list[list[float]]:
        """Estimate makespans in seconds by `LONGEST` and by mix; lengths are as in `history`.

        Late in the rollout the engines may change to the widest shapes of the context.
        """
        context = self._context
        by_shape = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        widest = _joined(
            [
                _filled(shapes[-1], shapes, context.pools[gpu])
                for gpu, shapes in self._fitting(by_shape).items()
            ]
        )
        return equal_progress_s(
            history,
            by_shape,
            mixes,
            widened=widest,
            trajectories=len(ts),
            prompt_tokens=sum(t.context_tokens for t in ts) / len(ts),
            prefilled_tokens=sum({t.group: t.context_tokens for t in ts}.values()),
            max_running=context.max_running,
            start_s=WIDENED_LATE_S + context.start_s(max(by_shape, key=lambda s: s.gpus)),
            widened_at=first_search_at(sum(s.gpus * n for s, n in widest.items())),
            longest_at=LONGEST,
        )


def _gpus(shape: EngineShape) -> int:
    return shape.gpus


def _joined(mixes: Sequence[Mix]) -> Mix:
    """The engines of several classes."""
    return {shape: count for mix in mixes for shape, count in mix.items()}


def _filled(shape: EngineShape, shapes: Sequence[EngineShape], gpus: int) -> Mix:
    """Engines of `shape` on as many GPUs as possible, and on the rest of narrower `shapes`."""
    mix: dict[EngineShape, int] = {}
    for each in sorted((s for s in shapes if s.gpus <= shape.gpus), key=lambda s: -s.gpus):
        if gpus >= each.gpus:
            mix[each] = gpus // each.gpus
            gpus %= each.gpus
    return mix


def _partly(wide: EngineShape, shapes: Sequence[EngineShape], gpus: int) -> list[Mix]:
    """Mixes of `wide` engines on some of the GPUs, and of a narrower shape on the others."""
    counts = sorted({max(1, round(share * gpus / wide.gpus)) for share in _SHARES})
    return [
        {wide: count, **_filled(narrow, shapes, gpus - count * wide.gpus)}
        for count in counts
        for narrow in shapes
        if narrow.gpus < wide.gpus and count * wide.gpus + narrow.gpus <= gpus
    ]


def _least_regret(estimates: Sequence[Sequence[float]], *, single: int | None = None) -> int:
    """Position of the least makespan over the least one, in the mean of the logarithms.

    One of the first `single`, if it is given, where it gains `_ONE_SHAPE` over the others, or
    where others bring nothing.
    """
    logs = np.log(np.asarray(estimates))
    regret = (logs - logs.min(axis=1, keepdims=True)).mean(axis=0)
    best = int(regret[:single].argmin())
    other = np.where(np.isclose(regret, regret[best], atol=1e-9), np.inf, regret - _ONE_SHAPE)
    other[:single] = regret[:single]
    return int(other.argmin())
