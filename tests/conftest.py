"""Settings of all tests. Real engines and slow tests go first; a summary says if engines lacked.

Hypothesis measures no time here: on a slow machine an example may take as long as it takes.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.runtime.vllm_bench import VLLM_GROUP, no_vllm, python_with_vllm

settings.register_profile("heddle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("heddle")


TESTS = Path(__file__).resolve().parent
SLOW = TESTS / "slow.txt"
"""Tests that `make test` leaves out, by measured time; `python -m tests.slow` writes it."""


# Before xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest and runs in one process; a group keeps its order."""
    listed = frozenset(SLOW.read_text(encoding="utf-8").split())
    slow = set()
    for item in items:
        if is_real(item):
            item.add_marker("real_engines")
        if item.nodeid.partition("[")[0] in listed:
            item.add_marker("slow")
        if shares_with_module(item) and item.get_closest_marker("xdist_group") is None:
            module = item.path.relative_to(TESTS).with_suffix("")
            item.add_marker(pytest.mark.xdist_group(str(module)))
        if item.get_closest_marker("slow") is not None:
            slow.add(group_of(item))
    items.sort(key=lambda item: (not is_real(item), group_of(item) not in slow))


def group_of(item: pytest.Item) -> str:
    """The name of its group, or its own where it has none."""
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid if mark is None else str(mark.args[0])


def shares_with_module(item: pytest.Item) -> bool:
    """Whether a fixture is made once for its module, and again in each further process."""
    assert isinstance(item, pytest.Function)
    made = item._fixtureinfo.name2fixturedefs.values()
    return any(each[-1].scope == "module" for each in made)


def is_real(item: pytest.Item) -> bool:
    return any(mark.args == (VLLM_GROUP,) for mark in item.iter_markers("xdist_group"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not python_with_vllm():
        terminalreporter.write_line(f"Real engines were not tested: {no_vllm()}.")
