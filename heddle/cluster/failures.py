"""Reads which simulated engines die, and when."""

import re
from collections.abc import Mapping, Sequence

from heddle.config_error import ConfigError


def faults_of(failures: str) -> tuple[tuple[float, str], ...]:
    """Read ``ENGINE@SECONDS`` with commas between; return (time_s, engine), in order of time.

    Raises:
        ValueError: an entry is not ENGINE@SECONDS.
    """
    found = []
    for text in filter(None, (part.strip() for part in failures.split(","))):
        engine, at, seconds = text.rpartition("@")
        try:
            time_s = float(seconds)
        except ValueError:
            time_s = -1.0
        if not (engine and at and 0.0 <= time_s < 1e9):
            raise ValueError(f"failures: {text!r} is not ENGINE@SECONDS, such as e0@120")
        found.append((time_s, engine))
    return tuple(sorted(found))


def too_late(failures: str, ends_s: Sequence[float]) -> list[str]:
    """A warning where failures come after the end of runs, which change nothing there."""
    late = [(time_s, engine) for time_s, engine in faults_of(failures) if time_s > min(ends_s)]
    if not late:
        return []
    named = ", ".join(f"{engine}@{time_s:g}" for time_s, engine in late)
    before = [end_s for end_s in ends_s if end_s < late[-1][0]]
    return [
        f"cluster.failures: {len(before)} of {len(ends_s)} runs end before {named}, the last of "
        f"them at {max(before):,.0f} s; a failure after the end changes nothing"
    ]


def check_faults(failures: str, engines: Mapping[str, int]) -> None:
    """Refuse a failure of an engine that no plan has; `engines` has how many begin with a letter.

    Raises:
        ConfigError: names the engine, and those that there are.
    """
    for _, engine in faults_of(failures):
        # "e3+1" is the engine that took the place of "e3".
        found = re.fullmatch(r"([a-z]+)(\d+)(\+\d+)?", engine)
        if found is not None and int(found[2]) < engines.get(found[1], 0):
            continue
        known = [
            f"{letter}0 to {letter}{number - 1}" if number > 1 else f"{letter}0"
            for letter, number in engines.items()
            if number
        ]
        raise ConfigError(
            f"cluster.failures: there is no engine {engine!r}; there are "
            f"{' and '.join(known)} at most"
        )
