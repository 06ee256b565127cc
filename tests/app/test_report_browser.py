"""The page of `heddle report` as a reader has it: in Chromium, with a mouse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from heddle.reports.page.html import page
from heddle.reports.run_bounds import run_bound
from heddle.runs import load_run
from tests.app.browser import WIDTH, Page
from tests.app.journals import arrived, dispatch, done, entry, ready
from tests.app.reported import Made, by_hand
from tests.app.test_metrics import story

TIMELINE = ("doing", "engines", "slots")
PLOTS = 13


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts]


def column(shown: Page, name: str) -> list[str]:
    """Cells of one column of the table, as far as they are in the document."""
    heads = [e.get_attribute("data-column") for e in shown.browser.find_elements(By.TAG_NAME, "th")]
    place = [head for head in heads if head is not None].index(name) + 1
    return shown.texts(f"#table tbody tr[data-name] td:nth-child({place})")


def contrast(one: list[float], other: list[float]) -> float:
    """Contrast of two colours by WCAG 2.1, from 1 to 21."""

    def luminance(rgb: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def rgb(text: str) -> list[float]:
    return [float(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]


@pytest.mark.parametrize("dark", [False, True])
def test_it_loads_whole_without_a_complaint_or_a_network(browser: Chrome, small: Made, dark: bool):
    shown = Page(browser, small.path, dark=dark)
    assert shown.errors() == []
    assert shown.run("return document.body.dataset.ready") == "true"
    assert shown.run("return performance.getEntriesByType('resource').length") == 0
    assert shown.run("return document.querySelectorAll('.plot .main-svg').length") >= PLOTS
    assert shown.run("return document.documentElement.scrollWidth") <= WIDTH
    assert shown.texts("#focus button") == ["verl s0", "heddle-paper s0"]
    back = rgb(
        shown.run("return getComputedStyle(document.querySelector('section')).backgroundColor")
    )
    assert (sum(back) < 1.5) is dark
    for selector in ("h2", "td", ".caption", "figcaption", "nav a", "#table th button", "#verdict"):
        script = "return getComputedStyle(document.querySelector(arguments[0])).color"
        assert contrast(rgb(shown.run(script, selector)), back) >= 4.5, selector
    ticks = shown.run("return getComputedStyle(document.querySelector('#active .xtick text')).fill")
    assert contrast(rgb(ticks), back) >= 4.5


def test_colours_follow_when_the_scheme_changes(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    script = "return getComputedStyle(document.querySelector('#active .xtick text')).fill"
    before = shown.run(script)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    shown.until(f"{script} !== '{before}'")
    assert shown.errors() == []


def test_the_summary_shows_the_results_of_the_runs(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    made = [run.summary["makespan_s"] for run in small.runs]
    assert numbers(shown.texts("#runs td:nth-child(2)")) == pytest.approx(made, abs=0.05)
    assert shown.texts("#runs td.best") == [f"{min(made):,.1f}".rstrip("0").rstrip(".")]
    assert "no policy ends this trace on this cluster before" in shown.find("#bound").text


def test_figures_have_the_labels_of_other_tables(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    shown.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    labels = [text.replace("\u00a0", " ") for text in shown.texts("#figures td:first-child")]
    assert len(labels) > 40
    assert {"makespan s", "tokens/s", "queueing p99 s", "TPOT ms", "TTFT p50 s"} <= {*labels}
    assert not [label for label in labels if "_" in label]


def test_hovering_a_slot_shows_what_ran_there(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    run = small.runs[-1]
    steps = run.steps.to_pandas()
    # One that ran through: its only dispatch is where it says.
    steps = steps[(steps["dispatches"] == 1) & (steps["recomputes"] == 0)]
    step = steps.loc[(steps["ended_s"] - steps["dispatched_s"]).idxmax()]
    engines = shown.run("return page.run.engines.map((engine) => engine.name)")
    shown.run("pickEngine(page, arguments[0])", engines.index(step["engine"]))
    slot = shown.run(
        "const {dispatches: d, trajectories: t} = page.run;"
        "return d.slot[d.step.findIndex((n, i) => n === arguments[1]"
        " && page.names[t.name[d.trajectory[i]]] === arguments[0])]",
        step["trajectory"],
        int(step["step"]),
    )
    arrived_s = run.trajectories.to_pandas()["arrived_s"].min()
    shown_text = shown.hover(
        "slots", (step["dispatched_s"] + step["ended_s"]) / 2 - arrived_s, slot
    )
    assert shown_text.startswith(
        f"{step['trajectory']}, step {step['step']}\non {step['engine']} from "
    )
    assert f"\n{step['output_tokens']:,} tokens in " in shown_text
    assert shown.errors() == []


def test_hovering_an_engine_shows_how_full_it_is(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    shown_text = shown.hover("engines", 20.0, 0)
    assert shown_text.startswith("e0, TP ")
    assert "running" in shown_text
    assert "KV cache in use" in shown_text
    assert "failed at 40 s" in shown_text


def test_zooming_in_shows_one_stretch_in_all_three_and_a_double_click_all(
    browser: Chrome, small: Made
):
    shown = Page(browser, small.path)
    whole = shown.ranges(*TIMELINE)
    end = small.runs[-1].summary["makespan_s"]
    assert whole == [[0, pytest.approx(end)]] * 3
    mouse = shown.point("engines", 0.25 * end, 0)
    mouse.click_and_hold().move_by_offset(120, 0).move_by_offset(80, 0).release().perform()
    shown.until("return timeline.range !== null")
    assert shown.find("#all").is_displayed()
    zoomed = shown.ranges(*TIMELINE)
    assert zoomed[0] == zoomed[1] == zoomed[2]
    assert zoomed[0] == pytest.approx([0.25 * end, zoomed[0][1]], abs=0.01 * end)
    assert 0 < zoomed[0][1] - zoomed[0][0] < 0.5 * end
    # On a busy machine more than the usual 0.3 s may pass between the two clicks.
    shown.run("document.getElementById('slots')._context.doubleClickDelay = arguments[0]", 60_000)
    shown.point("slots", sum(zoomed[0]) / 2, 0).double_click().perform()
    shown.until("return timeline.range === null")
    assert shown.ranges(*TIMELINE) == whole
    assert shown.errors() == []


def test_counts_over_time_are_exact_means(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    rng = np.random.default_rng(5)
    begin = rng.uniform(-2, 10, 60)
    end = begin + rng.exponential(2, 60) * rng.integers(0, 2, 60)
    edges = np.linspace(1.0, 9.0, 14)
    got = shown.run(
        "const [from, to, n, a, b] = arguments;"
        "return [...binned(n, from, to, (add) => a.forEach((_, i) => add(a[i], b[i])))]",
        1.0,
        9.0,
        13,
        begin.tolist(),
        end.tolist(),
    )
    held = np.clip(end[:, None], edges[:-1], edges[1:]) - np.clip(
        begin[:, None], edges[:-1], edges[1:]
    )
    assert got == pytest.approx(held.sum(axis=0) / np.diff(edges), abs=1e-9)


def test_the_table_sorts_and_searches(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    truth = small.runs[-1].trajectories.to_pandas()
    assert numbers(column(shown, "finished"))[:3] == pytest.approx(
        sorted(truth["finished_s"], reverse=True)[:3], abs=0.06
    )
    shown.click("#table th[data-column=output] button")
    most = numbers(column(shown, "output"))
    assert most == sorted(truth["output_tokens"], reverse=True)[: len(most)]
    assert shown.find("#table th[data-column=output]").get_attribute("aria-sort") == "descending"
    shown.click("#table th[data-column=output] button")
    assert numbers(column(shown, "output"))[0] == truth["output_tokens"].min()
    shown.find("#search").send_keys(truth["group"][0])
    wanted = (truth["group"] == truth["group"][0]).sum()
    assert shown.find("#found").text == f"{wanted} of {len(truth)} trajectories"
    assert all(name.startswith(truth["group"][0]) for name in column(shown, "name"))
    shown.find("#search").send_keys(" no such thing")
    assert column(shown, "name") == []
    assert shown.errors() == []


def test_a_chosen_trajectory_is_drawn_under_both_policies(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    row = shown.find("#table tbody tr[data-name]:nth-child(4)")
    name = row.get_attribute("data-name")
    row.click()
    assert shown.find("#who").text == name
    ends = [
        run.trajectories.to_pandas().set_index("trajectory")["finished_s"][name]
        for run in small.runs
    ]
    drawn = shown.run(
        "return [0, 1].map((y) => Math.max(...document.getElementById('life').data"
        ".filter((t) => t.type === 'bar')"
        ".flatMap((t) => t.x.map((x, i) => (t.y[i] === y ? t.base[i] + x : 0)))))"
    )
    assert drawn == pytest.approx(ends, abs=0.01)


def test_the_difference_shows_trajectories_that_gained_and_lost(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    ends = [r.trajectories.to_pandas().set_index("trajectory")["finished_s"] for r in small.runs]
    change = (ends[1] - ends[0]).round(3)
    sooner, later = int((change < 0).sum()), int((change > 0).sum())
    said = shown.find("#verdict").text
    all_s = small.runs[1].summary["makespan_s"] - small.runs[0].summary["makespan_s"]
    way = "sooner" if all_s < 0 else "later"
    assert said.startswith("heddle-paper s0 ends ")
    assert f" s {way} than verl s0." in said
    assert f"{sooner} of 96 trajectories end sooner" in said
    assert f"{later} of 96 later" in said
    assert change.idxmin() in shown.texts("#gained li")[0]
    assert change.idxmax() in shown.texts("#lost li")[0]
    shown.run("const s = byId('from'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    assert f"{later} of 96 trajectories end sooner" in shown.find("#verdict").text


def test_another_run_in_view_changes_what_is_of_one_run(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    assert shown.texts("section:not([hidden]) h2 .of") == ["of heddle-paper s0"] * 3
    assert "Planned at" in shown.find("#mix").text
    assert len(shown.texts("#cluster button")) == small.runs[1].summary["engines"]
    shown.click("#focus [data-run='0']")
    assert shown.texts("section:not([hidden]) h2 .of") == ["of verl s0"] * 3
    assert "Not planned" in shown.find("#mix").text
    assert len(shown.texts("#cluster button")) == small.runs[0].summary["engines"]
    last = small.runs[0].trajectories.to_pandas()["finished_s"].max()
    assert numbers(column(shown, "finished"))[0] == pytest.approx(last, abs=0.06)
    assert shown.errors() == []


def test_an_unfinished_run_is_marked_on_its_page(browser: Chrome, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(page([by_hand(tmp_path, story()[:6])], run_bound))
    shown = Page(browser, path)
    assert shown.errors() == []
    assert "is still running, or its process died" in shown.find("#notes").text
    assert shown.texts("#runs td:nth-child(2)") == ["≥ 4"]
    assert set(column(shown, "outcome")) == {"unfinished"}
    assert not shown.find("#differences").is_displayed()


def test_names_are_text_wherever_they_are_shown(browser: Chrome, tmp_path: Path):
    name = "<img src=x onerror=window.hacked=1>&amp;<b>x"
    entries: list[Any] = [
        entry(ready("e0")),
        entry(arrived(name), dispatch(name, 0, "e0")),
        entry(done(name, 0, "e0", at=2.0, tokens=3)),
    ]
    path = tmp_path / "page.html"
    path.write_bytes(page([by_hand(tmp_path, entries)], run_bound))
    shown = Page(browser, path)
    assert column(shown, "name") == [name]
    assert shown.find("#who").text == name
    assert shown.hover("slots", 1.0, 0).startswith(name)
    assert shown.run("return window.hacked === undefined")
    assert shown.errors() == []


def test_6400_trajectories_stay_usable(browser: Chrome, large: Made):
    shown = Page(browser, large.path)
    assert shown.errors() == []
    assert shown.run("return page.run.trajectories.name.length") == 6400
    assert (
        shown.run("return page.run.dispatches.step.length") == large.runs[0].summary["dispatches"]
    )
    # What is in the document does not grow with the run: the table holds what is in sight.
    assert shown.run("return document.querySelectorAll('#table tbody tr').length") < 50
    assert shown.run("return document.querySelectorAll('*').length") < 20_000
    assert shown.run("return document.documentElement.scrollWidth") <= WIDTH
    truth = load_run(large.runs[0].path).trajectories.to_pandas()
    shown.click("#table th[data-column=waited] button")
    waited = truth["queueing_s"] + truth["engine_queued_s"]
    assert numbers(column(shown, "waited"))[0] == pytest.approx(waited.max(), abs=0.06)
    shown.run("byId('table').scrollTop = 1e9")
    shown.until("return listed.from > 6000")
    assert numbers(column(shown, "waited"))[-1] == pytest.approx(waited.min(), abs=0.06)
    shown.find("#search").send_keys("00399/15")
    assert column(shown, "name") == [n for n in truth["trajectory"] if "00399/15" in n]
    end = large.runs[0].summary["makespan_s"]
    mouse = shown.point("engines", 0.1 * end, 20)
    mouse.click_and_hold().move_by_offset(60, 0).move_by_offset(60, 0).release().perform()
    shown.until("return timeline.range !== null")
    assert shown.hover("slots", sum(shown.ranges("slots")[0]) / 2, 3).count("\n") >= 4
    assert shown.errors() == []
