"""The first schedules of faults hold, and a seed gives the same cases with the same outcomes."""

import pytest

from campaigns.campaign import numbered
from campaigns.faults.campaign import Faults
from campaigns.fuzz.campaign import Fuzz
from campaigns.kill.campaign import Kills
from campaigns.report import Result, execute

SEED = 11


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_schedules_of_faults_hold(first: int):
    for number in range(first, first + 10):
        outcome = Faults().run(numbered(Faults(), SEED, number))
        assert outcome.failure is None, f"case {number}: {outcome.failure.text}"


def counted(result: Result) -> dict[str, int]:
    return {name: n for name, n in result.counts.items() if not name.startswith("peak")}


@pytest.mark.parametrize(
    ("campaign", "cases"),
    [(Faults(), 12), (Fuzz(), 40), pytest.param(Kills(), 3, marks=pytest.mark.soak)],
)
def test_a_seed_gives_the_same_outcomes_in_any_number_of_processes(campaign, cases: int):
    once, again = (execute(campaign, SEED, minutes=60.0, cases=cases, jobs=jobs) for jobs in (1, 3))
    assert once.cases == again.cases == cases
    assert counted(once) == counted(again)
    assert once.findings == again.findings == {}
