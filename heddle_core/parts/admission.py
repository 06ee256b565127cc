"""Admissions: how much KV a step must find free before it may run."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from mypy_extensions import mypyc_attr

from heddle_core.estimate.tool_times import RECENT, RecentDurations
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import PolicyContext, TrajectoryView, View


@mypyc_attr(allow_interpreted_subclasses=True)
class PromptOnly:
    """The prompt must fit beside the running steps; KV of trajectories in a tool may be evicted."""

    keeps_kv = False

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        return 0


STEPS_AHEAD = 1.5
"""Reserve of `headroom` in mean steps: step lengths are skewed, and one is often too small."""

UNKNOWN_STEP_TOKENS = 512.0
"""Mean output of a step without history, until steps have ended."""
UNKNOWN_STEPS: Final = 32
"""Steps as which that counts in the mean of those that have."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ReserveOutput:
    """Reserve for the step's output, and keep the KV of trajectories that are in a tool.

    An engine full of prompts runs out of KV as they grow; it then preempts the youngest sequence
    and prefills it again. A trajectory that returns from a short tool may find its KV evicted. On
    6,400 coding trajectories on 64 H100 (Qwen3-14B) that was a fifth of the makespan. Without a
    history, steps that end tell what a step makes and what its tool appends.
    """

    keeps_kv = True

    def __init__(
        self,
        context: PolicyContext,
        *,
        steps: float = STEPS_AHEAD,
        results: bool = False,
    ) -> None:
        """Reserve `steps` mean steps, and with `results` what tools append to so much output."""
        history = context.history
        self._step_tokens = history.step_output_tokens if history else UNKNOWN_STEP_TOKENS
        self._steps = steps
        self._results = results
        self._growth = 1.0 + history.appended_per_output if history and results else 1.0
        self._learns = history is None
        self._ended = UNKNOWN_STEPS
        self._made = UNKNOWN_STEP_TOKENS * UNKNOWN_STEPS
        self._appended = 0

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        """Return some mean steps of this trajectory or of the workload, whichever is more."""
        own = t.output_tokens / t.step if t.step else 0.0
        ahead = self._steps * max(own, self._step_tokens)
        # Even at an estimate of 0 remaining tokens, the step that runs will make some.
        return int(self._growth * min(max(remaining_tokens, self._step_tokens), ahead))

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        if self._learns:
            self._ended += 1
            self._made += event.output_tokens
            self._step_tokens = self._made / self._ended

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        if self._learns and self._results:
            self._appended += event.observation_tokens
            self._growth = 1.0 + self._appended / self._made


CHUNK_TOKENS = 2_048
"""An assumption: a few times the mean step of the shipped workloads."""


@mypyc_attr(allow_interpreted_subclasses=True)
class InChunks:
    """Ends a dispatch after `chunk_tokens`, and admits it when prompt and chunk fit.

    So an engine does not run out of KV, and what is left of a long step is ordered and placed anew
    (Seer, arXiv 2511.14617).
    """

    keeps_kv = False

    def __init__(self, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        """Set the size of chunks.

        Raises:
            ValueError: it is below 1.
        """
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; give at least 1")
        self.chunk_tokens = chunk_tokens

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        """Return a chunk, or what the trajectory is estimated to make if that is less."""
        return int(min(self.chunk_tokens, max(remaining_tokens, 1.0)))


ENOUGH: Final = 100
"""Durations from which on they are used: of the tool, else of all tools."""


@dataclass(slots=True)
class _Correlation:
    """Of pairs, from their sums."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.yy += y * y
        self.xy += x * y

    def value(self) -> float | None:
        """Pearson's; None where one of the two does not vary."""
        spread = (self.n * self.xx - self.x**2) * (self.n * self.yy - self.y**2)
        return (self.n * self.xy - self.x * self.y) / math.sqrt(spread) if spread > 0.0 else None


@mypyc_attr(allow_interpreted_subclasses=True)
class TimeToLive:
    """KV of a trajectory in a tool counts as in use for a limited time (arXiv 2511.02230).

    The limit is the time `s` that maximizes ``P(s) * (wait_s * order + prefill_s) - s``. `P(s)` is
    the share of the tool's earlier calls that took at most `s`, among `RECENT`; of all tools'
    calls until there are `ENOUGH` of the tool, and until there are `ENOUGH` at all an exponential
    distribution of mean 1 s. `prefill_s` is the estimated prefill of the whole context, or its load
    from a store. `wait_s` is the mean wait of the last `RECENT` steps whose KV had not been kept.
    `order` is minus the correlation of the steps that a trajectory has done with those that it has
    left, over all that have ended: 1 where all have equally many, 0 where progress tells nothing;
    1 before any has ended.

    It admits a step when its prompt fits, as vLLM does.
    """

    keeps_kv = True

    def __init__(self, context: PolicyContext) -> None:
        self._cost = context.cost
        self._tools: dict[str, RecentDurations] = {}
        self._all = RecentDurations()
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._steps = _Correlation()

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        return 0

    def keep_kv_s(self, t: TrajectoryView, tool: str, view: View) -> float:
        """Return the limit for this call."""
        assert t.home is not None
        restore_s = self._cost.by_shape[view.engine(t.home).shape].restore_s
        return self.limit_s(tool, restore_s * t.context_tokens)

    def limit_s(self, tool: str, prefill_s: float) -> float:
        """Return the limit for a call of `tool` by a context with this prefill."""
        wait_s = sum(self._waits) / len(self._waits) if self._waits else 0.0
        known = self._tools.get(tool)
        if known is None or len(known) < ENOUGH:
            known = self._all
        if len(known) < ENOUGH:
            # Of (1 - exp(-s)) * benefit - s the maximum is at log(benefit); order counts as 1.
            benefit_s = wait_s + prefill_s
            return math.log(benefit_s) if benefit_s > 1.0 else 0.0
        return known.best_limit_s(wait_s * self.order() + prefill_s)

    def order(self) -> float:
        """What an order by trajectory is worth: see the class."""
        correlation = self._steps.value()
        return 1.0 if correlation is None else -correlation

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn how long a step waited whose KV was not kept."""
        if event.step and not t.kv_kept:
            self._waits.append(t.dispatched_s - t.runnable_s + event.queued_s)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        seconds = event.time_s - t.tool_started_s
        self._tools.setdefault(event.tool, RecentDurations()).add(seconds)
        self._all.add(seconds)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Learn how many steps followed each step."""
        steps = t.step + 1
        for done in range(1, steps):
            self._steps.add(done, steps - done)
