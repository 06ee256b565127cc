"""Records what commands answer, and compares later answers with it, digit by digit.

Usage, from the repository root: `python -m tests.golden.record_answers [--check] [NAME...]` runs
the commands of `answers/commands.toml` whose names begin with a NAME, or all. Without --check it
writes their answers, one file for each first word of a name; with it, it writes nothing and prints
what differs. The columns: `old`, the command line of 0.1, and `new`, that of this tree. A recorded
answer changes only where that is intended; the commit says which number changed, and why.

Left out of answers: seconds of this machine, paths, time stamps, versions and commits.
"""

import base64
import gzip
import json
import math
import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import click
import numpy as np
from click.testing import CliRunner

import heddle
from heddle.cli import main as command_line
from heddle_compiled import installed_version
from heddle_runtime.virtual_time import run_virtual

Column: TypeAlias = Literal["old", "new"]
Answer: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = Path(__file__).resolve().parent / "answers"
TABLE = ANSWERS / "commands.toml"
COLUMN: Column = "new"
"""The column of the table that the command line of this tree understands."""

PLACES: Mapping[str, Path] = {
    "traces": ROOT / "traces",
    "logs": ROOT / "tests" / "trace" / "fixtures",
    "configs": ANSWERS / "configs",
    "shipped": ROOT / "heddle_predict" / "shipped.heddle",
    "samples": ROOT.parent / "shared" / "raw_samples",
    "recorded": ROOT.parent / "shared" / "traces",
}
"""What steps name in braces."""
ELSEWHERE = ("samples", "recorded")
"""Places that a clone does not have."""

LEFT_OUT = frozenset(
    {
        *("wall_s", "solver_s", "times", "conditions", "versions", "commit", "started"),
        *("run", "run directory", "path", "page", "command", "meanings"),
    }
)
"""Keys of answers: seconds of this machine, folders, versions, command lines, and prose."""
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-")
"""How the names of run folders begin."""
DATA = re.compile(rb'<script id="data" type="application/octet-stream">([^<]*)<')
"""Where a page has its data."""
LENGTH, ABSENT = "length", "absent"
"""In comparisons: the key of a list's length, and the value of a key that is not there."""
COLUMN_TYPES = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32}


class AnswerError(Exception):
    """A command that fails, or a table that does not fit; the message names it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the table, for one value of its `each`."""

    name: str
    old: tuple[str, ...]
    """Its steps."""
    new: tuple[str, ...]
    """The same in the new command line; those that the tables do not translate."""
    reads: tuple[str, ...]
    """Patterns of files that are part of the answer."""
    leaves_out: tuple[str, ...]
    """Keys besides `LEFT_OUT`."""
    fast: bool
    soak: bool
    """It takes long, and what it runs a cheaper command runs too."""
    virtual: bool
    status: int
    """Exit status of its last step."""
    notebook: str
    """The notebook that is executed in place of steps."""

    @property
    def group(self) -> str:
        """The name of its file."""
        return self.name.partition(".")[0]

    def missing(self) -> list[Path]:
        """Files of its steps that lie outside of the repository and are not there."""
        named = re.findall(rf"\{{(?:{'|'.join(ELSEWHERE)})\}}\S*", " ".join(self.old))
        return [path for path in (Path(_placed(text)) for text in named) if not path.exists()]


def table() -> dict[str, Any]:
    """Return the tables of `commands.toml`."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def commands() -> list[Command]:
    """Return all commands, in the order of the table."""
    found = []
    for row in table()["command"]:
        for value in row.get("each", [""]):
            name = f"{row['name']}.{value}" if value else row["name"]
            steps = {
                key: tuple(step.replace("{each}", value) for step in row.get(key, ()))
                for key in ("old", "new")
            }
            found.append(
                Command(
                    name=name,
                    old=steps["old"],
                    new=steps["new"],
                    reads=tuple(row.get("reads", ())),
                    leaves_out=tuple(row.get("leaves_out", ())),
                    fast=row.get("fast", False),
                    soak=row.get("soak", False),
                    virtual=row.get("virtual", False),
                    status=row.get("status", 0),
                    notebook=row.get("notebook", "").replace("{each}", value),
                )
            )
    return found


# -- from old to new -------------------------------------------------------------------------------


def translated(step: str, tables: Mapping[str, Any]) -> str:
    """Say a step of the old command line in the new one, by the tables alone.

    Raises:
        AnswerError: a verb or an option is in no table, or goes.
    """
    words = shlex.split(step)
    count = 2 if " ".join(words[:2]) in tables["verbs"] else 1
    verb = " ".join(words[:count])
    new_verb = tables["verbs"].get(verb, "")
    if not new_verb:
        raise AnswerError(f"{step}: the verb {verb} has no new form")
    made, rest = new_verb.split(), iter(words[count:])
    for word in rest:
        if not word.startswith("-"):
            made.append(word)
            continue
        value = None if word in tables["valueless"]["options"] else next(rest)
        made += _option(verb, word, value, tables, step)
    added = shlex.split(tables["added"].get(verb, ""))
    kept = [] if added[:1] != ["--set"] and added[:1] and added[0] in made else added
    return shlex.join([*made, *kept])


def _option(
    verb: str, option: str, value: str | None, tables: Mapping[str, Any], step: str
) -> list[str]:
    options = tables["options"]
    target = options.get(verb, {}).get(option, options["*"].get(option))
    if not target:
        raise AnswerError(f"{step}: {option} of {verb} has no new form")
    if option == "--set":
        key, _, rest = str(value).partition("=")
        moved = tables["config"].get(key, key)
        if not moved:
            raise AnswerError(f"{step}: the key {key} has no new form")
        return ["--set", f"{moved}={rest}"]
    several = value is not None and ("," in value or value == "best")
    several = several and options.get(verb, {}).get(option) != option  # it takes several
    if several and option in tables["sweeps"] and (option, value) != ("--tp", "best"):
        return ["--sweep", f"{tables['sweeps'][option]}={value}"]
    if target.startswith("--"):
        return target.split(" ") if value is None else [target, value]
    if "=" in target:
        return ["--set", target]
    if target == "prices[]" and value is not None:
        return ["--set", f"prices.{value}"]
    if target.endswith("[]"):
        values = json.dumps([int(v) if v.isdigit() else v for v in str(value).split(",")])
        return ["--set", f"{target[:-2]}={values}"]
    return ["--set", f"{target}={'true' if value is None else value}"]


def steps_of(command: Command, column: Column, tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the steps of a command in one of the columns."""
    if column == "old":
        return command.old
    return command.new or tuple(translated(step, tables) for step in command.old)


def renamed(answer: Answer, command: str, tables: Mapping[str, Any]) -> Answer:
    """Return an answer under the keys of the column `new`: of each document, its values by key."""
    rules = [rule for rule in tables["keys"] if command.startswith(rule["commands"])]
    rules.sort(key=lambda rule: -len(_parts(rule["old"])))
    found: Answer = {}
    for name, leaves in flat(answer).items():
        own = [
            rule
            for rule in rules
            if name.endswith(rule["document"]) or leaves.get("schema") == rule["document"]
        ]
        moved = {_moved(key, own): value for key, value in leaves.items()}
        found[name] = {key: value for key, value in moved.items() if key is not None}
    return found


def _moved(key: str, rules: Sequence[Mapping[str, str]]) -> str | None:
    parts = key.split("\t")
    for rule in rules:
        old, new = _parts(rule["old"]), _parts(rule["new"])
        pairs = list(zip(old, parts, strict=False))
        if len(pairs) == len(old) and all(want in ("*", part) for want, part in pairs):
            stars = iter([part for want, part in pairs if want == "*"])
            made = [next(stars) if part == "*" else part for part in new]
            return "\t".join([*made, *parts[len(old) :]]) if rule["new"] else None
    return key


def _parts(key: str) -> list[str]:
    return key.strip(".").split(".") if key.strip(".") else []


def flat(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return the values of each document of an answer, by the parts of their keys with tabs."""
    documents = {f"stdout/{i}": value for i, value in enumerate(answer["stdout"])}
    documents |= {f"files/{name}": value for name, value in answer["files"].items()}
    return {name: dict(_leaves(value, ())) for name, value in documents.items()}


def _leaves(value: Any, at: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, (*at, key))
    elif isinstance(value, list):
        yield "\t".join((*at, LENGTH)), len(value)
        for i, each in enumerate(value):
            yield from _leaves(each, (*at, str(i)))
    else:
        yield "\t".join(at), value


def differences(command: Command, was: Answer, now: Answer, column: Column) -> list[str]:
    """Values of an answer that are not as recorded, a line each.

    In the column `new` keys are moved first. A key that the recorded answer lacks is no difference;
    a list that is longer is one.
    """
    before = renamed(was, command.name, table()) if column == "new" else flat(was)
    after = flat(now)
    lines = []
    for document, values in before.items():
        for key, a in values.items():
            b = after.get(document, {}).get(key, ABSENT)
            if not _equal(a, b):
                where = f"{document} {key.replace(chr(9), '.')}"
                lines.append(f"{command.name}: {where}: recorded {a!r}, now {b!r}")
    return lines


def _equal(a: object, b: object) -> bool:
    """Whether two values are the same, floats but for their last digits.

    The kernels of numpy and BLAS differ by the type of CPU, and with them the last digits of a sum
    (at most 4 units there, measured between two types). A correlation near 0 is a difference of
    such sums: its error is that of numbers near 1.
    """
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-14, abs_tol=1e-15)
    return a == b and isinstance(a, bool) == isinstance(b, bool)


# -- answers ---------------------------------------------------------------------------------------


def answer(command: Command, column: Column = COLUMN) -> Answer:
    """Run a command in a new folder and return what it answers.

    Raises:
        AnswerError: a step ends with another status than 0, or one folder is not found.
    """
    if command.notebook:
        return _notebook(command.notebook)
    tables, left_out = table(), LEFT_OUT | {*command.leaves_out}
    printed = []
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name).resolve()
        clock = mock.patch("asyncio.run", run_virtual) if command.virtual else nullcontext()
        with clock:
            steps = steps_of(command, column, tables)
            for step in steps:
                text = _run(command, step, folder, command.status if step is steps[-1] else 0)
                if "--json" in shlex.split(step):
                    printed.append(_plain(json.loads(text), folder, left_out))
        files = {
            label: _plain(content, folder, left_out)
            for pattern in command.reads
            for label, content in _read(command, folder, pattern)
        }
    return {"stdout": printed, "files": files}


def _run(command: Command, step: str, folder: Path, status: int) -> str:
    words = [_placed(word, folder) for word in shlex.split(step)]
    done = CliRunner().invoke(command_line, words)
    if done.exit_code != status:
        said = done.output.strip() or repr(done.exception)
        raise AnswerError(f"{command.name}: {step}: status {done.exit_code}: {said}")
    return done.stdout


def _placed(word: str, folder: Path | None = None) -> str:
    """Fill in what a word has in braces."""
    for name, path in PLACES.items():
        word = word.replace(f"{{{name}}}", str(path))
    if folder is not None and "{run}" in word:
        word = word.replace("{run}", _only(sorted(folder.glob("runs/**/manifest.json"))))
    if folder is not None and "{comparison}" in word:
        word = word.replace("{comparison}", Path(_only(sorted(folder.glob("runs/*/*")))).name)
    return word


def _only(found: Sequence[Path]) -> str:
    """The folder that all of `found` lie in."""
    folders = list(dict.fromkeys(path.parent for path in found))
    if len(folders) != 1:
        raise AnswerError(f"one folder is needed below runs/, and there are {len(folders)}")
    return str(folders[0])


def _read(command: Command, folder: Path, pattern: str) -> Iterator[tuple[str, Any]]:
    """The files of a pattern, by their names without time stamps."""
    labels: dict[str, Any] = {}
    for path in sorted(folder.glob(pattern)):
        place = path.relative_to(folder)
        # Of a run its own folder names it; those around it have names that say no more.
        kept = place.parts[-2:] if place.parts[0] == "runs" else place.parts
        label = STAMP.sub("", "/".join(kept))
        if label in labels:
            raise AnswerError(f"{command.name}: two files are named {label}")
        labels[label] = _content(path)
    if not labels:
        raise AnswerError(f"{command.name}: wrote no {pattern}")
    yield from sorted(labels.items())


def _content(path: Path) -> Any:
    match path.suffix:
        case ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        case ".html":
            return page_data(path.read_bytes())
        case _:
            return path.read_text(encoding="utf-8").splitlines()


def page_data(html: bytes) -> Any:
    """Return the data of a page: its JSON, and in `columns` the columns of each run as lists."""
    found = DATA.search(html)
    if found is None:
        raise AnswerError("the page has no data")
    block = gzip.decompress(base64.b64decode(found.group(1)))
    size = int.from_bytes(block[:4], "little")
    head = json.loads(block[4 : 4 + size])
    head["columns"] = [
        {
            name: {
                column: np.frombuffer(block, COLUMN_TYPES[kind], length, 4 + size + at).tolist()
                for column, (kind, at, length) in columns.items()
            }
            for name, columns in run.items()
        }
        for run in head["columns"]
    ]
    return head


def _plain(value: Any, folder: Path, left_out: Set[str]) -> Any:
    """Leave out what varies from run to run."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in left_out}
        return {key: _plain(each, folder, left_out) for key, each in kept.items()}
    if isinstance(value, list):
        return [_plain(each, folder, left_out) for each in value]
    if not isinstance(value, str):
        return value
    for name, path in PLACES.items():
        value = value.replace(str(path), f"{{{name}}}")
    for path in (folder, ROOT):
        value = value.replace(f"{path}/", "").replace(str(path), ".")
    return "{version}" if value == installed_version() else STAMP.sub("", value)


def _notebook(name: str) -> Answer:
    """Execute a notebook; its answer is the text of its cells, without pictures and times."""
    from notebooks.execute import VARIES, executed, notebooks

    path = next(path for path in notebooks() if path.stem == name)
    # The kernel is a process of its own: it shall import this tree, too.
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        done = executed(path)
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    texts = [
        [line for output in cell.outputs for line in _shown(output)]
        for cell in cells
        if VARIES not in cell.metadata.get("tags", ())
    ]
    return {"stdout": [texts], "files": {}}


def _shown(output: Any) -> list[str]:
    """The lines of an output; a table in HTML has every column, its text may not."""
    if output.output_type == "stream":
        text = output.text
    elif any(kind.startswith("image/") for kind in output.get("data", {})):
        text = ""
    elif "text/html" in output.data:
        rows = re.sub(r"\s+", " ", output.data["text/html"]).replace("</tr>", "\n")
        text = re.sub(r"<style.*?</style>|<[^>]*>", " ", rows)
    else:
        text = output.data.get("text/plain", "")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


# -- files -----------------------------------------------------------------------------------------


def recorded(group: str) -> dict[str, Answer]:
    """Return the recorded answers of a group, by name; empty where there are none."""
    path = ANSWERS / f"{group}.json"
    if not path.exists():
        return {}
    found: dict[str, Answer] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(group: str, answers: Mapping[str, Answer]) -> None:
    """Write the answers of a group, a line each."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(answers[name], allow_nan=False, separators=(',', ':'))}"
        for name in sorted(answers)
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (ANSWERS / f"{group}.json").write_text(text, encoding="utf-8")


def chosen(names: Sequence[str]) -> list[Command]:
    """Return the commands whose names begin with one of `names`, or all."""
    known = commands()
    for name in names:
        if not any(command.name.startswith(name) for command in known):
            raise click.UsageError(f"no command begins with {name!r}")
    return [c for c in known if not names or c.name.startswith(tuple(names))]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Compare with the recorded answers; write nothing")
@click.option("--column", type=click.Choice(["old", "new"]), default=COLUMN, show_default=True)
def main(names: Sequence[str], check: bool, column: Column) -> None:
    """Record the answers of commands whose names begin with a NAME, or of all."""
    if Path(heddle.__file__).resolve().parents[1] != ROOT:
        raise click.ClickException(f"heddle is imported from {heddle.__file__}, not from {ROOT}")
    apart: list[str] = []
    for command in chosen(names):
        if command.missing():
            click.echo(f"{command.name}: skipped: {command.missing()[0]} is not there")
            continue
        try:
            now = answer(command, column)
        except AnswerError as error:
            apart.append(str(error))
            click.echo(f"FAILED {error}")
            continue
        kept = recorded(command.group)
        if not check:
            write(command.group, {**kept, command.name: now})
            click.echo(f"{command.name}: recorded")
            continue
        was = kept.get(command.name)
        lines = ["no answer is recorded"] if was is None else differences(command, was, now, column)
        apart += lines
        click.echo("\n".join(lines) if lines else f"{command.name}: the same")
    if apart:
        raise click.ClickException(f"{len(apart)} differences")


if __name__ == "__main__":
    main()
