"""FollowRank against the published rule, computed with fractions and by counting."""

from fractions import Fraction

import hypothesis.strategies as st
from hypothesis import given, settings

from heddle_core.ids import EngineId
from heddle_core.ledger import Ledger
from heddle_core.parts.migration import FollowRank
from tests.core.ledgers import add_engine, add_trajectory, ledger_of, policy_context


def literal(
    totals: dict[str, float], asked: str, sizes: list[tuple[EngineId, int]]
) -> EngineId | None:
    """The engine of the group that contains the rank of `asked`: ``s_i * n / n_0``."""
    n, n0 = len(totals), sum(size for _, size in sizes)
    rank = sum(total > totals[asked] for total in totals.values())
    edge = Fraction(0)
    for engine, size in sizes:
        edge += Fraction(size * n, n0)
        if rank < edge:
            return engine
    return sizes[-1][0]


def groups(ledger: Ledger) -> list[tuple[EngineId, int]]:
    return [(e.id, e.sessions) for e in sorted(ledger.engines, key=lambda e: -e.shape.tp)]


def test_a_revised_prediction_moves_to_the_group_of_the_new_rank():
    ledger = ledger_of(1, 4)
    for i in range(6):
        home = "e1" if i < 2 else "e0"
        add_trajectory(ledger, f"t{i}", home, remaining_tokens=1_000.0 - 100 * i)
    last = ledger.trajectories["t5"]
    part = FollowRank()
    assert part.target(last, 500.0, ledger) is None  # still last
    assert part.target(last, 5_000.0, ledger) == "e1"  # the longest now: to the widest engine
    first = ledger.trajectories["t0"]
    assert part.target(first, 1_000.0, ledger) is None  # second of two long ones
    second = ledger.trajectories["t1"]
    assert part.target(second, 900.0, ledger) == "e0"  # pushed out


def test_groups_shrink_as_trajectories_finish():
    ledger = ledger_of(4, 1)
    for i in range(8):
        home = "e0" if i < 4 else "e1"
        add_trajectory(ledger, f"t{i}", home, remaining_tokens=1_000.0 - 100 * i)
    part = FollowRank()
    assert part.target(ledger.trajectories["t3"], 700.0, ledger) is None
    for i in range(4, 8):
        part.finished(ledger.trajectories[f"t{i}"])
        ledger.finish(ledger.trajectories[f"t{i}"])
    # Four are left: two of them belong to the wide engine.
    assert part.target(ledger.trajectories["t3"], 700.0, ledger) == "e1"
    assert part.target(ledger.trajectories["t1"], 900.0, ledger) is None


def test_output_so_far_counts_so_progress_alone_moves_no_trajectory():
    ledger = ledger_of(1, 1)
    for i in range(4):
        add_trajectory(ledger, f"t{i}", f"e{i // 2}", remaining_tokens=1_000.0 - 100 * i)
    part = FollowRank()
    t = ledger.trajectories["t0"]
    t.output_tokens = 950
    assert part.target(t, 50.0, ledger) is None


def test_other_engines_form_other_groups():
    ledger = ledger_of(1, 1)
    for i in range(4):
        add_trajectory(ledger, f"t{i}", f"e{i // 2}", remaining_tokens=1_000.0 - 100 * i)
    part = FollowRank()
    assert part.target(ledger.trajectories["t0"], 1_000.0, ledger) is None
    ledger.close_engine(ledger.engine(EngineId("e0")))
    assert part.target(ledger.trajectories["t0"], 1_000.0, ledger) == "e1"
    add_engine(ledger, "e2", 8)  # nobody lives there, so nobody's rank falls into it
    assert part.target(ledger.trajectories["t3"], 1.0, ledger) is None


@settings(max_examples=150)
@given(
    tps=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    totals=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    homes=st.lists(st.integers(0, 3), min_size=14, max_size=14),
    asks=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 12), st.booleans()), max_size=12),
)
def test_every_answer_is_that_of_the_published_rule(tps, totals, homes, asks):
    ledger = ledger_of(*tps)
    for i, total in enumerate(totals):
        home = f"e{homes[i] % len(tps)}"
        add_trajectory(ledger, f"t{i}", home, remaining_tokens=float(total))
    part, sizes = FollowRank(), groups(ledger)
    known = {t.id: t.remaining_tokens for t in ledger.trajectories.values()}
    for which, remaining, finishes in asks:
        live = [t for t in ledger.trajectories.values() if t.phase != "finished"]
        if not live:
            break
        t = live[which % len(live)]
        known[t.id] = float(remaining)
        expected = literal(known, t.id, sizes)
        found = part.target(t, float(remaining), ledger)
        assert (found or t.home) == expected
        assert found != t.home
        ledger.set_home(t, expected)
        if finishes:
            part.finished(t)
            ledger.finish(t)
            del known[t.id]


def crowded_wide_engine(members: int) -> Ledger:
    """TP 4 with `members` of 1,000 tokens, TP 1 with one of 100 whose new rank is the first."""
    ledger = ledger_of(4, 1, max_running=64)
    for i in range(members):
        add_trajectory(ledger, f"t{i}", "e0", remaining_tokens=1_000.0)
    add_trajectory(ledger, "short", "e1", remaining_tokens=100.0)
    return ledger


def test_a_rank_is_followed_to_where_the_end_is_earlier():
    ledger = crowded_wide_engine(4)
    t = ledger.trajectories["short"]
    assert FollowRank(policy_context(max_running=64)).target(t, 5_000.0, ledger) == "e0"


def test_a_rank_is_not_followed_to_a_later_end():
    ledger = crowded_wide_engine(63)
    for engine in ledger.engines:
        engine.max_running = 8  # eight waves on the wide engine
    t = ledger.trajectories["short"]
    assert FollowRank().target(t, 5_000.0, ledger) == "e0"
    assert FollowRank(policy_context(max_running=64)).target(t, 5_000.0, ledger) is None


def test_a_transfer_that_no_tool_hides_counts():
    ledger = crowded_wide_engine(4)
    t = ledger.trajectories["short"]
    part = FollowRank(policy_context(max_running=64, transfer_fixed_s=200.0))
    t.step, t.tool_s = 1, 200.0
    assert part.target(t, 5_000.0, ledger) == "e0"  # hidden by a tool of 200 s
    t.phase = "predicting"
    assert part.target(t, 5_000.0, ledger) is None
    t.phase, t.tool_s = "tool", 0.0
    assert part.target(t, 5_000.0, ledger) is None
