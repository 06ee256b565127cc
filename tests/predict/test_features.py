"""Features: made from what was observed by then, and from nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_core.estimate.history import Levels
from heddle_predict import features
from heddle_predict.corpus import vocabulary_of
from heddle_predict.examples import examples, training_examples
from heddle_predict.model import OWN, ROLLOUT, SIBLINGS, Vocabulary
from heddle_predict.play import Pace
from tests.predict.made import script, synthetic, with_future

LEVELS = Levels(total_tokens=1000, step_tokens=200, payload_tokens=50, prompt_tokens=100)
VOCABULARY = Vocabulary(tasks={"coding": LEVELS}, anywhere=LEVELS, tools=("sandbox", "search"))
AT_ONCE = Pace(tokens_per_s=1.0)

step = st.tuples(st.integers(1, 400), st.integers(0, 900), st.booleans())
lives = st.lists(step, min_size=1, max_size=6)


def rows_by_question(scripts):
    asked = examples(scripts, VOCABULARY, AT_ONCE)
    keys = zip(asked.script, asked.step, asked.queued, strict=True)
    return {key: (row, s) for key, row, s in zip(keys, asked.rows, asked.survival, strict=True)}


@settings(max_examples=60)
@given(st.lists(lives, min_size=3, max_size=6), lives, st.data())
def test_another_future_of_a_trajectory_changes_no_earlier_question(all_lives, new, data):
    """With others beside it: its future steps change no row before they happen."""
    scripts = [script(f"g{i % 2}/{i}", life) for i, life in enumerate(all_lives)]
    who = data.draw(st.integers(0, len(scripts) - 1))
    kept = data.draw(st.integers(0, len(scripts[who].steps) - 1))
    changed = list(scripts)
    future = script("g0/x", [*all_lives[who][: kept + 1], *new]).steps[kept + 1 :]
    changed[who] = with_future(scripts[who], kept, future)
    before, after = rows_by_question(scripts), rows_by_question(changed)
    # Seconds at which step `kept` ends: until then the two worlds are one.
    steps = scripts[who].steps
    parts = sum(s.output_tokens + s.tool_s for s in steps[:kept]) + steps[kept].output_tokens
    early = [key for key in before if key[0] == who and (key[1], not key[2]) <= (kept, False)]
    for other in range(len(scripts)):
        now = 0.0
        for number, s in enumerate(scripts[other].steps):
            if now < parts and other != who:
                early.append((other, number, True))
            now += s.output_tokens + s.tool_s
    assert len(early) >= len(scripts)
    for key in early:
        assert np.array_equal(before[key][0], after[key][0]), key
        assert before[key][1] == after[key][1]


def test_the_remaining_tokens_themselves_are_no_feature():
    asked = examples(synthetic().scripts, vocabulary_of([synthetic()]), Pace())
    for column in asked.rows.T:
        assert abs(np.corrcoef(column + 1e-9 * asked.step, asked.remaining)[0, 1]) < 0.95


def test_a_row_has_a_number_for_each_name():
    names = VOCABULARY.names()
    assert len(set(names)) == len(names) == len(OWN) + len(SIBLINGS) + len(ROLLOUT) + 4 + 1
    asked = examples([script("a/0", [(10, 5, True), (20, 0, True)])], VOCABULARY, AT_ONCE)
    assert asked.rows.shape == (3, len(names))
    assert np.isfinite(asked.rows).all()


def test_rows_contain_the_observations():
    life = [(200, 50, True), (400, 10, False), (100, 0, True)]
    asked = examples([script("a/0", life)], VOCABULARY, AT_ONCE)
    column = {name: asked.rows[:, i] for i, name in enumerate(VOCABULARY.names())}
    assert column["steps"].tolist() == [0, 1, 1, 2, 2]
    assert column["in_tool"].tolist() == [0, 1, 0, 1, 0]
    assert column["calls"].tolist() == [0, 0, 1, 1, 2]
    assert column["last_failed"].tolist() == [-1, -1, 0, 0, 1]
    assert column["failed_share"].tolist() == [-1, -1, 0, 0, 0.5]
    assert column["calls_of:sandbox"].tolist() == [0, 0, 1, 1, 2]
    assert column["calls_of:search"].tolist() == [0] * 5
    assert column["task:coding"].tolist() == [1] * 5
    assert asked.remaining.tolist() == [700, 500, 500, 100, 100]


@pytest.mark.parametrize("kept", [1, 1_000])
def test_each_tool_of_parallel_calls_counts(kept: int, monkeypatch: pytest.MonkeyPatch):
    # Without effect in the compiled build.
    monkeypatch.setattr(features, "_MOST_CALLS", kept)
    monkeypatch.setattr(features, "_MOST_COUNTS", kept)
    life = script("a/0", [(200, 50, True)] * 6)
    names = ("search", "sandbox+sandbox", "x+y", "search+sandbox", "z")
    steps = [replace(s, tool=name) for s, name in zip(life.steps, names, strict=False)]
    other = replace(life, id="b/0", group="b")
    asked = examples([replace(life, steps=(*steps, life.steps[-1])), other], VOCABULARY, AT_ONCE)
    own = asked.rows[(asked.script == 0) & ~asked.queued]
    column = {name: own[:, i].tolist() for i, name in enumerate(VOCABULARY.names())}
    assert column["tools_seen"] == [0, 1, 2, 4, 4]
    assert column["calls_of:sandbox"] == [0, 0, 2, 2, 3]
    assert column["calls_of:search"] == [0, 1, 1, 1, 2]
    assert column["last:search"] == [0, 1, 0, 0, 1]
    assert column["last:sandbox"] == [0, 0, 1, 0, 1]
    at = VOCABULARY.names().index("calls_of:sandbox")
    assert asked.rows[(asked.script == 1) & ~asked.queued, at].tolist() == [0, 1, 2, 3, 4]


def test_siblings_count_when_they_have_ended_and_oneself_never():
    scripts = [script("a/0", [(100, 5, True)] * 6), script("a/1", [(60, 0, True)] * 2)]
    asked = examples(scripts, VOCABULARY, AT_ONCE)
    first = asked.script == 0
    column = {name: asked.rows[:, i] for i, name in enumerate(VOCABULARY.names())}
    assert column["ended"][first].tolist() == [0, 0, 0] + [1] * 8
    assert set(column["running"][first].tolist()) == {0, 1}
    alone = examples([scripts[0]], VOCABULARY, AT_ONCE)
    own = {name: alone.rows[:, i] for i, name in enumerate(VOCABULARY.names())}
    for name in ("ended", "running", "group_mean_output", "group_mean_payload"):
        assert not own[name].any(), name
    assert (own["group_failed_share"] == -1).all()


def test_sizes_are_relative_to_the_levels_so_that_scale_does_not_matter():
    """A stranger's rows hardly change when everything is four times as large."""

    def rows(factor):
        lives = [[(factor * n, factor * 40, True) for n in (200, 300, 250)] for _ in range(12)]
        scripts = [script(f"a/{i}", life, task="new") for i, life in enumerate(lives)]
        levels = replace(
            LEVELS,
            total_tokens=750.0 * factor,
            step_tokens=250.0 * factor,
            payload_tokens=40.0 * factor,
        )
        return examples(scripts, replace(VOCABULARY, anywhere=levels), Pace()).rows

    names = VOCABULARY.names()
    same = [i for i, name in enumerate(names) if name not in ("made", "context", "made_in_step")]
    assert np.allclose(rows(4)[:, same], rows(1)[:, same], atol=0.1)


def test_a_rollout_moves_the_levels_of_a_model():
    """Lengths drift as a policy is trained: after many steps a longer step is the usual one."""
    scripts = [script(f"g{i}/0", [(800, 5, True)] * 20) for i in range(100)]
    asked = examples(scripts, VOCABULARY, Pace(slots=0.1))
    last = {name: asked.rows[-1, i] for i, name in enumerate(VOCABULARY.names())}
    begun = np.flatnonzero(~asked.queued)[0]
    first = {name: asked.rows[begun, i] for i, name in enumerate(VOCABULARY.names())}
    assert first["first_output"] == pytest.approx(np.log(4), abs=0.05)
    assert 0.0 < last["last_output"] < 0.5 * np.log(4)


def test_training_plays_differ_and_are_repeatable():
    source = synthetic()
    vocabulary = vocabulary_of([source])
    again = [training_examples([source], lambda _: vocabulary, s, enough_rows=0) for s in (1, 1, 2)]
    assert np.array_equal(again[0].rows, again[1].rows)
    assert not np.array_equal(again[0].rows, again[2].rows)
    # One trajectory keeps its group and its script through every play.
    of = dict(zip(again[0].script, again[0].group, strict=True))
    assert len(of) == len(source.scripts)
    assert all(of[s] == g for s, g in zip(again[0].script, again[0].group, strict=True))
    names = list(dict.fromkeys(s.group for s in source.scripts))
    assert all(names[g] == source.scripts[s].group for s, g in of.items())


def test_the_features_of_a_rollout_are_those_that_models_were_fitted_on():
    """The shipped model has learned from these numbers: a change of any needs a new fit.

    `features.json` has the mean of each, and its mean over rows weighted by their position.
    """
    asked = examples(synthetic().scripts, vocabulary_of([synthetic()]), Pace())
    names = vocabulary_of([synthetic()]).names()
    position = np.linspace(-1.0, 1.0, len(asked.rows))
    means = zip(asked.rows.mean(0), (asked.rows * position[:, None]).mean(0), strict=True)
    found = {name: [float(x) for x in pair] for name, pair in zip(names, means, strict=True)}
    recorded = json.loads(Path(__file__).with_name("features.json").read_text())
    assert list(found) == list(recorded)
    for name, pair in found.items():
        assert pair == pytest.approx(recorded[name], rel=1e-9, abs=1e-12), name
