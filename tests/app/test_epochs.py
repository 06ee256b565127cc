"""Epoch files, and the order of a data set by them; frameworks' own loaders are in other tests."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heddle.config_error import ConfigError
from heddle.epochs.file import EpochFile, EpochLog, SampleLength, prompt_id, read_samples
from heddle.epochs.rows import EpochSettings, RowOrder
from heddle_core.events import (
    EngineFailed,
    StepFinished,
    StepPreempted,
    ToolReturned,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId
from tests.app.gateways import gateway

HEADER = '{"schema":"heddle.epoch/1"}\n'


def line(prompt: str, tokens: int, at_s: float = 1.0) -> str:
    return json.dumps({"prompt": prompt, "tokens": tokens, "at_s": at_s}) + "\n"


def written(path: Path, lengths: dict[str, int]) -> Path:
    file = EpochFile(path)
    for prompt, tokens in lengths.items():
        file.add(prompt, tokens)
    return path


def order(path: Path, ids: list[str], batch: int = 4, **options: Any) -> RowOrder:
    settings = EpochSettings(epoch_file=str(path), **options)
    return RowOrder(ids, settings, batch=batch, seed=7, place="data.heddle.")


# -- the file -------------------------------------------------------------------------------------


def test_lines_of_several_programs_are_read_and_an_unfinished_one_is_cut(tmp_path: Path):
    path = tmp_path / "epoch.jsonl"
    first = EpochFile(path)
    assert read_samples(path) == []
    first.add("a", 5)
    second = EpochFile(path)
    second.add("b", 6)
    first.add("a", 7)
    with path.open("a") as file:
        file.write('{"prompt": "c", "tok')
    with pytest.raises(ConfigError, match="line 5: ends within the line"):
        read_samples(path)
    EpochFile(path).add("d", 8)
    found = [(each.prompt, each.tokens) for each in read_samples(path)]
    assert found == [("a", 5), ("b", 6), ("a", 7), ("d", 8)]


def test_no_line_is_lost_where_others_open_the_file(tmp_path: Path):
    path = written(tmp_path / "epoch.jsonl", {"first": 1})
    code = (
        "import sys; from pathlib import Path; from heddle.epochs.file import EpochFile\n"
        "file = EpochFile(Path(sys.argv[1]))\n"
        "for n in range(2000): file.add('p', n)\n"
        "print('done', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as other:
        while other.poll() is None:
            EpochFile(path)
    assert other.returncode == 0
    assert [each.tokens for each in read_samples(path)] == [1, *range(2000)]
    assert path.read_text().startswith(HEADER)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"schema": "heddle.epoch/2"}\n',
            "line 1: has the schema heddle.epoch/2, and an epoch file of this Heddle",
        ),
        ('{"schema": "heddle.run/2"}\n', "line 1: has the schema heddle.run/2"),
        ("step,loss\n1,2\n", "line 1: has no schema"),
        ("[1]\n", "line 1: has no schema"),
        ("\udcff", "line 1: has no schema"),
        ('{"schema": "heddle.ep', "line 1: has no schema"),
        ('{"a": ' + "[" * 5_000, "line 1: has no schema"),
        (HEADER + line("a", 1) + "x\n", "line 3: JSON is malformed"),
        (HEADER + '{"a": ' + "[" * 5_000 + "\n", "line 2: .* remove the line"),
        (HEADER + line("a", -1), r"line 2: Expected `int` >= 0 - at `\$.tokens`"),
        (HEADER + '{"prompt": "a"}\n', "line 2: Object missing required field `tokens`"),
    ],
)
def test_what_is_no_epoch_file_names_its_line(tmp_path: Path, text: str, said: str):
    path = tmp_path / "epoch.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"epoch\.jsonl, {said}"):
        order(path, ["a", "b"], 2)
    before = path.read_bytes()
    if "line 1" in said:
        with pytest.raises(ConfigError, match="line 1"):
            EpochFile(path)
    assert path.read_bytes() == before


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="give the path of an epoch file that can be written"):
        EpochFile(tmp_path / "none" / "epoch.jsonl")


def test_the_log_has_trajectories_that_ended_of_themselves(tmp_path: Path):
    path = tmp_path / "epoch.jsonl"
    log = EpochLog(path)

    def arrive(name: str, group: str) -> None:
        log(
            TrajectoryArrived(
                time_s=0.0, rollout="r", trajectory=name, group=group, task="t", prompt_tokens=9
            ),
            (),
        )

    def step(name: str, tokens: int, kind: Any = StepFinished, **more: Any) -> None:
        common = {"time_s": 1.0, "trajectory": name, "step": 0, "engine": EngineId("e0")}
        log(kind(output_tokens=tokens, **common, **more), ())

    def tool(name: str) -> None:
        log(
            ToolReturned(
                time_s=1.0,
                trajectory=name,
                step=0,
                tool="",
                ok=None,
                observation_tokens=3,
                context_tokens=3,
            ),
            (),
        )

    def end(name: str, outcome: Any) -> None:
        log(TrajectoryFinished(time_s=2.0, trajectory=name, outcome=outcome), ())

    for name in ("done", "idle", "cut", "broken", "failed", "resumed"):
        arrive(name, f"of {name}")
    for name in ("done", "idle", "cut"):
        step(name, 10, reason="tool_call")
    tool("done")
    step("done", 5, StepPreempted)
    step("done", 6, reason="answer")
    end("done", "completed")
    end("idle", "cancelled")  # its client sends nothing more
    tool("cut")
    end("cut", "cancelled")
    step("broken", 4, reason="error")
    end("broken", "completed")
    step("failed", 4, reason="answer")
    end("failed", "failed")
    salvaged = (("resumed", 3),)
    log(EngineFailed(time_s=1.0, engine=EngineId("e0"), reason="x", salvaged=salvaged), ())
    step("resumed", 4, reason="length_limit")
    end("resumed", "truncated")
    end("unknown", "completed")
    found = {each.prompt: each.tokens for each in read_samples(path)}
    assert found == {"of done": 21, "of idle": 10, "of resumed": 7}


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path: Path, caplog: Any, monkeypatch: Any):
    log = EpochLog(tmp_path / "epoch.jsonl")

    def full(self: EpochFile, prompt: str, tokens: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EpochFile, "add", full)
    for name in ("a", "b"):
        log(
            TrajectoryArrived(
                time_s=0.0, rollout="r", trajectory=name, group=name, task="t", prompt_tokens=9
            ),
            (),
        )
        log(
            StepFinished(
                time_s=1.0,
                trajectory=name,
                step=0,
                engine=EngineId("e0"),
                output_tokens=3,
                reason="answer",
            ),
            (),
        )
        log(TrajectoryFinished(time_s=2.0, trajectory=name, outcome="completed"), ())
    (record,) = caplog.records
    assert "No space left on device: no more lengths are written" in record.getMessage()


def test_names_follow_the_content_of_rows():
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "extra_info": {"index": 3}}
    assert prompt_id(row) == prompt_id(dict(reversed(row.items())))
    assert prompt_id(row) != prompt_id({**row, "extra_info": {"index": 4}})
    assert prompt_id({**row, "image": object()}) == prompt_id({**row, "image": object()})
    assert "_" not in prompt_id(row)


# -- lengths ---------------------------------------------------------------------------------------


def test_a_sample_counts_for_the_epoch_that_it_ended_in(tmp_path: Path, monkeypatch: Any):
    now_s = 0.0
    monkeypatch.setattr("heddle.epochs.rows.time.time", lambda: now_s)
    path = tmp_path / "epoch.jsonl"
    rows = order(path, ["a", "b", "c", "d"], 2)
    rows.begin()
    now_s = 100.0
    old = {"a": 100, "b": 200, "c": 40, "d": 10}
    path.write_text(HEADER + "".join(line(*each, 50.0) for each in old.items()))
    rows.begin()
    now_s = 200.0
    with path.open("a") as file:
        file.write("".join(line(*each, 150.0) for each in {**old, "a": 1}.items()))
    found = rows.begin()
    # The mean of both epochs would put a with b.
    assert {frozenset(found[:2]), frozenset(found[2:])} == {frozenset((1, 2)), frozenset((0, 3))}


# -- the order ------------------------------------------------------------------------------------


def test_the_first_epoch_is_random_and_later_ones_are_packed(tmp_path: Path):
    path = tmp_path / "epoch.jsonl"
    ids = [f"p{n}" for n in range(32)]
    rows = order(path, ids)
    first = rows.begin()
    assert sorted(first) == list(range(32)) != first
    written(path, {f"p{n}": 10 * n for n in range(32)} | {"of another": 1})
    for _ in range(3):
        packed = rows.begin()
        assert sorted(packed) == list(range(32))
        assert all(len({n // 4 for n in packed[at : at + 4]}) == 1 for at in range(0, 32, 4))
    # A second run knows the lengths from the beginning.
    assert {n // 4 for n in order(path, ids).begin()[:4]} in [{k} for k in range(8)]
    tail = order(path, ids, plan="tail:.25").begin()
    batches = [set(tail[at : at + 4]) for at in range(0, 32, 4)]
    assert {28, 29, 30, 31} in batches
    assert {24, 25, 26, 27} in batches
    assert not any(len({n // 4 for n in each}) == 1 for each in batches if max(each) < 24)


def test_random_needs_no_lengths(tmp_path: Path):
    rows = order(tmp_path / "none.jsonl", ["a", "a", "b"], 2, plan="random")
    assert {tuple(sorted(rows.begin())) for _ in range(3)} == {(0, 1, 2)}


MISMATCHES = [
    (
        {"x": 1, "y": 2},
        ["a", "b"],
        2,
        "has lengths of 0 of the 2 prompts of the data set, and of 2",
    ),
    ({"a": 1}, ["a", "b", "a", "c"], 2, "rows 0 and 2 of the data set are the same prompt, a"),
    ({"a": 1}, ["a", "b", "c"], 2, "3 prompts are no whole batches of 2: take 2 of them"),
]


@pytest.mark.parametrize(("lengths", "ids", "batch", "said"), MISMATCHES)
def test_a_file_that_does_not_fit_is_refused_or_ignored_on_demand(
    tmp_path: Path, caplog: Any, lengths: dict[str, int], ids: list[str], batch: int, said: str
):
    path = written(tmp_path / "epoch.jsonl", lengths)
    with pytest.raises(ConfigError, match=said):
        order(path, ids, batch)
    rows = order(path, ids, batch, on_mismatch="random")
    assert sorted(rows.begin()) == list(range(len(ids)))
    assert f"{caplog.records[0].getMessage()}".endswith("The order is random instead")
    assert said in caplog.records[0].getMessage()


def test_a_file_that_fits_few_prompts_says_how_many(tmp_path: Path, caplog: Any):
    ids = [f"p{n}" for n in range(32)]
    path = written(tmp_path / "epoch.jsonl", {"p3": 5} | {f"other {n}": n for n in range(40)})
    rows = order(path, ids)
    (record,) = caplog.records
    assert "lengths of 1 of the 32 prompts of the data set, and of 40 others" in record.getMessage()
    assert "3.1 % are known" in record.getMessage()
    assert sorted(rows.begin()) == list(range(32))
    caplog.clear()
    order(written(path, dict.fromkeys(ids[:16], 5)), ids)
    assert not caplog.records


def test_after_an_epoch_the_file_must_have_half_of_the_prompts(tmp_path: Path):
    path = tmp_path / "epoch.jsonl"
    ids = [f"p{n}" for n in range(8)]
    rows = order(path, ids)
    rows.begin()
    with pytest.raises(ConfigError, match=r"epoch\.jsonl: No such file or directory"):
        rows.begin()
    written(path, {f"p{n}": n for n in range(3)} | {"q": 1})
    with pytest.raises(
        ConfigError, match=r"of 3 of the 8 prompts .* of 1 others.*data\.heddle\.on_mismatch=random"
    ):
        rows.begin()
    written(path, {"p3": 3})
    assert sorted(rows.begin()) == list(range(8))


def test_an_evaluation_before_the_first_epoch_is_no_other_data_set(tmp_path: Path):
    path = tmp_path / "epoch.jsonl"
    rows = order(path, ["a", "b"], 2)
    written(path, {"evaluated": 5})
    assert sorted(rows.begin()) == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": "sort"}, r"data\.heddle\.plan = 'sort' is no epoch plan"),
        ({"on_mismatch": "ignore"}, r"data\.heddle\.on_mismatch is 'ignore': write error or"),
        ({"epoch_file": ""}, r"data\.heddle\.epoch_file is missing"),
    ],
)
def test_wrong_keys_are_named(options: dict[str, str], said: str):
    settings = EpochSettings(**({"epoch_file": "x"} | options))
    with pytest.raises(ConfigError, match=said):
        RowOrder(["a"], settings, batch=1, seed=None, place="data.heddle.")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("x.jsonl", r"data\.heddle is 'x\.jsonl': give it data\.heddle\.epoch_file"),
        ({"file": "x"}, r"data\.heddle is {'file': 'x'}: give it data\.heddle\.epoch_file"),
        ({"epoch_file": "x", "plan": 0.25}, r"data\.heddle\.plan is 0\.25: write text"),
        (None, r"data\.heddle\.epoch_file is missing"),
    ],
)
def test_a_section_that_is_none_is_refused(section: object, said: str):
    with pytest.raises(ConfigError, match=said):
        EpochSettings.of(section, "data.heddle.").checked("data.heddle.")


def test_a_seed_below_zero_is_refused(tmp_path: Path):
    settings = EpochSettings(epoch_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="the seed of the order of rows is -1: give 0 or more"):
        RowOrder(["a"], settings, batch=1, seed=-1, place="data.heddle.")


def test_batches_of_no_prompts_are_refused_though_mismatches_go_on(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"batches have 0 prompts.*synchronous trainer"):
        order(tmp_path / "none", ["a", "b"], batch=0, on_mismatch="random")


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_resumed_epoch_goes_on_in_its_order_though_the_file_has_grown(tmp_path: Path):
    path = written(tmp_path / "epoch.jsonl", {f"p{n}": n for n in range(8)})
    ids = [f"p{n}" for n in range(8)]
    loaded = order(path, ids)
    assert len(loaded) == 8
    list(loaded)
    rows = iter(loaded)
    seen = [next(rows) for _ in range(3)]
    state = json.loads(json.dumps(loaded.state_dict()))
    written(path, {f"p{n}": 100 - 13 * n for n in range(8)})

    resumed = order(path, ids)
    resumed.load_state_dict(state)
    assert sorted([*seen, *resumed]) == list(range(8))
    assert [*resumed.state_dict()["starts"][:2]] == state["starts"]
    # Where a loader has had all rows, or none yet, the next epoch begins.
    for over in (resumed.state_dict(), order(path, ids).state_dict()):
        ended = order(path, ids)
        ended.load_state_dict(over)
        assert sorted(ended) == sorted(ended) == list(range(8))
    with pytest.raises(ConfigError, match="an order of 8 prompts, and the data set has 4"):
        order(path, ids[:4]).load_state_dict(state)
    with pytest.raises(ConfigError, match="order is of other prompts"):
        order(tmp_path / "new", [f"q{n}" for n in range(8)]).load_state_dict(state)


def test_positions_of_a_data_set_begin_an_epoch_at_the_first(tmp_path: Path):
    path = written(tmp_path / "epoch.jsonl", {f"p{n}": n for n in range(8)})
    rows = order(path, [f"p{n}" for n in range(8)])
    one, two = ([rows.row(at) for at in range(8)] for _ in range(2))
    assert sorted(one) == sorted(two) == list(range(8))
    assert len(rows.state_dict()["starts"]) == 2
    resumed = order(path, [f"p{n}" for n in range(8)])
    resumed.load_state_dict(rows.state_dict())
    assert [resumed.row(at) for at in range(3, 8)] == two[3:]


# -- the gateway -----------------------------------------------------------------------------------


def test_the_gateway_writes_lengths_by_the_groups_of_its_clients(tmp_path: Path):
    pytest.importorskip("aiohttp", reason="the gateway needs aiohttp")
    options = ("--engine", "fake", "--set", "runtime.time_scale=0.01")
    with gateway(tmp_path, *options, "--set", "serve.epoch_file=epoch.jsonl") as served:
        used: dict[str, list[int]] = {}
        for session in ("p1_0", "p1_1", "p2_0", "other"):
            total = 0
            for step in range(2):
                answer = served.post(
                    "/v1/completions",
                    {"prompt": f"t{step} {session}", "max_tokens": 30},
                    **{"X-Session-ID": session, "X-Heddle-Group": "p2" * (session == "other")},
                )
                total += answer["usage"]["completion_tokens"]
            served.post(f"/finish_session?session_id={session}")
            used.setdefault(session.partition("_")[0].replace("other", "p2"), []).append(total)
        served.end()
    found: dict[str, list[int]] = {}
    for sample in read_samples(tmp_path / "epoch.jsonl"):
        assert isinstance(sample, SampleLength)
        found.setdefault(sample.prompt, []).append(sample.tokens)
    assert found == used


def test_the_gateway_refuses_a_file_of_others_before_it_starts(
    refused: Callable[..., str], tmp_path: Path
):
    pytest.importorskip("aiohttp", reason="the gateway needs aiohttp")
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n")
    out = ("--out", tmp_path / "runs")
    said = refused("serve", "--engine", "fake", "--set", f"serve.epoch_file={path}", *out)
    assert f"{path}, line 1: has no schema" in said
    assert path.read_text() == "step,loss\n"
    assert not (tmp_path / "runs").exists()
