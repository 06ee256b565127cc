"""Tasks to the GPU class that suits them: by measured shares of prefill and decode, or by tag."""

from collections.abc import Iterable
from dataclasses import dataclass

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.history import History, Levels
from heddle_core.events import StepFinished
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, pinned
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View

_PREFERS = 1.02
"""Times as much that a task must cost on one class as on another to prefer that one."""

_HISTORY_TOKENS = 20_000.0
"""Output tokens after which measurements count as much as what history has of a task."""


@dataclass(slots=True)
class _Measured:
    """Sums over finished steps of a task."""

    output_tokens: float = 0.0
    prefill_tokens: float = 0.0
    """Of prompts, without what a prefix cache had."""
    ended: int = 0
    """Trajectories."""
    attended_tokens: float = 0.0
    """Context of each output token, summed."""


@dataclass(frozen=True, slots=True)
class TaskShare:
    """What an output token of a task brings with it."""

    prefill_tokens: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class _Placed:
    gpu: str
    gpu_s: float


class Affinity(OneByOne):
    """A known trajectory stays; a new one goes to the class that its task costs the least on.

    A trajectory costs a class the GPU-seconds that its output tokens and the prefill that comes
    with them take on a full engine, by the cost estimate; how many tokens it will make is the mean
    of its task. Costs of two classes compare relative to what all trajectories so far cost there on
    average: a class may be slower at everything, and is still the better place for what it is least
    slow at. Finished steps of a task are measured: tokens prefilled and context, per output token.
    Until there are enough of them, history counts too; a task of which nothing is known prefers no
    class.

    The load of a class is the cost of its unfinished trajectories over its GPUs. The class is full
    when its load would be above `spread` times the least that another would have, by more than a
    trajectory for each of its engines. Then the next class takes the trajectory. In a class it goes
    to the engine with the fewest unfinished trajectories for each GPU, the first of equals.
    """

    def __init__(self, context: PolicyContext, *, spread: float = 1.1) -> None:
        if not spread >= 1.0:
            raise ValueError(f"spread of the loads of classes is {spread}; give at least 1")
        self._context = context
        self._spread = spread
        self._measured: dict[str, _Measured] = {}
        self._placed: dict[TrajectoryId, _Placed] = {}
        self._load_gpu_s: dict[str, float] = dict.fromkeys(context.pools, 0.0)
        """Of the unfinished trajectories of each class."""
        self._mean_gpu_s: dict[str, float] = dict.fromkeys(context.pools, 0.0)
        """Of all trajectories so far, on each class."""
        self._seen = 0

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the home, or an engine of the best class that is not full."""
        home = pinned(t, view)
        if home is not None:
            return home
        self._leave(t)
        by_class: dict[str, list[EngineView]] = {}
        for engine in view.engines:
            by_class.setdefault(engine.shape.gpu, []).append(engine)
        share = self.share(t)
        tokens = self._output_tokens(t)
        costs = {
            gpu: tokens
            * self._gpu_s(share or _of_prompt(t), dict.fromkeys(e.shape for e in engines))
            for gpu, engines in by_class.items()
        }
        self._count(costs)
        gpu = self._chosen(costs, by_class, known=share is not None)
        self._placed[t.id] = _Placed(gpu, costs[gpu])
        self._load_gpu_s[gpu] = self._load_gpu_s.get(gpu, 0.0) + costs[gpu]
        return min(by_class[gpu], key=lambda e: e.sessions / e.shape.gpus).id

    def share(self, t: TrajectoryView) -> TaskShare | None:
        """Return the measured share of a trajectory's task; None while nothing is known of it."""
        measured = self._measured.get(t.task, _Measured())
        prior = _of_history(self._context.history, t)
        weight = 0.0 if prior is None else _HISTORY_TOKENS
        tokens = measured.output_tokens + weight
        if tokens <= 0.0:
            return None
        known = prior or TaskShare(0.0, 0.0)
        return TaskShare(
            (measured.prefill_tokens + weight * known.prefill_tokens) / tokens,
            (measured.attended_tokens + weight * known.context_tokens) / tokens,
        )

    def _output_tokens(self, t: TrajectoryView) -> float:
        """Expected output of a trajectory of this task: by history, else its mean so far, or 1."""
        history, measured = self._context.history, self._measured.get(t.task)
        if history is not None and t.task in history.tasks:
            return max(history.tasks[t.task].total_tokens, 1.0)
        if measured is not None and measured.ended:
            return max(measured.output_tokens / measured.ended, 1.0)
        return 1.0 if history is None else max(history.mean_output_tokens(), 1.0)

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Count the step's output, prefill and context for its task."""
        output = event.output_tokens
        prompt = t.context_tokens - output
        measured = self._measured.setdefault(t.task, _Measured())
        measured.output_tokens += output
        measured.prefill_tokens += max(prompt - event.cached_tokens, 0)
        measured.attended_tokens += output * (prompt + 0.5 * output)

    def finished(self, t: TrajectoryView) -> None:
        """Take a trajectory out of the load of its class, and count it for its task."""
        self._measured.setdefault(t.task, _Measured()).ended += 1
        self._leave(t)

    def _leave(self, t: TrajectoryView) -> None:
        placed = self._placed.pop(t.id, None)
        if placed is not None:
            self._load_gpu_s[placed.gpu] -= placed.gpu_s

    def _count(self, costs: dict[str, float]) -> None:
        self._seen += 1
        for gpu, gpu_s in costs.items():
            mean = self._mean_gpu_s.get(gpu, 0.0)
            self._mean_gpu_s[gpu] = mean + (gpu_s - mean) / self._seen

    def _chosen(
        self, costs: dict[str, float], by_class: dict[str, list[EngineView]], *, known: bool
    ) -> str:
        """The class of the least relative cost that is not full."""
        load_s: dict[str, float] = {}
        slack_s: dict[str, float] = {}
        for gpu, engines in by_class.items():
            gpus = sum(e.shape.gpus for e in engines)
            load_s[gpu] = (self._load_gpu_s.get(gpu, 0.0) + costs[gpu]) / gpus
            slack_s[gpu] = len(engines) * costs[gpu] / gpus
        least = min(load_s, key=lambda gpu: load_s[gpu])
        relative = {gpu: gpu_s / max(self._mean_gpu_s[gpu], 1e-30) for gpu, gpu_s in costs.items()}
        if not known or max(relative.values()) <= _PREFERS * min(relative.values()):
            return least
        most_s = self._spread * load_s[least]
        best_first = sorted(relative, key=lambda gpu: relative[gpu])
        return next(gpu for gpu in best_first if load_s[gpu] <= most_s + slack_s[gpu])

    def _gpu_s(self, share: TaskShare, shapes: Iterable[EngineShape]) -> float:
        """GPU-seconds of an output token, and of the prefill that comes with it, on a class."""
        by_shape, slots = self._context.cost.by_shape, self._context.max_running
        return min(shape.gpus * _token_s(by_shape[shape], share, slots) for shape in shapes)


def _token_s(cost: StepCost, share: TaskShare, max_running: int) -> float:
    """Seconds of an output token, and of the prefill that comes with it, on a full engine."""
    context = share.context_tokens
    pace = max(context / cost.kv_capacity_tokens, 1.0 / max_running)
    return (
        cost.t0_s * pace + cost.t1_s + cost.t2_s * context + cost.prefill_s * share.prefill_tokens
    )


def _of_prompt(t: TrajectoryView) -> TaskShare:
    """Assumed of a trajectory of which only the prompt is known: as much output again."""
    return TaskShare(1.0, 1.5 * max(t.prompt_tokens, 1))


def _of_history(history: History | None, t: TrajectoryView) -> TaskShare | None:
    """What history has of a trajectory's task, with its own prompt."""
    if history is None:
        return None
    levels: Levels | None = history.tasks.get(t.task)
    if levels is None:
        output = max(history.mean_output_tokens(), 1.0)
        appended = history.appended_per_output * output
    else:
        output = max(levels.total_tokens, 1.0)
        appended = levels.payload_tokens * max(output / max(levels.step_tokens, 1.0) - 1.0, 0.0)
    context = t.prompt_tokens + 0.5 * (output + appended)
    return TaskShare((t.prompt_tokens + appended) / output, context)


class TaggedAffinity(OneByOne):
    """A known trajectory stays; a new one goes to the GPU class of its task's tag.

    RollArt's hardware affinity (arXiv 2512.22560). The class is full when each of its engines has
    as many unfinished trajectories as slots. A trajectory whose class is full, or whose task has no
    tag, goes to the others; where all are full, to its own class. Among engines: the fewest
    unfinished trajectories for each slot, the first of equals.
    """

    def __init__(self, context: PolicyContext) -> None:
        """Take the tags of the context.

        Raises:
            ValueError: a tag names a class without a pool.
        """
        self._tags = context.tags
        for task, gpu in context.tags.items():
            if gpu not in context.pools:
                raise ValueError(
                    f"task {task!r} is tagged with the GPU class {gpu!r}, which has no pool; "
                    f"pools are of {', '.join(context.pools)}"
                )

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the home, or an engine of the tagged class, or of another while that is full."""
        home = pinned(t, view)
        if home is not None:
            return home
        tag = self._tags.get(t.task)
        mine = [e for e in view.engines if tag in (None, e.shape.gpu)]
        others = [e for e in view.engines if tag not in (None, e.shape.gpu)]
        for engines in (mine, others):
            free = [e for e in engines if e.sessions < e.max_running]
            if free:
                return min(free, key=lambda e: e.sessions / e.max_running).id
        return min(mine or others, key=lambda e: e.sessions / e.max_running).id
