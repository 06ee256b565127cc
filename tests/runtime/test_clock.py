"""The run's clock under virtual time: order, freezing, speed."""

import asyncio
from collections.abc import Callable

import pytest

from heddle_runtime.clock import Lateness, RunClock
from heddle_runtime.virtual_time import VirtualTimeLoop, run_virtual


def told_by(body: Callable[[RunClock, list[tuple[float, str]]], None], **options: float) -> list:
    """Let `body` ask for calls; return (time, name) of each as it came, in loop time and order."""
    calls: list[tuple[float, str]] = []

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop(), **options)
        body(clock, calls)
        await asyncio.sleep(1000.0)

    run_virtual(main())
    return calls


def test_calls_of_one_moment_come_in_the_order_they_were_asked_for():
    def body(clock, calls):
        clock.thaw()
        for name in "abcdefgh":
            clock.call_at(2.0, lambda name=name: calls.append((clock.now_s, name)))
        clock.call_at(1.0, lambda: clock.call_at(2.0, lambda: calls.append((clock.now_s, "late"))))

    assert told_by(body) == [(2.0, c) for c in "abcdefgh"] + [(2.0, "late")]


def test_nothing_but_what_is_due_happens_while_it_stands_still():
    def body(clock, calls):
        loop = asyncio.get_running_loop()
        clock.call_after(0.0, lambda: calls.append((loop.time(), "due")))
        clock.call_after(5.0, lambda: calls.append((loop.time(), "later")))
        loop.call_at(100.0, clock.thaw)

    assert told_by(body) == [(0.0, "due"), (105.0, "later")]


def test_it_goes_on_from_where_it_stood():
    def body(clock, calls):
        loop = asyncio.get_running_loop()
        clock.thaw()
        loop.call_at(3.0, clock.freeze)
        loop.call_at(10.0, clock.thaw)
        clock.call_at(4.0, lambda: calls.append((clock.now_s, f"at {loop.time()}")))

    assert told_by(body) == [(4.0, "at 11.0")]


def test_a_faster_clock_calls_earlier_and_tells_its_own_time():
    def body(clock, calls):
        loop = asyncio.get_running_loop()
        clock.thaw()
        clock.call_at(50.0, lambda: calls.append((clock.now_s, f"at {loop.time()}")))

    assert told_by(body, speed=10.0) == [(50.0, "at 5.0")]


def test_a_virtual_hour_of_many_sleepers_is_over_at_once_and_in_order():
    async def main() -> list[float]:
        woke: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woke.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(sleeper(3600.0 - i * 0.25) for i in range(100)))
        return woke

    woke = run_virtual(main())
    assert woke == sorted(woke) == [3600.0 - i * 0.25 for i in reversed(range(100))]


def test_timers_a_hair_apart_are_not_rung_together():
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        at: list[float] = []
        done = loop.create_future()
        loop.call_at(1.0, lambda: at.append(loop.time()))
        loop.call_at(1.0 + 1e-12, lambda: (at.append(loop.time()), done.set_result(None)))
        await done
        return at

    assert run_virtual(main()) == [1.0, 1.0 + 1e-12]


def test_real_io_works_in_virtual_time():
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(4))
        writer.close()
        await writer.wait_closed()

    async def main() -> bytes:
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"ping")
            answer = await reader.read(4)
            writer.close()
            await writer.wait_closed()
            return answer

    assert run_virtual(main()) == b"ping"


def test_the_loop_begins_at_zero():
    loop = VirtualTimeLoop()
    try:
        assert loop.time() == 0.0
    finally:
        loop.close()


@pytest.mark.parametrize("delay_s", [0.0, 1e-9, 7.5])
def test_sleep_takes_its_time(delay_s):
    async def main() -> float:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        await clock.sleep(delay_s)
        return clock.now_s

    assert run_virtual(main()) == delay_s


def lateness_of(body: Callable[[RunClock, VirtualTimeLoop], None], *, speed: float) -> Lateness:
    """What a clock says after 1000 s of its loop."""

    async def main() -> Lateness:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        clock = RunClock(loop, speed=speed)
        body(clock, loop)
        await asyncio.sleep(1000.0)
        return clock.lateness

    return run_virtual(main())


def test_a_clock_states_how_late_its_calls_were_in_its_own_seconds():
    def body(clock, loop):
        clock.thaw()

        def block() -> None:
            loop.now += 3.0  # as a callback does that computes for 3 s

        clock.call_at(20.0, block)
        clock.call_at(30.0, lambda: None)  # due at 3.0 of the loop, made at 5.0
        clock.call_at(200.0, lambda: None)

    assert lateness_of(body, speed=10.0) == Lateness(3, pytest.approx(20.0), pytest.approx(20.0))
    assert lateness_of(body, speed=10.0).mean_s == pytest.approx(20.0 / 3)


def test_no_call_is_late_in_virtual_time_or_because_the_clock_stood_still():
    def body(clock, loop):
        clock.call_after(0.0, lambda: None)
        clock.call_after(5.0, lambda: None)
        loop.call_at(100.0, clock.thaw)
        loop.call_at(103.0, clock.freeze)
        loop.call_at(110.0, clock.thaw)

    assert lateness_of(body, speed=1.0) == Lateness(1, 0.0, 0.0)


def test_a_call_for_a_past_time_is_due_when_it_is_requested():
    def body(clock, loop):
        clock.thaw()
        loop.call_at(50.0, lambda: clock.call_at(10.0, lambda: None))

    assert lateness_of(body, speed=1.0) == Lateness(1, 0.0, 0.0)


def test_a_clock_without_calls_is_not_late():
    assert Lateness().mean_s == 0.0
