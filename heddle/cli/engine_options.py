"""Options that say how many engines there are and of which TP degrees, as keys of the cluster."""

from typing import TYPE_CHECKING, Any

from heddle.config_error import ConfigError

if TYPE_CHECKING:
    from heddle.config_files import ConfigSource


def positive_numbers(text: str) -> list[int]:
    """Read numbers of 1 or more with commas between; none if any of them is something else."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        return []
    return numbers if min(numbers) >= 1 else []


def tp_degrees(tps: str) -> dict[str, Any]:
    """Read `--tp` as keys of the cluster: one TP degree for every engine, or one for each.

    Raises:
        ConfigError: it is no list of degrees.
    """
    each = positive_numbers(tps)
    if not each:
        raise ConfigError(
            f"--tp {tps}: write a TP degree, or one for each engine: 1,2; all must be 1 or more"
        )
    return {"tp": min(each), "mix": each if len(each) > 1 else []}


def engines_of(engines: int | None, tps: str | None, *, pools: bool) -> "list[ConfigSource]":
    """Read `--engines` and `--tp` of `heddle run`; GPUs follow from them, unless pools have them.

    Raises:
        ConfigError: they are no engines, or do not agree.
    """
    from heddle.config_files import option_value

    given = {"--engines": engines, "--tp": tps}
    label = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    found = _degrees(engines, tps)
    if pools and engines is None:
        found.pop("gpus", None)
    return [option_value(f"cluster.{key}", value, label) for key, value in found.items()]


def _degrees(engines: int | None, tps: str | None) -> dict[str, Any]:
    """The keys of the cluster that `--engines` and `--tp` set."""
    if engines is None and tps is None:
        return {}
    found = tp_degrees(tps or "1")
    each = found["mix"]
    if engines is not None and engines < 1:
        raise ConfigError(f"--engines {engines}: must be 1 or more")
    if each and engines not in (None, len(each)):
        raise ConfigError(f"--tp {tps} names {len(each)} engines, --engines says {engines}")
    if not each:
        return {**found, "gpus": found["tp"] * (engines or 2)}
    choices = sorted(dict.fromkeys(each))
    # Engines that all have one degree leave a planner its choice, as one number does.
    more = {"tp_choices": choices} if len(choices) > 1 else {"mix": []}
    return {**found, "gpus": sum(each), **more}
