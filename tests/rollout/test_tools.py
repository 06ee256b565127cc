"""Tool calls: each on a few numbers that can be checked by hand, under both clocks."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from heddle_core.ids import TrajectoryId
from heddle_rollout.agents import ToolAnswer
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.tools import ToolPool
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.calendar import Calendar
from heddle_sim.services import Latency, ServiceConfig, ToolServices
from tests.rollout.one_world import script, step


class Pool:
    """A pool whose answers are kept with their times; `on_end` is called with each name."""

    def __init__(
        self,
        clock: Any,
        on_end: Callable[["Pool", str], None],
        tools: ToolServices | None = None,
        **limits: Any,
    ) -> None:
        self.clock, self.on_end = clock, on_end
        pools = None if tools is None else tools.made(clock, 0)
        self.pool = ToolPool(clock, self, pools=pools, **limits)
        self.ends: list[tuple[str, float]] = []
        self.answers: list[ToolAnswer] = []

    def call(self, name: str, seconds: float, tool: str = "sh") -> None:
        steps = step(100, 1, tool_s=seconds), step(110, 1, tool=None)
        self.pool.call(ScriptedAgent(script(name, *steps), self.clock), tool)

    def tool_returned(self, trajectory: TrajectoryId, answer: ToolAnswer) -> None:
        self.ends.append((trajectory, self.clock.now_s))
        self.answers.append(answer)
        self.on_end(self, trajectory)

    def tool_failed(self, trajectory: TrajectoryId, error: BaseException) -> None:
        raise error


def played(
    clock: str,
    begin: Callable[[Pool], None],
    on_end: Callable[[Pool, str], None] = lambda pool, name: None,
    **limits: Any,
) -> Pool:
    """Let `begin` call tools, and time pass until all have ended."""
    if clock == "simpy":
        sim_clock = Calendar()
        pool = Pool(sim_clock, on_end, **limits)
        begin(pool)
        sim_clock.run()
        return pool

    async def main() -> Pool:
        run_clock = RunClock(asyncio.get_running_loop())
        run_clock.thaw()
        pool = Pool(run_clock, on_end, **limits)
        begin(pool)
        await asyncio.sleep(1000.0)
        return pool

    return run_virtual(main())


def test_tools_without_a_limit_run_side_by_side(clock: str) -> None:
    def begin(pool: Pool) -> None:
        for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 0.0)):
            pool.call(name, seconds)
        assert pool.pool.running == 3
        assert pool.ends == []

    pool = played(clock, begin)
    assert pool.ends == [("c", 0.0), ("b", 1.0), ("a", 3.0)]
    assert (pool.pool.running, pool.pool.waiting) == (0, 0)


def test_tools_with_a_limit_wait_in_order_of_arrival(clock: str) -> None:
    def begin(pool: Pool) -> None:
        for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 4.0), ("d", 1.0)):
            pool.call(name, seconds)
        assert (pool.pool.running, pool.pool.waiting) == (2, 2)

    pool = played(clock, begin, capacity=2)
    assert pool.ends == [("b", 1.0), ("a", 3.0), ("d", 4.0), ("c", 5.0)]


def test_a_call_requested_at_an_end_queues_behind_waiting_ones(clock: str) -> None:
    def begin(pool: Pool) -> None:
        pool.call("first", 1.0)
        pool.call("waited", 1.0)

    def again(pool: Pool, name: str) -> None:
        if name == "first":
            pool.call("again", 1.0)

    pool = played(clock, begin, again, capacity=1)
    assert pool.ends == [("first", 1.0), ("waited", 2.0), ("again", 3.0)]


def test_a_call_over_its_limit_is_cut_and_not_answered_twice(clock: str) -> None:
    def begin(pool: Pool) -> None:
        pool.call("slow", 9.0)
        pool.call("quick", 1.0)

    pool = played(clock, begin, limit_s=4.0)
    assert pool.ends == [("quick", 1.0), ("slow", 4.0)]
    assert [answer.ok for answer in pool.answers] == [True, False]
    assert pool.pool.running == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_tool_takes_a_time_that_can_be(seconds: float) -> None:
    pool = Pool(Calendar(), lambda pool, name: None)
    with pytest.raises(ValueError, match="cannot take"):
        pool.call("a", seconds)


def test_a_pool_has_a_place() -> None:
    with pytest.raises(ValueError, match="tool capacity must be 1 or more"):
        Pool(Calendar(), lambda pool, name: None, capacity=0)


def services(others: int | None = None, **pools: ServiceConfig) -> ToolServices:
    return ToolServices(pools=pools, others=ServiceConfig(capacity=others))


def test_each_tool_waits_for_its_own_pool(clock: str) -> None:
    def begin(pool: Pool) -> None:
        for name, tool in (("a", "sh"), ("b", "sh"), ("c", "web"), ("d", "web"), ("e", "other")):
            pool.call(name, 2.0, tool)

    tools = services(1, sh=ServiceConfig(capacity=1), web=ServiceConfig(cold_start_s=0.5))
    pool = played(clock, begin, tools=tools)
    assert pool.ends == [("a", 2.0), ("e", 2.0), ("c", 2.5), ("d", 2.5), ("b", 4.0)]


def test_parallel_tools_take_a_place_in_each_of_their_pools(clock: str) -> None:
    def begin(pool: Pool) -> None:
        pool.call("web", 3.0, "web")
        pool.call("both", 2.0, "web+sh")
        pool.call("sh", 1.0, "sh")

    tools = services(sh=ServiceConfig(capacity=1), web=ServiceConfig(capacity=1))
    # "both" holds the place of "sh", the first pool, and waits for that of "web".
    pool = played(clock, begin, tools=tools)
    assert pool.ends == [("web", 3.0), ("both", 5.0), ("sh", 6.0)]


def test_parallel_tools_in_every_order_never_wait_for_each_other_for_ever(clock: str) -> None:
    def begin(pool: Pool) -> None:
        for k in range(12):
            pool.call(f"t{k}", 1.0, ("a+b", "b+a", "b+c+a", "c", "c+b", "x+a")[k % 6])

    one = ServiceConfig(capacity=1)
    pool = played(clock, begin, tools=services(1, a=one, b=one, c=one))
    assert len(pool.ends) == 12
    assert pool.pool.running == 0


def test_a_cancelled_call_gives_all_its_places_back(clock: str) -> None:
    def begin(pool: Pool) -> None:
        pool.call("runs", 9.0, "sh")
        pool.call("waits", 1.0, "sh")
        pool.call("last", 1.0, "sh")
        pool.pool.cancel(TrajectoryId("waits"))
        pool.clock.call_after(2.0, pool.pool.cancel, TrajectoryId("runs"))

    pool = played(clock, begin, tools=services(sh=ServiceConfig(capacity=1)))
    assert pool.ends == [("last", 3.0)]


def test_a_call_cancelled_before_its_instance_is_ready_never_begins(clock: str) -> None:
    def begin(pool: Pool) -> None:
        pool.call("cold", 1.0, "sh")
        assert pool.pool.running == 1
        pool.clock.call_after(2.0, pool.pool.cancel, TrajectoryId("cold"))

    pool = played(clock, begin, tools=services(sh=ServiceConfig(cold_start_s=5.0)))
    assert pool.ends == []
    assert pool.pool.running == 0


def test_latency_is_added_to_every_call_and_not_cut_with_it(clock: str) -> None:
    def begin(pool: Pool) -> None:
        for name, tool in (("a", "sh"), ("b", "web"), ("c", "sh+web")):
            pool.call(name, 2.0, tool)

    sh = ServiceConfig(capacity=9, latency=Latency(seconds=1.0))
    tools = ToolServices(
        pools={"sh": sh}, others=ServiceConfig(), latency=Latency(seconds=10.0, sigma=0.0)
    )
    # A pool's own latency takes the place of the common one; parallel tools wait side by side.
    pool = played(clock, begin, tools=tools, limit_s=1.5)
    assert pool.ends == [("a", 2.5), ("b", 11.5), ("c", 11.5)]
    assert [answer.ok for answer in pool.answers] == [False] * 3


def test_a_call_that_cannot_begin_after_its_latency_has_failed(
    clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[tuple[str, str]] = []

    def refuse(agent: ScriptedAgent, listener: object) -> None:
        raise OSError("no sandbox")

    monkeypatch.setattr(ScriptedAgent, "call_tool", refuse)
    monkeypatch.setattr(
        Pool, "tool_failed", lambda _, name, error: failed.append((name, str(error)))
    )
    slow = services(sh=ServiceConfig(latency=Latency(seconds=2.0)))
    played(clock, lambda pool: pool.call("a", 1.0), tools=slow)
    assert failed == [("a", "no sandbox")]
