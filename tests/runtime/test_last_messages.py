"""What a process sent before it died is read, in whatever order the event loop reports both."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle_runtime.process import wire
from heddle_runtime.process.child import ChildProcess
from heddle_runtime.process.wire import Report

MESSAGES = 100


def child(
    tmp_path: Path, reports: list[Report], on_exit: Callable[[str], None]
) -> ChildProcess[Report]:
    return ChildProcess(
        "tests.runtime.dying_process",
        reads=Report,
        environment=dict(os.environ),
        log=tmp_path / "log",
        on_report=reports.append,
        on_exit=on_exit,
    )


@pytest.mark.parametrize("exit_first", [False, True])
def test_the_last_messages_of_a_dying_process_are_delivered(tmp_path, exit_first):
    async def main() -> list[Report]:
        loop = asyncio.get_running_loop()
        reports: list[Report] = []
        over = asyncio.Event()
        process = child(tmp_path, reports, lambda reason: over.set())
        # The loop does nothing meanwhile: the process has sent everything and is dead.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert reports == []
        if exit_first:  # as when the loop reports the exit before what can be read
            loop.remove_reader(process._channel._channel.fileno())
        await over.wait()
        return reports

    reports = asyncio.run(main())
    assert [r.version for r in reports if isinstance(r, wire.WeightsLoaded)] == list(
        range(MESSAGES)
    )
    assert isinstance(reports[-1], wire.Broken)


def test_a_process_that_is_killed_silently_reports_nothing_more_and_no_reason(tmp_path):
    async def main() -> tuple[list[Report], str]:
        reports: list[Report] = []
        reasons: asyncio.Queue[str] = asyncio.Queue()
        process = child(tmp_path, reports, reasons.put_nowait)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its messages are sent, unread
        process.kill(silent=True)
        process.kill()
        return reports, await reasons.get()

    assert asyncio.run(main()) == ([], "")
