import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.ids import EngineId
from heddle_core.parts.placement.consistent_hash import ConsistentHash
from tests.core.policy_fakes import FakeEngine, trajectory, view_of

NAMES = [f"g{i // 16:03d}/{i % 16}" for i in range(400)]


def homes(placement, view):
    return {name: placement.place(trajectory(name), view) for name in NAMES}


@given(lost=st.integers(0, 7))
def test_losing_an_engine_moves_only_its_share(lost):
    placement, view = ConsistentHash(points_per_engine=16), view_of(*[0] * 8)
    before = homes(placement, view)
    view.known[lost].accepting = False
    after = homes(placement, view)
    assert after == {
        name: after[name] if home == f"e{lost}" else home for name, home in before.items()
    }
    assert f"e{lost}" not in after.values()


def test_a_newcomer_takes_only_a_share_of_its_own():
    placement, view = ConsistentHash(), view_of(*[0] * 4)
    before = homes(placement, view)
    view.known[1].accepting = False
    without_e1 = homes(placement, view)
    view.known.append(FakeEngine(id=EngineId("e9")))
    after = homes(placement, view)
    moved = [name for name in NAMES if after[name] != without_e1[name]]
    assert moved
    assert {after[name] for name in moved} == {"e9"}
    assert {before[name] for name in NAMES if before[name] != without_e1[name]} == {"e1"}
    assert len(placement._ring) == 4 * 128, "the dead leave the ring, nobody stands there twice"


def test_the_order_in_which_engines_came_does_not_matter():
    view, other = view_of(*[0] * 5), view_of(*[0] * 5)
    other.known.reverse()
    assert homes(ConsistentHash(), view) == homes(ConsistentHash(), other)


def test_shares_are_near_even():
    counts = Counter(homes(ConsistentHash(), view_of(*[0] * 4)).values())
    assert len(counts) == 4
    assert max(counts.values()) < 2 * len(NAMES) / 4


def test_load_plays_no_part():
    assert homes(ConsistentHash(), view_of(0, 0)) == homes(ConsistentHash(), view_of(99, 0))


def test_the_hash_is_the_same_in_every_process():
    module = "heddle_core.parts.placement.consistent_hash"
    code = f"from {module} import _point; print(_point('math-017/3'))"
    homes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(homes) == 1


def test_no_points_are_refused():
    with pytest.raises(ValueError, match="points_per_engine is 0"):
        ConsistentHash(points_per_engine=0)
