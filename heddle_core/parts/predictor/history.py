"""History: a prompt of earlier rollouts takes about as many tokens again."""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import GroupId
from heddle_core.policy import TrajectoryView


class HistoryPredictor:
    """Estimates from the totals of a group's earlier samples and of those that end in this run.

    The estimate is the mean residual of the group's known totals: of those longer than the output
    of `t` so far, the mean of the rest. A trajectory longer than all of them is expected to need
    their mean once more. Without a known total the group falls back to the mean total of its task,
    then to the mean of all tasks, then to `unknown_tokens`; minus the output so far, at least
    `floor_tokens`.
    """

    served = False

    def __init__(
        self,
        totals: Mapping[GroupId, Sequence[int]],
        *,
        task_totals: Mapping[str, Sequence[int]] | None = None,
        unknown_tokens: float = 0.0,
        floor_tokens: float = 1.0,
    ) -> None:
        """Take output tokens per trajectory, by group and, where groups do not recur, by task."""
        self._groups = {group: sorted(made) for group, made in totals.items() if made}
        self._tasks = {task: (len(made), sum(made)) for task, made in (task_totals or {}).items()}
        known = [*totals.values(), *(task_totals or {}).values()]
        self._all = (sum(map(len, known)), sum(map(sum, known)))
        self._unknown_tokens = unknown_tokens
        self._floor_tokens = floor_tokens

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it: only ends count."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Ignore it."""

    def observe_finish(self, t: TrajectoryView) -> None:
        """Add the total to its group, its task and all."""
        made = t.output_tokens
        insort(self._groups.setdefault(t.group, []), made)
        count, tokens = self._tasks.get(t.task, (0, 0))
        self._tasks[t.task] = (count + 1, tokens + made)
        self._all = (self._all[0] + 1, self._all[1] + made)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean residual of the group, or the task's mean minus the output so far."""
        made = t.output_tokens
        group = self._groups.get(t.group)
        if group is not None:
            longer = group[bisect_right(group, made) :]
            left = sum(longer) / len(longer) - made if longer else sum(group) / len(group)
            return max(left, self._floor_tokens)
        count, tokens = self._tasks.get(t.task, (0, 0))
        if not count:
            count, tokens = self._all
        mean = tokens / count if count else self._unknown_tokens
        return max(mean - made, self._floor_tokens)
