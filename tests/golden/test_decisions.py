"""Every preset decides as it did before, to the last digit."""

import json
from functools import cache
from typing import Any

import pytest

from tests.golden.decisions import GOLDEN, POLICIES, SCENARIOS, SHIPPED, of_scenario, of_trace


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_rollout_is_decided_as_before(policy: str, scenario: str) -> None:
    assert of_scenario(policy, scenario) == golden()[f"{scenario}/{policy}"]


@pytest.mark.parametrize(
    ("trace", "policy"), [(trace, policy) for trace, names in SHIPPED.items() for policy in names]
)
def test_a_shipped_trace_is_decided_and_measured_as_before(trace: str, policy: str) -> None:
    expected = golden()[f"{trace}/{policy}"]
    found = of_trace(trace, policy)
    assert found["figures"] == expected["figures"]
    assert found["decisions"] == expected["decisions"]


def test_the_golden_results_tell_policies_apart() -> None:
    coding = [
        golden()[f"coding-512.jsonl.gz/{p}"]["decisions"] for p in ("verl", "slime", "heddle")
    ]
    assert len(dict.fromkeys(coding)) == 3
