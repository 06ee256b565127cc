"""One engine with simple numbers, and what it answered: the bench of the hand-solved cases."""

from collections.abc import Callable
from typing import Any

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_sim.clock import SimEnvironment
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable

A, B, C = TrajectoryId("a"), TrajectoryId("b"), TrajectoryId("c")
G = GroupId("g")


def table(**changes: Any) -> LatencyTable:
    """1 s an iteration, 0.1 s more per decoding sequence, 0.01 s per prompt token."""
    fields: dict[str, Any] = {
        "model": "m",
        "gpu": "g",
        "tp": 1,
        "base_s": [1.0 + 0.1 * batch for batch in range(9)],
        "per_context_s": [0.0] * 9,
        "prefill_tokens": [0.0, 100.0],
        "prefill_knots_s": [0.0, 1.0],
        "prefill_pair_s": 0.0,
        "host_per_prefill_s": 0.0,
        "kv_capacity_tokens": 16_000,
        "kv_bytes_per_token": 1,
    }
    return LatencyTable(**(fields | changes))


class Bench:
    """One engine and what it answered, with the time of each answer."""

    def __init__(self, latency: LatencyTable | None = None, **settings: Any) -> None:
        self.env = SimEnvironment()
        self.ends: dict[TrajectoryId, tuple[float, StepResult]] = {}
        self.on_end: Callable[[StepResult], None] = lambda _: None
        self.engine = SimEngine(
            self.env.calendar,
            EngineId("e0"),
            latency or table(),
            on_end=self._ended,
            **({"max_running": 8} | settings),
        )

    def _ended(self, result: StepResult) -> None:
        self.ends[result.trajectory] = (self.env.now, result)
        self.on_end(result)

    def start(
        self, name: TrajectoryId, prompt: int, output: int, shared: int = 0, group: str = ""
    ) -> None:
        """Start a step of a trajectory in a group of its own, or of `group`."""
        self.engine.start(
            name,
            GroupId(group or name),
            prompt_tokens=prompt,
            shared_tokens=shared,
            output_tokens=output,
        )

    def at(self, time_s: float, act: Callable[[], object]) -> None:
        callbacks = self.env.timeout(time_s - self.env.now).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())

    def run(self) -> None:
        self.env.run()

    def end_s(self, name: TrajectoryId) -> float:
        return self.ends[name][0]
