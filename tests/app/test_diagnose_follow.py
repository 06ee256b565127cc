"""`heddle diagnose --follow`: steps of logs that are being written."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.cli import follow
from heddle.diagnosis.remedies import Remedy
from heddle.search import result
from heddle.search.race import Race
from heddle_trace import TraceError
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.reading import read_observed
from heddle_trace.observed.schema import SCHEMA, ObservedHeader, ObservedRequest, Phase
from tests.app.journals import Heddle
from tests.app.test_diagnose import FIXTURES, QUICK

HEAD = msgspec.json.encode(ObservedHeader(schema=SCHEMA, source="verl", clock="shared")) + b"\n"
Follow = Callable[..., Any]


def step(label: int, tokens: int = 100, begin_s: float | None = None) -> bytes:
    """Lines of a step of 16 s: 10 of trajectories, 6 of training."""
    at_s = 16.0 * label if begin_s is None else begin_s
    seen = [
        ObservedRequest(
            trajectory_id=f"{label}/{number}",
            step=0,
            rl_step=label,
            start_s=at_s,
            decode_s=6.0,
            tool_s=4.0,
            input_tokens=10,
            output_tokens=tokens,
        )
        for number in range(4)
    ]
    training = Phase(phase="training", start_s=at_s + 10.0, end_s=at_s + 16.0, rl_step=label)
    return b"".join(msgspec.json.encode(each) + b"\n" for each in (*seen, training))


@pytest.fixture
def followed(heddle: Heddle, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Follow the folder `logs`, act between two looks, and press ctrl-C after the last act."""
    Path("logs").mkdir()

    def run(*acts: Callable[[], object], more: Sequence[object] = QUICK) -> Any:
        left = list(acts)

        def act(_: float) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(follow, "pause", act)
        done = heddle("diagnose", "--follow", "logs", *more)
        assert done.exit_code == 130, done.output
        assert done.stderr.endswith("Interrupted.\n")
        return done

    return run


def appends(*pieces: bytes, name: str = "verl.jsonl") -> list[Callable[[], object]]:
    def act(piece: bytes) -> None:
        with (Path("logs") / name).open("ab") as file:
            file.write(piece)

    return [lambda piece=piece: act(piece) for piece in pieces]


def numbers(done: Any) -> list[int]:
    """Of the steps that are complete."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    return [int(line.split()[1]) for line in lines if not line.endswith(" so far")]


def test_a_step_is_shown_once_when_another_has_begun(followed: Follow):
    written = HEAD + b"".join(map(step, range(1, 5)))
    cuts = range(0, len(written) + 97, 97)  # in the middle of lines
    done = followed(*appends(*(written[a : a + 97] for a in cuts)))
    assert numbers(done) == [1, 2, 3]
    first = " ".join(done.stdout.splitlines()[0].split())
    assert first == "step 1 16.0 s 37.5 % training, 37.5 % decode, 25.0 % tool"
    last = " ".join(done.stdout.splitlines()[-1].split())
    assert last == "step 4 16.0 s 37.5 % training, 37.5 % decode, 25.0 % tool so far"
    assert "damaged" not in done.stderr
    assert "malformed" not in done.stderr


def test_as_json_each_step_is_a_line(followed: Follow):
    done = followed(*appends(HEAD + step(1), step(2)), more=(*QUICK, "--json"))
    line, left = map(json.loads, done.stdout.splitlines())
    assert (left["kind"], left["step"]) == ("unfinished", 2)
    assert line["schema"] == "heddle.follow/1"
    assert (line["kind"], line["step"], line["seconds"]) == ("step", 1, 16.0)
    assert sum(line["parts"].values()) == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("moved", "on", "grown"), [(0.2, ["1/0", "4/0", "6/0"], 100), (1.5, ["1/0", "6/0"], 200)]
)
def test_a_recommendation_is_searched_and_shown_when_lengths_drift(
    followed: Follow, monkeypatch: pytest.MonkeyPatch, moved: float, on: list[str], grown: int
):
    searched: list[Container[str]] = []

    def remedies(
        steps: ObservedSteps, config: object, of: Container[str]
    ) -> tuple[list[Remedy], str]:
        searched.append(of)
        wide = "6/0" in of
        found = Remedy(
            over="verl with TP 1, qwen3-14b on 8 h100",
            setting="verl with 2 x TP 4" if wide else "verl with 8 x TP 1",
            saving=0.2,
            low=0.1,
            high=0.3,
            framework="verl",
            block="tp=4" if wide else "tp=1",
        )
        return [found], ""

    monkeypatch.setattr(follow, "found_remedies", remedies)
    tokens = [100, 101, 105, 150, 155, 300, 300, 310]
    acts = appends(HEAD, *(step(n + 1, each) for n, each in enumerate(tokens)), step(9))
    done = followed(*acts, more=("--set", f"diagnose.follow_moved={moved}"))
    assert [next(name for name in on if name in each) for each in searched] == on
    lines = done.stdout.splitlines()
    changes = f"(parts +0 %, lengths +{grown} %, tools +0 %)"
    said = ["after step 1: recommended", f"after step 6 {changes}: recommended"]
    assert [line for line in lines if "recommended" in line] == said
    assert lines[lines.index(said[1]) + 2] == "   tp=4"


def test_an_empty_folder_is_said_once(followed: Follow):
    done = followed(*[lambda: None] * 3, *appends(b""))
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["logs: no file yet", "Interrupted."]


def test_damage_is_said_once_and_what_follows_is_shown_when_it_is_mended(followed: Follow):
    path = Path("logs/verl.jsonl")
    acts = appends(HEAD + step(1), step(2) + b"{no JSON\n", step(3))
    done = followed(*acts, lambda: path.write_bytes(HEAD + step(1) + step(2) + step(3)))
    assert done.stderr.count("malformed JSON") == 1
    assert "verl.jsonl: line 12" in done.stderr
    assert numbers(done) == [1, 2]


@pytest.mark.parametrize(("skip", "shown"), [("false", []), ("true", [1, 2, 3])])
def test_a_writer_that_was_killed_in_a_line_and_goes_on_in_the_same_file(
    followed: Follow, skip: str, shown: list[int]
):
    cut = HEAD + step(1) + step(2)[:-30]
    more = (*QUICK, "--set", f"logs.skip_bad={skip}")
    done = followed(*appends(cut + HEAD + step(2) + step(3), step(4)), more=more)
    assert numbers(done) == shown
    assert done.stderr.count("malformed JSON") == (0 if shown else 1)


def test_a_file_that_is_removed_and_another_run_in_its_place(followed: Follow):
    path = Path("logs/verl.jsonl")
    again = HEAD + step(1, begin_s=0.0) + step(2, begin_s=16.0)
    acts = [*appends(HEAD + step(1), step(2), step(3)), path.unlink, lambda: None]
    done = followed(*acts, lambda: path.write_bytes(again))
    assert numbers(done) == [1, 2, 1]
    assert done.stderr.splitlines() == ["logs: no file yet"] * 2 + ["Interrupted."]


def test_old_steps_that_are_removed_are_not_shown_again(followed: Follow):
    path = Path("logs/verl.jsonl")
    acts = appends(HEAD + step(1), step(2), step(3))
    done = followed(*acts, lambda: path.write_bytes(HEAD + step(2) + step(3)), *appends(step(4)))
    assert numbers(done) == [1, 2, 3]


def test_steps_that_were_recorded_whole_need_none_after_them(followed: Follow):
    done = followed(lambda: shutil.copy(FIXTURES / "nemo_rl.json", "logs"))
    assert numbers(done) == [1]


def test_logs_without_steps_are_said_to_have_none(followed: Follow):
    done = followed(lambda: shutil.copy(FIXTURES / "vllm.prom", "logs"))
    assert done.stdout == ""
    assert "number no steps" in done.stderr


def test_ctrl_c_ends_a_search_too(followed: Follow, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(result, "all_rounds", interrupted)
    monkeypatch.setattr(Race, "ranked", lambda _: ["some"])
    done = followed(*appends(HEAD + step(1), step(2)), *[lambda: 1 / 0], more=())
    assert numbers(done) == [1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none",), "no such folder"),
        (("logs", "logs"), "one folder"),
        (("logs", "--set", "diagnose.observed=a.jsonl"), "writes no file"),
        (("logs", "--set", "diagnose.follow_moved=-1"), "diagnose.follow_moved must be from 0"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    followed: Follow, refused: Callable[..., str], words: tuple[str, ...], said: str
):
    assert said in refused("diagnose", "--follow", *words)


@pytest.mark.parametrize("name", ["nemo_rl.json", "rl_insight.jsonl", "rl_insight.jsonl.gz"])
def test_a_file_that_grows_is_read_as_far_as_it_goes(tmp_path: Path, name: str):
    whole = (FIXTURES / name.removesuffix(".gz")).read_bytes()
    whole = gzip.compress(whole) if name.endswith(".gz") else whole
    path = tmp_path / name
    path.write_bytes(whole[: int(len(whole) * 0.9)])
    with pytest.raises(TraceError):
        read_observed([path])
    read = read_observed([path], growing=True)
    assert read.notes.damaged == 0
    assert read.steps.count > 0


def test_a_training_in_another_process_is_followed(tmp_path: Path):
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "verl.jsonl"
    path.write_bytes(HEAD + step(1))
    words = ["--set", "diagnose.follow_s=0", *QUICK]
    with subprocess.Popen(
        [sys.executable, "-m", "heddle.cli", "diagnose", "--follow", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for label in (2, 3):
            with path.open("ab") as file:
                file.write(step(label))
            assert process.stdout.readline().startswith(f"step {label - 1} ")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == "Interrupted.\n"
