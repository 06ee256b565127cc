import json
from pathlib import Path

import pytest

from experiments.harness.experiment import Outcome, judged_all
from experiments.harness.jobs import FULL, REDUCED
from experiments.harness.report import results_page
from experiments.harness.values import Value, estimate, exactly
from experiments.harness.verdicts import Claim, Expected, judge, read_expected


def claim(**fields) -> Claim:
    return Claim(id="gain", what="gain", source="Figure 12", **fields)


RANGE = {"low": 1.4, "high": 2.3, "direction": "above"}


@pytest.mark.parametrize(
    ("fields", "mean", "verdict"),
    [
        (RANGE, 1.4, "agrees"),
        (RANGE, 1.37, "agrees"),  # the range is widened by 10 % of its distance from neutral
        (RANGE, 1.35, "direction only"),
        (RANGE, 2.42, "agrees"),
        (RANGE, 2.6, "direction only"),
        ({"low": 1.1, "high": 1.26, "direction": "above"}, 1.01, "direction only"),
        ({"value": 0.25, "tolerance": 0.2}, 0.21, "agrees"),
        (RANGE, 0.99, "disagrees"),
        (RANGE, 1.0, "disagrees"),
        ({"value": 0.54, "direction": "below"}, 0.9, "direction only"),
        ({"value": 0.54, "direction": "below"}, 0.5, "agrees"),
        ({"value": 0.54}, 0.9, "disagrees"),
        ({"direction": "below", "neutral": 0.038}, 0.02, "agrees"),
        ({"direction": "above", "neutral": 4.0}, 3.9, "disagrees"),
        ({"value": 1.0, "tolerance": 1e-9}, 1.0 + 1e-6, "disagrees"),
    ],
)
def test_verdicts(fields, mean: float, verdict: str):
    assert judge(claim(**fields), exactly(mean)).verdict == verdict


def test_a_confidence_interval_that_meets_the_range_agrees_and_a_range_of_cells_does_not():
    wide = Value(mean=1.3, low=1.1, high=1.5, n=3, spread="ci95")
    wider = Value(mean=1.2, low=0.8, high=1.6, n=2, spread="ci95")
    assert judge(claim(**RANGE), wider).verdict == "direction only"
    cells = Value(mean=1.2, low=0.9, high=1.5, n=9, spread="range")
    assert judge(claim(**RANGE), wide).verdict == "agrees"
    assert judge(claim(**RANGE), cells).verdict == "direction only"


def test_a_spread_over_neutral_is_remarked():
    assert judge(claim(direction="above"), estimate([0.8, 1.4])).remark == "within noise"
    cells = Value(mean=1.1, low=0.9, high=1.3, n=3, spread="range")
    assert judge(claim(direction="above"), cells).remark == "not in every cell"
    assert judge(claim(direction="above"), estimate([1.2, 1.21])).remark == ""


def test_ratio_is_over_the_middle_of_the_claim():
    assert judge(claim(low=1.0, high=3.0), exactly(1.0)).ratio == 0.5
    assert judge(claim(direction="above"), exactly(1.0)).ratio is None


@pytest.mark.parametrize(
    ("fields", "said"), [({}, "claims nothing"), ({"low": 1.0, "direction": "above"}, "one end")]
)
def test_half_a_claim_is_refused(fields, said: str):
    with pytest.raises(ValueError, match=said):
        claim(**fields)


def write(path: Path, *claims: dict) -> Path:
    fields = {"figure": "F0", "title": "t", "source": "s", "claims": list(claims)}
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([{"id": "a", "what": "a", "value": 1}], "source"),
        ([{"id": "a", "what": "a", "source": "s", "valu": 1}], "valu"),
        ([{"id": "a", "what": "a", "source": "s", "value": 1}] * 2, "two claims"),
    ],
)
def test_expected_json_is_read_strictly_and_errors_name_the_file(tmp_path, claims, said: str):
    path = write(tmp_path / "expected.json", *claims)
    with pytest.raises(ValueError, match=said) as error:
        read_expected(path)
    assert str(path) in str(error.value)


def test_every_claim_is_measured_and_every_measurement_claimed():
    expected = Expected(figure="F0", title="t", source="s", claims=(claim(value=1.0),))
    assert [j.verdict for j in judged_all(expected, {"gain": exactly(1.0)})] == ["agrees"]
    for values in ({}, {"gain": exactly(1.0), "loss": exactly(1.0)}):
        with pytest.raises(ValueError, match="not both"):
            judged_all(expected, values)


def page() -> str:
    claims = (claim(**RANGE), Claim(id="b", what="b", source="s", value=9.0, why="Because."))
    expected = Expected(figure="F1", title="Gains", source="s", claims=claims)
    judged = judged_all(expected, {"gain": exactly(1.5), "b": exactly(3.0)})
    own = Expected(figure="A", title="Own", source="s", claims=())
    outcomes = [
        Outcome(name="f01", expected=expected, judged=judged, size=FULL),
        Outcome(name="a_own", expected=own, skipped="no trace"),
    ]
    return results_page(outcomes, figures="pictures")


def test_the_page_puts_paper_and_ours_side_by_side():
    text = page()
    assert "| gain | 1.4 to 2.3 | 1.50 | 0.81 | agrees |" in text
    assert "| b | 9 | 3.00 | 0.33 | disagrees |" in text
    assert "- *b*: Because." in text
    assert "- *gain*" not in text
    assert "![Gains](pictures/f01.png)" in text
    assert "Skipped: no trace." in text
    assert text.index("The paper's figures") < text.index("Beyond the paper")


def test_the_page_says_how_large_its_runs_are():
    text = page()
    assert "Of 2 claims 1 agree, 0 in direction only, 1 disagree." in text
    assert "1 of 1 sets of runs have the paper's size" in text
    assert "0 experiments are small worked examples, 1 were skipped." in text
    assert "`experiments/f01`, 64 GPUs, 3 rollouts." in text
    assert FULL.full
    assert not REDUCED.full
