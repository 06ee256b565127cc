"""A gateway before engines that do everything wrong: each fault once, and cases of the campaign.

Times are virtual: a limit in seconds does not depend on the machine. `campaigns.faults.answers`
judges every request: it is answered with exactly its tokens, and in time.
"""

from typing import Any

import msgspec
import pytest

from tests.gateway.served import NO_AIOHTTP
from tests.in_turn import some

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from campaigns.campaign import numbered
from campaigns.faults.answers import Answers, AnswersCase
from campaigns.faults.mock_bodies import continued
from campaigns.faults.mock_faults import ANSWERS, KINDS, Fault
from campaigns.faults.mock_vllm import MockVllm

SEED = 11


def held(case: AnswersCase) -> dict[str, int]:
    """Run a case that must hold; what it counted."""
    outcome = Answers().run(case)
    assert outcome.failure is None, f"{outcome.failure.kind}\n{outcome.failure.text}"
    return dict(outcome.counts)


def one_fault(kind: str, **fields: Any) -> AnswersCase:
    """Two engines, the first at fault for some seconds."""
    fault = Fault(kind=kind, engine=0, at_s=2.0, seconds=6.0)
    given = {"seed": 3, "faults": (fault,), "clients": 12, "seconds": 15.0, "thinks_s": 0.6}
    return AnswersCase(**(given | fields))


@pytest.mark.parametrize("kind", some(KINDS, 2, always=["die"]))
def test_no_request_is_lost_doubled_or_late_while_one_engine_of_two_has(kind: str):
    assert held(one_fault(kind))["requests"] > 50


@pytest.mark.parametrize("kind", some([kind for kind in KINDS if kind in ANSWERS], 2))
def test_a_part_of_the_requests_at_fault_is_made_up_for(kind: str):
    fault = Fault(kind=kind, engine=1, at_s=2.0, seconds=6.0, share=0.3)
    assert held(one_fault(kind, faults=(fault,)))["hits"] > 0


def test_refusals_reach_clients_and_no_engine_leaves():
    assert held(one_fault("", faults=(), hostile=8))["refusals"] > 50


@pytest.mark.parametrize("kind", ["refuse", "die", "silent", "status 429", "status 503"])
def test_requests_wait_while_all_engines_are_at_fault_for_a_moment(kind: str):
    faults = tuple(Fault(kind=kind, engine=n, at_s=4.0, seconds=2.0) for n in range(3))
    held(one_fault(kind, engines=3, faults=faults))


@pytest.mark.parametrize("kind", ["status 500", "html 200", "truncated event", "event 500 middle"])
def test_a_step_that_fails_on_two_engines_is_not_tried_on_a_third(kind: str):
    faults = tuple(Fault(kind=kind, engine=n, at_s=2.0, seconds=6.0) for n in range(3))
    held(one_fault(kind, engines=4, faults=faults))


def test_prompts_that_take_half_a_minute_are_waited_for_on_engines_that_compute():
    case = AnswersCase(
        seed=5,
        engines=2,
        clients=2,
        long_prompts=2,
        prefill_tokens=2048,
        iteration_s=0.65,
        seconds=60.0,
        policy="verl",
    )
    held(case)


def test_steps_that_wait_in_an_engine_are_waited_for():
    held(AnswersCase(seed=6, engines=2, clients=64, max_running=8, iteration_s=0.2, policy="verl"))


@pytest.mark.parametrize("number", some(range(8), 4))
def test_the_first_cases_of_the_campaign_hold(number: int):
    case = numbered(Answers(), SEED, number)
    held(msgspec.structs.replace(case, clients=min(case.clients, 40)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", pytest.param("silent", marks=pytest.mark.soak)])
def test_two_hundred_clients_do_not_see_that_an_engine_is_gone(kind: str):
    counts = held(one_fault(kind, engines=3, clients=200, thinks_s=4.0, iteration_s=0.1))
    assert counts["requests"] > 200


def test_cases_are_drawn_again_and_have_smaller_ones():
    campaign = Answers()
    for number in range(30):
        case = numbered(campaign, SEED, number)
        assert case == numbered(campaign, SEED, number)
        assert msgspec.json.decode(msgspec.json.encode(case), type=campaign.case_type) == case
        assert case not in list(campaign.smaller(case))
        assert {fault.engine for fault in case.faults} <= set(range(case.engines))


@pytest.mark.parametrize(
    ("defect", "found"),
    [("token", "text"), ("ill", "a well engine failed"), ("slow", "late")],
)
def test_a_planted_defect_is_found(defect: str, found: str, monkeypatch: pytest.MonkeyPatch):
    case = one_fault("", faults=(), seconds=6.0)
    if defect == "token":
        wrong = continued(range(3), 50)
        monkeypatch.setattr(
            "campaigns.faults.mock_vllm.next_token", lambda context: wrong[len(context) % 50]
        )
    elif defect == "ill":
        first: list[MockVllm] = []

        def is_ill(engine: MockVllm, kind: str) -> bool:
            if engine.generated > 50 and not first:
                first.append(engine)
            return kind == "ill" and engine in first

        monkeypatch.setattr(MockVllm, "_has", is_ill)
    else:
        monkeypatch.setattr("campaigns.faults.answers.LATE_S", -5.0)
    outcome = Answers().run(case)
    assert outcome.failure is not None
    assert found in f"{outcome.failure.kind} {outcome.failure.text}"
