"""Which row of a data set comes next: whole batches of like length, by an epoch file.

The order is that of `EpochPlan`, over rows. A checkpoint holds the order of its epoch: the file may
have grown since, and every row is to come once.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.config_error import ConfigError, require
from heddle.epochs.file import prompt_id, read_samples
from heddle_core.ids import GroupId
from heddle_core.loop.epoch import LEAST_KNOWN, EpochPlan, lengths_by_age

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
    def of(section: Any, place: str) -> "EpochSettings":
        """Read a section of a configuration, or None; ConfigError where it is another thing."""
        try:
            return EpochSettings(**(section or {}))
        except TypeError:
            keys = f"{place}epoch_file, {place}plan or {place}on_mismatch"
            raise ConfigError(f"{place[:-1]} is {section!r}: give it {keys}") from None

    def checked(self, place: str) -> EpochPlan:
        """The plan; `place` is what messages put before a key.

        Raises:
            ConfigError: a value is wrong; names its key.
        """
        for key in self.__dataclass_fields__:
            value = getattr(self, key)
            require(isinstance(value, str), f"{place}{key} is {value!r}: write text")
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
    """The rows of a data set, epoch after epoch; a sampler for torchdata's stateful loader."""

    def __init__(
        self,
        ids: Sequence[str],
        settings: EpochSettings,
        *,
        batch: int,
        seed: int | None,
        place: str,
    ) -> None:
        """`ids` are the prompts' names in the file, by row; `place` goes before keys in messages.

        Raises:
            ConfigError: a key is wrong, or the file is not of this data set.
        """
        self._plan, self._goes_on = settings.checked(place), settings.on_mismatch == "random"
        require(
            batch > 0,
            f"batches have {batch} prompts: order by length needs a synchronous trainer, with a "
            "batch size of 1 or more",
        )
        require(not seed or seed > 0, f"the seed of the order of rows is {seed}: give 0 or more")
        self._ids, self._path = ids, Path(settings.epoch_file)
        self._place, self._batch, self._seed = place, batch, seed or 0
        self._starts: list[float] = []
        """When epochs began, Unix time: samples belong to the last one before their end."""
        self.rows: list[int] | None = None
        """Order of the present epoch."""
        self._at = 0
        """Rows of it that a loader has had."""
        self._resumed = False
        # Before anything is sampled: what is in the file is of earlier runs.
        self._earlier = self._lengths()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        rows, resumed, self._resumed = self.rows, self._resumed, False
        if rows is None or not resumed or self._at == len(rows):
            rows = self.begin()
        while self._at < len(rows):
            self._at += 1
            yield rows[self._at - 1]

    def begin(self) -> list[int]:
        """Begin an epoch; return the order of its rows.

        Raises:
            ConfigError: the file has no lengths of this data set, or is wrong.
        """
        lengths = self._lengths() if self._starts else self._earlier
        plan = self._plan if lengths else EpochPlan(0.0)
        names = [GroupId(str(row)) for row in range(len(self))]
        seed = (self._seed, len(self._starts))
        self.rows = [int(n) for n in plan.order(names, lengths, batch=self._batch, seed=seed)]
        self._at = 0
        self._starts.append(time.time())
        return self.rows

    def row(self, position: int) -> int:
        """The row at a position of the present epoch; the first position begins one."""
        rows = self.begin() if self.rows is None or position == 0 else self.rows
        return rows[position]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        prompts = prompt_id(self._ids)
        return {"starts": [*self._starts], "rows": self.rows, "at": self._at, "prompts": prompts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the epoch of a checkpoint.

        Raises:
            ConfigError: the checkpoint is of another data set.
        """
        rows, own = state["rows"], prompt_id(self._ids)
        if rows is not None and len(rows) != len(self):
            raise ConfigError(
                f"the checkpoint has an order of {len(rows):,} prompts, and the data set has "
                f"{len(self):,}: resume with the data set of the checkpoint"
            )
        require(
            rows is None or state.get("prompts", own) == own,
            "the checkpoint's order is of other prompts: resume with its data set",
        )
        self._starts, self.rows, self._at = list(state["starts"]), rows, state["at"]
        self._resumed = True

    def _lengths(self) -> dict[GroupId, float]:
        """Mean output tokens by row; none where the order is to be random."""
        if not self._plan.packed:
            return {}
        try:
            self._check_rows()
            return self._known()
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
        if len(self) % self._batch:
            raise ConfigError(
                f"{len(self):,} prompts are no whole batches of {self._batch:,}: take "
                f"{len(self) // self._batch * self._batch:,} of them, or another batch size"
            )

    def _known(self) -> dict[GroupId, float]:
        if not (self._starts or self._path.exists()):
            return {}
        epochs: list[dict[GroupId, list[int]]] = [{} for _ in range(len(self._starts) + 1)]
        for sample in read_samples(self._path):
            epoch = epochs[bisect_right(self._starts, sample.at_s)]
            epoch.setdefault(GroupId(sample.prompt), []).append(sample.tokens)
        found = lengths_by_age(epochs)
        ids = enumerate(map(GroupId, self._ids))
        known = {GroupId(str(row)): found[prompt] for row, prompt in ids if prompt in found}
        said = (
            f"{self._path}: has lengths of {len(known):,} of the {len(self):,} prompts of the data "
            f"set, and of {len(found) - len(known):,} others"
        )
        least, share = LEAST_KNOWN * len(self), len(known) / max(len(self), 1)
        if len(known) < (least if self._starts else min(len(found), 1)):
            raise ConfigError(
                f"{said}: give the file of this data set, or a new path; or "
                f"{self._place}on_mismatch=random"
            )
        if 0 < len(known) < least:
            log.warning("%s: %.1f %% are known, the rest takes their mean", said, 100.0 * share)
        return known
