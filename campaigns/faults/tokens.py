"""A ledger of tokens that sees only what goes to engines and what comes back.

It has the scripts of the trajectories. A request must continue where the reported tokens ended:
earlier would generate tokens twice, later would leave some out.
"""

from collections.abc import Callable

from heddle_core.ids import EngineId, TrajectoryId
from heddle_rollout.engines import StepRequest, StepResult
from heddle_trace import TrajectoryScript


class TokenLedger:
    """Tokens of every step, by what engines reported."""

    def __init__(self, script: Callable[[TrajectoryId], TrajectoryScript]) -> None:
        self._script = script
        self._position: dict[TrajectoryId, tuple[int, int]] = {}
        """Finished steps, and tokens of the step after them."""
        self._open: dict[TrajectoryId, tuple[EngineId, StepRequest]] = {}
        self.tokens = 0
        """Reported, all trajectories together."""

    def started(self, engine: EngineId, request: StepRequest) -> None:
        """An engine took a request."""
        name = request.trajectory
        assert name not in self._open, f"{name} runs twice"
        self._open[name] = engine, request
        step, made = self._position.get(name, (0, 0))
        steps = self._script(name).steps
        assert step < len(steps), f"{name} runs after its last step"
        expected = steps[step].prompt_tokens + made
        assert request.prompt_tokens == expected, (
            f"{name}: step {step} begins at {request.prompt_tokens} tokens, not at {expected}"
        )
        left = steps[step].output_tokens - made
        assert 0 < request.max_tokens <= left, f"{name}: {request.max_tokens} tokens of {left}"

    def ended(self, engine: EngineId, result: StepResult) -> None:
        """The result of a request was reported; one of an engine that has died is salvage."""
        name = result.trajectory
        where, request = self._open.pop(name, (None, None))
        assert where == engine, f"{name} ends on {engine}, but runs on {where}"
        assert request is not None
        assert result.tokens <= request.max_tokens, f"{name} has more tokens than requested"
        self.tokens += result.tokens
        step, made = self._position.get(name, (0, 0))
        made += result.tokens
        if made == self._script(name).steps[step].output_tokens:
            step, made = step + 1, 0
        self._position[name] = step, made

    def complete(self, name: TrajectoryId) -> bool:
        """Whether every token of a trajectory was reported."""
        return self._position.get(name) == (len(self._script(name).steps), 0)

    def whole(self, name: TrajectoryId) -> int:
        """Tokens of the script of a trajectory."""
        return sum(step.output_tokens for step in self._script(name).steps)
