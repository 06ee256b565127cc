"""What is stable: commands and options, Python names, entry points and schemas.

    python -m tests.golden.public_names

writes public_names.json. A change of it is a change for users: it goes into CHANGELOG.md.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click

import heddle
from heddle.cli import main
from heddle.policies.plugins import ENTRY_POINTS

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("public_names.json")
SCHEMA = re.compile(r'"(heddle\.[a-z-]+/\d+)"')


def commands(found: click.Command, name: str = "heddle") -> dict[str, list[str]]:
    """Every command with its arguments and options."""
    if isinstance(found, click.Group):
        context = click.Context(found)
        each = {verb: found.get_command(context, verb) for verb in found.list_commands(context)}
        return {
            key: value
            for verb, command in each.items()
            if command is not None
            for key, value in commands(command, f"{name} {verb}").items()
        }
    return {name: sorted(option for p in found.params for option in (p.opts or [p.name or ""]))}


def python_names() -> dict[str, list[str]]:
    """What `import heddle` offers, with parameters of functions and fields of classes."""
    names: dict[str, list[str]] = {}
    for name in sorted(heddle.__all__):
        value = getattr(heddle, name)
        if inspect.isclass(value) and issubclass(value, msgspec.Struct):
            names[name] = list(value.__struct_fields__)
        elif callable(value):
            names[name] = list(inspect.signature(value).parameters)
        else:
            names[name] = sorted(value)
    return names


def schemas() -> list[str]:
    """Schemas of files and of JSON outputs, as their sources name them."""
    sources = (path.read_text() for path in ROOT.glob("heddle*/**/*.py"))
    return sorted({name for text in sources for name in SCHEMA.findall(text)})


def public_names() -> dict[str, Any]:
    """All that is stable."""
    return {
        "commands": commands(main),
        "python": python_names(),
        "entry_points": ENTRY_POINTS,
        "schemas": schemas(),
    }


if __name__ == "__main__":
    KEPT.write_text(json.dumps(public_names(), indent=1) + "\n")
