"""The learned predictor as the controller meets it: one question at a time, in runs, in replays."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.knowledge import taught
from heddle_core.history import History
from heddle_core.ids import GroupId
from heddle_core.predict.learned import LearnedPredictor, told
from heddle_predict.artefact import write_artefact
from heddle_predict.examples import answers, examples
from heddle_predict.play import Pace, play
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.core.policy_fakes import trajectory
from tests.predict.made import artefact, fitted, synthetic

HISTORY = History(
    output_quantiles=(100.0, 200.0, 600.0),
    appended_per_output=0.5,
    tool_s_per_output=0.01,
    step_output_tokens=50.0,
)


class Asked:
    """Asks at every moment and keeps the answers."""

    def __init__(self, predictor):
        self.predictor = predictor
        self.found = []
        self.observe_step = predictor.observe_step
        self.observe_tool = predictor.observe_tool
        self.observe_finish = predictor.observe_finish

    def asked(self, t, index, moment):
        self.found.append(self.predictor.remaining_quantiles(t))


def test_one_question_at_a_time_gives_what_the_batch_gives():
    asked = Asked(LearnedPredictor(fitted()))
    play(synthetic().scripts, Pace(), asked)
    batch = examples(synthetic().scripts, fitted().vocabulary, Pace())
    assert np.allclose(asked.found, answers(fitted(), batch))


def test_quantiles_rise_and_someone_who_runs_has_a_token_left():
    asked = Asked(LearnedPredictor(fitted()))
    scripts = [replace(s, task="never met") for s in synthetic("search").scripts[:40]]
    play(scripts, Pace(slots=0.5), asked)
    found = np.array(asked.found)
    assert np.isfinite(found).all()
    assert (found >= 1.0).all()
    assert (np.diff(found, axis=1) >= 0.0).all()


def test_an_estimate_is_raised_by_all_and_lowered_by_little():
    hedged, plain = (LearnedPredictor(fitted(), least_share=s) for s in (0.75, 0.0))
    found = []

    class Both(Asked):
        def asked(self, t, index, moment):
            survival = math.exp(hedged._survival.log_tokens(t))
            found.append((hedged.remaining_tokens(t), plain.remaining_tokens(t), survival))

    watcher = Both(hedged)
    for name in ("observe_step", "observe_tool", "observe_finish"):
        tell = [getattr(p, name) for p in (hedged, plain)]
        setattr(watcher, name, lambda *told, tell=tell: [t(*told) for t in tell])
    play(synthetic().scripts, Pace(), watcher)
    for estimate, median, survival in found:
        assert estimate == pytest.approx(max(median, 0.75 * survival, 1.0))
    assert any(median < 0.7 * survival for _, median, survival in found)
    with pytest.raises(ValueError, match=r"least_share is 1\.5"):
        LearnedPredictor(fitted(), least_share=1.5)


def test_nothing_is_kept_of_who_has_ended():
    predictor = LearnedPredictor(fitted())
    play(synthetic().scripts, Pace(), Asked(predictor))
    assert predictor._features._own == {}
    assert predictor._states == {}


def test_a_strange_task_takes_its_scale_from_history():
    t = trajectory("x/0", group=GroupId("x"), task="never met")
    plain = LearnedPredictor(fitted()).remaining_tokens(t)
    small = LearnedPredictor(fitted(), history=HISTORY).remaining_tokens(t)
    assert small < 0.5 * plain
    known = trajectory("x/1", group=GroupId("x"), task="coding")
    same = {LearnedPredictor(fitted(), history=h).remaining_tokens(known) for h in (None, HISTORY)}
    assert len(same) == 1
    assert told(fitted().vocabulary, None) is fitted().vocabulary


def test_a_quantile_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"quantile 0.6 is none of the model's: 0.05, 0.1"):
        LearnedPredictor(fitted(), quantile=0.6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "now.jsonl", synth("coding", 48, seed=77, samples_per_group=4))
    write_artefact(tmp_path / "mine.heddle", artefact())
    taught.cache_clear()
    return tmp_path


def heddle(*args: object):
    return CliRunner().invoke(main, [str(a) for a in args])


def test_a_run_with_a_learned_predictor_names_its_model_and_replays(folder: Path):
    options = ("--gpus", 2, "--max-running", 8, "--predictor-model", "mine.heddle", "--json")
    done = heddle("simulate", "now.jsonl", "--policy", "heddle+learned:0.5", *options)
    assert done.exit_code == 0, done.output
    run = Path(json.loads(done.stdout)["run"])
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["predictor_model"]["name"] == "mine.heddle"
    assert manifest["predictor_model"]["sha256"] == taught("mine.heddle").sha256
    assert manifest["oracle"] is False
    assert heddle("replay", run).exit_code == 0
    # Another model under the same name is not what the run was told.
    other = artefact()
    header = other.header
    write_artefact(folder / "mine.heddle", replace(other, header=_named(header)))
    taught.cache_clear()
    refused = heddle("replay", run)
    assert refused.exit_code == 2
    assert "its predictor read the model mine.heddle" in refused.output
    assert "Traceback" not in refused.output


def _named(header):
    import msgspec

    return msgspec.structs.replace(header, command="another command")


def test_the_shipped_model_is_used_when_none_is_named(folder: Path):
    done = heddle("simulate", "now.jsonl", "--policy", "verl+lpt+learned", "--gpus", 1, "--json")
    assert done.exit_code == 0, done.output
    run = Path(json.loads(done.stdout)["run"])
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["predictor_model"]["name"] == "shipped"


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
        "simulate", "now.jsonl", "--policy", policy, "--gpus", 1, "--predictor-model", model
    )
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output
    assert not list(folder.glob("runs/*"))


def test_plan_and_policies_know_learned_predictors(folder: Path):
    planned = heddle("plan", "now.jsonl", "--gpus", 4, "--predictor", "learned")
    assert planned.exit_code == 0, planned.output
    assert "learned:QUANTILE" in heddle("policies").output
