"""Plans that contradict themselves are refused before an engine starts or stops."""

import pytest

from heddle_core.commands import CommandList
from heddle_core.fleet import Fleet
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec, PlanError, ResourcePlan

E0, E1 = EngineId("e0"), EngineId("e1")


def spec(engine: EngineId) -> EngineSpec:
    return EngineSpec(engine=engine, shape=EngineShape("h100", 1), max_running=1)


def refused(plan: ResourcePlan) -> None:
    out = CommandList()
    try:
        Fleet().change_to(plan, out)
    finally:
        assert not out


def test_an_engine_that_is_planned_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="engine 'e0' twice"):
        refused(ResourcePlan(engines=(spec(E0), spec(E1), spec(E0))))


def test_homes_on_an_engine_that_is_not_planned_are_refused() -> None:
    homes = ((E1, (TrajectoryId("a"),)),)
    with pytest.raises(PlanError, match="homes on engine 'e1', which is not among its engines: e0"):
        refused(ResourcePlan(engines=(spec(E0),), homes=homes))
