"""Numbers with their spread, and the runs they come from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Spread: TypeAlias = Literal["ci95", "range", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A measured number.

    `low` and `high` are ends of the 95 % confidence interval of the mean over seeds (``ci95``), or
    the least and the greatest of several cells (``range``), or the number itself (``none``).
    """

    mean: float
    low: float
    high: float
    n: int = 1
    spread: Spread = "none"

    def text(self) -> str:
        """For a table: 1.41 (1.2 to 1.6) for cells, 1.41 ± 0.05 for seeds."""
        if self.spread == "range":
            return f"{_short(self.mean)} ({_short(self.low)} to {_short(self.high)})"
        if self.spread == "ci95":
            return f"{_short(self.mean)} ± {_short(self.high - self.mean)}"
        return _short(self.mean)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "spread": self.spread,
        }


def exactly(value: float) -> Value:
    """A number without spread."""
    return Value(mean=float(value), low=float(value), high=float(value))


def estimate(values: Sequence[float]) -> Value:
    """Mean over seeds and its 95 % confidence interval (Student's t); one value has none.

    Raises:
        ValueError: there is no value.
    """
    n = len(values)
    if n == 0:
        raise ValueError("no value to estimate from")
    mean = math.fsum(values) / n
    if n == 1:
        return exactly(mean)
    from scipy.special import stdtrit

    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)
    return Value(mean=mean, low=mean - half, high=mean + half, n=n, spread="ci95")


def across(values: Sequence[Value]) -> Value:
    """Several cells as one value: mean of their means, least and greatest mean.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no cell to put together")
    means = [value.mean for value in values]
    mean = math.fsum(means) / len(means)
    return Value(mean=mean, low=min(means), high=max(means), n=len(means), spread="range")


class Results:
    """Finished runs of one experiment, found by their axes."""

    def __init__(self, rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        self.all = tuple(rows)

    def rows(self, **axes: Any) -> list[Mapping[str, Any]]:
        """Results whose axes have these values, in order of seeds.

        Raises:
            KeyError: no run has them.
        """
        found = [
            result
            for known, result in self.all
            if all(known.get(axis) == value for axis, value in axes.items())
        ]
        if not found:
            raise KeyError(f"config.toml has no run with {axes}")
        return found

    def estimate(self, metric: str, **axes: Any) -> Value:
        """Mean of one figure over seeds; None counts as 0."""
        return estimate([float(row[metric] or 0.0) for row in self.rows(**axes)])

    def ratio(
        self, metric: str, over: Mapping[str, Any], under: Mapping[str, Any], **shared: Any
    ) -> Value:
        """Mean over seeds of `over` / `under`, paired: each seed is a rollout of its own."""
        top, bottom = self.rows(**shared, **over), self.rows(**shared, **under)
        return estimate([a[metric] / b[metric] for a, b in zip(top, bottom, strict=True)])

    def gain(self, policy: str, baseline: str, **shared: Any) -> Value:
        """Throughput of a policy over that of another."""
        return self.ratio("throughput_tok_s", {"policy": policy}, {"policy": baseline}, **shared)


def _short(value: float) -> str:
    if value == 0.0:
        return "0"
    size = abs(value)
    if size >= 1_000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.3g}"
    if size >= 0.01:
        return f"{value:.2f}"
    return f"{value:.2g}"
