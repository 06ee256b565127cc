"""Sweeps of a machine whose speed drifts: fitted together, they give the speed in between."""

from dataclasses import replace
from pathlib import Path

import pytest

from heddle_calibrate.fit.from_sweep import fit_sweep
from heddle_calibrate.sweeps import TRIALS, Sweep, SweepError, pooled
from heddle_sim.profile_files import load_profile
from tests.calibrate.test_fit_sweep import sweep

H200 = load_profile("qwen3-8b", "h200")
A, B = Path("a.json"), Path("b.json")


def slower(found: Sweep, factor: float) -> Sweep:
    """The same sweep on a machine that takes longer for everything that is fitted."""
    decode = tuple(replace(t, step_s=t.step_s * factor) for t in found.decode)
    prefill = tuple(
        replace(
            t,
            prefill_s=t.prefill_s * factor,
            queued_s=t.queued_s * factor,
            wall_s=t.wall_s * factor,
        )
        for t in found.prefill
    )
    return replace(found, decode=decode, prefill=prefill)


@pytest.fixture(scope="module")
def once() -> Sweep:
    return sweep(H200.table)


def decoding_s(found: Sweep) -> float:
    """Seconds of an iteration of 16 at 32,000 tokens, as fitted."""
    table = fit_sweep(found, file="it").table(1)
    return table.base_s[16] + table.per_context_s[16] * 32_000


def test_a_fit_of_two_lies_between_them(once: Sweep) -> None:
    late = slower(once, 1.2)
    fast, both, slow = (decoding_s(s) for s in (once, pooled({A: once, B: late}), late))
    assert slow == pytest.approx(1.2 * fast, rel=0.02)
    assert both == pytest.approx(1.1 * fast, rel=0.02)


def test_all_trials_are_kept_in_turn(once: Sweep) -> None:
    both = pooled({A: once, B: once})
    for name in TRIALS:
        assert len(getattr(both, name)) == 2 * len(getattr(once, name))
    last = max(t.order for name in TRIALS for t in getattr(once, name))
    assert [t.order for t in both.decode[len(once.decode) :]] == [
        t.order + last + 1 for t in once.decode
    ]
    assert both.spoiled == 2 * once.spoiled


def test_one_is_itself(once: Sweep) -> None:
    assert pooled({A: once}) == once


def test_another_source_state_is_the_same_engine(once: Sweep) -> None:
    later = replace(once, versions={**once.versions, "git_commit": "f00"}, seed=3)
    assert len(pooled({A: once, B: later}).decode) == 2 * len(once.decode)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "other"}, "b.json: model is other, in a.json it is known"),
        ({"max_running": 7}, "b.json: max_running is 7"),
        ({"versions": {"fake": "2"}}, "b.json: versions is"),
        ({"hardware": {"cores": 64}}, "b.json: hardware is"),
    ],
)
def test_sweeps_of_different_engines_are_refused(once: Sweep, changed: dict, said: str) -> None:
    with pytest.raises(SweepError, match=r"(?s).*same engine") as refused:
        pooled({A: once, B: replace(once, **changed)})
    assert str(refused.value).startswith(said)
    with pytest.raises(SweepError, match="no sweep"):
        pooled({})
