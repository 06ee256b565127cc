"""The options that a command was given, for another command that it names."""

from collections.abc import Collection, Sequence
from typing import Final

import rich_click as click
from click.core import ParameterSource

SEARCHED: Final = (
    *("regimes", "as_json", "sweeps", "export", "deadline_s", "dollars", "jobs", "policies"),
    *("policy", "seeds", "wide", "budget_s", "out", "tp", "max_running", "speculation", "settings"),
)
"""Parameters that the command of a recommendation says itself, or does not have."""
FOUND: Final = (
    *("cluster.tp", "cluster.max_running", "cluster.speculation"),
    *("loop.train_gpus", "loop.epoch_plan", "plan.budget_s"),
)
"""The same of keys."""


def given_options(context: click.Context, *, but: Collection[str]) -> list[str]:
    """Arguments and options of the command line as they were given, arguments first.

    `but` are names of parameters that are left out.
    """
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in but or source is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            words = [*value, *words]
        elif isinstance(value, bool):
            words.append(parameter.opts[0])
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(each)]
    return words


def kept_words(context: click.Context, settings: Sequence[str]) -> list[str]:
    """Trace and options of the command line that do not change what was found."""
    return [*given_options(context, but=SEARCHED), *_settings_but(settings, FOUND)]


def words_but(context: click.Context, settings: Sequence[str], keys: Collection[str]) -> list[str]:
    """The command line without options of these keys."""
    names = [key.rpartition(".")[2] for key in keys]
    words = given_options(context, but=[*names, "settings"])
    return ["heddle", context.info_name or "", *words, *_settings_but(settings, keys)]


def _settings_but(settings: Sequence[str], keys: Collection[str]) -> list[str]:
    kept = [text for text in settings if text.partition("=")[0].strip() not in keys]
    return [word for text in kept for word in ("--set", text)]
