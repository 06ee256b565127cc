"""The posterior of what is left: properties, calibration, and who may use its quantiles."""

import math
import re
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heddle_core.estimate.history import History
from heddle_core.estimate.posterior import (
    SCORE_BOUND,
    LengthPosterior,
    LengthPrior,
    LengthScores,
    between_share,
)
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, GroupId
from heddle_core.parts.predictor import PosteriorPredictor
from tests.core.policy_fakes import FakeTrajectory, trajectory

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95)
ENGINE = EngineId("e0")


def history(quantiles, group_totals=None):
    return History(
        output_quantiles=tuple(quantiles),
        appended_per_output=0.5,
        tool_s_per_output=0.001,
        step_output_tokens=300.0,
        group_totals=group_totals or {},
    )


def lognormal(*, median=2_000.0, sd=0.9, count=256):
    normal = NormalDist()
    return [median * math.exp(sd * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]


USUAL = history(lognormal())


class World:
    """Shows a predictor what a controller would: 50 tokens a second, steps at any time."""

    def __init__(self, predictor):
        self.predictor = predictor
        self.ts: dict[str, FakeTrajectory] = {}
        self.now_s = 0.0

    def t(self, name):
        if name not in self.ts:
            group = GroupId(name.partition("/")[0])
            self.ts[name] = trajectory(name, group=group, home=ENGINE, phase="queued")
            self.predictor.remaining_tokens(self.ts[name])  # as on arrival
        return self.ts[name]

    def step(self, name, tokens, *, ends=False):
        t = self.t(name)
        t.output_tokens += tokens
        t.phase = "tool"
        t.dispatched_s = self.now_s
        self.now_s += tokens / 50.0
        self.predictor.observe_step(
            t,
            StepFinished(
                time_s=self.now_s,
                trajectory=t.id,
                step=t.step,
                engine=ENGINE,
                output_tokens=tokens,
                reason="answer" if ends else "tool_call",
            ),
        )
        if ends:
            self.finish(name)

    def at(self, time_s, name):
        """An event of `name` at this time, so that running steps have made more tokens."""
        self.now_s = time_s
        self.predictor.observe_tool(
            self.t(name),
            ToolReturned(
                time_s=time_s,
                trajectory=self.t(name).id,
                step=0,
                tool="sandbox",
                ok=True,
                observation_tokens=1,
                context_tokens=1,
            ),
        )

    def run(self, name):
        """A step of `name` is dispatched now."""
        self.t(name).phase, self.t(name).dispatched_s = "running", self.now_s

    def finish(self, name):
        self.t(name).phase = "finished"
        self.predictor.observe_finish(self.t(name))

    def left(self, name, **given):
        return self.predictor.remaining_quantiles(self.t(name), LEVELS, **given)

    def median(self, name):
        return self.predictor.remaining_quantiles(self.t(name), (0.5,))[0]

    def estimate(self, name):
        return self.predictor.remaining_tokens(self.t(name))


def world(past=USUAL):
    return World(PosteriorPredictor(past))


# -- scores --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1e9), max_size=40))
def test_scores_rise_with_lengths_and_return_to_them(quantiles):
    scores = LengthScores(sorted(quantiles))
    tokens = np.geomspace(0.5, 1e12, 200)
    found = scores.scores(tokens)
    assert np.all(np.diff(found) >= 0.0)
    assert np.abs(found).max() <= SCORE_BOUND
    inside = np.abs(found) < SCORE_BOUND
    assert scores.tokens(found)[inside] == pytest.approx(tokens[inside], rel=1e-3)


def test_scores_of_the_known_distribution_are_normal_whatever_its_shape():
    rng = np.random.default_rng(5)
    drawn = np.minimum(rng.gamma(0.7, 4_000, 20_000) + 100, 40_960)
    at = (np.arange(256) + 0.5) / 256
    found = LengthScores(np.quantile(drawn, at).tolist()).scores(drawn)
    assert found.mean() == pytest.approx(0.0, abs=0.02)
    assert found.std() == pytest.approx(1.0, abs=0.02)


# -- evidence ------------------------------------------------------------------------------------


def test_a_sibling_that_still_runs_raises_the_estimate_and_a_short_one_that_ended_lowers_it():
    nothing, running, ended = world(), world(), world()
    before = nothing.left("g/0")
    running.step("g/1", 9_000)
    ended.step("g/1", 300, ends=True)
    assert all(a > b for a, b in zip(running.left("g/0"), before, strict=True))
    assert all(a < b for a, b in zip(ended.left("g/0"), before, strict=True))


def test_an_ended_length_says_more_than_the_same_length_of_one_that_runs():
    running, ended = world(), world()
    running.step("g/1", 9_000)
    ended.step("g/1", 9_000, ends=True)
    assert running.median("g/0") > ended.median("g/0")


def test_tokens_of_running_steps_count_for_siblings():
    early, late = world(), world()
    for w, seconds in ((early, 1.0), (late, 200.0)):
        w.step("other/0", 500)
        w.run("g/1")
        w.at(w.now_s + seconds, "other/0")
    assert late.median("g/0") > early.median("g/0")


def test_tokens_of_the_running_step_are_estimated_by_the_pace_of_its_engine():
    w = world()
    w.step("other/0", 500)  # 50 tokens a second
    w.run("g/0")
    w.at(w.now_s + 40.0, "other/0")
    t = w.t("g/0")
    assert w.predictor.running_tokens(t) == pytest.approx(2_000.0)
    assert w.left("g/0") == w.left("g/0", running_tokens=2_000.0)
    assert w.left("g/0") != w.left("g/0", running_tokens=0.0)
    t.phase = "tool"
    assert w.predictor.running_tokens(t) == 0.0


def test_totals_rise_with_the_tokens_made():
    w = world()
    totals = [
        [made + rest for rest in w.left("g/0", running_tokens=made)]
        for made in (0.0, 100.0, 1_000.0, 10_000.0, 100_000.0)
    ]
    assert np.all(np.diff(np.array(totals), axis=0) >= 0.0)


def test_the_estimate_is_the_mean():
    w = world(history(lognormal(median=2_000.0, sd=0.5)))
    assert w.median("g/0") == pytest.approx(2_000.0, rel=0.02)
    assert w.estimate("g/0") == pytest.approx(2_000.0 * math.exp(0.5**2 / 2), rel=0.05)


def test_one_that_the_driver_cut_off_stays_censored():
    cut, ended = world(), world()
    cut.step("g/1", 3_000)
    cut.finish("g/1")
    ended.step("g/1", 3_000, ends=True)
    assert cut.median("g/0") > ended.median("g/0")
    never_ran = world()
    never_ran.t("g/1")
    never_ran.finish("g/1")
    assert never_ran.median("g/0") == world().median("g/0")


def test_the_level_of_a_rollout_is_learned_from_all_groups():
    long, short = world(), world()
    for i in range(200):
        long.step(f"g{i}/0", 6_000, ends=True)
        short.step(f"g{i}/0", 700, ends=True)
    assert long.median("new/0") > 1.2 * short.median("new/0")


def test_the_share_between_prompts_comes_from_history():
    rng = np.random.default_rng(3)
    effects = rng.normal(0.0, 1.0, 400)
    groups = [rng.normal(0.5**0.5 * e, 0.5**0.5, 8) for e in effects]
    assert between_share(groups) == pytest.approx(0.5, abs=0.06)
    alike = [rng.normal(0.0, 1.0, 8) for _ in range(400)]
    assert between_share(alike) < 0.06
    assert between_share([np.full(4, z) for z in rng.normal(size=400)]) > 0.9
    assert between_share([np.array([1.0])] * 9, assumed=0.3) == 0.3
    assert between_share([np.ones(3)] * 9) == 0.5


def test_siblings_say_more_where_prompts_differ_more():
    totals = lognormal(count=40)
    apart = {GroupId(f"p{i}"): [round(q)] * 6 for i, q in enumerate(totals)}
    alike = {GroupId(f"p{i}"): [round(q) for q in totals] for i in range(40)}
    estimates = []
    for past in (apart, alike):
        w = world(history(totals, past))
        w.step("g/1", 12_000, ends=True)
        estimates.append(w.median("g/0"))
    assert estimates[0] > 1.5 * estimates[1]


# -- limits --------------------------------------------------------------------------------------


moves = st.lists(
    st.tuples(
        st.integers(0, 11),
        st.one_of(st.integers(0, 5_000), st.integers(0, 10**12)),
        st.sampled_from(["go", "go", "go", "run", "end", "cancel"]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("past", [None, USUAL, history([700.0] * 9), history([0.0, 1e12])])
@given(moves=moves)
@example(moves=[(0, 23_657_029, "go")])
@settings(max_examples=25)
def test_quantiles_rise_with_the_level_and_are_never_below_one_token(past, moves):
    w, ended = world(past), set()
    for who, tokens, what in moves:
        name = f"g{who // 4}/{who % 4}"
        if name in ended:
            continue
        if what in ("end", "cancel"):
            ended.add(name)
        if what == "cancel":
            w.t(name)
            w.finish(name)
        elif what == "run":
            w.run(name)
        else:
            w.step(name, tokens, ends=what == "end")
        for other in set(w.ts) - ended:
            found = w.left(other)
            assert np.all(np.isfinite(found))
            assert found[0] >= 1.0
            assert np.all(np.diff(found) >= 0.0)
            # The mean is of these and those between: the lowest may be far below that of 5 %.
            low, high = w.predictor.remaining_quantiles(w.t(other), (0.025, 0.975))
            assert low * (1.0 - 1e-9) <= w.estimate(other) <= high * (1.0 + 1e-9)


def test_without_a_history_one_trajectory_has_a_wide_estimate():
    found = world(None).left("g/0")
    assert found[2] == pytest.approx(3_000.0, rel=0.05)
    assert found[-1] > 20 * found[0]
    sharper = world().left("g/0")
    assert sharper[-1] / sharper[0] < found[-1] / found[0]


def test_where_all_lengths_are_equal_the_estimate_is_that_length():
    w = world(history([700.0] * 64))
    w.step("g/0", 400)
    assert w.median("g/0") == pytest.approx(300.0, rel=0.15)


def test_groups_that_are_done_are_forgotten_at_last():
    w = world()
    w.step("running/0", 100)
    for i in range(600):
        w.step(f"g{i}/0", 500, ends=True)
    assert len(w.predictor._groups) == 512
    assert GroupId("running") in w.predictor._groups
    assert not w.predictor._answered


# -- calibration ---------------------------------------------------------------------------------


def survivors(seed, *, own=0.5, groups=60, samples=8):
    """Coverage at each level of `LEVELS` when 0, 25, 50 and 75 % have ended, all at one speed.

    Lengths come from the model itself, seen through a distribution that is not lognormal.
    """
    rng = np.random.default_rng(seed)
    effects = rng.normal(0.0, (1.0 - own) ** 0.5, groups)
    scores = effects[:, None] + rng.normal(0.0, own**0.5, (groups, samples))
    gammas = rng.gamma(1.5, 2_000, 99_999) + 50
    base = LengthScores(np.quantile(gammas, np.arange(0.002, 1.0, 0.004)).tolist())
    totals = np.rint(base.tokens(scores))
    past = base.tokens(rng.normal(size=4_096))
    at = (np.arange(256) + 0.5) / 256
    w = world(history(np.quantile(past, at).tolist()))
    names = {f"g{i}/{j}": totals[i, j] for i in range(groups) for j in range(samples)}
    shares = {}
    for share in (0.0, 0.25, 0.5, 0.75):
        made = float(np.quantile(totals, share)) if share else 0.0
        for name, total in names.items():
            if w.t(name).phase == "finished":
                continue
            if total <= made:
                w.step(name, int(total) - w.t(name).output_tokens, ends=True)
            elif made:
                w.step(name, int(made) - w.t(name).output_tokens)
        left = {name: total for name, total in names.items() if w.t(name).phase != "finished"}
        hits = [
            total - w.t(name).output_tokens <= np.array(w.left(name))
            for name, total in left.items()
        ]
        shares[share] = np.mean(hits, axis=0)
    return shares


def test_survivors_are_covered_at_every_time():
    found = [survivors(seed) for seed in (1, 2, 3, 4)]
    for share in (0.0, 0.25, 0.5, 0.75):
        coverage = np.mean([f[share] for f in found], axis=0)
        assert coverage == pytest.approx(np.array(LEVELS), abs=0.1), share
        assert 0.90 <= coverage[-1] <= 0.98, share


def test_the_check_of_coverage_sees_survivors_that_are_not_censored(monkeypatch):
    # Ended trajectories in full and nothing of those that run: what makes quantiles too low.
    monkeypatch.setattr(
        LengthPosterior,
        "running",
        lambda self, scores: np.zeros((len(scores), len(self.nothing()))),
    )
    found = [survivors(seed)[0.5] for seed in (1, 2, 3)]
    assert np.mean(found, axis=0)[-1] < 0.88


def test_a_posterior_of_no_evidence_is_its_prior():
    posterior = LengthPosterior(LengthPrior(level_sd=0.01, spread_sd=0.01))
    found = posterior.quantiles(posterior.nothing(), -SCORE_BOUND, (0.05, 0.5, 0.95))
    assert found == pytest.approx([-1.645, 0.0, 1.645], abs=0.02)
    half = posterior.quantiles(posterior.nothing(), 0.0, (0.5,))
    assert half == pytest.approx([0.6745], abs=0.02)


# -- use -----------------------------------------------------------------------------------------


def test_no_policy_uses_quantiles_that_are_not_calibrated():
    # Those of a trained model are right when a step ends, and too low in mid-rollout.
    sources = sorted((ROOT / "heddle_core").rglob("*.py"))
    users = [path for path in sources if re.search(r"quantiles\(t\b", path.read_text())]
    assert [path.relative_to(ROOT / "heddle_core").as_posix() for path in users] == [
        "parts/predictor.py"
    ]
