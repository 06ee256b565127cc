"""The scorecard: each section's lines beyond their target are listed first."""

from tools.profiles.scorecard import (
    ScoreLine,
    Section,
    kv_section,
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
