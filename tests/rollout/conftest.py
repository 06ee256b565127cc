"""Runs the tests of the driver under both clocks."""

import pytest

from tests.rollout.one_world import Run


@pytest.fixture(params=["simpy", "asyncio"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The clock that every `Run` of a test has."""
    monkeypatch.setattr(Run, "clock", request.param)
    return str(request.param)
