"""Books of a rollout kept apart from the ledger's, to check invariants (docs/architecture.md).

The ledger can be wrong about itself; these books know only which commands went out and which events
came in.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from heddle_core import Controller
from heddle_core.commands import (
    Cancel,
    Command,
    Dispatch,
    Migrate,
    Predict,
    Preempt,
    SolvePlan,
    StartEngine,
    StopEngine,
)
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineStopped,
    Event,
    MigrationFinished,
    PlanSolved,
    Predicted,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, TrajectoryId

RUNNING = ("running", "preempting")
ELSEWHERE = ("tool", "predicting", "migrating", "pulling", "cancelling")


class Books:
    """What is under way, by the commands and events alone."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.running: dict[TrajectoryId, Dispatch] = {}
        self.preempting: dict[TrajectoryId, Preempt] = {}
        self.moving: dict[TrajectoryId, Migrate] = {}
        self.in_tool: dict[TrajectoryId, int] = {}
        self.predicting: Counter[tuple[TrajectoryId, int]] = Counter()
        self.solving: dict[int, SolvePlan] = {}
        self.starting: dict[EngineId, StartEngine] = {}
        self.alive: dict[EngineId, StartEngine] = {}
        self.stopping: dict[EngineId, StopEngine] = {}
        self.gone: dict[EngineId, None] = {}
        self.cancelled: dict[TrajectoryId, None] = {}
        self.arrived: dict[TrajectoryId, None] = {}
        self.finished: dict[TrajectoryId, str] = {}
        self.made: Counter[TrajectoryId] = Counter()
        self.steps: Counter[TrajectoryId] = Counter()
        self.now_s = 0.0

    def watched(self, controller: Controller) -> Callable[[Event], Sequence[Command]]:
        """Return `controller.handle`, checked around every event."""

        def handle(event: Event) -> Sequence[Command]:
            assert event.time_s >= self.now_s, "time runs backwards (4)"
            self.now_s = event.time_s
            self.took_place(event)
            commands = controller.handle(event)
            for command in commands:
                self.opened(command)
            controller.ledger.check()
            self.agree(controller)
            return commands

        return handle

    def took_place(self, event: Event) -> None:
        """An event ends the command it answers: one that is open (2)."""
        match event:
            case TrajectoryArrived():
                self.arrived[event.trajectory] = None
            case StepFinished() | StepPreempted():
                command = self.running.pop(event.trajectory)
                assert (command.step, command.engine) == (event.step, event.engine)
                preempt = self.preempting.pop(event.trajectory, None)
                if preempt is None and isinstance(event, StepPreempted):
                    assert event.output_tokens == command.max_tokens, "neither preempt nor a chunk"
                self.made[event.trajectory] += event.output_tokens
                self.steps[event.trajectory] += isinstance(event, StepFinished)
            case ToolStarted():
                self.in_tool[event.trajectory] = event.step
            case ToolReturned():
                assert self.in_tool.pop(event.trajectory) == event.step
            case MigrationFinished():
                move = self.moving.pop(event.trajectory)
                assert (move.source, move.target) == (event.source, event.target)
            case Predicted():
                assert self.predicting[event.trajectory, event.step] == 1
                del self.predicting[event.trajectory, event.step]
            case PlanSolved():
                del self.solving[event.plan]
            case EngineReady():
                self.alive[event.engine] = self.starting.pop(event.engine)
            case EngineStopped():
                del self.stopping[event.engine]
                self.leave(event.engine)
                assert event.engine not in [c.engine for c in self.running.values()]
            case EngineFailed():
                self.leave(event.engine)
                self.stopping.pop(event.engine, None)
                lost = [t for t, c in self.running.items() if c.engine == event.engine]
                assert sorted(t for t, _ in event.salvaged) == sorted(lost)
                for t, tokens in event.salvaged:
                    del self.running[t]
                    self.preempting.pop(t, None)
                    self.made[t] += tokens
            case TrajectoryFinished():
                assert event.trajectory not in self.finished, "ends twice"
                assert event.trajectory not in self.running
                assert (event.outcome == "cancelled") == (event.trajectory in self.cancelled)
                self.finished[event.trajectory] = event.outcome
                self.in_tool.pop(event.trajectory, None)

    def leave(self, engine: EngineId) -> None:
        """An engine has ended."""
        (self.starting if engine in self.starting else self.alive).pop(engine)
        self.gone[engine] = None

    def opened(self, command: Command) -> None:
        """A command opens; dead or stopping engines get none (9), no step two preemptions (8)."""
        match command:
            case Dispatch():
                assert command.engine in self.alive
                assert command.engine not in self.stopping
                assert command.trajectory not in self.running
                assert command.trajectory not in self.in_tool
                assert command.trajectory not in self.moving, "its KV is on its way"
                assert command.step == self.steps[command.trajectory]
                self.running[command.trajectory] = command
            case Preempt():
                assert self.running[command.trajectory].engine == command.engine
                assert command.engine not in [c.engine for c in self.preempting.values()]
                self.preempting[command.trajectory] = command
            case Migrate():
                assert command.source in self.alive
                assert command.target in self.alive
                assert command.target not in self.stopping
                assert command.target != command.source
                assert command.trajectory not in self.running, "its KV is in use"
                assert command.trajectory not in self.moving
                self.moving[command.trajectory] = command
            case Predict():
                assert self.in_tool[command.trajectory] == command.step
                self.predicting[command.trajectory, command.step] += 1
            case SolvePlan():
                assert command.plan not in self.solving
                self.solving[command.plan] = command
            case StartEngine():
                for known in (self.starting, self.alive, self.gone):
                    assert command.engine not in known, "names are never used twice"
                self.starting[command.engine] = command
                used = sum(c.shape.tp for c in (*self.starting.values(), *self.alive.values()))
                assert used <= self.gpus, "more GPUs than there are (11)"
            case StopEngine():
                assert command.engine in self.alive
                assert command.engine not in self.stopping
                self.stopping[command.engine] = command
            case Cancel():
                assert command.trajectory not in self.cancelled, "cancelled twice"
                self.cancelled[command.trajectory] = None

    def agree(self, controller: Controller) -> None:
        """The ledger agrees with these books: 1, 2, 7, 8, 10."""
        ledger = controller.ledger
        running = {t.id: t.engine for t in ledger.trajectories.values() if t.phase in RUNNING}
        assert running == {t: c.engine for t, c in self.running.items()}
        queued = [t.id for e in ledger.known_engines.values() for t in e.waiting()]
        elsewhere = [t.id for t in ledger.trajectories.values() if t.phase in ELSEWHERE]
        placed = [*queued, *running, *elsewhere, *ledger.held, *self.finished]
        assert sorted(placed) == sorted(self.arrived), "not in exactly one place (1)"
        for t in ledger.trajectories.values():
            assert t.output_tokens == self.made[t.id], "tokens lost or made twice (10)"
            if t.phase == "predicting":
                assert self.predicting[t.id, t.step - 1] == 1, (
                    "waits for an answer that is not due (2)"
                )
                assert t.id not in self.in_tool
        for engine in (*ledger.engines, *ledger.prefill_engines):
            head = engine.head()
            assert head is None or not engine.fits(head), "waits beside a free slot (7)"

    def closed(self) -> None:
        """At the end of a rollout no step is under way, and every trajectory has ended."""
        assert not self.running
        assert not self.preempting
        assert not self.in_tool
        assert self.finished
        assert sorted(self.finished) == sorted(self.arrived)
