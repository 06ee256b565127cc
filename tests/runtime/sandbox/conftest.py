"""The modes of this machine; after each test no process is left."""

from collections.abc import Iterator

import pytest

from campaigns.processes import descendants
from heddle_runtime.sandbox.runner import IsolationMode
from tests.runtime.sandbox.programs import REFUSED


@pytest.fixture(params=["namespaces", "filter"])
def mode(request: pytest.FixtureRequest) -> IsolationMode:
    if REFUSED[request.param]:
        pytest.skip(REFUSED[request.param])
    return request.param


@pytest.fixture
def namespaces() -> IsolationMode:
    if REFUSED["namespaces"]:
        pytest.skip(REFUSED["namespaces"])
    return "namespaces"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = descendants()
    yield
    assert descendants(besides=before) == []
