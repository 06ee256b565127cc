"""`python -m tools.profiles serving`: profiles of a fit, its page, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.serving.samples import ServingSample
from heddle_sim.profile_files import read_profile
from tests.app.test_calibrate_serving import written
from tests.tools.profiles.test_serving_fit import QWEN, made
from tools.profiles.__main__ import profiles


@pytest.fixture(scope="module")
def known() -> list[ServingSample]:
    return made()


def run(*args: object) -> Result:
    return CliRunner().invoke(profiles, ["serving", *map(str, args)])


def test_the_command_fits_profiles_of_experts_and_other_precisions(
    known: list[ServingSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = written(Path("rows.csv"), known)
    other = replace(
        QWEN["qwen3-8b", "h100"],
        source=replace(QWEN["qwen3-8b", "h100"].source, precision="fp8", files=()),
    )
    Path("mine.json").write_bytes(encode_profile(other))
    result = run(rows, "--profile", "mine.json", "--fit", "out", "--out", "page.html")
    assert result.exit_code == 0, result.output
    assert "by fits without the layout of each run" in result.output
    assert "written to out: 1 profiles: qwen3-8b.h100" in result.output
    profile = read_profile(Path("out") / "qwen3-8b.h100.json")
    assert profile.errors["measured"]["tpot_mean_abs_pct"] < 2
    assert profile.kernel_factors is not None
    page = Path("page.html").read_text(encoding="utf-8")
    assert "Plotly.newPlot" in page
    assert "qwen3-8b h100" in page

    # The profiles of the folder are where the next fit begins, and it leaves the others there.
    again = run(rows, "--fit", "out", "--force")
    assert again.exit_code == 0, again.output
    assert "written to out: 1 profiles: qwen3-8b.h100" in again.output
    assert "left as it was: qwen3-8b.h200: host time of dense models" in again.output
    assert "the fit began at the constants that the profiles have" in again.output
    assert [path.name for path in Path("out").iterdir()] == ["qwen3-8b.h100.json"]
    after = read_profile(Path("out") / "qwen3-8b.h100.json")
    assert "; before: 9 runs of" in after.host.measured_on


def test_a_table_without_rows_of_a_profile_is_refused(
    known: list[ServingSample], tmp_path: Path
) -> None:
    strange = [replace(s, row=replace(s.row, model="other")) for s in known]
    result = run(written(tmp_path / "rows.csv", strange), "--fit", tmp_path / "out")
    assert result.exit_code == 1
    assert "no row can be predicted: no profile of other on h100 (18)" in result.output


def test_a_fit_into_a_file_is_refused(known: list[ServingSample], tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.csv", known)
    result = run(rows, "--fit", rows)
    assert result.exit_code == 2
    assert "is a file" in result.output
