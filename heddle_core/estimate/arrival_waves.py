"""How trajectories arrive: a batch at once, or one by one while others end."""

from typing import Final

_ENDS: Final = 8
"""A wave goes on while less than one trajectory ends for so many of its arrivals."""


class ArrivalWaves:
    """Arrivals in waves: few trajectories end while one comes in.

    The trajectories of a rollout come in one wave, before the first of them have ended. Where
    clients come at times of their own, ends lie between the arrivals, and waves have one trajectory
    or few. Only the order of arrivals and ends counts, no time.
    """

    def __init__(self) -> None:
        self._arrivals = 0
        self._wave = 0
        self._came = self._ends = 0
        """Arrivals in the newest wave, and ends since its first."""
        self._wave_of: dict[int, int] = {}
        """Wave of each unfinished trajectory, by the number of its arrival."""
        self._sizes: dict[int, int] = {}
        """Unfinished trajectories of each wave that has some."""
        self._batch: bool | None = None
        """The answer of `batch`; None after a change."""

    def arrived(self, arrivals: int) -> None:
        """Take the number of arrivals so far; those that are new came after all known ends."""
        count = arrivals - self._arrivals
        if count <= 0:
            return
        if self._ends * _ENDS > self._came:
            self._wave += 1
            self._came = self._ends = 0
        for number in range(self._arrivals, arrivals):
            self._wave_of[number] = self._wave
        self._sizes[self._wave] = self._sizes.get(self._wave, 0) + count
        self._arrivals = arrivals
        self._came += count
        self._batch = None

    def ended(self, number: int) -> None:
        """Take the end of the trajectory before which `number` others had arrived."""
        self.arrived(number + 1)
        wave = self._wave_of.pop(number)
        self._sizes[wave] -= 1
        if not self._sizes[wave]:
            del self._sizes[wave]
        self._ends += 1
        self._batch = None

    @property
    def batch(self) -> bool:
        """Whether most of the unfinished trajectories came in one wave."""
        if self._batch is None:
            self._batch = 2 * max(self._sizes.values(), default=0) > len(self._wave_of)
        return self._batch
