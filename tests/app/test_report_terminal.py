"""What a terminal sees and a pipe does not: progress, colour, blocks."""

import json
import os
import pty
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from heddle.cli.progress import running
from heddle.cli.tables import VERDICT_WIDTH, show_rows
from heddle.comparison.compare import compare
from heddle.config import RunConfig
from heddle.runs import load_run
from heddle.simulation import simulate
from heddle_trace import synth, write_trace
from tests.app.journals import BRIEF, ONE_RUN, Heddle

HEDDLE = (sys.executable, "-m", "heddle.cli")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    *command: object, folder: Path, both: bool = False, **environment: str
) -> tuple[str, str]:
    """Run a command with standard error on a terminal, and standard output on it, too, or a pipe.

    Returns what each of them got; output on the terminal counts as that of standard error.
    """
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [*HEDDLE, *map(str, command)],
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **environment},
        stdin=subprocess.DEVNULL,
        stdout=writer if both else subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    seen = b""
    try:
        while chunk := os.read(reader, 65_536):
            seen += chunk
    except OSError:  # how Linux says that the other side of a terminal is closed
        pass
    finally:
        os.close(reader)
    out = b"" if process.stdout is None else process.stdout.read()
    if process.stdout is not None:
        process.stdout.close()
    assert process.wait() == 0, seen
    return out.decode(), seen.decode()


def test_a_terminal_shows_what_runs_and_how_much_is_done(trace: Path, tmp_path: Path):
    out, seen = on_terminal(
        *("compare", trace, "--policies", "verl,slime", "--gpus", 2, "--seeds", 1, "--json"),
        folder=tmp_path,
    )
    plain = ESCAPES.sub("", seen)
    assert "closing (2 of 2 runs done)" in plain
    assert "12/12 trajectories" in plain
    assert json.loads(out)["schema"] == "heddle.compare/2"
    write_trace(tmp_path / "four.jsonl", synth("coding", 8, seed=5, samples_per_group=2))
    (run, _) = sorted(path.parent for path in tmp_path.glob("runs/*/*/manifest.json"))
    for command, said in (
        ((*ONE_RUN, trace, "--json"), "6/6 trajectories"),
        (("plan", tmp_path / "four.jsonl", *BRIEF, "--json"), "searching"),
        (("replay", run), "replaying "),
        (("report", run, "-o", "report.html"), "writing"),
    ):
        _, seen = on_terminal(*command, folder=tmp_path)
        assert said in ESCAPES.sub("", seen), command


def test_worker_processes_say_how_far_they_are(config: RunConfig, tmp_path: Path):
    calls: list[list[int]] = []
    compare(
        config,
        ["verl", "slime"],
        out=tmp_path / "runs",
        jobs=2,
        on_progress=lambda names, done, each: calls.append([*done]),
    )
    assert calls
    assert all(len(done) == 2 for done in calls)
    for before, after in pairwise(calls):
        assert all(x <= y <= 6 for x, y in zip(before, after, strict=True))


def test_a_run_counts_its_trajectories_and_is_the_same_for_it(config: RunConfig, tmp_path: Path):
    calls: list[tuple[int, int]] = []
    result = simulate(
        config, out=tmp_path / "runs", on_progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(n, 6) for n in range(1, 7)]
    assert result.summary == simulate(config, out=tmp_path / "runs").summary


def test_what_runs_is_named_by_what_has_begun():
    names = ["a", "b", "c"]
    assert running(names, [6, 3, 1], 6) == "b, c"
    assert running(names, [6, 0, 0], 6) == "b"
    assert running(names, [6, 6, 6], 6) == "closing"


def test_a_pipe_gets_no_progress_and_bars_of_ascii(trace: Path, tmp_path: Path):
    command = [*HEDDLE, "compare", trace, "--policies", "verl,slime", "--gpus", "2", "--wide"]
    outs = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr.startswith("Warning: 6 trajectories for 2 engines")
        assert len(done.stderr.splitlines()) == 1
        outs.append(done.stdout.splitlines())
    bars = outs[0][-7:-4]
    names = ("runs in ", "  20", "index in ", "next: open ")
    assert "".join(bars).isascii()
    assert "\x1b" not in "".join(outs[0])
    assert bars[0] == "makespan in seconds; ### is the bound, which no policy can beat"
    # Only the names of runs tell one output from the other.
    one, other = ([line for line in out if not line.startswith(names)] for out in outs)
    assert one == other


def test_bars_are_as_long_as_makespans(heddle: Heddle, trace: Path):
    options = ("compare", trace, "--policies", "verl,slime", "--gpus", "2", "--max-running", "2")
    result = json.loads(heddle(*options, "--json").stdout)
    lines = heddle(*options, "--wide").stdout.splitlines()[-6:-4]
    means = [p["makespan_s"]["mean"] for p in result["policies"]]
    for line, policy, mean in zip(lines, result["policies"], means, strict=True):
        name, bar, value = line.split()
        assert name == policy["policy"]
        assert len(bar) == round(60 * mean / max(means))
        assert bar.count("#") == round(60 * result["bound"]["makespan_s"] / max(means))
        assert bar == "#" * bar.count("#") + "-" * bar.count("-")
        assert float(value.replace(",", "")) == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize("environment", [{"TERM": "dumb", "COLUMNS": "80"}, {"COLUMNS": "80"}])
def test_a_narrow_or_dumb_terminal_shows_every_policy_whole(
    trace: Path, tmp_path: Path, environment: dict[str, str]
):
    parts = ("keep_engines", "sticky+never", "fixed+keep_engines", "round_robin")
    names = [f"heddle+{part}" for part in parts]
    names += ["heddle-paper+longest_total", "verl"]
    _, seen = on_terminal(
        "compare",
        trace,
        "--policies",
        ",".join(names),
        "--gpus",
        2,
        "--wide",
        folder=tmp_path,
        both=True,
        **environment,
    )
    plain = ESCAPES.sub("", seen).splitlines()
    start = next(i for i, line in enumerate(plain) if line.startswith("policy"))
    end = next(i for i, line in enumerate(plain) if line.startswith("next "))
    assert all(len(line.rstrip()) <= 80 for line in plain[start:end])
    heads = [line.split()[1:] for line in plain[start:end] if line.startswith("policy")]
    assert [name for head in heads for name in head] == names
    assert "…" not in "".join(plain[start:])
    bars = 1 + next(i for i, line in enumerate(plain) if line.startswith("makespan in seconds"))
    assert [line.split()[0] for line in plain[bars : bars + len(names)]] == names


def test_a_simulation_prints_rounded_numbers(heddle: Heddle, trace: Path):
    shown = heddle(*ONE_RUN, trace, "--gpus", 2).stdout
    numbers = re.findall(r"\b\d+\.\d+$", shown, re.MULTILINE)
    assert numbers
    assert all(len(number.lstrip("0.").replace(".", "")) <= 3 for number in numbers), numbers


def test_a_report_keeps_the_order_of_its_comparison(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl,heddle,slime", "--gpus", 2, "--seeds", 2)
    runs = sorted(path.parent for path in Path("runs").glob("*/*/manifest.json"))
    told = json.loads(heddle("report", *runs, "--json").stdout)["runs"]
    labels = [load_run(run["run"]).label for run in told]
    assert labels == [f"{p} s{seed}" for p in ("verl", "heddle", "slime") for seed in (0, 1)]
    page = ("-o", "page.html", "--force", "--json")  # quicker than figures
    backwards = json.loads(heddle("report", *runs[::-1], *page).stdout)["runs"]
    assert [run["run"] for run in backwards] == list(map(str, runs[::-1]))
    (runs[0].parent / "index.json").unlink()
    listed = json.loads(heddle("report", *runs, *page).stdout)["runs"]
    assert [run["run"] for run in listed] == list(map(str, runs))


def test_a_report_keeps_the_order_of_the_policies_that_compare_has_of_itself(
    heddle: Heddle, trace: Path
):
    heddle("compare", trace, "--gpus", 2, "--policies", "v*l,slime,heddle")
    runs = sorted(path.parent for path in Path("runs").glob("*/*/manifest.json"))
    told = json.loads(heddle("report", *runs, "--json").stdout)["runs"]
    presets = [load_run(run["run"]).label.partition(" ")[0] for run in told]
    assert presets == ["verl", "slime", "heddle"]


def test_json_has_no_bars(heddle: Heddle, trace: Path):
    out = heddle("compare", trace, "--policies", "verl", "--gpus", "2", "--json").stdout
    assert len(out.splitlines()) == 1
    assert json.loads(out)


@pytest.mark.parametrize(
    ("environment", "coloured", "blocks"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, False, True),
        ({"PYTHONIOENCODING": "ascii"}, True, False),
    ],
)
def test_a_terminal_gets_blocks_and_colour_unless_it_is_limited(
    trace: Path, tmp_path: Path, environment: dict[str, str], coloured: bool, blocks: bool
):
    _, seen = on_terminal(
        "compare",
        trace,
        "--policies",
        "verl,slime",
        "--gpus",
        2,
        "--wide",
        folder=tmp_path,
        both=True,
        **environment,
    )
    bars = seen[seen.rindex("makespan in seconds") :]
    assert ("\x1b[3" in bars) is coloured
    assert ("█" in bars) is blocks
    assert ("#" in bars) is not blocks


@pytest.mark.parametrize("engines", ["8 x TP 1", "16 x TP 1, 8 x TP 2, 4 x TP 4, 2 x TP 8"])
def test_a_table_of_a_verdict_has_at_most_100_columns(
    capsys: pytest.CaptureFixture[str], engines: str
):
    row = {
        "policy": "heddle+fixed+keep_engines",
        "engines": engines,
        "slots": "100",
        "makespan_s": "13,390.9",
        "of one rollout": "11,363 to 21,171",
        "over best": "1.616 ±0.114",
        "GPU-hours": "1.4",
        "$": "3.79",
    }
    show_rows([row])
    assert max(map(len, capsys.readouterr().out.splitlines())) > VERDICT_WIDTH
    show_rows([row, {**row, "policy": "verl"}], VERDICT_WIDTH)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= VERDICT_WIDTH
    words = out.split()
    assert "heddle+fixed+keep_engines" in words
    assert all(words.count(word) == 2 * engines.split().count(word) for word in ("TP", "x"))


def test_a_table_that_cannot_be_as_narrow_has_whole_names(capsys: pytest.CaptureFixture[str]):
    row = {"regime": "verl-fully-async", "policy": "sticky_least_loaded"}
    show_rows([row | {f"figure {n}": "1,234.567" for n in range(9)}], VERDICT_WIDTH)
    assert "sticky_least_loaded" in capsys.readouterr().out
