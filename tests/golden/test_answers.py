"""Commands answer as they did at the commit that is recorded, digit by digit."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.golden.record_answers import (
    ANSWERS,
    COLUMN,
    ROOT,
    Answer,
    AnswerError,
    Command,
    answer,
    commands,
    differences,
    page_data,
    recorded,
    steps_of,
    table,
    translated,
)
from tests.in_turn import some

COMMANDS = commands()
RUN = [c for c in COMMANDS if not c.notebook]
"""Notebooks have a test of their own, tests/app/test_notebooks.py."""
MOST_BYTES, MOST_BYTES_OF_A_FILE = 3_000_000, 512 * 1024
FEWEST = 80
IMPORTERS = (
    *("mooncake", "dynamo", "swe-agent", "tau2", "inspect", "claude-code", "verl", "openai-chat"),
    *("openai-responses", "otel", "langfuse", "langsmith", "atif", "openhands"),
)

FORM = re.compile(r"|--[a-z-]+( [a-z_.]+=[a-z]+)?|[a-z_]+(\.[a-z0-9_]+)*(\[\]|=[a-z]+)?")
"""Of what an option becomes: nothing, a flag, or a key, with [] for a list or with its value."""


@cache
def answers() -> dict[str, Answer]:
    return {name: found for g in {c.group for c in COMMANDS} for name, found in recorded(g).items()}


def same(command: Command) -> None:
    if command.missing():
        pytest.skip(f"{command.missing()[0].relative_to(ROOT.parent)} is not beside this clone")
    assert differences(command, answers()[command.name], answer(command), COLUMN) == []


@pytest.mark.parametrize("command", [c for c in RUN if c.fast], ids=lambda c: c.name)
def test_a_quick_command_answers_as_before(command: Command) -> None:
    same(command)


MANY = some([c for c in RUN if not (c.fast or c.soak)], 2)
LONG = [pytest.param(c, marks=pytest.mark.soak) for c in RUN if c.soak]


@pytest.mark.slow
@pytest.mark.parametrize("command", [*MANY, *LONG], ids=lambda c: c.name)
def test_a_command_answers_as_before(command: Command) -> None:
    same(command)


def test_every_command_has_an_answer_and_every_answer_a_command() -> None:
    names = [command.name for command in COMMANDS]
    assert sorted(names) == sorted(answers())
    assert len(names) == len(dict.fromkeys(names))
    assert len(names) >= FEWEST


def test_answers_are_small_and_name_no_place_of_a_machine() -> None:
    files = sorted(ANSWERS.glob("*.json"))
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) <= MOST_BYTES_OF_A_FILE
    assert sum(sizes) <= MOST_BYTES
    for name, found in answers().items():
        paths = [text for text in _texts(found) if text.startswith(("/", "~"))]
        assert paths == [], name


def test_all_regimes_and_kept_importers_are_recorded() -> None:
    regimes = answers()["list.regimes"]["stdout"][0]
    names = [c.name.removeprefix("loop.regime.").partition(":")[0] for c in COMMANDS]
    assert [regime for regime in regimes if regime not in names] == []
    imports = [found["stdout"][0] for name, found in answers().items() if name.startswith("import")]
    assert {each["format"] for each in imports} == set(IMPORTERS)


def test_runs_were_replayed_the_same() -> None:
    replayed = [
        document
        for found in answers().values()
        for document in found["stdout"]
        if isinstance(document, dict) and document.get("schema") == "heddle.runs.replay/1"
    ]
    assert len(replayed) >= 10
    assert all(each["same"] and each["commands"] > 50 for each in replayed)


def test_answers_tell_policies_and_regimes_apart() -> None:
    presets = [
        found["stdout"][0]["runs"][0]["makespan_s"]
        for name, found in answers().items()
        if name.startswith("compare.preset.")
    ]
    assert len(dict.fromkeys(presets)) >= 16
    loops = [
        found["stdout"][0]["regimes"][0]["step_s"]["mean"]
        for name, found in answers().items()
        if name.startswith("loop.regime.")
    ]
    assert len(loops) == 14
    assert len(dict.fromkeys(loops)) >= 11


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", RUN, ids=lambda c: c.name)
def test_a_command_has_as_many_steps_with_an_answer_in_both_columns(command: Command) -> None:
    tables = table()
    old, new = (steps_of(command, column, tables) for column in ("old", "new"))
    assert sum("--json" in step for step in old) == sum("--json" in step for step in new)


def test_a_step_is_said_in_the_new_command_line() -> None:
    tables = table()
    step = "loop t.jsonl --regimes sync --steps 4 --repeat --train-gpus 4,8 --tp best --json"
    assert translated(step, tables) == (
        "loop t.jsonl --regimes sync --set loop.batches=4 --set loop.repeat=true "
        "--sweep loop.train_gpus=4,8 --tp best --json --seeds 1"
    )
    assert translated("simulate t.jsonl --policy verl --price h100=2", tables) == (
        "compare t.jsonl --policies verl --set prices.h100=2 --seeds 1"
    )
    moved = "compare t.jsonl --seeds 2 --env-latency 2 --set cluster.restarts=1 --tag swe=h20"
    assert translated(moved, tables) == (
        "compare t.jsonl --seeds 2 --set cluster.env_latency=2 --set cluster.restarts=1 "
        """--set 'policy.tags=["swe=h20"]'"""
    )
    with pytest.raises(AnswerError, match="the verb train has no new form"):
        translated("train --json", tables)
    with pytest.raises(AnswerError, match="--base of predict fit has no new form"):
        translated("predict fit t.jsonl --base m", tables)


def test_a_row_of_the_table_names_a_flag_or_a_key_or_nothing() -> None:
    tables = table()
    for verb, options in tables["options"].items():
        assert verb == "*" or verb in tables["verbs"]
        for option, target in options.items():
            assert option.startswith("-")
            assert FORM.fullmatch(target), f"{verb} {option}"
    keys = [*tables["config"], *tables["config"].values(), *tables["sweeps"].values()]
    assert [key for key in keys if key.startswith("-") or not FORM.fullmatch(key)] == []
    assert [o for o in tables["sweeps"] if o not in _options(tables)] == []
    assert [o for o in tables["valueless"]["options"] if o not in _options(tables)] == []


def _options(tables: dict[str, Any]) -> list[str]:
    return [option for options in tables["options"].values() for option in options]


# -- the comparison --------------------------------------------------------------------------------


def _command(name: str) -> Command:
    return next(command for command in COMMANDS if command.name == name)


def _answer(**values: Any) -> Answer:
    return {"stdout": [values], "files": {}}


def test_the_comparison_sees_a_late_digit_and_what_is_absent() -> None:
    tiny = _command("compare.tiny")
    was = _answer(a=0.1, b=[1, {"c": 2}], d={})
    assert differences(tiny, was, json.loads(json.dumps(was)), "old") == []
    assert differences(tiny, was, _answer(a=0.1, b=[1, {"c": 2}], d=[]), "old") != []
    assert (
        differences(tiny, was, _answer(a=0.10000000000000002, b=[1, {"c": 2}], d={}), "old") == []
    )
    now = _answer(a=0.10000000000001, b=[1], e=None)
    assert differences(tiny, was, now, "old") == [
        "compare.tiny: stdout/0 a: recorded 0.1, now 0.10000000000001",
        "compare.tiny: stdout/0 b.length: recorded 2, now 1",
        "compare.tiny: stdout/0 b.1.c: recorded 2, now 'absent'",
        "compare.tiny: stdout/0 d: recorded {}, now 'absent'",
    ]
    assert differences(tiny, _answer(a=1), _answer(a=True), "old") != []


def test_a_further_key_is_no_difference_and_a_further_row_is_one() -> None:
    tiny, was = _command("compare.tiny"), _answer(runs=[{"a": 1}])
    assert differences(tiny, was, _answer(runs=[{"a": 1, "b": 2}], c=3), "old") == []
    assert differences(tiny, was, _answer(runs=[{"a": 1}, {"a": 1}]), "old") == [
        "compare.tiny: stdout/0 runs.length: recorded 1, now 2"
    ]


def test_in_the_new_column_keys_are_moved_first() -> None:
    one, was = _command("compare.one_policy.verl"), _answer(makespan_s=2.5)
    assert differences(one, was, _answer(runs=[{"makespan_s": 2.5}]), "new") == []
    assert differences(one, was, _answer(runs=[{"makespan_s": 2.4}]), "new") == [
        "compare.one_policy.verl: stdout/0 runs.0.makespan_s: recorded 2.5, now 2.4"
    ]
    logs, was = _command("compare.logs"), _answer(comparison={"a": [{"b": 1}]}, plan={"c": 2})
    assert differences(logs, was, _answer(a=[{"b": 1}], logs={}), "new") == []
    assert len(differences(logs, was, _answer(a=[{"b": 3}]), "new")) == 1


def test_a_page_without_data_is_an_error() -> None:
    with pytest.raises(AnswerError, match="no data"):
        page_data(b"<html></html>")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
