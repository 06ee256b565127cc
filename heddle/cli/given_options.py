"""The options that a command was given, for another command that it names."""

from collections.abc import Collection

import rich_click as click
from click.core import ParameterSource


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
