"""Which row of a data set comes next: whole batches of like length, by an epoch file.

The order is that of `EpochPlan`, over rows. A checkpoint holds the order of its epoch: the file may
have grown since, and every row is to come once.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.config_error import ConfigError, require
from heddle.epochs.file import read_samples
from heddle_core.ids import GroupId
from heddle_core.loop.epoch import EpochPlan, recent_lengths

LEAST_KNOWN = 0.5
"""Share of the prompts whose lengths must be known after an epoch: fewer are another data set's."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSettings:
    """What a user sets in the configuration of a framework."""

    epoch_file: str = ""
    """Path of the file that the gateway or the router writes."""
    plan: str = "sorted"
    """`sorted`, `tail:SHARE` or `random`, as `loop.epoch_plan`."""
    on_mismatch: str = "error"
    """Whether training ends where the file does not fit the data set, or goes on in random order:
    `error` or `random`."""

    @staticmethod
    def of(values: Mapping[str, Any], place: str) -> "EpochSettings":
        """Read a section, whose keys have `place` before them.

        Raises:
            ConfigError: it has another key.
        """
        known = EpochSettings.__dataclass_fields__
        for key in values:
            if key not in known:
                raise ConfigError(f"{place}{key} is no key; known: {', '.join(known)}")
        return EpochSettings(**values)

    def checked(self, place: str) -> EpochPlan:
        """The plan; `place` is what messages put before a key.

        Raises:
            ConfigError: a value is wrong; names its key.
        """
        require(
            bool(self.epoch_file),
            f"{place}epoch_file is missing: give the path that the gateway or the router writes",
        )
        require(
            self.on_mismatch in ("error", "random"),
            f"{place}on_mismatch is {self.on_mismatch!r}: write error or random",
        )
        try:
            return EpochPlan.of(self.plan)
        except ValueError as error:
            raise ConfigError(f"{place}plan = {error}") from None


class RowOrder:
    """The rows of a data set, epoch after epoch."""

    def __init__(
        self,
        ids: Sequence[str],
        settings: EpochSettings,
        *,
        batch: int,
        seed: int | None,
        place: str = "",
    ) -> None:
        """`ids` are the prompts' names in the file, by row; `place` goes before keys in messages.

        Raises:
            ConfigError: a key is wrong, or the file is not of this data set.
        """
        self._plan = settings.checked(place)
        self._ids, self._path = ids, Path(settings.epoch_file)
        self._goes_on = settings.on_mismatch == "random"
        self._place, self._batch, self._seed = place, batch, seed or 0
        self._starts: list[float] = []
        """When epochs began, Unix time: samples belong to the last one before their end."""
        self.rows: list[int] | None = None
        """Order of the present epoch."""
        self._has_trained = False
        """Whether an epoch with this order has begun, so that the file must have lengths next."""
        # Before anything is sampled: what is in the file is of earlier runs.
        self._earlier = self._known()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def epoch(self) -> int:
        """Epochs that have begun."""
        return len(self._starts)

    def begin(self) -> list[int]:
        """Begin an epoch; return the order of its rows.

        Raises:
            ConfigError: the file has no lengths of this data set, or is wrong.
        """
        lengths = self._known() if self._has_trained else self._earlier
        plan = self._plan if lengths else EpochPlan(0.0)
        names = [GroupId(str(row)) for row in range(len(self._ids))]
        known = {
            name: lengths[prompt]
            for name, prompt in zip(names, map(GroupId, self._ids), strict=True)
            if prompt in lengths
        }
        seed = (self._seed, self.epoch)
        self.rows = [int(n) for n in plan.order(names, known, batch=self._batch, seed=seed)]
        self._starts.append(time.time())
        self._has_trained = True
        return self.rows

    def row(self, position: int) -> int:
        """The row at a position of the present epoch; the first position begins one."""
        if self.rows is None or position == 0:
            self.begin()
        assert self.rows is not None
        return self.rows[position]

    def skip_to(self, epoch: int) -> None:
        """The next epoch has this number: those before it began without this order."""
        if epoch > self.epoch:
            self._starts += [time.time()] * (epoch - self.epoch)
            self._has_trained = False

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"starts": list(self._starts), "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the epoch of a checkpoint; one that has begun since stays begun.

        Raises:
            ConfigError: the checkpoint is of a data set of another size.
        """
        rows = state["rows"]
        if rows is not None and len(rows) != len(self._ids):
            raise ConfigError(
                f"the checkpoint has an order of {len(rows):,} prompts, and the data set has "
                f"{len(self._ids):,}: resume with the data set of the checkpoint"
            )
        if len(state["starts"]) > len(self._starts):
            self._starts = list(state["starts"])
        self.rows = rows
        self._has_trained |= bool(state["starts"])

    def _known(self) -> dict[GroupId, float]:
        """Mean lengths of prompts; none where the order is to be random."""
        if not self._plan.packed:
            return {}
        try:
            self._check_rows()
            return self._lengths()
        except ConfigError as error:
            if not self._goes_on:
                raise
            log.warning("%s. The order is random instead", error)
            return {}

    def _check_rows(self) -> None:
        first: dict[str, int] = {}
        for row, prompt in enumerate(self._ids):
            if first.setdefault(prompt, row) != row:
                raise ConfigError(
                    f"rows {first[prompt]} and {row} of the data set are the same prompt, "
                    f"{prompt}: remove one of them, or make them differ"
                )
        rows, batch = len(self._ids), self._batch
        if rows % batch:
            raise ConfigError(
                f"{rows:,} prompts are no whole batches of {batch:,}: take "
                f"{rows // batch * batch:,} of them, or another batch size"
            )

    def _lengths(self) -> dict[GroupId, float]:
        if not (self._has_trained or self._path.exists()):
            return {}
        epochs: list[dict[GroupId, list[int]]] = [{} for _ in range(self.epoch + 1)]
        for sample in read_samples(self._path):
            epoch = epochs[bisect_right(self._starts, sample.at_s)]
            epoch.setdefault(GroupId(sample.prompt), []).append(sample.tokens)
        found = recent_lengths(epochs)
        known = {GroupId(each): found[GroupId(each)] for each in self._ids if each in found}
        least = LEAST_KNOWN * len(self._ids) if self._has_trained else min(len(found), 1)
        if len(known) < least:
            raise ConfigError(
                f"{self._path}: has lengths of {len(known):,} of the {len(self._ids):,} prompts of "
                f"the data set, and of {len(found) - len(known):,} others: give the file of this "
                f"data set, or a new path; or {self._place}on_mismatch=random"
            )
        return known


class EpochSampler:
    """A sampler for torch's data loaders; torchdata's stateful one saves its state."""

    def __init__(self, order: RowOrder) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> "EpochRows":
        return EpochRows(self._order)


class EpochRows:
    """The rows of one epoch, which begins with the first."""

    def __init__(self, order: RowOrder) -> None:
        self._order = order
        self._rows: list[int] | None = None
        self._at = 0

    def __iter__(self) -> "EpochRows":
        return self

    def __next__(self) -> int:
        if self._rows is None:
            self._rows = self._order.begin()
        if self._at == len(self._rows):
            raise StopIteration
        self._at += 1
        return self._rows[self._at - 1]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self._order.state_dict(), "rows": self._rows, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was."""
        self._order.load_state_dict(state)
        self._rows, self._at = state["rows"], state["at"]
