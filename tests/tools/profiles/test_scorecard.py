"""The scorecard: each section's lines beyond their target are listed first."""

from pathlib import Path

from heddle_calibrate.roofline.missing_layouts import BY_ROOFLINE
from heddle_calibrate.roofline.profile import EXPERTS_RUNS
from heddle_sim.profile_files import load_profile
from tools.profiles.scorecard import (
    ScoreLine,
    Section,
    configuration_section,
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
    layouts, median, tenth, prompt = _first_row("Layouts that tables lack")
    said = f"{layouts} such layouts, decode steps are {median} % off in the median and one in ten"
    assert BY_ROOFLINE.endswith(f"{said} over {tenth} %, prompts {prompt} %")
    # Of one model: the layouts that it has, none of those without ranks or experts spread.
    found = layout_section([load_profile("qwen3-30b-a3b", "h200")])
    number = {line.cells[0]: int(line.cells[1]) for line in found.lines}
    assert number["all"] == number["ranks"] + number["experts spread alone"]
    assert 0 < number["ranks"] < len(load_profile("qwen3-30b-a3b", "h200").tables)
    assert all(0 < float(cell) < 50 for line in found.lines for cell in line.cells[2:])


def test_the_error_of_models_from_a_configuration_is_the_one_that_profiles_state() -> None:
    runs, _, median, tenth, _ = _first_row("Models with experts from a configuration")
    said = f"on {runs}, these among them, TPOT of a layout is {median} % off in the median"
    assert EXPERTS_RUNS.endswith(f"{said}, of one in ten over {tenth} %")


def test_rows_of_a_configuration_are_predicted_without_the_shipped_profile(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    head = "backend,model,gpu,precision,tp,input_tokens,output_tokens,concurrency,TTFT_ms,TPOT_ms"
    row = "vllm,openai/gpt-oss-120b,h100,mxfp4,2,1024,1024,4,60,{}"
    rows.write_text(f"{head}\n{row.format(5.0)}\n", encoding="utf-8")
    shipped = [load_profile("gpt-oss-120b", "h100")]
    found = configuration_section([rows], shipped)
    assert [line.cells[1:3] for line in found.lines] == [("1", "1"), ("1", "1")]
    rows.write_text(f"{head}\n{row.format(50.0)}\n", encoding="utf-8")
    slow = configuration_section([rows], shipped)
    assert int(slow.lines[0].cells[3]) > int(found.lines[0].cells[3])


def _first_row(title: str) -> list[str]:
    """Figures of all, in a section of the page that is shipped."""
    card = Path("benchmarks/scorecard.md").read_text(encoding="utf-8")
    _, _, section = card.partition(f"## {title}")
    row = next(line for line in section.splitlines() if line.startswith("| all |"))
    return row.strip("| ").split(" | ")[1:]


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
