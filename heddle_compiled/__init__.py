"""The optional compiled build: extension modules beside the sources that they were made from.

Packages with compiled modules import this one first. The extensions are used when all of them were
built for this Python from the sources as they are, unless the environment variable `HEDDLE_PURE` is
1. Otherwise the sources run, with the same results.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from heddle_compiled.modules import MODULES

DISTRIBUTION = "heddle-rl"
"""What the package index calls these packages together."""
ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("build.json")
"""The build that is here: suffix and sizes of its extensions, and a hash of each source."""
GROUP = "heddle"
"""All modules are one extension, ``heddle__mypyc``, so that they call each other directly."""


@cache
def installed_version(package: str = DISTRIBUTION) -> str:
    """The version of a package that is installed, or "unknown"; by default Heddle's."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@cache
def in_force() -> bool:
    """Whether compiled modules are used."""
    return why_not() == ""


@cache
def why_not() -> str:
    """Why compiled modules are not used; empty if they are."""
    if not RECORD.exists():
        return "there is no compiled build"
    if os.environ.get("HEDDLE_PURE") == "1":
        return "HEDDLE_PURE is 1"
    try:
        recorded = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        recorded = None
    if recorded == record():
        return ""
    return "sources, extensions or Python have changed since the compiled build"


def record() -> dict[str, object]:
    """Return what a build of the present sources by this Python records."""
    hashes = {name: hashlib.sha256(source(name).read_bytes()).hexdigest() for name in MODULES}
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in extensions()}
    return {"suffix": EXTENSION_SUFFIXES[0], "sources": hashes, "extensions": sizes}


def extensions() -> list[Path]:
    """Return the extensions for this Python that are here: the one of all modules, and theirs."""
    named = [ROOT / f"{GROUP}__mypyc", *(source(name).with_suffix("") for name in MODULES)]
    paths = [path.with_name(path.name + EXTENSION_SUFFIXES[0]) for path in named]
    return [path for path in paths if path.exists()]


def source(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


class _Sources:
    """Finds the sources of modules that also have extensions."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(name, source(name)) if name in MODULES else None


if not in_force() and extensions():  # also those of a build that broke off before its record
    sys.meta_path.insert(0, _Sources)
