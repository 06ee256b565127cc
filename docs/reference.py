"""Writes docs/config.md and the second half of docs/cli.md: `python docs/reference.py`."""

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import rich_click as click

from heddle.cli import main
from heddle.config_reference import Key, reference

DOCS = Path(__file__).resolve().parent
CLI, CONFIG = DOCS / "cli.md", DOCS / "config.md"
MARK = "<!-- Below is made from the code by `python docs/reference.py`; a test compares both. -->\n"
HEAD = """# Keys of heddle.toml

Made by `python docs/reference.py`. `heddle config explain KEY` prints the same, `heddle config
init` writes a file of all, and [Command line](cli.md#configuration) says where they are read. A key
without a default has *none*.
"""


def cli_page() -> str:
    """The page about commands: what is written by hand, then every command with its options."""
    by_hand, mark, _ = CLI.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{CLI}: has no line {MARK}")
    return by_hand + MARK + "".join(_command(*each) for each in _commands(main, "heddle"))


def config_page() -> str:
    """The page about keys."""
    parts, section = [HEAD], None
    for key in reference():
        where = key.name.rpartition(".")[0]
        if where != section:
            section = where
            name = f"`[{where}]`" if where else "Keys above all sections"
            parts.append(f"\n## {name}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts.append(_row(key))
    return "".join(parts)


def _row(key: Key) -> str:
    default = "*none*" if key.default == "None" else f"`{key.default}`"
    name = key.name.rpartition(".")[2]
    cells = (f"`{name}`", f"`{_cell(key.kind)}`", default, _cell(key.text))
    return f"| {' | '.join(cells)} |\n"


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if found is not None:
            yield from _commands(found, f"{path} {name}")


def _command(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join(piece for piece in command.collect_usage_pieces(context))
    text = cleandoc(command.help or "").partition("\n\n\b")[0].partition("\b")[0].strip()
    text = re.sub(r"(?<!`)\[(\w+)\](?!`)", r"`[\1]`", text.replace("*.", r"\*."))
    rows = [_option(each) for each in command.params if isinstance(each, click.Option)]
    table = "\n| option | meaning |\n|---|---|\n" + "".join(rows) if rows else ""
    return f"\n### `{path}`\n\n`{path} {usage}`\n\n{text}\n{table}"


def _option(option: click.Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    kind = "" if option.is_flag else f" `{_cell(option.make_metavar(click.Context(main)))}`"
    default = option.default if option.show_default and not option.is_flag else None
    said = f" [{default}]" if default is not None else ""
    text = (option.help or "").replace("*.", r"\*.")
    return f"| {flags}{kind} | {_cell(text + said).strip()} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    CLI.write_text(cli_page(), encoding="utf-8")
    CONFIG.write_text(config_page(), encoding="utf-8")
