"""Reads which simulated engines die, and when."""


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
