"""Balance: a home moves only if another engine's estimated end is earlier by a margin."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.ledger import Ledger
from heddle_core.parts.migration import Balance
from heddle_core.policy import PolicyContext
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import (
    add_engine,
    add_trajectory,
    history,
    ledger_of,
    policy_context,
    step_cost,
)
from tests.core.scanning_balance import ScanningBalance

HISTORY = history()


def terms(s: PolicyContext, ledger: Ledger, context: int, remaining: float, engine: EngineId):
    """What one trajectory adds to the two sums of an engine, and its solo time: written apart."""
    e = ledger.engine(engine)
    cost = s.cost.by_shape[e.shape]
    output = max(remaining, 1.0)
    appended = output * (s.history.appended_per_output if s.history else 0.0)
    mean_context = context + (output + appended) / 2
    work = output * (cost.t1_s + cost.t2_s * mean_context) + cost.prefill_s * appended
    pace = max(mean_context / e.kv_capacity_tokens, 1 / s.max_running)
    tool_s = output * (s.history.tool_s_per_output if s.history else 0.0)
    return cost.t0_s * output * pace + work, work, cost.t0_s * output + work + tool_s


def gain_s(s: PolicyContext, ledger: Ledger, t: Trajectory, source: str, target: str) -> float:
    """Seconds by which `t` would end earlier at `target`, from the formula of the module."""

    def end_s(engine: str) -> float:
        full = work = 0.0
        for other in ledger.trajectories.values():
            if other.home == engine and other.id != t.id:
                add = terms(s, ledger, other.context_tokens, other.remaining_tokens, other.home)
                full, work = full + add[0], work + add[1]
        own = terms(s, ledger, t.context_tokens, t.remaining_tokens, EngineId(engine))
        return max(full + own[0], own[2] + work)

    return end_s(source) - end_s(target)


def sums(balance: Balance, engine: str) -> tuple[float, float]:
    shape, at = balance._place[balance._number[EngineId(engine)]]
    return balance._shapes[shape].sums(at)


def crowded(*, tool_s: float = 100.0) -> tuple[Ledger, Trajectory]:
    """Forty long trajectories at e0, one at e1; the target of the first of e0."""
    ledger = ledger_of(1, 1)
    for i in range(40):
        add_trajectory(ledger, f"t{i}", "e0", remaining_tokens=5_000.0, tool_s=tool_s, step=1)
    add_trajectory(ledger, "lonely", "e1", remaining_tokens=5_000.0)
    return ledger, ledger.trajectories[TrajectoryId("t0")]


def test_it_moves_for_the_least_gain_and_not_for_less():
    s = policy_context(tps=(1,))
    ledger, t = crowded()
    gain = gain_s(s, ledger, t, "e0", "e1")
    assert gain > 1.0
    for least, found in ((gain * 1.001, None), (gain * 0.999, "e1")):
        balance = Balance(s, min_gain_s=least, margin=0.0)
        assert balance.target(t, t.remaining_tokens, ledger) == found


def test_it_moves_for_the_least_share_of_the_end_at_home_and_not_for_less():
    s = policy_context(tps=(1,))
    ledger, t = crowded()
    gain = gain_s(s, ledger, t, "e0", "e1")
    own_full, _, own_solo = terms(s, ledger, t.context_tokens, t.remaining_tokens, EngineId("e0"))
    others = [
        terms(s, ledger, o.context_tokens, o.remaining_tokens, EngineId("e0"))
        for o in ledger.trajectories.values()
        if o.home == "e0" and o is not t
    ]
    end_at_home = max(own_full + sum(o[0] for o in others), own_solo + sum(o[1] for o in others))
    share = gain / end_at_home
    for margin, found in ((share * 1.001, None), (share * 0.999, "e1")):
        balance = Balance(s, min_gain_s=0.0, margin=margin)
        assert balance.target(t, t.remaining_tokens, ledger) == found


def test_an_even_load_is_left_alone():
    ledger = ledger_of(1, 1, 1)
    for i in range(30):
        add_trajectory(ledger, f"t{i}", f"e{i % 3}", tool_s=100.0, step=1)
    balance = Balance(policy_context(tps=(1,)))
    assert [balance.target(t, 1_000.0, ledger) for t in ledger.trajectories.values()] == [None] * 30


def test_repeated_calls_balance_a_full_engine_and_then_change_nothing():
    s = policy_context(tps=(1, 2), history=HISTORY)
    ledger = ledger_of(1, 1, 2)
    for i in range(60):
        remaining = 500.0 + 150.0 * i
        add_trajectory(ledger, f"t{i}", "e0", remaining_tokens=remaining, tool_s=100.0, step=1)
    balance = Balance(s)
    moves = []
    for _ in range(6):
        before = len(moves)
        for t in ledger.trajectories.values():
            target = balance.target(t, t.remaining_tokens, ledger)
            if target is not None:
                ledger.set_home(t, target)
                moves.append(t.id)
        if len(moves) == before:
            break
    else:
        pytest.fail("it never rests")
    ends = {}
    for e in ledger.engines:
        mine = [t for t in ledger.trajectories.values() if t.home == e.id]
        adds = [terms(s, ledger, t.context_tokens, t.remaining_tokens, e.id) for t in mine]
        work = sum(a[1] for a in adds)
        ends[e.id] = max(sum(a[0] for a in adds), max(a[2] + work - a[1] for a in adds))
    assert max(ends.values()) < 1.25 * min(ends.values())
    tokens = {
        e.id: sum(t.remaining_tokens for t in ledger.trajectories.values() if t.home == e.id)
        for e in ledger.engines
    }
    assert tokens["e2"] > max(tokens["e0"], tokens["e1"]), "twice the GPUs take more"


def test_a_transfer_that_no_tool_hides_is_paid_for():
    ledger, t = crowded(tool_s=0.0)
    gain = gain_s(policy_context(tps=(1,)), ledger, t, "e0", "e1")
    for fixed_s, found in ((gain + 1.0, None), (gain - 3.0, "e1")):
        balance = Balance(policy_context(tps=(1,), transfer_fixed_s=fixed_s), margin=0.0)
        assert balance.target(t, t.remaining_tokens, ledger) == found


def test_a_transfer_that_its_tools_hide_is_free():
    ledger, t = crowded(tool_s=1e6)
    balance = Balance(policy_context(tps=(1,), transfer_fixed_s=1e5))
    assert balance.target(t, t.remaining_tokens, ledger) == "e1"


def test_a_trajectory_without_a_home_or_on_a_stopping_engine_stays():
    ledger, t = crowded()
    balance = Balance(policy_context(tps=(1,)))
    assert balance.target(add_trajectory(ledger, "new"), 1.0, ledger) is None
    ledger.close_engine(ledger.engine(EngineId("e0")))
    assert balance.target(t, t.remaining_tokens, ledger) is None


def test_an_engine_that_comes_is_used_and_one_that_goes_is_not():
    ledger, t = crowded()
    balance = Balance(policy_context(tps=(1, 8)))
    assert balance.target(t, t.remaining_tokens, ledger) == "e1"
    add_engine(ledger, "e9", 8)
    assert balance.target(t, t.remaining_tokens, ledger) == "e9"
    ledger.close_engine(ledger.engine(EngineId("e9")))
    assert balance.target(t, t.remaining_tokens, ledger) == "e1"
    add_engine(ledger, "e9+1", 8)
    ledger.close_engine(ledger.engine(EngineId("e1")))
    assert balance.target(t, t.remaining_tokens, ledger) == "e9+1"


def test_finished_trajectories_drop_out_of_the_sums():
    ledger, t = crowded()
    balance = Balance(policy_context(tps=(1,)))
    balance.target(t, t.remaining_tokens, ledger)
    for other in ledger.trajectories.values():
        balance.finished(other)
        balance.finished(other)  # once too often, or one it never saw
    for engine in ledger.engines:
        assert np.allclose(sums(balance, engine.id), 0.0, atol=1e-9)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["ask"] * 6 + ["finish", "join", "leave", "arrive"]),
        st.integers(0, 30),
        st.floats(0.0, 50_000.0),
        st.integers(1, 50_000),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(ops=OPS)
def test_the_sums_follow_the_targets_of_all_trajectories_for_any_run_length(ops):
    s = policy_context(tps=(1, 2), history=HISTORY)
    ledger = ledger_of(1, 2, 1)
    for i in range(8):
        add_trajectory(ledger, f"t{i}", f"e{i % 3}", remaining_tokens=1_000.0 * i)
    balance = Balance(s, min_gain_s=0.0, margin=0.0)
    known: list[EngineId] = []
    placed: dict[TrajectoryId, tuple[EngineId, int, float]] = {}
    engines, arrived = 3, 8
    for op, which, remaining, context in ops:
        live = list(ledger.trajectories.values())
        t = live[which % len(live)] if live else None
        if op == "arrive" or t is None:
            home = ledger.engines[which % len(ledger.engines)].id
            arrived += 1
            add_trajectory(ledger, f"t{arrived}", home, remaining_tokens=remaining)
        elif op == "finish":
            ledger.finish(t)
            balance.finished(t)
            placed.pop(t.id, None)
        elif op == "join":
            add_engine(ledger, f"e{engines}", 1 + which % 2)
            engines += 1
        elif op == "leave" and len(ledger.engines) > 1:
            ledger.close_engine(ledger.engines[which % len(ledger.engines)])
        elif op == "ask":
            names = [e.id for e in ledger.engines]
            if sorted(names) != sorted(known) or not known:
                known = names
                placed = {
                    o.id: (o.home, o.context_tokens, o.remaining_tokens)
                    for o in live
                    if o.home in names
                }
            t.context_tokens, t.remaining_tokens = context, remaining
            target = balance.target(t, remaining, ledger)
            if target is not None:
                assert t.home in names
                ledger.set_home(t, target)
            if t.home in names:
                placed[t.id] = (t.home, context, remaining)
    if known:
        for name in known:
            adds = [terms(s, ledger, c, r, name) for home, c, r in placed.values() if home == name]
            full, work = sums(balance, name)
            assert full == pytest.approx(sum(a[0] for a in adds), rel=1e-9, abs=1e-6)
            assert work == pytest.approx(sum(a[1] for a in adds), rel=1e-9, abs=1e-6)


FIRST = [("ask", which, 20_000.0 - which, 30_000) for which in range(9)]
"""While the engines but the first are alike."""
RUNS = st.lists(
    st.tuples(
        st.sampled_from(["ask"] * 8 + ["finish", "join", "leave", "arrive", "run", "wait"]),
        st.integers(0, 40),
        st.sampled_from([0.0, 1.0, 300.0, 5_000.0, 5_000.5, 60_000.0]),
        st.sampled_from([1, 900, 1_000, 50_000]),
    ),
    max_size=80,
)


@settings(max_examples=150)
@given(
    ops=RUNS,
    tps=st.lists(st.sampled_from([1, 1, 1, 2, 4]), min_size=1, max_size=12),
    kv=st.lists(st.sampled_from([0, 0, 9_000, 40_000]), min_size=12, max_size=12),
    least=st.sampled_from([(0.0, 0.0), (2.0, 0.05)]),
    fixed_s=st.sampled_from([0.0, 0.5, 20.0]),
    lengths_known=st.booleans(),
)
def test_it_finds_what_a_scan_of_all_engines_finds(ops, tps, kv, least, fixed_s, lengths_known):
    s = policy_context(tps=(1, 2, 4), history=HISTORY, transfer_fixed_s=fixed_s)
    # Two shapes of one cost: ends on engines of different shapes may be equal.
    by_shape = {shape: step_cost(1 if shape.tp == 2 else shape.tp) for shape in s.shape_choices}
    s = replace(s, cost=replace(s.cost, by_shape=by_shape))
    ledger = ledger_of(*tps)
    for engine, more in zip(ledger.engines, kv, strict=False):
        engine.kv_capacity_tokens = 60_000 + more
    for i in range(4 * len(tps)):  # many at the first engine; the others are alike
        home = ledger.engines[0 if i % 4 else i // 4].id
        left = HISTORY.output_quantiles[i % 6] if lengths_known else 20_000.0
        add_trajectory(ledger, f"t{i}", home, remaining_tokens=left, tool_s=10.0 * (i % 3))
    searched = Balance(s, min_gain_s=least[0], margin=least[1])
    scanned = ScanningBalance(s, min_gain_s=least[0], margin=least[1])
    for number, (op, which, remaining, context) in enumerate([*FIRST, *ops]):
        live = list(ledger.trajectories.values())
        t = live[which % len(live)] if live else None
        engine = ledger.engines[which % len(ledger.engines)]
        if op == "arrive" or t is None:
            add_trajectory(ledger, f"n{number}", engine.id, remaining_tokens=remaining)
        elif op == "finish":
            ledger.finish(t)
            searched.finished(t)
            scanned.finished(t)
        elif op == "join":
            add_engine(ledger, f"j{number}", (1, 2, 4)[which % 3])
        elif op == "leave" and len(ledger.engines) > 1:
            ledger.close_engine(engine)
        elif op == "wait":
            ledger.advance(ledger.now_s + 0.2 * which)
        elif op == "run" and t.phase == "tool":
            t.phase, t.dispatched_s = "running", ledger.now_s
            ledger.engine(t.home).running[t.id] = t
            ledger.engine(t.home).estimated_kv_tokens += context
        elif op == "ask":
            t.step, t.context_tokens, t.remaining_tokens = which % 3, context, remaining
            target = searched.target(t, remaining, ledger)
            assert target == scanned.target(t, remaining, ledger)
            if target is not None and t.phase == "tool" and which % 5:
                ledger.set_home(t, target)
    assert searched._known == scanned._known
    if len(tps) % 3 == 0:
        assert searched._known == lengths_known
    for number, name in enumerate(scanned._names):
        assert sums(searched, name) == (scanned._full[number], scanned._work[number])


def test_an_arrival_pays_for_its_delay_of_the_longest_where_lengths_are_known():
    """The second engine has little work, but its longest ends last."""

    def target(*lengths):
        ledger = ledger_of(1, 1)
        for i, tokens in enumerate([20_000.0, 500.0, *lengths]):
            home = ledger.engines[1 if i == 0 else 0].id
            add_trajectory(ledger, f"t{i}", home, remaining_tokens=tokens, tool_s=60.0)
        t = ledger.trajectories[TrajectoryId("t1")]
        part = Balance(policy_context(tps=(1, 2, 4), history=HISTORY))
        return part.target(t, 500.0, ledger), part._known

    known = [4_000.0, 1_000.0, 8_000.0, 2_000.0]
    assert target(*known) == (None, True)
    assert target(*known, 1e9) == ("e1", False), "such lengths have errors"
