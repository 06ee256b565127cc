"""Tools and KV transfers: each on a few numbers that can be checked by hand."""

import pytest
import simpy
from heddle_sim.tools import ToolPool
from heddle_sim.transfer import Transfers

from heddle_core.ids import EngineId

E0, E1, E2, E3 = (EngineId(f"e{i}") for i in range(4))


def test_tools_without_a_limit_run_side_by_side() -> None:
    env, ends = simpy.Environment(), list[tuple[str, float]]()
    pool = ToolPool(env, None)
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 0.0)):
        pool.run(seconds, lambda name=name: ends.append((name, env.now)))
    assert pool.running == 3
    env.run()
    assert ends == [("c", 0.0), ("b", 1.0), ("a", 3.0)]
    assert (pool.running, pool.waiting, pool.queued_s) == (0, 0, 0.0)


def test_tools_with_a_limit_wait_in_order_of_arrival() -> None:
    env, ends = simpy.Environment(), list[tuple[str, float]]()
    pool = ToolPool(env, 2)
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 4.0), ("d", 1.0)):
        pool.run(seconds, lambda name=name: ends.append((name, env.now)))
    assert (pool.running, pool.waiting) == (2, 2)
    env.run()
    assert ends == [("b", 1.0), ("a", 3.0), ("d", 4.0), ("c", 5.0)]
    assert pool.queued_s == 1.0 + 3.0


def test_a_call_asked_for_at_an_end_queues_behind_those_that_wait() -> None:
    env, ends = simpy.Environment(), list[tuple[str, float]]()
    pool = ToolPool(env, 1)
    pool.run(1.0, lambda: pool.run(1.0, lambda: ends.append(("again", env.now))))
    pool.run(1.0, lambda: ends.append(("waited", env.now)))
    env.run()
    assert ends == [("waited", 2.0), ("again", 3.0)]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_tool_takes_a_time_that_can_be(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot take"):
        ToolPool(simpy.Environment(), None).run(seconds, lambda: None)


def test_a_pool_has_a_place() -> None:
    with pytest.raises(ValueError, match="tool capacity must be 1 or more"):
        ToolPool(simpy.Environment(), 0)


class Moves:
    """Transfers of 1 s and a second per byte, with the time each was told."""

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.transfers = Transfers(self.env, fixed_s=1.0, bytes_per_s=1.0)
        self.told: dict[str, float] = {}

    def move(self, name: str, source: EngineId, target: EngineId, kv_bytes: float) -> None:
        self.transfers.move(
            source, target, kv_bytes, lambda: self.told.__setitem__(name, self.env.now)
        )


def test_a_transfer_takes_its_fixed_time_and_its_bytes() -> None:
    moves = Moves()
    moves.move("a", E0, E1, 9.0)
    moves.env.run()
    assert moves.told == {"a": 10.0}
    assert moves.transfers.seconds(9.0) == 10.0


def test_of_transfers_that_meet_at_an_engine_the_longest_goes_first() -> None:
    moves = Moves()
    moves.move("short", E0, E1, 1.0)
    moves.move("long", E0, E2, 9.0)
    moves.move("apart", E3, E1, 3.0)
    moves.env.run()
    # `long` holds e0 until 10; `apart` uses e3 and e1 meanwhile; then `short`.
    assert moves.told == {"apart": 4.0, "long": 10.0, "short": 12.0}


def test_a_transfer_needs_both_of_its_engines() -> None:
    moves = Moves()
    moves.move("first", E0, E1, 4.0)
    moves.move("second", E1, E2, 3.0)
    moves.move("third", E2, E3, 2.0)
    moves.env.run(until=0.5)
    assert (moves.transfers.moving, moves.transfers.waiting) == (2, 1)
    moves.env.run()
    assert moves.told == {"third": 3.0, "first": 5.0, "second": 9.0}


def test_transfers_of_a_dead_engine_end_at_once_and_free_the_other() -> None:
    moves = Moves()
    moves.move("moving", E0, E1, 9.0)
    moves.env.run(until=2.0)
    moves.move("queued", E1, E0, 5.0)
    moves.move("other", E1, E2, 1.0)
    moves.transfers.drop(E0)
    assert moves.told == {}
    moves.env.run()
    assert moves.told == {"moving": 2.0, "queued": 2.0, "other": 4.0}


def test_a_transfer_that_cannot_be_is_refused() -> None:
    transfers = Transfers(simpy.Environment(), fixed_s=0.0, bytes_per_s=1.0)
    with pytest.raises(ValueError, match="cannot move"):
        transfers.move(E0, E0, 1.0, lambda: None)
    with pytest.raises(ValueError, match="bytes_per_s > 0"):
        Transfers(simpy.Environment(), fixed_s=0.0, bytes_per_s=0.0)
