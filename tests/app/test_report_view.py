"""What a reader does with the page beside looking: tooltips, links to a view, exports."""

import base64
import csv
import io
import struct
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.app.browser import Page
from tests.app.reported import Made, unpacked


def fragment(shown: Page) -> tuple[str, dict[str, list[str]]]:
    """The section and the parameters of the address."""
    section, _, query = str(shown.run("return location.hash.slice(1)")).partition("?")
    return section, parse_qs(query)


def exported(shown: Page, name: str) -> list[dict[str, str]]:
    return list(
        csv.DictReader(io.StringIO(shown.run("return csvText(linesOf(page, arguments[0]))", name)))
    )


def test_the_page_opens_on_the_reference_against_the_best(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    why = unpacked(small.path.read_bytes())[0]["why"]
    assert shown.find("#answer").text == why["verdict"]
    first, best = why["rows"][0], why["rows"][why["best"]]
    drawn = shown.run("const [t] = byId('waterfall').data; return [t.y[0], t.y.at(-1)]")
    assert drawn == pytest.approx([first["mean_s"], best["mean_s"]])
    bars = shown.run(
        "return [0, 1].map((i) => byId('parts').data.reduce((sum, t) => sum + t.x[i], 0))"
    )
    assert bars == pytest.approx([row["mean_s"] for row in why["rows"]], abs=0.4)
    assert len(shown.run("return byId('busy').data")) == len(why["rows"])
    assert shown.errors() == []


def test_every_column_has_a_tooltip(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    for table in ("#runs", "#last", "#table"):
        heads = browser.find_elements(By.CSS_SELECTOR, f"{table} th")
        said = [head.get_attribute("data-says") for head in heads]
        assert len(said) >= 8
        assert all(text and "undefined" not in text and "null" not in text for text in said)
    shown.run("byId('figures').closest('details').open = true")
    keys = browser.find_elements(By.CSS_SELECTOR, "#figures td:first-child")
    assert all(key.get_attribute("data-says") for key in keys)
    shown.run("document.querySelector('#last th:nth-child(2)').focus()")
    shown.until("return !byId('tip').hidden")
    assert "the rollout waits for it" in shown.find("#tip").text
    shown.run("document.activeElement.blur()")
    shown.until("return byId('tip').hidden")


def test_an_address_restores_the_view(browser: Chrome, small: Made):
    shown = Page(browser, small.path, "")
    assert fragment(shown) == ("", {})
    shown.click("#focus [data-run='0']")
    shown.run("view(page, [10, 40.5]); pickEngine(page, page.run.drawn[1])")
    shown.click("#measure [data-value=kv]")
    shown.click("#table th[data-column=output] button")
    shown.find("#search").send_keys("coding-0")
    row = shown.find("#table tbody tr[data-name]:nth-child(3)")
    name = row.get_attribute("data-name")
    row.click()
    shown.run("const s = byId('from'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    shown.click("nav a[href='#timeline']")
    section, found = fragment(shown)
    engine = shown.run("return page.run.engines[timeline.engine].name")
    assert section == "timeline"
    assert found == {
        "run": ["verl s0"],
        "trajectory": [name],
        "time": ["10-40.5"],
        "engine": [engine],
        "measure": ["kv"],
        "sort": ["output"],
        "search": ["coding-0"],
        "against": ["heddle-paper s0 / verl s0"],
    }
    link = str(shown.run("return location.hash"))
    again = Page(browser, small.path, link)
    assert again.errors() == []
    assert again.run("return location.hash") == link
    assert again.run("return [page.run.label, ...timeline.range]") == ["verl s0", 10, 40.5]
    assert again.run("return page.run.engines[timeline.engine].name") == engine
    assert again.find("#who").text == name
    assert again.find("#search").get_attribute("value") == "coding-0"
    assert again.texts("#measure [aria-pressed=true]") == ["KV cache in use"]
    assert again.ranges("doing", "engines", "slots") == [[10, 40.5]] * 3
    assert not again.find("#unknown").is_displayed()
    # Another address in the same page is another view, and what it does not name is as at first.
    again.run("location.hash = '#trajectories?sort=waited-up'")
    again.until("return page.run.label === 'heddle-paper s0'")
    assert again.run("return [sorting.by, sorting.down, timeline.range]") == ["waited", False, None]
    assert again.find("#search").get_attribute("value") == ""


def test_what_an_address_names_in_vain_is_said(browser: Chrome, small: Made):
    shown = Page(browser, small.path, "#plan?run=none+s9&time=40-10&sort=output")
    assert shown.errors() == []
    said = shown.find("#unknown").text
    assert said.startswith("The address has another run, time than this page")
    assert shown.run("return [page.run.label, timeline.range]") == ["heddle-paper s0", None]
    assert shown.run("return sorting.by") == "output"


def test_every_figure_and_table_is_exported(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    names = shown.run(
        "return [...document.querySelectorAll('[data-export$=\".csv\"]')]"
        ".map((b) => b.dataset.export.replace('.csv', ''))"
    )
    plots = shown.run("return [...document.querySelectorAll('figure > .plot')].map((p) => p.id)")
    assert set(plots) < set(names)
    found = {name: exported(shown, name) for name in names if name not in ("loop", "steps")}
    assert all(len(lines) >= 2 or name == "changes" for name, lines in found.items())
    why = unpacked(small.path.read_bytes())[0]["why"]
    makespans = [float(line["makespan s"]) for line in found["runs"]]
    assert makespans == [row["mean_s"] for row in why["rows"]]
    truth = small.runs[1].trajectories.to_pandas().set_index("trajectory")
    assert len(found["table"]) == len(truth)
    for line in found["table"]:
        end = float(line["ends at s"])
        assert end == pytest.approx(truth["finished_s"][line["trajectory"]], abs=1e-3)
    assert {line["series"] for line in found["busy"]} == {"verl s0", "heddle-paper s0"}
    gpus = [float(line["GPUs"]) for line in found["busy"] if line["series"] == "verl s0"]
    assert gpus == why["curves"]["gpus"][0]
    assert {line["engine"] for line in found["engines"]} >= {"e0"}
    steps = small.runs[1].steps.to_pandas()
    engine = found["slots"][0]["engine"]
    assert len(found["slots"]) >= (steps["engine"] == engine).sum()
    assert {line["from"] for line in found["life"]} != {""}
    assert shown.errors() == []


@pytest.mark.parametrize("name", ["waterfall", "slots"])
def test_a_figure_is_saved_as_a_picture(browser: Chrome, small: Made, name: str):
    shown = Page(browser, small.path)
    url = browser.execute_async_script(
        "const done = arguments[1];"
        "pictureOf(page, arguments[0], 'png').then(done, (e) => done(String(e)))",
        name,
    )
    head, _, body = url.partition(",")
    assert head == "data:image/png;base64"
    png = base64.b64decode(body)
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1200
    assert height >= 200
    assert shown.errors() == []


def test_a_figure_is_saved_as_a_drawing_and_a_table_for_latex(browser: Chrome, small: Made):
    shown = Page(browser, small.path)
    url = browser.execute_async_script(
        "const done = arguments[0]; pictureOf(page, 'waterfall', 'svg').then(done, String)"
    )
    assert url.startswith("data:image/svg+xml")
    latex = str(shown.run("return latexOf(page, 'last')")).splitlines()
    assert latex[0].startswith("\\begin{tabular}{l")
    assert latex[1:4:2] == ["\\toprule", "\\midrule"]
    assert all(line.endswith(" \\\\") for line in (latex[2], *latex[4:-2]))
    assert len({line.count(" & ") for line in (latex[2], *latex[4:-2])}) == 1
    assert latexed(shown, "50 % of $a_b$") == "50 \\% of \\$a\\_b\\$"
    assert shown.errors() == []


def latexed(shown: Page, text: str) -> str:
    return str(shown.run("return latexCell(arguments[0])", text))


def saved(shown: Page, browser: Chrome, folder: Path, name: str) -> Path:
    behaviour = {"behavior": "allow", "downloadPath": str(folder)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    shown.click(f"[data-export='{name}']")
    file = folder / f"{shown.run('return page.trace')}-{name}"
    for _ in range(600):
        if file.exists() and file.stat().st_size:
            break
        shown.until("return true")
        browser.execute_async_script("setTimeout(arguments[0], 50)")
    return file


def test_a_click_saves_a_file(browser: Chrome, small: Made, tmp_path: Path):
    shown = Page(browser, small.path)
    with saved(shown, browser, tmp_path, "last.csv").open(newline="") as lines:
        assert len(list(csv.DictReader(lines))) == 2
    pdf = saved(shown, browser, tmp_path, "busy.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-1.4")
    table = int(pdf.rsplit(b"startxref\n", 1)[1].split()[0])
    assert pdf[table:].startswith(b"xref\n0 6\n")
    for number, line in enumerate(pdf[table:].splitlines()[3:8], 1):
        assert pdf[int(line.split()[0]) :].startswith(b"%d 0 obj\n" % number)
    assert b"/DCTDecode" in pdf
    assert shown.errors() == []
