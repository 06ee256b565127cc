"""Figures of runs: a colour for each policy, and labels as they are."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from experiments.harness import drawing
from heddle.reports import figures
from heddle.reports.colours import SHADES, policy_colour, policy_dashes, policy_shade, style_sheet
from heddle.reports.page.facts import opening
from heddle.reports.page.html import page
from heddle.reports.run_bounds import run_bound
from heddle.runs import Run, load_run
from heddle.runs.record import record
from heddle_core.presets import PRESETS
from tests.app.journals import ONE_RUN, Heddle, run_of
from tests.app.reported import unpacked


@pytest.fixture
def runs(heddle: Heddle, trace: Path) -> list[Run]:
    made = []
    for policy in ("slime", "heddle", "verl"):
        args = ("--policies", policy, "--gpus", 2, "--max-running", 2, "--json")
        made.append(load_run(run_of(heddle(*ONE_RUN, trace, *args))["run"]))
    return made


def drawn(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Colours of the lines of a figure by the names in its legend."""
    seen: list[Axes] = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: seen.append(figure.axes[0]) or path)
    figures.draw(runs, Path("figures"))
    legend = seen[0].get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    colours = [str(line.get_color()) for line in seen[0].get_lines()]
    return dict(zip(names, colours, strict=True))


def test_every_preset_has_a_colour_of_its_own_and_others_keep_theirs():
    assert len({policy_colour(policy) for policy in PRESETS}) == len(PRESETS)
    assert policy_shade("heddle+lpt") == 10  # of its name: the same in every process


def test_lines_of_one_colour_differ_in_their_dashes():
    assert policy_dashes(["verl", "verl", "heddle", "verl"]) == [0, 1, 0, 2]


def test_a_policy_has_one_colour_in_every_figure_and_on_the_page(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
):
    for chosen in (runs, runs[::-1], runs[1:]):
        colours = drawn(chosen, monkeypatch)
        assert colours == {run.label: policy_colour(run.manifest["policy"]) for run in chosen}
        made = page(chosen, run_bound)
        for run, told in zip(chosen, unpacked(made)[0]["runs"], strict=True):
            variable = f"--run-{told['colour']}: {policy_colour(run.manifest['policy'])};"
            assert variable in made.decode()
    assert drawing.colour("verl") == policy_colour("verl")
    assert all(shade.dark in style_sheet() for shade in SHADES)


def test_a_label_that_begins_with_an_underscore_is_shown(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
):
    odd = [Run(run.path, {**run.manifest, "policy": f"_{run.label}$x$"}) for run in runs]
    assert list(drawn(odd, monkeypatch)) == [run.label for run in odd]


def test_a_page_opens_on_the_first_run_against_the_best_of_the_others(runs: list[Run]):
    makespans = [run.summary["makespan_s"] for run in runs]
    best = min((1, 2), key=lambda at: makespans[at])
    assert unpacked(page(runs, run_bound))[0]["opens"] == best
    turned = [runs[0], *runs[:0:-1]]
    assert opening([record(run) for run in turned]) == 3 - best
    assert opening([record(runs[0])]) == 0
