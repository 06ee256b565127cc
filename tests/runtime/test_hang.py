"""When a silent process counts as hung, in virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from heddle_runtime.process.hang import LOOKS, HangWatch
from heddle_runtime.virtual_time import VirtualTimeLoop, run_virtual

HANG_S, BUSY_S = 30.0, 600.0


class Process:
    """A process that uses so much of a CPU while it lasts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, share: Callable[[float], float]) -> None:
        self._loop, self._share = loop, share
        self.is_stopped = False
        self.looked = 0

    def cpu_s(self) -> float:
        self.looked += 1
        return sum(self._share(second) for second in range(int(self._loop.time())))

    def stopped(self) -> bool:
        return self.is_stopped


def hung_at(
    share: Callable[[float], float],
    messages: Callable[[HangWatch, asyncio.AbstractEventLoop, Process], None],
    *,
    lasts_s: float = 5000.0,
) -> list[tuple[float, str]]:
    """When and why a process counts as hung."""
    found: list[tuple[float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        process = Process(loop, share)
        watch = HangWatch(
            process,
            hang_s=HANG_S,
            busy_limit_s=BUSY_S,
            on_hang=lambda reason: found.append((loop.time(), reason)),
        )
        messages(watch, loop, process)
        await asyncio.sleep(lasts_s)
        watch.close()

    run_virtual(main())
    return found


def every(seconds: float, until_s: float):
    def send(watch, loop, process) -> None:
        for k in range(1, int(until_s / seconds) + 1):
            loop.call_at(k * seconds, watch.received)

    return send


def test_a_silent_process_that_does_not_compute_has_hung_once():
    [(time_s, reason)] = hung_at(lambda _: 0.0, every(4.0, 1000.0))
    assert 1000.0 + HANG_S <= time_s <= 1000.0 + HANG_S * (1 + 1 / LOOKS)
    assert reason == "it has hung: no message for 30 s, and it does not compute"


def test_threads_that_poll_do_not_count_as_computing():
    [(time_s, _)] = hung_at(lambda _: 0.005, every(4.0, 100.0))
    assert time_s < 140.0


def test_heartbeats_suffice_however_idle_a_process_is():
    assert hung_at(lambda _: 0.0, every(HANG_S / 8, 5000.0)) == []


def test_a_process_that_compiles_for_minutes_has_not_hung():
    def silent_for_590_s(watch, loop, process):
        every(4.0, 1000.0)(watch, loop, process)
        for second in range(1590, 5000, 4):
            loop.call_at(float(second), watch.received)

    assert hung_at(lambda _: 0.9, silent_for_590_s) == []


def test_a_process_that_computes_without_end_has_hung_too():
    [(time_s, reason)] = hung_at(lambda _: 1.0, every(4.0, 1000.0))
    assert 1000.0 + BUSY_S <= time_s <= 1000.0 + BUSY_S + 2 * HANG_S
    assert reason == "it has hung: it computes, but no message came for 600 s"


def test_a_process_that_computes_first_and_then_waits_for_ever_has_hung():
    [(time_s, reason)] = hung_at(lambda second: 1.0 if second < 200 else 0.0, every(4.0, 100.0))
    assert 200.0 + HANG_S <= time_s <= 200.0 + 3 * HANG_S
    assert "does not compute" in reason


def test_a_stopped_part_is_a_hang_while_others_wait_for_it_busily():
    def stops(watch, loop, process):
        every(4.0, 100.0)(watch, loop, process)
        loop.call_at(100.0, lambda: setattr(process, "is_stopped", True))

    [(time_s, reason)] = hung_at(lambda _: 1.0, stops)
    assert time_s < 140.0
    assert reason == "it has hung: no message for 30 s, and a signal has stopped it"


def test_a_pause_of_the_watching_process_is_no_silence_of_the_other():
    """The loop stands still for an hour; the messages that came meanwhile are read after a look."""

    def pause(watch, loop, process):
        assert isinstance(loop, VirtualTimeLoop)

        def stand_still() -> None:
            loop.now += 3600.0
            loop.call_later(1.0, watch.received)

        loop.call_at(1000.0, stand_still)
        every(4.0, 1000.0)(watch, loop, process)
        for second in range(4605, 9000, 4):
            loop.call_at(float(second), watch.received)

    assert hung_at(lambda _: 0.0, pause, lasts_s=7000.0) == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_closed_watch_reports_nothing(share):
    def close(watch, loop, process):
        loop.call_at(10.0, watch.close)

    assert hung_at(lambda _: share, close) == []
