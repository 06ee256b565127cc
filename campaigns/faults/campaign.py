"""The campaign `faults`: one schedule of faults a case."""

import traceback
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, Final

from campaigns.campaign import Failure, Outcome
from campaigns.faults import gateway, loop, rollout
from campaigns.faults.gateway import GatewayCase
from campaigns.faults.loop import LoopCase
from campaigns.faults.rollout import EndlessError, RolloutCase
from heddle_rollout.driver import StuckError

KINDS: Final[Mapping[Any, Any]] = {RolloutCase: rollout, LoopCase: loop, GatewayCase: gateway}


class Faults:
    """Rollouts above all; loops and gateways take longer."""

    name = "faults"
    unit = "schedules"
    tolerated = 0.0
    saves = True
    most_wall_s = 300.0
    case_type = RolloutCase | LoopCase | GatewayCase

    def begin(self, folder: str) -> None:
        """Nothing to prepare."""

    def case(self, rng: Random) -> Any:
        (kind,) = rng.choices((rollout, loop, gateway), weights=(90, 8, 2))
        return kind.draw(rng)

    def run(self, case: Any) -> Outcome:
        """Run a case; what it raises is the failure."""
        kind = KINDS[type(case)]
        try:
            events = kind.run(case)
        except (StuckError, EndlessError) as error:
            return Outcome(Failure(f"stuck {type(case).__name__}", str(error)))
        except Exception as error:
            return Outcome(Failure(_place(error), "".join(traceback.format_exception(error)[-3:])))
        return Outcome(counts={"events": events, f"{type(case).__name__[:-4].lower()}s": 1})

    def smaller(self, case: Any) -> Iterator[Any]:
        """Simpler cases."""
        yield from KINDS[type(case)].smaller(case)


def _place(error: Exception) -> str:
    """Where and how a case failed: equal for the same defect."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = frame.filename.rpartition("/")[2]
    return f"{type(error).__name__} {file} {frame.name} {frame.lineno}"
