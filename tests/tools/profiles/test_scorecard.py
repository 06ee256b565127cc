"""The scorecard: each section's lines beyond their target are listed first."""

from pathlib import Path

from heddle_calibrate.roofline.missing_layouts import BY_ROOFLINE
from heddle_sim.profile_files import load_profile
from tools.profiles.scorecard import (
    ScoreLine,
    Section,
    kv_section,
    layout_section,
    makespan_section,
    page,
    training_sections,
)


def test_a_line_beyond_its_target_stands_first_and_in_its_section() -> None:
    lines = [ScoreLine(cells=("a", "1")), ScoreLine(cells=("b", "9"), fails=True)]
    made = page([Section(title="Some", target="5 %", columns=("of", "%"), lines=lines)])
    assert "| Some | 2 | 1 |" in made
    assert made.index("- Some: b, 9") < made.index("## Some")
    assert "| b | 9 | fails |" in made
    assert "| a | 1 |  |" in made


def test_the_error_of_layouts_by_the_roofline_is_the_one_that_profiles_state() -> None:
    card = Path("benchmarks/scorecard.md").read_text(encoding="utf-8")
    _, _, section = card.partition("## Layouts that tables lack")
    row = next(line for line in section.splitlines() if line.startswith("| all |"))
    layouts, median, tenth, prompt = row.strip("| ").split(" | ")[1:5]
    said = f"{layouts} such layouts, decode steps are {median} % off in the median and one in ten"
    assert BY_ROOFLINE.endswith(f"{said} over {tenth} %, prompts {prompt} %")
    # Of one model: the layouts that it has, none of those without ranks or experts spread.
    found = layout_section([load_profile("qwen3-30b-a3b", "h200")])
    number = {line.cells[0]: int(line.cells[1]) for line in found.lines}
    assert number["all"] == number["ranks"] + number["experts spread alone"]
    assert 0 < number["ranks"] < len(load_profile("qwen3-30b-a3b", "h200").tables)
    assert all(0 < float(cell) < 50 for line in found.lines for cell in line.cells[2:])


def test_sections_are_made_of_what_is_shipped() -> None:
    kv, makespan = kv_section(), makespan_section()
    assert len(kv.lines) >= 25
    assert [line.cells[0].partition(" (")[0] for line in kv.failing] == [
        "Qwen/Qwen3-235B-A22B-FP8 h100 TP 4"
    ]
    assert {line.cells[0] for line in makespan.lines} == {"coding", "search", "math"}
    training, updates = training_sections()
    assert any(line.fails for line in training.lines)
    assert {line.cells[0] for line in updates.lines} >= {"all", "nccl", "colocated"}
    for section in (kv, makespan, training, updates):
        assert {len(line.cells) for line in section.lines} == {len(section.columns)}
