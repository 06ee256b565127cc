"""Presorted as a part: the groups it gives against every way to cut, and homes step by step."""

from itertools import combinations_with_replacement

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from heddle_core.estimate.group_cost import context_costs, longest_first, work_of
from heddle_core.estimate.paper_cost import paper_costs, simulated_paper_costs
from heddle_core.ids import EngineId, GroupId
from heddle_core.parts.placement.presorted import Presorted
from tests.core.ledgers import add_trajectory, history, ledger_of, policy_context
from tests.core.shapes import h100


def lengths_ledger(tps, outputs, contexts):
    ledger = ledger_of(*tps)
    for i, (output, context) in enumerate(zip(outputs, contexts, strict=True)):
        add_trajectory(ledger, f"t{i}", remaining_tokens=output, context_tokens=context)
    ts = list(ledger.trajectories.values())
    return ledger, ts, [t.remaining_tokens for t in ts]


def estimated(cost, s, ts, remaining, tps):
    """Order of trajectories and cost of each engine, widest first, as documented by the part."""
    output = np.maximum(np.asarray(remaining), 1.0)
    work = work_of(
        output,
        context_tokens=np.asarray([t.context_tokens for t in ts]),
        appended_tokens=output * (s.history.appended_per_output if s.history else 0.0),
        tool_s=output * (s.history.tool_s_per_output if s.history else 0.0),
    )
    by_shape = {h100(tp): s.cost.by_shape[h100(tp)] for tp in tps}
    if cost == "context":
        order = longest_first(work, by_shape[min(by_shape)])
        costs = context_costs(work.take(order), by_shape, max_running=s.max_running)
    else:
        order = np.argsort(-work.output_tokens, kind="stable")
        published = paper_costs if cost == "paper" else simulated_paper_costs
        costs = published(work.take(order), by_shape, max_running=s.max_running)
    return order, [costs[h100(tp)] for tp in sorted(tps, reverse=True)]


def makespan(costs, bounds):
    return max(
        float(c.end_s(np.array([a]), np.array([b]))[0])
        for c, a, b in zip(costs, bounds[:-1], bounds[1:], strict=True)
    )


@settings(max_examples=60)
@given(
    cost=st.sampled_from(["context", "paper", "paper-simulated"]),
    tps=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    trajectories=st.lists(
        st.tuples(st.floats(0.0, 30_000.0), st.integers(1, 30_000)), min_size=2, max_size=6
    ),
)
def test_groups_are_the_best_of_every_way_to_cut(cost, tps, trajectories):
    s = policy_context(max_running=4)
    ledger, ts, remaining = lengths_ledger(tps, *zip(*trajectories, strict=True))
    homes = Presorted(s, cost=cost).assign(ts, remaining, ledger)
    order, costs = estimated(cost, s, ts, remaining, tps)
    n, widest = len(ts), sorted(ledger.engines, key=lambda e: -e.shape.tp)
    assert len(homes) == n
    assert set(homes) <= {e.id for e in widest}
    position = {e.id: i for i, e in enumerate(widest)}
    along = [position[homes[int(k)]] for k in order]
    assert along == sorted(along), "a group is not contiguous, or a wide engine comes later"
    bounds = [0, *np.cumsum([along.count(i) for i in range(len(widest))]).tolist()]
    ways = combinations_with_replacement(range(n + 1), len(widest) - 1)
    best = min(makespan(costs, (0, *cuts, n)) for cuts in ways)
    assert makespan(costs, bounds) <= best * (1 + 2e-3)


def test_the_longest_stand_on_the_widest_engine():
    ledger, ts, remaining = lengths_ledger((1, 4), [100.0, 20_000.0, 200.0, 150.0], [500] * 4)
    homes = Presorted(policy_context()).assign(ts, remaining, ledger)
    assert homes[1] == "e1"
    assert "e0" in homes


def test_without_predictions_engines_share_evenly():
    ledger, ts, remaining = lengths_ledger((1, 1), [0.0] * 40, [500] * 40)
    homes = Presorted(policy_context()).assign(ts, remaining, ledger)
    assert abs(homes.count("e0") - homes.count("e1")) <= 1


def test_predictions_that_hardly_vary_are_interleaved_in_even_shares():
    lengths = [3_000.0 - i / 10 for i in range(400)]
    ledger, ts, remaining = lengths_ledger((4, 1, 1, 1), lengths, [9] * 400)
    blocks = Presorted(policy_context()).assign(ts, remaining, ledger)
    dealt = Presorted(policy_context(history=history())).assign(ts, remaining, ledger)
    assert dealt.count("e0") > dealt.count("e1") > 0, "a wide engine takes more"
    for quarter in range(4):
        here = dealt[100 * quarter : 100 * quarter + 100]
        assert abs(4 * here.count("e0") - dealt.count("e0")) <= 4, "dealt in blocks"
    assert blocks[:10] == ["e0"] * 10, "without a history every prediction is used"


def test_samples_of_a_long_prompt_stay_together():
    for prompt_tokens, engines_of_a_prompt in ((4_000, 2), (10, 4)):
        ledger = ledger_of(1, 1, 1, 1)
        for k in range(400):
            t = add_trajectory(ledger, f"t{k}", context_tokens=prompt_tokens)
            t.group = GroupId(f"g{k % 40}")
        ts = list(ledger.trajectories.values())
        part = Presorted(policy_context(history=history()))
        homes = part.assign(ts, [1_000.0] * 400, ledger)
        assert [homes.count(EngineId(f"e{k}")) for k in range(4)] == [100] * 4
        by_prompt: dict[GroupId, set[EngineId]] = {}
        for t, home in zip(ts, homes, strict=True):
            by_prompt.setdefault(t.group, set()).add(home)
        assert max(map(len, by_prompt.values())) <= engines_of_a_prompt
        assert part.assign([], [], ledger) == []


def test_a_home_stays_while_its_engine_takes_work():
    ledger = ledger_of(1, 4)
    t = add_trajectory(ledger, "t", "e0")
    part = Presorted(policy_context())
    assert part.needs_all
    assert part.place(t, ledger) == "e0"
    ledger.close_engine(ledger.engine(EngineId("e0")))
    assert part.place(t, ledger) == "e1"
    part.finished(t)
    assert part.place(t, ledger) == "e1"


@pytest.mark.parametrize(("on_wide", "home"), [(3, "e1"), (5, "e0")])
def test_a_trajectory_without_a_home_joins_the_engine_with_fewest_for_each_gpu(on_wide, home):
    ledger = ledger_of(1, 4)
    add_trajectory(ledger, "a", "e0")
    for i in range(on_wide):
        add_trajectory(ledger, f"w{i}", "e1")
    assert Presorted(policy_context()).place(add_trajectory(ledger, "new"), ledger) == home
