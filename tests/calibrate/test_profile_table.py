"""The table of shipped profiles in the documentation is that of the files."""

from pathlib import Path

from benchmarks.profile_table import rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_table_is_that_of_the_files() -> None:
    page = (ROOT / "docs" / "calibration.md").read_text()
    missing = [row for row in rows() if row not in page]
    assert missing == [], "run benchmarks/profile_table.py and put its output into the page"
