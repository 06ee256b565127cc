"""Settings of all tests. Real engines: their tests go first; the summary says if there were none.

Hypothesis measures no time here: on a slow machine an example may take as long as it takes.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.runtime.vllm_bench import VLLM_GROUP, no_vllm

settings.register_profile("heddle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("heddle")


SLOW = Path(__file__).with_name("slow.txt")
"""Tests that `make test` leaves out, by measured time; `python -m tests.slow` writes it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest and runs in one process."""
    slow = frozenset(SLOW.read_text(encoding="utf-8").split())
    items.sort(key=lambda item: not is_real(item))
    for item in items:
        if is_real(item):
            item.add_marker("real_engines")
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker("slow")


def is_real(item: pytest.Item) -> bool:
    return any(mark.args == (VLLM_GROUP,) for mark in item.iter_markers("xdist_group"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if no_vllm():
        terminalreporter.write_line(f"Real engines were not tested: {no_vllm()}.")
