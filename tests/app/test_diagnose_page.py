"""The page of a diagnosis as a reader has it: in Chromium."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from heddle.diagnosis.intervals import PARTS
from heddle.diagnosis.page import page
from heddle.diagnosis.remedies import Remedy
from heddle.diagnosis.verdict import WORDS, diagnosed
from heddle.reports.plotly_script import plotly_script
from heddle_trace.importers.notes import Notes
from heddle_trace.observed.columns import ObservedSteps, observed
from heddle_trace.observed.core import ParsedObservation
from heddle_trace.observed.reading import read_observed
from heddle_trace.observed.schema import SCHEMA, Observation, ObservedHeader, ObservedRequest, Phase
from tests.app.browser import WIDTH, Page
from tests.app.journals import Heddle
from tests.app.test_diagnose import FIXTURES, SAMPLES

REMEDY = Remedy(
    over="verl with TP 1, qwen3-14b on 8 h100",
    setting="verl with 2 x TP 4",
    saving=0.25,
    low=0.2,
    high=0.3,
    framework="verl",
    block="tp=4 & <more>",
)


def steps(count: int, labels: Sequence[int] = (1, 2)) -> ObservedSteps:
    """Trajectories of two requests, in steps that end with a training."""
    seen: list[Observation] = []
    begin_s = 100.0
    for label in labels:
        for number in range(count):
            seen += [_request(label, number, step, begin_s, number / count) for step in range(2)]
        end_s = begin_s + 50.0
        seen.append(Phase(phase="training", start_s=end_s, end_s=end_s + 10.0, rl_step=label))
        begin_s = end_s + 10.0
    header = ObservedHeader(schema=SCHEMA, source="verl", clock="shared")
    return observed(header, (ParsedObservation("here", each) for each in seen), Notes())


def _request(label: int, number: int, step: int, begin_s: float, size: float) -> ObservedRequest:
    return ObservedRequest(
        trajectory_id=f"<b>{label}</b>/prompt{number // 4}/sample{number % 4}",
        step=step,
        rl_step=label,
        start_s=begin_s + step * (4.0 + size * 20.0),
        queue_s=number % 3 * 0.1,
        prefill_s=0.5,
        decode_s=1.0 + size * 18.0,
        tool_s=1.0,
        engine=f"http://node{number % 4}:8000",
        output_tokens=50,
    )


def written(seen: ObservedSteps, folder: Path, remedies: Sequence[Remedy] = (REMEDY,)) -> Path:
    path = folder / "page.html"
    path.write_bytes(page(diagnosed(seen, "verl"), seen, remedies, "" if remedies else "none"))
    return path


@pytest.mark.parametrize("dark", [False, True])
def test_it_says_and_draws_what_the_diagnosis_says(browser: Chrome, tmp_path: Path, dark: bool):
    seen = steps(64)
    found = diagnosed(seen, "verl")
    shown = Page(browser, written(seen, tmp_path), dark=dark)
    assert shown.errors() == []
    assert shown.run("return performance.getEntriesByType('resource').length") == 0
    assert shown.run("return document.documentElement.scrollWidth") <= WIDTH
    assert shown.find("#answer").text == found.sentence
    cells = "document.querySelectorAll('#parts td:nth-child(2)')"
    values = shown.run(f"return [...{cells}].map((e) => +e.dataset.value)")
    assert sum(values[:-1]) == pytest.approx(values[-1]) == pytest.approx(found.total_s)
    assert "unaccounted" in shown.texts("#parts td:first-child")
    assert {"prefill_again", "env_start"}.isdisjoint(shown.find("main").text.split())
    drawn = "return [...document.querySelectorAll('.plot')].map((e) => [e.id, e.data.length])"
    assert all(traces > 0 for _, traces in shown.run(drawn))
    assert shown.find("#blocks pre").text == REMEDY.block
    assert shown.texts("#slowest td:first-child")[0] == found.paths[0].trajectory


def test_labels_are_inside_their_plots_and_bars_in_the_order_of_the_parts(
    browser: Chrome, tmp_path: Path
):
    seen = steps(64)
    shown = Page(browser, written(seen, tmp_path))
    cut = shown.run(
        "return [...document.querySelectorAll('.ytick text, .xtick text')].filter((e) => {"
        " const [one, all] = [e, e.closest('.plot')].map((each) => each.getBoundingClientRect());"
        " return one.left < all.left - 1 || one.right > all.right + 1; }).map((e) => e.textContent)"
    )
    assert cut == []
    bars = shown.run("return page.longest[0].intervals")
    assert [part for part, *_ in bars] == ["prefill", "decode", "tool"] * 2
    assert all(before[2] <= after[1] + 1e-6 for before, after in pairwise(bars))


def test_a_zoom_and_a_hover_show_more(browser: Chrome, tmp_path: Path):
    shown = Page(browser, written(steps(8, [1]), tmp_path))
    name = shown.run("return page.names[0]")
    assert shown.hover("each", 0.3, 0).startswith(f"{name}\nprefill from 0 s to 0.5 s")
    shown.run("zoom([0, 10])")
    assert shown.ranges("did", "each", "requests", "fleet") == [[0, 10]] * 4
    shown.click('#measure button[data-value="waiting"]')
    assert shown.errors() == []


def test_tables_and_figures_are_exported(browser: Chrome, tmp_path: Path):
    shown = Page(browser, written(steps(8), tmp_path))
    ids = shown.run(
        "return [...document.querySelectorAll('[data-export]')].map((e) => e.dataset.export)"
    )
    assert {"parts.csv", "parts.latex", "each.png", "each.svg", "paths.pdf", "busy.csv"} <= set(ids)
    for each in {each.partition(".")[0] for each in ids}:
        lines = shown.run("return linesOf(page, arguments[0])", each)
        assert len(lines) > 1, each
        assert len({len(line) for line in lines}) == 1, each


@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_source_lacks_has_no_empty_plot(browser: Chrome, tmp_path: Path, name: str):
    shown = Page(browser, written(read_observed([FIXTURES / name]).steps, tmp_path, ()))
    assert shown.errors() == []
    assert set(shown.run("return Object.keys(PART)")) >= {*WORDS, *PARTS}
    empty = shown.run(
        "return [...document.querySelectorAll('.plot')].filter((e) => e.offsetParent && !e.data)"
        ".map((e) => e.id)"
    )
    assert empty == []
    assert shown.find("#simulated").text == "No remedies: none."


def test_10_000_trajectories_fit_into_less_than_two_megabytes(tmp_path: Path):
    made = written(steps(10_000, [1]), tmp_path).stat().st_size
    assert made - len(plotly_script().encode()) < 2e6


def test_a_page_is_written_of_logs(heddle: Heddle, tmp_path: Path):
    Path("heddle.toml").write_text("[diagnose]\nbudget_s = 0\n")
    out = tmp_path / "a b.html"
    done = heddle("report", FIXTURES / "nemo_rl.json", "-o", out)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("48 % of your step is generation")
    assert b"Where the time went" in out.read_bytes()
    done = heddle("report", FIXTURES / "nemo_rl.json", "-o", out)
    assert (done.exit_code, "--force" in done.stderr) == (2, True)


def test_the_key_of_a_page_names_the_command_in_its_place(refused: Callable[..., str]):
    said = refused("diagnose", FIXTURES / "nemo_rl.json", "--set", "diagnose.page=a.html")
    assert "`heddle report LOGS -o FILE.html` writes the page" in said
