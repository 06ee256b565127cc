"""The learned predictor as the controller meets it: one question at a time, in runs, in replays."""

import json
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.policies.plugins import load_policy
from heddle.policy_inputs import load_predictor_model
from heddle_core.parts.table import learned, progressive
from heddle_predict.artefact import write_artefact
from heddle_predict.examples import answers, examples
from heddle_predict.learned import ByTask, LearnedFactory, LearnedPredictor
from heddle_predict.play import Pace, play
from heddle_trace.files import write_trace
from heddle_trace.history import history_of
from heddle_trace.synth import synth
from tests.app.journals import ONE_RUN, run_of, unlisted
from tests.core.policy_fakes import policy_context
from tests.predict.made import Asked, all_quantiles, artefact, fitted, synthetic


class Counting:
    """A model that counts its questions."""

    def __init__(self, model):
        self.vocabulary, self.levels = model.vocabulary, model.levels
        self.asked = 0
        self._model = model

    def row_quantile(self, level):
        inner = self._model.row_quantile(level)

        def quantile(row):
            self.asked += 1
            return inner(row)

        return quantile


def test_one_question_at_a_time_gives_what_the_batch_gives():
    asked = all_quantiles(fitted())
    play(synthetic().scripts, Pace(), asked, asked.on_question)
    batch = examples(synthetic().scripts, fitted().vocabulary, Pace())
    anew = [moment == "in tool" for moment, _, _ in asked.questions]
    assert sum(anew) > 100
    assert np.allclose(np.array(asked.found)[anew], answers(fitted(), batch)[anew])


def test_the_model_runs_once_for_each_step_and_survival_at_every_question():
    model = Counting(fitted())
    asked = all_quantiles(model)
    play(synthetic().scripts, Pace(), asked, asked.on_question)
    generated = {(t, step) for moment, t, step in asked.questions if moment == "in tool"}
    # All arrive at once, and samples of one prompt differ in nothing before their first step.
    arrivals = len(list(groupby((s.task, s.steps[0].prompt_tokens) for s in synthetic().scripts)))
    assert 0 < arrivals < len(synthetic().scripts)
    assert model.asked == len(model.levels) * (len(generated) + arrivals)
    assert len(generated) + arrivals < 0.6 * len(asked.found)
    last = {}
    for (moment, t, _), found in zip(asked.questions, asked.found, strict=True):
        if moment == "queued" and t in last:  # the correction holds, survival has moved
            moved = np.log(found) - np.log(last[t])
            assert np.allclose(moved, moved[0])
        last[t] = found


def test_quantiles_rise_and_a_running_trajectory_has_a_token_left():
    asked = all_quantiles(fitted())
    scripts = [replace(s, task="never met") for s in synthetic("search").scripts[:40]]
    play(scripts, Pace(slots=0.5), asked, asked.on_question)
    found = np.array(asked.found)
    assert np.isfinite(found).all()
    assert (found >= 1.0).all()
    assert (np.diff(found, axis=1) >= 0.0).all()


def test_an_estimate_is_raised_by_all_and_lowered_by_little():
    hedged, plain = (LearnedPredictor(fitted(), least_share=s) for s in (0.75, 0.0))
    found = []

    class Both(Asked):
        def on_question(self, t, index, moment):
            observed = hedged._observations.of(t)
            survival = math.exp(hedged._observations.log_survival(observed, t))
            found.append((hedged.remaining_tokens(t), plain.remaining_tokens(t), survival))

    both = Both(hedged, plain)
    play(synthetic().scripts, Pace(), both, both.on_question)
    for estimate, median, survival in found:
        assert estimate == pytest.approx(max(median, 0.75 * survival, 1.0))
    assert any(median < 0.7 * survival for _, median, survival in found)
    with pytest.raises(ValueError, match=r"least_share is 1\.5"):
        LearnedPredictor(fitted(), least_share=1.5)


def test_no_state_of_ended_trajectories_is_kept():
    predictor = LearnedPredictor(fitted())
    asked = Asked(predictor)
    play(synthetic().scripts, Pace(), asked, asked.on_question)
    assert len(predictor._observations) == 0


def test_the_rule_estimates_unknown_tasks_without_effect_on_others():
    strange = [replace(s, id=f"x/{s.id}", task="x") for s in synthetic("search").scripts[:40]]
    told = replace(policy_context(), learned=LearnedFactory(fitted()))
    mixed, rule, model = answered(told), answered(policy_context()), LearnedPredictor(fitted())
    play([*synthetic().scripts, *strange], Pace(), mixed, mixed.on_question)
    play(strange, Pace(), rule, rule.on_question)
    alone = Estimates(model)
    play(synthetic().scripts, Pace(), alone, alone.on_question)
    assert {k: v for k, v in mixed.found.items() if k[0].startswith("x/")} == rule.found
    assert {k: v for k, v in mixed.found.items() if not k[0].startswith("x/")} == alone.found


def test_history_gives_the_levels_of_a_task():
    """A task whose trajectories became ten times as short is not taken for what it was."""
    scripts = [
        replace(
            s, steps=tuple(replace(x, output_tokens=x.output_tokens // 10 + 1) for x in s.steps)
        )
        for s in synthetic("coding").scripts
    ]
    rest = {}
    for name, history in (("told", history_of(scripts)), ("not told", None)):
        watcher = answered(
            replace(policy_context(), learned=LearnedFactory(fitted()), history=history)
        )
        play(scripts, Pace(), watcher, watcher.on_question)
        rest[name] = [tokens for (_, step, _), tokens in watcher.found.items() if step == 0]
    mean = history_of(scripts).mean_output_tokens()
    assert 0.4 * mean < np.mean(rest["told"]) < 2.5 * mean
    assert np.mean(rest["not told"]) > 5.0 * mean


class Estimates(Asked):
    """Keeps estimates by question."""

    def __init__(self, predictor):
        super().__init__(predictor)
        self.found = {}

    def on_question(self, t, index, moment):
        self.found[t.id, t.step, moment] = self.predictors[0].remaining_tokens(t)


def answered(told) -> Estimates:
    return Estimates(learned(told))


def test_the_preset_uses_the_model_of_its_context():
    told = replace(policy_context(), learned=LearnedFactory(fitted()))
    assert isinstance(load_policy("heddle", told).predictor, ByTask)
    assert isinstance(load_policy("heddle+fixed+keep_engines", told).predictor, ByTask)
    for name in ("heddle", "heddle+learned"):  # without one it falls back
        assert type(load_policy(name, policy_context()).predictor) is type(
            progressive(policy_context())
        )
    assert type(load_policy("heddle+progressive", told).predictor) is type(progressive(told))


def test_a_quantile_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"quantile 0.6 is none of the model's: 0.05, 0.1"):
        LearnedPredictor(fitted(), quantile=0.6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "now.jsonl", synth("coding", 48, seed=77, samples_per_group=4))
    write_artefact(tmp_path / "mine.heddle", artefact())
    return tmp_path


def heddle(*args: object):
    return CliRunner().invoke(main, [str(a) for a in args])


def test_a_run_with_a_learned_predictor_names_its_model_and_replays(folder: Path):
    options = ("--gpus", 2, "--max-running", 8, "--set", "predictor_model=mine.heddle", "--json")
    done = heddle(*ONE_RUN, "now.jsonl", "--policies", "heddle+learned:0.5", *options)
    run = Path(run_of(done)["run"])
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["predictor_model"]["name"] == "mine.heddle"
    assert manifest["predictor_model"]["sha256"] == load_predictor_model("mine.heddle").sha256
    assert manifest["oracle"] is False
    assert heddle("replay", run).exit_code == 0
    # Another model under the same name, written by this process or not, is not what it was told.
    other = artefact()
    header = other.header
    write_artefact(folder / "mine.heddle", replace(other, header=_named(header)))
    refused = heddle("replay", run)
    assert refused.exit_code == 2
    assert "its predictor needs the model that it read, mine.heddle" in refused.output
    assert "the file that is there now has sha256" in refused.output
    # Nor is none: the message says whose model is gone, and where it was.
    (folder / "mine.heddle").unlink()
    refused = heddle("replay", run)
    assert refused.exit_code == 2
    assert refused.output.startswith(f"Error: {run}: its predictor needs the model")
    assert "seen from the folder in which the run was started): No such file" in refused.output


def _named(header):
    import msgspec

    return msgspec.structs.replace(header, command="another command")


def made_by(policy: str) -> Path:
    done = heddle(*ONE_RUN, "now.jsonl", "--policies", policy, "--gpus", 1, "--json")
    return Path(run_of(done)["run"])


@pytest.mark.parametrize("policy", ["heddle", "verl+lpt+learned", "heddle+learned:0.9"])
def test_the_shipped_model_is_used_when_none_is_named(folder: Path, policy: str):
    run = made_by(policy)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["predictor_model"]["name"] == "shipped"
    assert json.loads((run / "context.json").read_text())["learned"] is None
    assert heddle("replay", run).exit_code == 0


def test_a_model_that_was_fitted_on_the_replayed_trace_is_refused(folder: Path):
    """As a history of the replayed trace is: its lengths would be known."""
    assert heddle("predict", "fit", "now.jsonl", "-o", "own.heddle").exit_code == 0
    options = ("--gpus", 1, "--set", "predictor_model=own.heddle")
    done = heddle(*ONE_RUN, "now.jsonl", "--policies", "heddle", *options)
    assert done.exit_code == 2
    assert "own.heddle was fitted on the replayed trace itself" in done.output
    assert not list(folder.glob("runs/*"))
    assert heddle(*ONE_RUN, "now.jsonl", "--policies", "verl", *options).exit_code == 0


def test_a_comparison_refuses_such_a_model_before_its_first_run_and_a_plan_does_too(folder: Path):
    assert heddle("predict", "fit", "now.jsonl", "-o", "own.heddle").exit_code == 0
    options = ("--gpus", 1, "--set", "predictor_model=own.heddle")
    for command in (("compare", "now.jsonl", "--policies", "verl,heddle"), ("plan", "now.jsonl")):
        done = heddle(*command, *options)
        assert done.exit_code == 2
        assert "own.heddle was fitted on the replayed trace itself" in done.output
    assert not list(folder.glob("runs/*"))


def test_a_policy_without_a_model_names_none(folder: Path):
    for policy in ("verl", "heddle+progressive", "heddle-paper"):
        manifest = json.loads((made_by(policy) / "manifest.json").read_text())
        assert manifest["predictor_model"] is None


def test_a_manifest_with_another_thing_for_its_model_is_one_message(folder: Path):
    run = made_by("heddle")
    path = run / "manifest.json"
    path.chmod(0o644)
    path.write_text(json.dumps({**json.loads(path.read_text()), "predictor_model": "mine"}))
    refused = heddle("replay", run)
    assert refused.exit_code == 2
    assert "damaged" in refused.output
    assert "Traceback" not in refused.output


def test_a_setting_that_was_damaged_where_a_model_would_be_replays_all_the_same(folder: Path):
    run = unlisted(made_by("heddle"))
    path = run / "context.json"
    path.chmod(0o644)
    path.write_text(json.dumps({**json.loads(path.read_text()), "learned": {"levels": [0.5]}}))
    assert heddle("replay", run).output.endswith("the same\n")


@pytest.mark.parametrize(
    ("policy", "model", "said"),
    [
        ("heddle+learned:most", "mine.heddle", "as in learned:0.5"),
        ("heddle+learned:0.6", "mine.heddle", "quantile 0.6 is none of the model's"),
        ("heddle+learned", "now.jsonl", "not a model of Heddle"),
        ("heddle+learned", "gone.heddle", "gone.heddle"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_message(folder: Path, policy, model, said):
    done = heddle(
        *ONE_RUN,
        "now.jsonl",
        "--policies",
        policy,
        "--gpus",
        1,
        "--set",
        f"predictor_model={model}",
    )
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output
    assert not list(folder.glob("runs/*"))


def test_policies_list_learned_predictors(folder: Path):
    assert "learned:QUANTILE" in heddle("policies", "list").output
