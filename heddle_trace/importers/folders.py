"""Files of an import that a folder holds: those of one format are read, the others are left out."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os import walk
from pathlib import Path

from heddle_trace.errors import TraceError
from heddle_trace.importers.formats import AUTO, FORMATS, format_of, recognised
from heddle_trace.importers.heads import head_of
from heddle_trace.importers.sources import SourceFile, sources

_NAMED = 5


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """Files of one format, and why each of the others is left out."""

    format: str
    sources: tuple[SourceFile, ...]
    foreign: tuple[str, ...]


def chosen_files(paths: Sequence[str | Path], requested: str = AUTO) -> ChosenFiles:
    """The files to import: those named, and those in named folders and the folders within.

    A folder's files of another format are left out. The format is the requested one, else that of
    the named files, else the one of most files. Hidden files are not looked at. Raises TraceError
    for a named file of another format, and for folders of which it is not clear what they hold.
    """
    named = [Path(path) for path in paths if not Path(path).is_dir()]
    found = [file for path in paths if Path(path).is_dir() for file in within(Path(path))]
    if not found:
        if len(named) < len(paths):
            raise TraceError(f"{paths[0]}: the folder holds no file; name one with logs")
        every = sources(named)
        return ChosenFiles(format_of(every, requested), tuple(every), ())
    shown = {path: _formats(path) for path in found}
    name = requested
    if named or requested != AUTO:
        name = format_of(sources(named), requested)
    else:
        name = _most_common(shown, paths)
    kept = [path for path in found if name in shown[path]]
    if not named and not kept:
        raise TraceError(f"{paths[0]}: the folder holds no {name} log; {_listed(shown)}")
    foreign = tuple(
        f"{path}: {shown[path][0] if shown[path] else 'no known format'}"
        for path in found
        if name not in shown[path]
    )
    return ChosenFiles(name, tuple(sources([*named, *kept])), foreign)


def within(folder: Path) -> list[Path]:
    """The files of a folder and of the folders within it, in the order of their names."""
    return [
        Path(at) / name
        for at, folders, names in sorted(walk(folder))
        if not any(part.startswith(".") for part in Path(at).relative_to(folder).parts)
        for name in sorted(names)
        if not name.startswith(".")
    ]


def _formats(path: Path) -> list[str]:
    try:
        (source,) = sources([path])
        return recognised(head_of(source))
    except TraceError:
        return []


def _most_common(shown: dict[Path, list[str]], paths: Sequence[str | Path]) -> str:
    counts = Counter(name for formats in shown.values() for name in formats[:1])
    (most, files), *rest = counts.most_common() or [("", 0)]
    if not files:
        raise TraceError(
            f"{paths[0]}: no file in it is of a known format; name one with --set "
            f"logs.format=FORMAT: {', '.join(FORMATS)}"
        )
    if rest and rest[0][1] == files:
        raise TraceError(
            f"{paths[0]}: holds as many files of {most} as of {rest[0][0]}; choose one with "
            "--set logs.format=FORMAT"
        )
    return most


def _listed(shown: Collection[Path]) -> str:
    first = ", ".join(path.name for path in list(shown)[:_NAMED])
    return f"it has {first}{' and more' if len(shown) > _NAMED else ''}"
