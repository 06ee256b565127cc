"""Names of engines' parallelism in profile files."""

import re

from heddle_core.ids import EngineShape

_LAYOUT = re.compile(r"([1-9]\d*)(?:dp([1-9]\d*))?(?:ep([1-9]\d*))?")


class ProfileError(ValueError):
    """A profile that does not exist, does not parse, or has no table for a TP degree."""


def layout_name(shape: EngineShape) -> str:
    """Name of an engine's parallelism in a profile: "8", "8ep8", "1dp8ep8"."""
    ranks = f"dp{shape.dp}" if shape.dp > 1 else ""
    return f"{shape.tp}{ranks}" + (f"ep{shape.ep}" if shape.ep > 1 else "")


def read_layout(name: str) -> tuple[int, int, int]:
    """Return TP degree, attention data-parallel ranks and GPUs of experts of a `layout_name`.

    Raises:
        ProfileError: it is none.
    """
    found = _LAYOUT.fullmatch(name)
    tp, dp, ep = (int(part or 1) for part in found.groups()) if found else (0, 0, 0)
    if found is None or ep not in (1, tp * dp):
        raise ProfileError(
            f"{name!r} is no layout of an engine: give a TP degree, and where they apply dp with "
            'ranks and ep with the GPUs that experts are spread over, all of them, as "1dp8ep8"'
        )
    return tp, dp, ep
