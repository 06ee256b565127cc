"""Runs recorded trajectories against a core in simulated time."""

from collections.abc import Callable, Sequence

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


class Simulation:
    """A driver in simulated time; `driver.open_rollout` and `driver.admit` give it work."""

    def __init__(
        self,
        core: Core,
        config: SimulationConfig,
        *,
        launcher: Callable[[SimulationConfig, Clock], SimLauncher] = SimLauncher,
    ) -> None:
        """`launcher` makes what starts the engines: another one may disturb them."""
        self._stop: list[object] = []
        """Has an item once no rollout is open, or after an error."""
        self._errors: list[BaseException] = []
        self.env = SimEnvironment()
        """Processes of a user may run in it."""
        self.clock = clock = self.env.calendar
        self.launcher = launcher(config, clock)
        self.driver = Driver(
            core,
            self.launcher,
            clock,
            predictions=CoreEstimates(clock, config.prediction_s),
            solver=ChargedSolver(clock, config.planning_s),
            tool_capacity=config.tool_capacity,
            tool_pools=config.tool_pools(clock),
            report_interval_s=config.report_interval_s,
            report_delay_s=config.report_delay_s,
            on_idle=lambda: self._stop.append(None),
            on_error=self._failed,
        )
        self.driver.start()

    def _failed(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop.append(error)

    def run(self) -> None:
        """Let time pass until no rollout is open.

        Raises:
            StuckError: nothing is left to happen before that.
        """
        errors = self._errors
        try:
            while self.driver.open_rollouts and not errors:
                self._stop.clear()
                self.env.run_until(self._stop)
        except EmptySchedule:
            names = ", ".join(self.driver.open_rollouts)
            raise StuckError(
                f"nothing is left to happen at {self.clock.now_s:.1f} s, and these rollouts are "
                f"open: {names}. Admit their agents, or close them"
            ) from None
        if errors:
            raise errors[0]


def simulate_rollout(
    scripts: Sequence[TrajectoryScript], core: Core, config: SimulationConfig
) -> None:
    """Run one rollout of `scripts` under `core`; the first of them arrives at 0 s.

    Raises:
        StuckError: nothing is left to happen before all trajectories are finished.
    """
    simulation = Simulation(core, config)
    driver = simulation.driver
    driver.open_rollout(ROLLOUT, trajectories=len(scripts))
    simulation.launcher.schedule_faults()
    first_arrival_s = min((script.arrival_s for script in scripts), default=0.0)
    for script in scripts:
        driver.admit(ScriptedAgent(script, simulation.clock, first_arrival_s=first_arrival_s))
    simulation.run()
