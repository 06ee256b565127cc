"""Errors that a policy of one's own raises while it runs, as one message with file and line."""

import inspect
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, Final

from heddle.packages import OUR_PACKAGES
from heddle.policies.plugins import PolicyError
from heddle_core.engine_state import Engine
from heddle_core.ledger import Ledger
from heddle_core.parts.table import KINDS
from heddle_core.policy import EngineView, Policy, PolicyContext, TrajectoryView, View
from heddle_core.trajectory import Trajectory

VIEWS: Final[tuple[tuple[type, type, str], ...]] = (
    (Trajectory, TrajectoryView, "a trajectory"),
    (Engine, EngineView, "an engine"),
    (Ledger, View, "the view"),
    (PolicyContext, PolicyContext, "the context"),
)
"""What parts get, the class with what they may read of it, and its name in messages."""


def own_files(policy: Policy) -> list[str]:
    """Return the source files of those parts, and parts that they wrap, that are not Heddle's."""
    found: dict[str, None] = {}
    for kind in KINDS:
        part = getattr(policy, kind)
        while part is not None:
            made = type(part)
            if made.__module__.partition(".")[0] not in OUR_PACKAGES:
                with suppress(OSError, TypeError):
                    found[os.path.realpath(inspect.getfile(made))] = None
            part = getattr(part, "inner", None)
    return list(found)


@contextmanager
def policy_errors(policy: Policy) -> Iterator[None]:
    """Turn an error out of a part that is not Heddle's into a message with file and line.

    Raises:
        PolicyError: a part raised the error, which is its cause. All others are raised as they are.
    """
    files = own_files(policy)
    try:
        yield
    except Exception as error:
        place = line_in(error, files)
        if place is None:
            raise
        raise PolicyError(f"{place}: {_what(error)}") from error


def line_in(error: BaseException, files: Iterable[str]) -> str | None:
    """Return file, line and function of the last call in one of `files`; None if there is none."""
    listed = list(files)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) in listed
    ]
    if not frames:
        return None
    last = frames[-1]
    return f"{os.path.relpath(last.filename)}:{last.lineno}: in {last.name}"


def readable_names(view: type) -> list[str]:
    """Names of all that a policy may read of a view, in the order of the code."""
    own = vars(view).get("__dataclass_fields__", {})
    names = [*own, *(name for name in vars(view) if name not in own)]
    return [name for name in names if not name.startswith("_")]


def _what(error: Exception) -> str:
    name: Any = getattr(error, "name", None)
    if isinstance(error, AttributeError) and isinstance(name, str):
        for state, view, said in VIEWS:
            if isinstance(error.obj, state):
                known = readable_names(view)
                near = get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                return (
                    f"{said} has no {name!r}.{hint} It has {', '.join(known)} "
                    "(docs/policy-attributes.md)"
                )
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
