"""TOML files and command-line options into a `Config`, strictly.

Order: defaults in the dataclasses, then files left to right, then ``key=value`` settings. An
unknown key, a wrong type and a bad value each name the file or option, the key and the remedy.
"""

import dataclasses
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from heddle.cluster.config import AUTO, AUTO_RUNNING
from heddle.command_config import Config
from heddle.config import RunConfig
from heddle.config_error import ConfigError as ConfigError

Values: TypeAlias = dict[str, Any]
Kind = TypeVar("Kind", bound=RunConfig)
_hints: Callable[[Any], Values] = cache(typing.get_type_hints)

TOO_LARGE = "nested too deeply, or a number of too many digits"
"""What `tomllib` does not report as a fault of the text."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Values from one source. `label` names it in messages: a file, or an option."""

    label: str
    values: Mapping[str, Any]


def read_toml(path: Path) -> ConfigSource:
    """Read one TOML file.

    Raises:
        ConfigError: it is missing, not UTF-8, or not TOML; with the line where the parser stopped.
    """
    try:
        # With or without a byte-order mark, which some editors write.
        return ConfigSource(str(path), tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, not a TOML file") from None
    except PermissionError:
        raise ConfigError(f"{path}: permission denied; change its permissions") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start})") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path}: not TOML: {e}") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path}: a value is {TOO_LARGE}") from None


def setting(text: str) -> ConfigSource:
    """Read one ``section.key=value``; the value is TOML, or else taken as a bare string.

    A number is text where the key takes only text, as in ``cluster.env_latency=3``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write it as section.key=value")
    try:
        found = tomllib.loads(f"value = {value}")
        parsed: Any = found["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
        if re.fullmatch(r"-?\.\d+", parsed):  # No number of TOML, and usual on command lines.
            parsed = float(parsed)
    except (RecursionError, ValueError):
        raise ConfigError(f"--set {key.strip()}: its value is {TOO_LARGE}") from None
    else:
        if len(found) > 1:
            raise ConfigError(f"--set {text!r}: one key at a time; repeat --set for others")
    if _hint(key.strip()) is str and not isinstance(parsed, str):
        parsed = value.strip()
    return option_value(key.strip(), parsed, f"--set {text}")


def option_value(key: str, value: Any, label: str) -> ConfigSource:
    """Return the source that sets one dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return ConfigSource(label, value)


def resolve(sources: Sequence[ConfigSource]) -> Config:
    """Merge the sources, later ones winning, over the defaults.

    Raises:
        ConfigError: for the first source with an unknown key or a value that does not fit.
    """
    return _resolved(sources, Config)


def _resolved(sources: Sequence[ConfigSource], kind: type[Kind]) -> Kind:
    merged: Values = {}
    origin: dict[str, str] = {}
    for source in sources:
        _refuse_unknown(source.values, kind, "", source.label)
        _merge(merged, source.values, "", source.label, origin)
    if "trace" not in merged:
        raise ConfigError(
            'no trace is named: give its path, or set trace = "path" in the TOML file'
        )
    _refuse_pools_beside(merged, origin)
    cluster = merged.get("cluster", {})
    if cluster.get("max_running") == AUTO:
        cluster |= {"max_running": AUTO_RUNNING, "adaptive": True}
    if merged.get("cluster", {}).get("engines"):
        # The least: engines that are listed say how many GPUs there are.
        merged["cluster"].setdefault("gpus", 1)
    try:
        return msgspec.convert(merged, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(_explain(str(e), origin)) from None


def to_builtins(config: RunConfig) -> Values:
    """Return every value in force of a run as plain data, for ``config.resolved.json``."""
    values: Values = msgspec.to_builtins(config)
    return {f.name: values[f.name] for f in dataclasses.fields(RunConfig)}


def from_builtins(values: Mapping[str, Any], label: str) -> RunConfig:
    return _resolved([ConfigSource(label, values)], RunConfig)


def _fields(cls: type) -> dict[str, type | None]:
    """Each key of a section, with its dataclass when it is a section itself."""
    hints = _hints(cls)
    names = (f.name for f in dataclasses.fields(cls))
    return {name: hints[name] if dataclasses.is_dataclass(hints[name]) else None for name in names}


def _tables(cls: type, key: str) -> type | None:
    """The dataclass of each table of a key that is a list of tables."""
    each = next(iter(typing.get_args(_hints(cls)[key])), None)
    return each if isinstance(each, type) and dataclasses.is_dataclass(each) else None


def _refuse_pools_beside(merged: Values, origin: Mapping[str, str]) -> None:
    """Refuse another GPU type or number of GPUs beside pools and lists of engines, which say both.

    Raises:
        ConfigError: there is one.
    """
    cluster = merged.get("cluster", {})
    key = "engines" if cluster.get("engines") else "pool"
    pools = cluster.get(key)
    if not pools or not isinstance(pools, list) or not all(isinstance(p, Mapping) for p in pools):
        return
    if any("count" in pool or pool.get("role", "both") != "both" for pool in pools):
        return  # The trainer of a loop has the other GPUs; `ClusterConfig` counts the engines.
    counts = [pool.get("gpus", 0) for pool in pools]
    implied = {"gpu": pools[0].get("gpu"), "gpus": sum(c for c in counts if isinstance(c, int))}
    for name, value in implied.items():
        if value is not None and cluster.get(name, value) != value:
            raise ConfigError(
                f"{origin[f'cluster.{name}']}: sets cluster.{name} = {cluster[name]}, and the "
                f"pools of {origin[f'cluster.{key}']} have {value}: leave one of them out"
            )


def _refuse_unknown(values: Mapping[str, Any], cls: type, prefix: str, label: str) -> None:
    known = _fields(cls)
    where = f"[{prefix.rstrip('.')}]" if prefix else "the top level"
    for key, value in values.items():
        if key == _PRICES and not prefix:
            _check_prices(value, label)
            continue
        if key == _REGIMES and not prefix:
            _check_regimes(value, label)
            continue
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"Known: {', '.join(known)}."
            hint = _GONE.get(f"{prefix}{key}", hint)
            raise ConfigError(f"{label}: {prefix}{key} is not a key of {where}. {hint}")
        section = known[key]
        if section is None:
            each = _tables(cls, key)
            if each is not None and isinstance(value, Mapping):
                raise ConfigError(
                    f"{label}: {prefix}{key} is a list of tables: write [[{prefix}{key}]] in place "
                    f"of [{prefix}{key}], once for each"
                )
            if each is not None and isinstance(value, Sequence):
                for table in value:
                    if isinstance(table, Mapping):
                        _refuse_unknown(table, each, f"{prefix}{key}.", label)
            elif isinstance(value, Mapping):
                raise ConfigError(f"{label}: {prefix}{key} is a value, not a section: {key} = ...")
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{label}: {prefix}{key} is a section: write [{prefix}{key}]")
        _refuse_unknown(value, section, f"{prefix}{key}.", label)


_GONE: Final = {"diagnose.page": "`heddle report LOGS -o FILE.html` writes the page."}
"""What took the place of keys."""
_PRICES, _REGIMES = "prices", "regimes"
"""Sections whose keys are free: GPU classes, and names of regimes."""
MAX_PRICE = 100_000
"""Dollars of a GPU and hour; more is a typing error."""


def _check_prices(values: Any, label: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{label}: prices is a section: write [prices]")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{label}: prices.{name} must be a number, not {value!r}")
        if not 0.0 <= value < MAX_PRICE:
            raise ConfigError(
                f"{label}: prices.{name} must be from 0 to below {MAX_PRICE:,}, not {value!s:.20}"
            )


def _check_regimes(values: Any, label: str) -> None:
    from heddle.loops.own_regimes import check_own_regime

    tables = values if isinstance(values, Mapping) else {"": None}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{label}: regimes has a section for each regime of yours: write [regimes.NAME] "
                'with regime = "areal", and its parameters'
            )
        try:
            check_own_regime(name, table)
        except ValueError as error:
            raise ConfigError(f"{label}: [regimes.{name}]: {error}") from None


def _merge(
    into: Values, values: Mapping[str, Any], prefix: str, label: str, origin: dict[str, str]
) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value, f"{prefix}{key}.", label, origin)
        else:
            into[key] = value
            origin[f"{prefix}{key}"] = label


def _explain(message: str, origin: Mapping[str, str]) -> str:
    """Turn msgspec's message with its ``$.section.key`` path into one that names the source."""
    text, _, path = message.partition(" - at `$")
    key = re.sub(r"\[\d+\]", "", path.strip("`. "))
    label = origin.get(key) or origin.get(key.rpartition(".")[0])
    if label is None:
        # A section's own check: name the source of the first key that its message mentions.
        names = [
            k for k in origin if k.startswith(key) and re.search(rf"\b{k.split('.')[-1]}\b", text)
        ]
        key, label = (names[0], origin[names[0]]) if names else (key, "configuration")
    said = f"{text[:1].lower()}{text[1:]}{_allowed(key)}"
    # The name of an option identifies its key.
    return f"{label}: {said}" if label.startswith("--") or not key else f"{label}: {key}: {said}"


def _hint(key: str) -> Any:
    """The type of a key; None if there is no such key."""
    hint: Any = Config
    for part in filter(None, key.split(".")):
        hint = _hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    return hint


def _allowed(key: str) -> str:
    """The values that a key takes, where they can be listed."""
    hint = _hint(key)
    each = [hint, *typing.get_args(hint)]  # Of a value that may be None, its parts.
    literals = [part for part in each if typing.get_origin(part) is typing.Literal]
    if not literals:
        return ""
    return f"; take one of {', '.join(map(repr, typing.get_args(literals[0])))}"
