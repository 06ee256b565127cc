"""Prices of GPU classes, and the cost of a run: GPU-hours and dollars."""

import math
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.config_files import MAX_PRICE, ConfigError
from heddle_sim.profile_files import known_profiles

PRICE_FILE = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrice:
    """A row of the shipped table."""

    gpu: str
    dollars_per_hour: float | None
    """Of one GPU; None where no source has a price."""
    date: str
    """Of the source."""
    source: str


def price_text(price: float) -> str:
    """Format dollars with as many places as are counted with: cents, or tenths of them."""
    return f"{price:,.2f}" if round(price, 2) == price else f"{price:,.3f}"


def price_option(gpu: str) -> str:
    """The option that prices a class, as a shell takes it."""
    return f"--set {shlex.quote(f'prices.{gpu}=DOLLARS')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """What a run occupies, and costs. GPUs are paid while they idle."""

    gpu_hours: float
    dollars: float | None
    """None if a class has no price."""

    def plain(self) -> dict[str, float | None]:
        return {"gpu_hours": self.gpu_hours, "dollars": self.dollars}


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in force: the shipped ones, and a user's in their place."""

    own: Mapping[str, float]
    """By GPU class, in lower case."""

    def dollars_per_hour(self, gpu: str) -> float | None:
        """Price of a GPU of a class; None if it has none."""
        name = gpu.lower()
        row = shipped_prices().get(name)
        return self.own.get(name, row.dollars_per_hour if row is not None else None)

    def cost(self, gpus: Mapping[str, float], seconds: float) -> RunCost:
        """Cost of GPUs, counted by class, that are reserved for a time."""
        hours = {gpu: number * seconds / 3600.0 for gpu, number in gpus.items()}
        dollars: list[float] = []
        for gpu, each in hours.items():
            price = self.dollars_per_hour(gpu)
            if price is not None:
                dollars.append(price * each)
        return RunCost(
            gpu_hours=math.fsum(hours.values()),
            dollars=math.fsum(dollars) if len(dollars) == len(hours) else None,
        )

    def plain(self, gpus: Iterable[str]) -> dict[str, float | None]:
        """Price of each class, as JSON."""
        return {gpu: self.dollars_per_hour(gpu) for gpu in gpus}

    def kept(self, config: RunConfig, gpus: Iterable[str]) -> RunConfig:
        """The same run with the prices of its GPUs, which a later list does not change."""
        found = {gpu: price for gpu, price in self.plain(gpus).items() if price is not None}
        return replace(config, prices={**self.own, **found})

    def text(self, gpus: Iterable[str]) -> str:
        """The same for people, with the date of shipped prices, and what to do without one."""
        priced: dict[str, list[str]] = {}
        unpriced = []
        for gpu, price in self.plain(gpus).items():
            if price is None:
                unpriced.append(f"{gpu} without a price: give {price_option(gpu)}")
                continue
            given = gpu.lower() in self.own
            when = "given" if given else f"heddle prices, {shipped_prices()[gpu.lower()].date}"
            priced.setdefault(when, []).append(f"{gpu} at ${price_text(price)}")
        lists = [f"{', '.join(each)} a GPU-hour ({when})" for when, each in priced.items()]
        return "; ".join([*lists, *unpriced])


@cache
def shipped_prices() -> Mapping[str, GpuPrice]:
    """The table of `heddle prices`, by GPU class."""
    rows: Mapping[str, Mapping[str, Any]] = tomllib.loads(PRICE_FILE.read_text(encoding="utf-8"))
    return {
        gpu: GpuPrice(
            gpu=gpu,
            dollars_per_hour=row.get("dollars_per_hour"),
            date=row["date"],
            source=row["source"],
        )
        for gpu, row in rows.items()
    }


def priced_classes() -> list[GpuPrice]:
    """Rows of the table, and those GPU classes with a profile that it lacks."""
    rows = dict(shipped_prices())
    for _, gpu in known_profiles():
        rows.setdefault(
            gpu,
            GpuPrice(gpu=gpu, dollars_per_hour=None, date="", source=f"none: {price_option(gpu)}"),
        )
    return list(rows.values())


def prices_of(own: Mapping[str, float], used: Iterable[str] = ()) -> Prices:
    """Prices of a run on GPUs of the classes `used`, with a user's own in place of shipped ones.

    Raises:
        ConfigError: an own price is out of range, or of a class that is neither shipped nor used.
    """
    known = dict.fromkeys((*(row.gpu for row in priced_classes()), *map(str.lower, used)))
    for name, price in own.items():
        if not 0.0 <= price < MAX_PRICE:
            raise ConfigError(
                f"price of {name!r} must be from 0 to below {MAX_PRICE:,}, not {price:g}"
            )
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"price of {name!r} ([prices]): no such GPU class{hint}. "
                f"Known: {', '.join(known)}; and the class of a profile file that is used"
            )
    return Prices({name.lower(): float(price) for name, price in own.items()})
