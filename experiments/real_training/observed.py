"""What a training run did, from its journal: lengths, and the times of what took time."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heddle_core.commands import (
    AccumulateGradients,
    Command,
    StartEngine,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineUpdated,
    Event,
    GradientsAccumulated,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    Trained,
    TrajectoryArrived,
)
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_trace.schema import StepScript


@dataclass(slots=True)
class ObservedTrajectory:
    """What a trajectory has done so far."""

    group: GroupId
    sample: int
    prompt_tokens: int = 0
    steps: list[StepScript] = field(default_factory=list)
    context: int = 0
    """Tokens before the current step."""
    made: int = 0
    """Tokens of it, of dispatches that did not finish it."""
    tool_began_s: float = 0.0

    def end_step(self, output: int) -> None:
        """The current step made `output` more tokens, and is over."""
        output = max(1, output + self.made)
        self.steps.append(
            StepScript(
                prompt_tokens=self.context,
                shared_tokens=self.context - self.steps[-1].tool_tokens if self.steps else 0,
                output_tokens=output,
                tool=None,
                tool_s=0.0,
                tool_ok=None,
                tool_tokens=0,
            )
        )
        self.made = 0

    @property
    def tokens(self) -> int:
        """Of the whole context."""
        return self.context + self.steps[-1].output_tokens if self.steps else self.prompt_tokens


@dataclass(frozen=True, slots=True)
class ObservedDispatch:
    """A dispatch that ended."""

    scheduled_s: float
    """When its engine began with it."""
    ended_s: float
    engine: EngineId
    tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float


@dataclass(slots=True)
class ObservedRun:
    """A run's trajectories, dispatches, trainings and updates, from its journal."""

    trajectories: dict[TrajectoryId, ObservedTrajectory] = field(default_factory=dict)
    dispatches: list[ObservedDispatch] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    trainings: list[tuple[float, int, float]] = field(default_factory=list)
    """End, tokens and seconds of each."""
    parts: list[tuple[float, int, float]] = field(default_factory=list)
    """The same of the parts of batches."""
    updates: list[tuple[float, float]] = field(default_factory=list)
    """End and seconds of each engine's."""
    starts: list[float] = field(default_factory=list)
    """Seconds of starts while the run was under way."""
    faults: list[tuple[float, EngineId]] = field(default_factory=list)
    kv_tokens: int = 0
    _training: tuple[float, int] = (0.0, 0)
    _updating: dict[EngineId, float] = field(default_factory=dict)
    _starting: dict[EngineId, float] = field(default_factory=dict)

    def take(self, event: Event, commands: Sequence[Command]) -> None:
        """Take an event and its commands."""
        match event:
            case TrajectoryArrived():
                known = self.trajectories[event.trajectory]
                known.prompt_tokens = known.context = event.prompt_tokens
            case StepFinished() | StepPreempted():
                self._ended(event)
            case ToolStarted():
                self.trajectories[event.trajectory].tool_began_s = event.time_s
            case ToolReturned():
                self._returned(event)
            case EngineFailed():
                self.faults.append((event.time_s, event.engine))
                for trajectory, tokens in event.salvaged:
                    self.trajectories[trajectory].made += tokens
            case EngineReady():
                self.kv_tokens = event.kv_capacity_tokens
                began_s = self._starting.pop(event.engine, event.time_s)
                if event.time_s > began_s:
                    self.starts.append(event.time_s - began_s)
            case EngineUpdated():
                began_s = self._updating.pop(event.engine, event.time_s)
                self.updates.append((event.time_s, event.time_s - began_s))
            case Trained():
                began_s, tokens = self._training
                self.trained_s.append(event.time_s)
                self.trainings.append((event.time_s, tokens, event.time_s - began_s))
            case GradientsAccumulated():
                began_s, tokens = self._training
                self.parts.append((event.time_s, tokens, event.time_s - began_s))
            case _:
                pass
        self._take_commands(event.time_s, commands)

    def _take_commands(self, time_s: float, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartTrajectory():
                    self.trajectories[command.trajectory] = ObservedTrajectory(
                        command.group, command.sample
                    )
                case AccumulateGradients() | Train():
                    tokens = sum(self.trajectories[t].tokens for t in command.trajectories)
                    self._training = time_s, tokens
                case UpdateWeights():
                    self._updating[command.engine] = time_s
                case StartEngine():
                    self._starting[command.engine] = time_s
                case _:
                    pass

    def _ended(self, event: StepFinished | StepPreempted) -> None:
        self.dispatches.append(
            ObservedDispatch(
                scheduled_s=event.time_s - event.prefill_s - event.decode_s,
                ended_s=event.time_s,
                engine=event.engine,
                tokens=event.output_tokens,
                queued_s=event.queued_s,
                prefill_s=event.prefill_s,
                decode_s=event.decode_s,
            )
        )
        trajectory = self.trajectories[event.trajectory]
        if isinstance(event, StepFinished):
            trajectory.end_step(event.output_tokens)
        else:
            trajectory.made += event.output_tokens

    def _returned(self, event: ToolReturned) -> None:
        trajectory = self.trajectories[event.trajectory]
        last = trajectory.steps[-1]
        trajectory.steps[-1] = replace(
            last,
            tool=event.tool,
            tool_s=event.time_s - trajectory.tool_began_s,
            tool_ok=event.ok,
            tool_tokens=event.observation_tokens,
        )
        trajectory.context = event.context_tokens
