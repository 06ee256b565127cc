"""prime-rl's budget, rule by rule; engines of 1,000 tokens of KV."""

from collections.abc import Mapping

import pytest

from heddle_core.engine_state import Engine
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.ledger import Ledger
from heddle_core.parts.placement.kv_budget import KvBudget
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory, policy_context

FULL = 1_000


def budget() -> KvBudget:
    return KvBudget(policy_context(), first_tokens=250)


def cluster(engines: int = 1) -> Ledger:
    ledger = Ledger()
    for number in range(engines):
        shape = EngineShape("h100", 1)
        name = EngineId(f"e{number}")
        ledger.add_engine(Engine(id=name, shape=shape, max_running=99, kv_capacity_tokens=FULL))
    return ledger


def arrive(part: KvBudget, ledger: Ledger, name: str) -> Trajectory:
    t = add_trajectory(ledger, name, None, context_tokens=10)
    ledger.set_home(t, part.place(t, ledger))
    return t


def under_way(ts: list[Trajectory]) -> int:
    return sum(t.home is not None for t in ts)


def review(
    part: KvBudget, ledger: Ledger, used: int, backlog: Mapping[TrajectoryId, Trajectory]
) -> list[str]:
    ledger.now_s += 5.0
    for engine in ledger.engines:
        ledger.engine(engine.id).reported_kv_used_tokens = used
    started = []
    while released := part.release(backlog, ledger):
        for name, engine in released:
            ledger.set_home(ledger.trajectories[name], engine)
            backlog = {key: t for key, t in backlog.items() if key != name}
            started.append(str(name))
    return started


def test_as_many_start_as_all_kv_holds_at_their_end() -> None:
    part, ledger = budget(), cluster(2)
    ts = [arrive(part, ledger, f"t{n}") for n in range(12)]
    assert [t.home for t in ts[:8]] == ["e0", "e1"] * 4
    assert under_way(ts) == 8  # 2,000 tokens at 250


def test_one_that_ends_makes_room_for_the_first_that_waits() -> None:
    part, ledger = budget(), cluster()
    ts = [arrive(part, ledger, f"t{n}") for n in range(6)]
    part.finished(ts[0])
    assert review(part, ledger, 0, {t.id: t for t in ts[4:]}) == ["t4"]


def test_beyond_the_soft_share_those_under_way_drain() -> None:
    part, ledger = budget(), cluster()
    ts = [arrive(part, ledger, f"t{n}") for n in range(6)]
    waiting = {t.id: t for t in ts[4:]}
    assert review(part, ledger, 1_000, waiting) == []  # At most 4 * .7 / 1.0 = 2.8 from now on.
    part.finished(ts[0])
    assert review(part, ledger, 700, waiting) == []
    part.finished(ts[1])
    assert review(part, ledger, 700, waiting) == ["t4"]


def test_the_limit_grows_once_as_many_have_ended_as_it_is() -> None:
    part, ledger = budget(), cluster(5)
    ts = [arrive(part, ledger, f"t{n}") for n in range(60)]
    assert under_way(ts) == 20
    backlog = {t.id: t for t in ts[20:]}
    for t in ts[:19]:
        part.finished(t)
        review(part, ledger, 0, {k: v for k, v in backlog.items() if v.home is None})
    assert under_way(ts) == 39  # One for one.
    part.finished(ts[19])
    review(part, ledger, 0, {k: v for k, v in backlog.items() if v.home is None})
    assert under_way(ts) == 44  # The limit is a fifth more, 24.


def test_shares_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 < trim <= soft"):
        KvBudget(policy_context(), trim=0.9)
