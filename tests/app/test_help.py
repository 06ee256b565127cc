"""Help texts: groups, examples that parse, suggestions, completion; lines that fit."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich_click as click
from click.shell_completion import BashComplete

from heddle.cli import VERBS, main
from heddle.cli.help_examples import EXAMPLES
from heddle.cli.help_panels import COMMANDS, OPTIONS
from tests.app.journals import ONE_RUN, Heddle


def verb(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


MOST_OPTIONS, MOST_OF_ONE = 160, 20
"""Of all commands and verbs, and of the largest: they only go down."""


def commands(found: click.Command) -> list[click.Command]:
    if not isinstance(found, click.Group):
        return [found]
    context = click.Context(found)
    each = (found.get_command(context, name) for name in found.list_commands(context))
    return [command for one in each if one is not None for command in commands(one)]


def test_an_option_is_a_key_unless_many_set_it():
    options = [
        sum(isinstance(parameter, click.Option) for parameter in command.params)
        for command in commands(main)
    ]
    assert sum(options) <= MOST_OPTIONS
    assert max(options) <= MOST_OF_ONE


def test_every_verb_is_in_one_group_of_the_help():
    assert sorted(name for names in COMMANDS.values() for name in names) == sorted(VERBS)


def test_every_verb_has_examples_in_its_help(heddle: Heddle):
    assert EXAMPLES.keys() == VERBS.keys()
    for name in ("compare", "policies"):
        said = heddle(name, "--help").stdout
        assert all(line in said for line in EXAMPLES[name])


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_parses(line: str):
    program, name, *args = shlex.split(line)
    assert program == "heddle"
    command = verb(name)
    if isinstance(command, click.Group) and args and not args[0].startswith("-"):
        _, sub, args = command.resolve_command(click.Context(command), args)
        assert sub is not None
        command = sub
    command.make_context(name, args)


def test_every_option_of_a_panel_is_one_of_a_command():
    flags = {flag for name in VERBS for each in verb(name).params for flag in each.opts}
    assert {flag for listed in OPTIONS.values() for flag in listed} <= flags


def test_options_of_compare_are_in_panels():
    compare: Any = verb("compare")
    assert [panel.name for panel in compare.panels] == list(OPTIONS)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("comprae",), "compare"),
        (("polices",), "policies"),
        (("profile", "lst"), "list"),
        (("policies", "chek"), "check"),
        (("compare", "t.jsonl", "--polices", "verl"), "--policies"),
        (("runs", "--lsat", "1"), "--last"),
    ],
)
def test_a_misspelt_command_or_option_gets_a_suggestion(
    heddle: Heddle, words: tuple[str, ...], near: str
):
    done = heddle(*words)
    assert done.exit_code == 2
    assert "Did you mean" in done.stderr
    assert f"'{near}'" in done.stderr


@pytest.mark.parametrize(
    ("words", "begun", "offered"),
    [([], "comp", "compare"), (["compare"], "--poli", "--policies"), (["trace"], "imp", "import")],
)
def test_a_shell_completes_commands_and_options(words: list[str], begun: str, offered: str):
    shell = BashComplete(main, {}, "heddle", "_HEDDLE_COMPLETE")
    assert offered in [item.value for item in shell.get_completions(words, begun)]


@pytest.mark.parametrize(
    "model", [("qwen3-14b", "h100"), ("qwen3-32b-fp8", "h800"), ("llama-3.1-70b-fp8", "h800")]
)
def test_lines_above_the_figures_fit_80_columns(
    heddle: Heddle, trace: Path, model: tuple[str, str]
):
    done = heddle(*ONE_RUN, trace, "--model", model[0], "--gpu", model[1], "--tp", 8)
    assert done.exit_code == 0, done.output
    head = done.stdout.partition("\n\n")[0].splitlines()
    labels = [line[:9].strip() for line in head if line[:9].strip()]
    assert labels == ["trace", "cluster", "profile", "history", "prices", "bound", "ideal"]
    assert max(map(len, head)) <= 80


def test_the_profile_of_the_default_cluster_is_one_line(heddle: Heddle, trace: Path):
    head = heddle(*ONE_RUN, trace, "--gpus", 2).stdout.splitlines()
    said = "profile  vLLM 0.24 kernel tables, decode error 1.1 % median, 3.9 % worst"
    assert head[2] == said


def test_the_top_level_is_short():
    assert len(VERBS) == 18


def test_a_verb_that_went_is_refused_with_what_takes_its_place(refused: Callable[..., str]):
    assert "python -m experiments real_training" in refused("train", "--regime", "sync")
