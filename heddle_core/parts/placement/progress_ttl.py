"""Progress-TTL of vllm-router: program scheduling with KV reserved for growth."""

from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.growth_reserve import GrowthReserve, speedup
from heddle_core.parts.placement.program_scheduling import Member, ProgramScheduling, Space
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View


@dataclass(slots=True)
class _Progress:
    """Of a trajectory."""

    prompt_tokens: int = 0
    """Of its last step."""
    rounds: int = 0
    """Since it was admitted."""
    rounds_since_ttl: int = 0
    """Since a time-to-live of it ended."""
    yielded: bool = False


@mypyc_attr(allow_interpreted_subclasses=True)
class ProgressTtl(ProgramScheduling):
    """`ProgramScheduling` with the rest of Progress-TTL: defaults of vllm-router 0.1.17.

    A round is a step that finds 0.9 of the prompt before it in the cache. KV is reserved for the
    rounds to come of active trajectories and of the one that is to be admitted: for each twice the
    mean of rounds since a time-to-live ended, `max_rounds` at most, less those that it had; for
    each round the mean growth of a prompt (`GrowthReserve`). What does not fit beside the reserve
    is admitted all the same if a larger batch saves the mean step more than is prefilled for it.

    A trajectory that had `max_rounds` pauses in its tool where another waits for its engine, and
    resumes after others. Not modelled: shorter limits than `force_s`, by the steps done a second.
    """

    def __init__(self, context: PolicyContext, *, max_rounds: int = 14) -> None:
        super().__init__(context)
        self._max_rounds = max_rounds
        self._progress: dict[TrajectoryId, _Progress] = {}
        self._reserves: dict[EngineId, GrowthReserve] = {}
        self._reviewed: set[EngineId] = set()

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn how prompts grow; one with enough rounds makes room for one that waits."""
        member = self._members.get(t.id)
        if member is None or t.id not in self._progress:
            return
        progress = self._progress[t.id]
        prompt, before = t.context_tokens - event.output_tokens, progress.prompt_tokens
        progress.prompt_tokens = prompt
        if event.cached_tokens >= 0.9 * before:
            progress.rounds += 1
            progress.rounds_since_ttl += 1
        grown = prompt - before if 0 < prompt - before < before else 0
        reserve = self._reserves.setdefault(member.engine, GrowthReserve())
        reserve.steps.append((grown, progress.rounds_since_ttl, event.decode_s))
        space = self._spaces.get(member.engine)
        waited_for = space is not None and space.waiting > 0
        if member.active and waited_for and progress.rounds >= self._max_rounds:
            progress.yielded = True
            self._pause(t, member)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Learn how long a call took; one beyond its time-to-live begins a new segment."""
        super().observe_tool(t, event)
        member, progress = self._members.get(t.id), self._progress.get(t.id)
        if member is None or progress is None or member.keep[0] != event.step:
            return
        if event.time_s - t.tool_started_s > member.keep[1]:
            progress.rounds_since_ttl = 0

    def finished(self, t: TrajectoryView) -> None:
        super().finished(t)
        self._progress.pop(t.id, None)

    def _order(self, t: TrajectoryView) -> tuple[bool, bool, float]:
        """Those that yielded last."""
        _, new, latest_first = super()._order(t)
        progress = self._progress.get(t.id)
        return progress is not None and progress.yielded, new, latest_first

    def _count(self, view: View) -> None:
        super()._count(view)
        self._reviewed.clear()

    def _review(self, engine: EngineId, space: Space) -> GrowthReserve:
        """Return the reserve of an engine, by the last steps at the last review."""
        reserve = self._reserves.setdefault(engine, GrowthReserve())
        if engine not in self._reviewed:
            self._reviewed.add(engine)
            reserve.review(self._max_rounds)
            had = [self._progress[name].rounds for name in space.active]
            reserve.left = sum(max(reserve.rounds - rounds, 0.0) for rounds in had)
        return reserve

    def _admits(self, t: TrajectoryView, space: Space, engine: EngineView) -> bool:
        if not super()._admits(t, space, engine):
            return False
        reserve = self._review(engine.id, space)
        if not reserve.growth or not space.active:
            return True
        free = space.tokens - self._need(t) - reserve.growth * reserve.rounds
        if free >= reserve.growth * reserve.left:
            return True
        cost, tokens = self._cost.by_shape[engine.shape], engine.estimated_kv_tokens
        saved_s = reserve.decode_s * speedup(cost, engine.running_steps, tokens, t.context_tokens)
        token_s = self._impact * cost.prefill_s
        lost_s = token_s * t.context_tokens
        if saved_s < lost_s:
            return False
        mean_s = token_s * (engine.kv_capacity_tokens - space.tokens) / len(space.active)
        return saved_s >= lost_s + reserve.prefills_more(space.tokens, free) * mean_s

    def _admit(self, t: TrajectoryView, member: Member, space: Space) -> EngineId:
        progress = self._progress.setdefault(t.id, _Progress())
        progress.rounds, progress.yielded = 0, False
        if member.engine in self._reviewed:
            self._reserves[member.engine].left += self._reserves[member.engine].rounds
        return super()._admit(t, member, space)
