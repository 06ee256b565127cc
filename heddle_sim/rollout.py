"""Runs recorded trajectories against a core in simulated time."""

from collections.abc import Callable, Sequence
from math import inf, nextafter
from typing import Any

from simpy.core import EmptySchedule

from heddle_rollout.clock import Clock
from heddle_rollout.core import Core
from heddle_rollout.driver import ROLLOUT, Driver, StuckError
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import ChargedSolver, CoreEstimates
from heddle_sim.clock import SimEnvironment
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_trace.schema import TrajectoryScript


class World:
    """A clock and simulated engines, in which a rollout or an RL loop runs."""

    def __init__(self, config: SimulationConfig, launcher: Callable[..., SimLauncher]) -> None:
        """`launcher` makes what starts the engines: another one may disturb them."""
        self._config = config
        self._stop: list[object] = []
        """Has an item once the run may be over, or after an error."""
        self._errors: list[BaseException] = []
        self.env = SimEnvironment()
        """Processes of a user may run in it."""
        self.clock = self.env.calendar
        self.launcher = launcher(config, self.clock)

    def driver_of(self, core: Core, *, on_idle: Callable[[], None], **options: Any) -> Driver:
        """A driver of this world's engines under `core`."""
        clock, config = self.clock, self._config
        return Driver(
            core,
            self.launcher,
            clock,
            predictions=CoreEstimates(clock, config.prediction_s),
            solver=ChargedSolver(clock, config.planning_s),
            tool_capacity=config.tool_capacity,
            tool_pools=config.tool_pools(clock),
            report_interval_s=config.report_interval_s,
            report_delay_s=config.report_delay_s,
            on_idle=on_idle,
            on_error=self._failed,
            **options,
        )

    def stop(self) -> None:
        """Let `run_while` look whether the run is over."""
        self._stop.append(None)

    def _failed(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop.append(error)

    def run_while(self, going: Callable[[], object], stuck: Callable[[], str]) -> None:
        """Let time pass until a run is over. Raises the first error of the driver.

        Raises:
            StuckError: nothing is left to happen before that; `stuck` says what is open.
        """
        try:
            while going() and not self._errors:
                self._stop.clear()
                self.env.run_until(self._stop)
        except EmptySchedule:
            raise StuckError(
                f"nothing is left to happen at {self.clock.now_s:.1f} s, and {stuck()}"
            ) from None
        if self._errors:
            raise self._errors[0]


class Simulation(World):
    """A driver in simulated time; `driver.open_rollout` and `driver.admit` give it work."""

    def __init__(
        self,
        core: Core,
        config: SimulationConfig,
        *,
        launcher: Callable[[SimulationConfig, Clock], SimLauncher] = SimLauncher,
    ) -> None:
        super().__init__(config, launcher)
        self.driver = self.driver_of(core, on_idle=self.stop)
        self.driver.start()

    def run(self, stop_s: float = inf) -> bool:
        """Let time pass until no rollout is open, or more than `stop_s`. Returns whether none is.

        Raises:
            StuckError: nothing is left to happen before that.
        """
        if stop_s < inf:
            self.clock.call_at(nextafter(stop_s, inf), self.stop)
        self.run_while(
            lambda: self.driver.open_rollouts and self.clock.now_s <= stop_s,
            lambda: (
                f"these rollouts are open: {', '.join(self.driver.open_rollouts)}. Admit their "
                "agents, or close them"
            ),
        )
        return not self.driver.open_rollouts


def simulate_rollout(
    scripts: Sequence[TrajectoryScript],
    core: Core,
    config: SimulationConfig,
    *,
    stop_s: float = inf,
) -> bool:
    """Run one rollout of `scripts` under `core`; the first of them arrives at 0 s.

    Returns whether it ended; False where it was stopped after `stop_s`.

    Raises:
        StuckError: nothing is left to happen before all trajectories are finished.
    """
    simulation = Simulation(core, config)
    driver = simulation.driver
    driver.open_rollout(ROLLOUT, trajectories=len(scripts))
    simulation.launcher.schedule_faults()
    agents = [ScriptedAgent(script, simulation.clock) for script in scripts]
    first_arrival_s = min((agent.arrival_s for agent in agents), default=0.0)
    for agent in agents:
        agent.arrival_s -= first_arrival_s
        driver.admit(agent)
    return simulation.run(stop_s)
