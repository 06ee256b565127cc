"""Converts the journal of a run back to a trace.

Sizes and tools are the original ones. Times are those of the run: a tool's wait includes waiting
for a free slot, as a reward's does, and `llm_s` all queueing. What a journal lacks stays unknown:
whether a task was solved, what the last tool added, how much of a compacted prompt repeated the one
before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from heddle_core.events import (
    EngineFailed,
    Event,
    Scored,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import TrajectoryId
from heddle_trace.errors import TraceError
from heddle_trace.schema import StepRecord, TrajectoryRecord

# Times in a journal are sums of floats; a microsecond is far above their error.
_DIGITS = 6


class _DoesNotFitError(Exception):
    """An event that cannot follow those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractReport:
    """Trajectories left out of an extracted trace, by their outcome."""

    left_out: Mapping[str, int]


@dataclass(slots=True)
class _Going:
    """A trajectory while its events are read. Tokens and seconds."""

    arrived: TrajectoryArrived
    runnable_s: float
    context: int
    """Of the generation that runs or will run next."""
    steps: list[StepRecord] = field(default_factory=list)
    made: int = 0
    input_tokens: int | None = None
    """The context, where it is not the sum of what came before."""
    generation: StepRecord | None = None
    tool: ToolStarted | None = None
    outcome: str | None = None
    finished_s: float = 0.0
    scored: Scored | None = None
    between_steps: bool = False
    """It was cancelled when its last step was answered: a client of a gateway fell silent."""


def extract(
    events: Iterable[Event],
    *,
    source: str | None = None,
    model: str | None = None,
    with_silent: bool = False,
) -> tuple[tuple[TrajectoryRecord, ...], ExtractReport]:
    """Records of all trajectories that ran to their end, in the order of their arrival.

    Those that failed, were cancelled, or never finished are left out and counted. `with_silent`
    keeps those cancelled between two steps: their last answered step is taken for their last.
    Raises TraceError for events that no run can have had, or when nothing is left.
    """
    going: dict[TrajectoryId, _Going] = {}
    for event in events:
        try:
            _take(going, event)
        except (KeyError, _DoesNotFitError):
            raise TraceError(
                f"the journal does not add up at {event.time_s:.6f} s: {type(event).__name__} of "
                "a trajectory that was not there, or not at that point; run it again"
            ) from None
    left_out: dict[str, int] = {}
    records = []
    # A simulated loop gives 0 to all trajectories of a trace without rewards.
    rewarded = any(one.scored is not None and one.scored.reward for one in going.values())
    for one in going.values():
        ended = one.outcome in ("completed", "truncated")
        if one.steps and (ended or (with_silent and one.between_steps)):
            records.append(_record(one, source, model, rewarded))
        else:
            how = one.outcome or "unfinished"
            left_out[how] = left_out.get(how, 0) + 1
    if not records:
        counts = ", ".join(f"{count:,} {how}" for how, count in left_out.items()) or "there is none"
        raise TraceError(
            f"no trajectory of this run came to its end ({counts}); there is nothing to extract. "
            "Clients of heddle serve end theirs by POST /finish_session; with_silent "
            "(--with-silent) keeps those that fell silent between two steps"
        )
    return tuple(records), ExtractReport(left_out=left_out)


def _take(going: dict[TrajectoryId, _Going], event: Event) -> None:
    match event:
        case TrajectoryArrived(time_s=time_s, trajectory=trajectory, prompt_tokens=prompt):
            going[trajectory] = _Going(event, runnable_s=time_s, context=prompt)
        case StepPreempted(trajectory=trajectory, output_tokens=tokens):
            going[trajectory].made += tokens
        case EngineFailed(salvaged=salvaged):
            for trajectory, tokens in salvaged:
                going[trajectory].made += tokens
        case StepFinished(trajectory=trajectory):
            _finish_step(going[trajectory], event)
        case ToolStarted(trajectory=trajectory):
            going[trajectory].tool = event
        case ToolReturned(trajectory=trajectory):
            _return_tool(going[trajectory], event)
        case TrajectoryFinished(trajectory=trajectory, outcome=outcome):
            _close(going[trajectory], event)
            going[trajectory].outcome = outcome
            going[trajectory].finished_s = event.time_s
        case Scored(trajectory=trajectory):
            going[trajectory].scored = event
        case _:
            pass


def _finish_step(one: _Going, event: StepFinished) -> None:
    """The generation is whole: what was kept from preemptions and failures belongs to it."""
    if one.generation is not None:
        raise _DoesNotFitError
    one.generation = StepRecord(
        output_tokens=one.made + event.output_tokens,
        llm_s=_span(one.runnable_s, event.time_s),
        t_s=_span(one.arrived.time_s, one.runnable_s),
        input_tokens=one.input_tokens,
    )
    one.made = 0


def _return_tool(one: _Going, event: ToolReturned) -> None:
    generation = one.generation
    if generation is None:
        raise _DoesNotFitError
    _step(one, event.time_s, ok=event.ok, added=event.observation_tokens)
    grown = one.context + (generation.output_tokens or 0) + event.observation_tokens
    one.input_tokens = None if event.context_tokens == grown else event.context_tokens
    one.context, one.runnable_s = event.context_tokens, event.time_s


def _close(one: _Going, event: TrajectoryFinished) -> None:
    if one.generation is None:
        return
    if event.outcome == "cancelled":
        one.between_steps, one.tool = True, None
    _step(one, event.time_s, ok=None, added=None)


def _step(one: _Going, until_s: float, *, ok: bool | None, added: int | None) -> None:
    """Add the step whose generation is whole, with the tool that ran until now."""
    made, tool = one.generation, one.tool
    if made is None:
        raise _DoesNotFitError
    name = wait_s = None
    if tool is not None:
        wait_s = _span(tool.time_s, until_s)
        name = tool.tool or ("unspecified" if wait_s else None)
    one.steps.append(
        StepRecord(
            output_tokens=made.output_tokens,
            tool=name,
            tool_s=wait_s if name is not None else None,
            tool_tokens=added,
            tool_ok=ok,
            llm_s=made.llm_s,
            t_s=made.t_s,
            input_tokens=made.input_tokens,
        )
    )
    one.generation = one.tool = None


def _span(start_s: float, end_s: float) -> float:
    return max(0.0, round(end_s - start_s, _DIGITS))


def _record(one: _Going, source: str | None, model: str | None, rewarded: bool) -> TrajectoryRecord:
    arrived, scored = one.arrived, one.scored
    return TrajectoryRecord(
        trajectory_id=arrived.trajectory,
        group_id=arrived.group,
        workload=arrived.task,
        prompt_tokens=arrived.prompt_tokens,
        arrival_s=round(arrived.time_s, _DIGITS) or None,
        steps=tuple(one.steps),
        source=source,
        model=model,
        truncated=True if one.outcome == "truncated" else None,
        reward=scored.reward if scored is not None and rewarded else None,
        reward_s=None if scored is None else _span(one.finished_s, scored.time_s),
    )
