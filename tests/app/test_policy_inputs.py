"""What policies know: history and priors, oracles by name, a prediction service; and again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from heddle.policies.plugins import load_policy
from heddle.policy_inputs import sees_the_future
from heddle.runs import load_run
from heddle_core.ids import EngineShape
from heddle_core.policy import Policy, PolicyContext
from heddle_sim.profile_files import load_profile
from heddle_trace.files import write_trace
from heddle_trace.oracle import Oracle
from heddle_trace.synth import synth
from tests.app.conftest import ROOT
from tests.app.journals import ONE_RUN, Heddle, run_of

CLUSTER = ("--gpus", 4, "--max-running", 8)


@pytest.fixture
def coding(tmp_path: Path) -> Path:
    path = tmp_path / "now.jsonl"
    write_trace(path, synth("coding", 32, seed=5, samples_per_group=4))
    return path


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    path = tmp_path / "earlier.jsonl"
    write_trace(path, synth("coding", 48, seed=6, samples_per_group=4))
    return path


def simulated(heddle: Heddle, *args: object) -> dict[str, Any]:
    done = heddle(*ONE_RUN, *args, *CLUSTER, "--json")
    row: dict[str, Any] = run_of(done)
    return row


def manifest(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(row["run"]) / "manifest.json").read_text())
    return found


def same_again(heddle: Heddle, row: dict[str, Any]) -> None:
    again = heddle("replay", row["run"], "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["same"]


# -- history ------------------------------------------------------------------------------------


def test_a_known_workload_gets_its_prior_and_the_run_names_it(heddle: Heddle, coding: Path):
    row = simulated(heddle, coding, "--policies", "heddle")
    run = load_run(row["run"])
    assert manifest(row)["history"]["name"] == "prior:coding"
    assert len(manifest(row)["history"]["sha256"]) == 64
    assert run.config.history == "prior:coding"
    assert run.context is not None
    assert run.context.history is not None
    assert len(run.context.history.output_quantiles) == 256


def test_a_trace_of_earlier_rollouts_is_used_and_named(heddle: Heddle, coding: Path, earlier: Path):
    row = simulated(heddle, coding, "--policies", "heddle", "--history", earlier)
    known = manifest(row)["history"]
    assert (known["name"], len(known["sha256"])) == (str(earlier), 64)
    assert load_run(row["run"]).config.history == str(earlier)
    compared = heddle(
        "compare", coding, "--policies", "heddle", "--history", earlier, *CLUSTER, "--json"
    )
    assert json.loads(compared.stdout)["history"] == known
    shown = heddle("compare", coding, "--policies", "heddle", "--history", earlier, *CLUSTER)
    assert f"history  {earlier}" in shown.stdout.splitlines()


def test_history_gives_the_part_of_that_name_its_prompts(
    heddle: Heddle, coding: Path, earlier: Path
):
    policy = ("--policies", "heddle+history")
    with_prior = simulated(heddle, coding, *policy)
    with_trace = simulated(heddle, coding, *policy, "--history", earlier)
    context = load_run(with_trace["run"]).context
    assert context is not None
    assert context.history is not None
    assert len(context.history.group_totals) == 12
    assert with_prior["makespan_s"] != with_trace["makespan_s"]


@pytest.mark.parametrize("source", ["none", "prior"])
def test_no_history_is_no_history(heddle: Heddle, coding: Path, source: str):
    # A workload that nothing is shipped for, or none wanted.
    if source == "prior":
        coding.write_text(coding.read_text().replace('"workload":"coding"', '"workload":"poetry"'))
    row = simulated(heddle, coding, "--policies", "heddle", "--history", source)
    assert manifest(row)["history"] is None
    run = load_run(row["run"])
    assert run.config.history == "none"
    assert run.context is not None
    assert run.context.history is None
    same_again(heddle, row)


def test_a_mixed_trace_gets_no_prior(heddle: Heddle, coding: Path):
    coding.write_text(coding.read_text().replace('"workload":"coding"', '"workload":"math"', 1))
    assert manifest(simulated(heddle, coding))["history"] is None


def test_a_prior_is_named_in_a_file_too(heddle: Heddle, coding: Path):
    Path("a.toml").write_text(f'trace = "{coding}"\nhistory = "prior:search"\n')
    assert manifest(simulated(heddle, "-c", "a.toml"))["history"]["name"] == "prior:search"


def test_baselines_decide_alike_with_any_history(heddle: Heddle, coding: Path):
    rows = [simulated(heddle, coding, "--history", h) for h in ("none", "prior")]
    assert rows[0]["makespan_s"] == rows[1]["makespan_s"]


@pytest.mark.parametrize("verb", ["compare", "plan"])
def test_the_replayed_trace_is_refused_as_history(
    refused: Callable[..., str], coding: Path, tmp_path: Path, verb: str
):
    copied = tmp_path / "renamed.jsonl"
    shutil.copy(coding, copied)
    said = refused(verb, coding, "--history", copied)
    assert "is the replayed trace itself" in said
    assert "know the future" in said


@pytest.mark.parametrize(
    ("history", "says"),
    [
        ("prior:poetry", "no prior history is shipped for workload 'poetry'"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        (" ", "history must be a path, prior"),
    ],
)
def test_a_history_that_is_not_there_is_explained(
    refused: Callable[..., str], coding: Path, history: str, says: str
):
    assert says in refused(*ONE_RUN, coding, "--policies", "heddle", "--history", history)


# -- oracles ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "heddle+oracle",
        "verl+lpt+oracle",
        "heddle+noisy-oracle:0.5",
        "heddle-paper+paper_quality",
        "verl+paper_quality",
    ],
)
def test_an_oracle_is_chosen_by_name_and_marked_in_the_manifest(
    heddle: Heddle, coding: Path, policy: str
):
    row = simulated(heddle, coding, "--policies", policy, "--seed", 3)
    assert row["policy"] == policy
    assert manifest(row)["oracle"] is True
    same_again(heddle, row)


def test_no_preset_is_an_oracle(heddle: Heddle, coding: Path):
    for policy in ("heddle", "heddle-paper", "verl+lpt+progressive"):
        assert manifest(simulated(heddle, coding, "--policies", policy))["oracle"] is False


@pytest.mark.parametrize("part", [field.name for field in fields(Policy)])
def test_a_part_of_the_trace_package_makes_a_policy_an_oracle_whichever_it_is(part: str):
    shape = EngineShape("h100", 1)
    context = PolicyContext(
        pools={"h100": 1},
        shape=shape,
        shape_choices=(shape,),
        max_running=1,
        cost=load_profile("qwen3-14b", "h100").cost_estimate((1,)),
    )
    policy = load_policy("verl", context)
    assert not sees_the_future(policy)
    assert sees_the_future(replace(policy, **{part: Oracle([])}))


def test_noise_of_nothing_is_the_oracle_itself(heddle: Heddle, coding: Path):
    exact = simulated(heddle, coding, "--policies", "heddle+oracle")
    noisy = simulated(heddle, coding, "--policies", "heddle+noisy-oracle:0")
    assert exact["makespan_s"] == noisy["makespan_s"]


@pytest.mark.parametrize("part", ["noisy-oracle", "noisy-oracle:x", "noisy-oracle:-1"])
def test_noise_needs_its_size(refused: Callable[..., str], coding: Path, part: str):
    said = refused("compare", coding, "--policies", f"verl,heddle+{part}")
    assert "as in noisy-oracle:0.5" in said


def test_a_mistyped_oracle_is_recognised(refused: Callable[..., str], coding: Path):
    assert "Did you mean 'oracle'?" in refused(*ONE_RUN, coding, "--policies", "heddle+orcale")


def test_a_replay_with_an_oracle_needs_the_trace_that_it_knew(
    heddle: Heddle, refused: Callable[..., str], coding: Path
):
    row = simulated(heddle, coding, "--policies", "heddle+oracle")
    text = coding.read_text()
    coding.write_text(text + "\n" + text.splitlines()[0].replace('/00"', '/99"') + "\n")
    said = refused("replay", row["run"])
    assert "its oracle needs the trace that it knew" in said
    assert "the file that is there now has sha256" in said
    coding.unlink()
    assert "no such file" in refused("replay", row["run"])


def test_a_replay_without_an_oracle_needs_nothing_but_the_run(
    heddle: Heddle, coding: Path, earlier: Path
):
    row = simulated(heddle, coding, "--policies", "heddle", "--history", earlier)
    coding.unlink()
    earlier.unlink()
    same_again(heddle, row)


def test_oracles_are_listed(heddle: Heddle):
    found = json.loads(heddle("policies", "list", "--json").stdout)
    assert {"oracle", "noisy-oracle:SIGMA", "paper_quality"} <= found["parts"]["predictor"].keys()
    assert "reads the scripts" in found["parts"]["predictor"]["paper_quality"]
    assert "heddle-paper" in found["presets"]


def test_compare_explains_how_parts_are_put_in(heddle: Heddle):
    said = heddle("compare", "--help").stdout
    assert "PRESET+PART" in said
    assert "noisy-oracle:SIGMA" in said
    assert "paper_quality know the trace" in said


# -- a prediction service -----------------------------------------------------------------------


def predictions(row: dict[str, Any]) -> tuple[int, int]:
    summary = load_run(row["run"]).summary
    return summary["predictions"], summary["predictions_late"]


def at_once(row: dict[str, Any]) -> int:
    """Steps after the first that were dispatched within a tenth of a second of their tool's end."""
    steps = load_run(row["run"]).steps.select(["step", "queueing_s"]).to_pylist()
    return sum(s["step"] > 0 and s["queueing_s"] < 0.1 for s in steps)


def test_math_tools_are_faster_than_predictions(heddle: Heddle, tmp_path: Path):
    trace = tmp_path / "math.jsonl"
    write_trace(trace, synth("math", 48, seed=7))
    policy = ("--policies", "heddle-paper", "--set")
    slow, fast = (
        simulated(heddle, trace, *policy, f"cluster.prediction_s={s}") for s in ("0.27", "0.001")
    )
    made, late = predictions(slow)
    # Tools of 0.05 s against predictions of 0.27 s, Table 1 of the paper: hardly any is in time.
    assert made > 48
    assert late / made > 0.95
    assert predictions(fast)[1] / predictions(fast)[0] < 0.05
    for row in (slow, fast):
        same_again(heddle, row)


def test_only_a_service_that_is_not_awaited_loses_predictions(heddle: Heddle, tmp_path: Path):
    trace = tmp_path / "math.jsonl"
    write_trace(trace, synth("math", 48, seed=7))
    awaited, lost = (
        simulated(heddle, trace, "--policies", policy, "--set", "cluster.prediction_s=0.27")
        for policy in ("heddle-paper", "heddle-paper+served")
    )
    made, late = predictions(awaited)
    assert (made, late) == predictions(lost)
    # Tools of 0.05 s leave most of 0.27 s to wait for.
    assert at_once(awaited) <= made - late < at_once(lost)
    same_again(heddle, awaited)
    same_again(heddle, lost)


def test_coding_tools_hide_some_predictions_and_not_others(heddle: Heddle, coding: Path):
    made, late = predictions(simulated(heddle, coding, "--policies", "heddle-paper"))
    assert 0.2 < late / made < 0.8


def test_predictors_that_answer_at_once_use_no_service(heddle: Heddle, coding: Path):
    row = simulated(heddle, coding, "--policies", "heddle", "--set", "cluster.prediction_s=5")
    assert predictions(row) == (0, 0)


# -- TP degrees to plan with --------------------------------------------------------------------


def longer(path: Path, prompt_tokens: int) -> Path:
    lines = path.read_text().splitlines()
    first = json.loads(lines[0]) | {"prompt_tokens": prompt_tokens}
    path.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    return path


def test_planners_choose_among_degrees_that_hold_the_largest_context(heddle: Heddle, coding: Path):
    args = (longer(coding, 400_000), "--policies", "heddle", "--tp", 2)
    run = load_run(simulated(heddle, *args)["run"])
    assert run.context is not None
    assert [shape.tp for shape in run.context.shape_choices] == [2, 4]
    assert run.summary["cancelled"] == 0


def test_named_degrees_must_hold_it(refused: Callable[..., str], coding: Path):
    args = (longer(coding, 400_000), "--gpus", 4, "--tp", 2, "--set", "cluster.tp_choices=[1,2]")
    said = refused(*ONE_RUN, *args)
    assert "at TP 1 holds" in said
    assert "a tp_choices that begins at 2" in said


def test_the_shipped_traces_are_no_history_of_each_other_by_mistake(heddle: Heddle):
    # The seed of the priors is none of the shipped traces': a prior never repeats a trace.
    texts = (ROOT / "traces" / "README.md").read_text()
    for path in (ROOT / "heddle_trace" / "priors").glob("*.json"):
        seed = json.loads(path.read_text())["seed"]
        assert f"--seed {seed}" not in texts
