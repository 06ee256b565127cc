"""`heddle profile check ROWS.csv`: predicting, and what is wrong with a table."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from heddle_calibrate.serving.samples import ServingSample
from heddle_sim.profile_files import PROFILE_FOLDER
from tests.app.journals import Heddle
from tests.tools.profiles.test_serving_fit import made

HEAD = b"backend,model,gpu,precision,tp,input_tokens,output_tokens,concurrency,TTFT_ms,TPOT_ms"


@pytest.fixture(scope="module")
def known() -> list[ServingSample]:
    return made()


def written(path: Path, known: list[ServingSample]) -> Path:
    names = (
        "backend,backend_version,model,gpu,precision,tp,input_tokens,output_tokens,concurrency,"
        "TTFT_ms,TPOT_ms"
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(names.split(","))
        for sample in known:
            r = sample.row
            out.writerow(
                [r.engine, r.version, r.model, r.gpu, r.precision, r.tp, r.input_tokens,
                 r.output_tokens, r.concurrency, r.ttft_s * 1e3, r.tpot_s * 1e3]
            )  # fmt: skip
    return path


def test_the_command_predicts(heddle: Heddle, known: list[ServingSample]) -> None:
    rows = written(Path("rows.csv"), known)
    result = heddle("profile", "check", rows)
    assert result.exit_code == 0, result.output
    assert "vllm, errors in percent by model and GPU class" in result.output
    assert "qwen3-8b h200" in result.output


def test_the_command_prints_json(heddle: Heddle, known: list[ServingSample]) -> None:
    rows = written(Path("rows.csv"), known)
    result = heddle("profile", "check", rows, "--json")
    report = json.loads(result.stdout)
    assert report["schema"] == "heddle.serving/1"
    assert len(report["runs"]) == len(known)
    first = report["runs"][0]
    error = first["tpot_predicted_ms"] / first["tpot_ms"] - 1
    assert -0.6 < error < 0.6


def test_a_table_as_spreadsheets_write_it_is_read(heddle: Heddle) -> None:
    row = b"\r\nvllm,Qwen/Qwen3-32B,h100,bf16,2,1024,128,4,100,15\r\n"
    Path("rows.csv").write_bytes(b"\xef\xbb\xbf" + HEAD.replace(b",", b", ") + row)
    assert "qwen3-32b h100 TP 2" in heddle("profile", "check", "rows.csv").stdout


def test_runs_of_which_no_given_file_is_are_left_out(heddle: Heddle) -> None:
    rows = [b"vllm,Qwen/Qwen3-%s,h100,bf16,2,1024,128,4,100,15" % size for size in (b"32B", b"8B")]
    Path("rows.csv").write_bytes(b"\n".join([HEAD, *rows]))
    Path("mine.json").write_bytes((PROFILE_FOLDER / "qwen3-8b.h100.json").read_bytes())
    said = heddle("profile", "check", "rows.csv", "--model", "mine.json").stdout
    assert "qwen3-32b h100 TP 2" not in said
    assert "no --model FILE is of qwen3-32b on h100, but of qwen3-8b on h100" in said


@pytest.mark.parametrize("precision", [b"bfloat16", b"fp8"])
def test_a_given_file_is_of_shared_rows_that_name_no_model(
    heddle: Heddle, precision: bytes
) -> None:
    row = b"vllm,unnamed,h100,%s,2,1024,128,4,100,15" % precision
    Path("rows.csv").write_bytes(b"\n".join([HEAD, row]))
    Path("mine.json").write_bytes((PROFILE_FOLDER / "qwen3-8b.h100.json").read_bytes())
    said = heddle("profile", "check", "rows.csv", "--model", "mine.json").stdout
    assert "qwen3-8b h100 TP 2" in said
    assert "no profile of unnamed on h100" in heddle("profile", "check", "rows.csv").stderr


def test_of_several_given_files_of_a_type_none_is_of_rows_that_name_no_model(
    heddle: Heddle,
) -> None:
    Path("rows.csv").write_bytes(HEAD + b"\nvllm,unnamed,h100,bf16,2,1024,128,4,100,15\n")
    for size in ("8b", "32b"):
        file = PROFILE_FOLDER / f"qwen3-{size}.h100.json"
        Path(f"{size}.json").write_bytes(file.read_bytes())
    asked = "profile", "check", "rows.csv", "--model", "8b.json", "--model"
    said = "no profile of unnamed on h100: give its --model FILE, the only one of this GPU type"
    assert said in heddle(*asked, "32b.json").stderr
    assert "8b.json: a second profile of qwen3-8b on h100" in heddle(*asked, "8b.json").stderr


def test_a_row_has_the_host_time_that_simulations_take_for_its_release(heddle: Heddle) -> None:
    row = b"\nvllm,Qwen/Qwen3-8B,h200,bf16,1,1024,256,%d,150,7,%b"
    versions = (b"0.26.0", b"", b"v0.26.0", b"0.25.0", b"0.12.0")
    rows = [row % (8 + n, version) for n, version in enumerate(versions)]
    Path("rows.csv").write_bytes(HEAD + b",backend_version" + b"".join(rows))
    report = json.loads(heddle("profile", "check", "rows.csv", "--json").stdout)
    *newest, old = (run["tpot_predicted_ms"] for run in report["runs"])
    assert old > 1.15 * max(newest)
    assert max(newest) < 1.1 * min(newest)


@pytest.mark.parametrize(
    ("bound", "status", "said"),
    [
        ("profile.max_tpot_error=7", 0, ""),
        ("profile.max_tpot_error=5", 1, "failed: vllm: TPOT 5.8 % off over groups, allowed 5 %\n"),
        ("profile.max_p99_error=5", 2, "profile.max_p99_error is of runs; of rows, "),
    ],
)
def test_a_bound_that_is_given_decides_the_exit_status(
    heddle: Heddle, bound: str, status: int, said: str
) -> None:
    Path("rows.csv").write_bytes(HEAD + b"\nvllm,Qwen/Qwen3-32B,h100,bf16,2,1024,128,4,100,15\n")
    for more in ((), ("--json",)):
        result = heddle("profile", "check", "rows.csv", "--set", bound, *more)
        assert result.exit_code == status
        assert said in result.stderr


def test_tables_that_no_profile_covers_are_refused(
    heddle: Heddle, known: list[ServingSample]
) -> None:
    strange = [replace(s, row=replace(s.row, model="other")) for s in known]
    result = heddle("profile", "check", written(Path("rows.csv"), strange))
    assert result.exit_code == 2
    assert "no row can be predicted: no profile of other on h100 (18)" in result.stderr


def test_a_missing_table_is_named(heddle: Heddle) -> None:
    result = heddle("profile", "check", "none.csv")
    assert result.exit_code == 2
    assert result.stderr == "Error: cannot read none.csv: no such file\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "rows.csv:1: no column backend, "),
        (b"\xff\xfe", "cannot read rows.csv: not UTF-8 text (byte 0); save the table as CSV"),
        (HEAD + b"\n", "the tables have no rows below their first line; add some"),
        (HEAD + b"\nvllm,x\n", "rows.csv:2: 2 cells under 10 columns: write one for each"),
        (HEAD + b",tp\nvllm,x,h100,bf16,1,9,9,4,3,3,2\n", "rows.csv:1: column tp is there twice"),
        (HEAD + b"\n" + b"x" * 200_000, "rows.csv:2: no line of CSV: field larger than field"),
        (HEAD + b"\nvllm,x,h100,bf16,1,9,9,1e9,3,3\n", "1,000,000,000 clients: replayed are 8,192"),
        (HEAD + b",requests\nvllm,x,h100,bf16,1,9,9,4,3,3,9999999\n", "9,999,999 requests: repl"),
        (HEAD + b"\nvllm,x,h100,bf16,1,9,9,4,a,3\n", "TTFT_ms is 'a', not a positive number; mend"),
        (HEAD + b"\nvllm,x,h100,bf16,1,9,9,4,3,3\n", "no profile of x on h100 (1); take rows of"),
    ],
)
def test_a_bad_table_is_one_message_with_the_remedy(
    refused: Callable[..., str], content: bytes, said: str
) -> None:
    Path("rows.csv").write_bytes(content)
    message = refused("profile", "check", "rows.csv")
    assert message.startswith("Error: ")
    assert said in message
