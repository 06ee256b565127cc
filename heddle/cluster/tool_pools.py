"""Reads distributions of seconds and pools of tools from their text."""

from collections.abc import Sequence
from typing import Any, Final

from heddle_sim.services import Latency, ServiceConfig

TOOL_RETRIES: Final = 3
"""Of a call whose attempts fail at a rate, unless its pool has another number."""

_DISTRIBUTIONS: Final = (
    "write seconds, as 2; MEAN,SIGMA of a normal distribution cut at 0, as 10,5; or "
    "lognormal:MEDIAN,SIGMA, with a share of misses and their median as lognormal:2,0.5,0.05,90"
)
_POOLS: Final = (
    "write TOOL=CAPACITY as bash=64, or TOOL=elastic:cold=SECONDS:keep=SECONDS; both may go on "
    "with :fail=RATE:timeout=SECONDS:retries=NUMBER and :latency=DISTRIBUTION"
)
_SECONDS: Final = {"cold": "cold_start_s", "keep": "keep_alive_s", "timeout": "timeout_s"}
_KEYS: Final = (*_SECONDS, "fail", "retries", "latency")


def latency_of(text: str) -> Latency:
    """Read a distribution of seconds.

    Raises:
        ValueError: it is none; the message has the forms.
    """
    kind, colon, listed = text.strip().rpartition(":")
    try:
        numbers = [float(word) for word in listed.split(",")]
    except ValueError:
        numbers = []
    try:
        if kind == "lognormal" and len(numbers) in (2, 4):
            miss_rate, miss_s = numbers[2:] or (0.0, 0.0)
            return Latency(
                seconds=numbers[0],
                sigma=numbers[1],
                lognormal=True,
                miss_rate=miss_rate,
                miss_s=miss_s,
            )
        if not colon and len(numbers) in (1, 2):
            return Latency(seconds=numbers[0], sigma=(numbers[1:] or [0.0])[0])
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    raise ValueError(f"{text!r} is no distribution of seconds: {_DISTRIBUTIONS}")


def tool_pools_of(texts: Sequence[str]) -> dict[str, ServiceConfig]:
    """Read pools of tools, each `TOOL=CAPACITY` or `TOOL=elastic`, with `:KEY=VALUE` after it.

    Raises:
        ValueError: one is no pool, or two are of one tool.
    """
    found: dict[str, ServiceConfig] = {}
    for text in texts:
        # A tool's name may have "=" in it, a capacity never.
        tool, equals, shape = text.partition("=")
        if not (tool.strip() and equals):
            raise ValueError(f"{text!r} is no pool of a tool: {_POOLS}")
        if tool in found:
            raise ValueError(f"two pools of the tool {tool!r}: leave one out")
        try:
            found[tool] = _pool(shape)
        except ValueError as error:
            raise ValueError(f"pool {text!r}: {error}") from None
    return found


def _pool(text: str) -> ServiceConfig:
    size, *rest = _parts(text)
    values: dict[str, Any] = {}
    for part in rest:
        key, _, value = part.partition("=")
        if key not in _KEYS:
            raise ValueError(f"{key!r} is not one of {', '.join(_KEYS)}")
        if key == "latency":
            values[key] = latency_of(value)
        elif key == "retries":
            values[key] = _whole(value, key)
        else:
            values[_SECONDS.get(key, "failure_rate")] = _number(value, key)
    if size != "elastic":
        values["capacity"] = _whole(size, "capacity")
        if "cold_start_s" in values or "keep_alive_s" in values:
            raise ValueError("cold and keep are of elastic pools: write elastic, or leave them out")
    if ("failure_rate" in values) != ("timeout_s" in values):
        raise ValueError("fail and timeout belong together: a failed attempt is noticed after that")
    if values.get("failure_rate"):
        values.setdefault("retries", TOOL_RETRIES)
    return ServiceConfig(**values)


def _parts(text: str) -> list[str]:
    """The text at its colons, but for the one in a distribution's name."""
    parts: list[str] = []
    for part in text.split(":"):
        if parts and parts[-1] == "latency=lognormal":
            parts[-1] += f":{part}"
        else:
            parts.append(part.strip())
    return parts


def _number(text: str, key: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key} {text!r} is no number") from None


def _whole(text: str, key: str) -> int:
    try:
        return int(text)
    except ValueError:
        more = f": {_POOLS}" if key == "capacity" else ""
        raise ValueError(f"{key} {text!r} is no whole number{more}") from None
