"""`heddle profile check ROWS.csv`: predicting, and what is wrong with a table."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from heddle_calibrate.serving.samples import ServingSample
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
