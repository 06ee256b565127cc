"""The same events to a fresh controller: does this code still decide as it did?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from heddle.runs import Run
from heddle.simulation import policy_of
from heddle_core.controller import Controller
from heddle_core.journal import Divergence, Entry, first_divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How far a replay went, and where it left the recorded run, if it did."""

    run: str
    entries: int
    commands: int
    divergence: Divergence | None

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        d = self.divergence
        return {
            "schema": "heddle.replay/1",
            "run": self.run,
            "events": self.entries,
            "commands": self.commands,
            "same": d is None,
            "divergence": None
            if d is None
            else {
                "index": d.index,
                "time_s": d.event.time_s,
                "event": str(d.event),
                "recorded": [str(c) for c in d.recorded],
                "replayed": [str(c) for c in d.replayed],
            },
        }


def replay_run(run: Run) -> Replay:
    """Feed a run's events to a fresh controller with its policy, and compare commands one by one.

    Raises:
        RunError, JournalError: the run is damaged.
        PolicyNotFound, ProfileError: it used a policy or profile that is not here.
    """
    entries = commands = 0

    def counted() -> Iterator[Entry]:
        nonlocal entries, commands
        for entry in run.entries():
            entries += 1
            commands += len(entry.commands)
            yield entry

    controller = Controller(policy_of(run.config))
    divergence = first_divergence(counted(), controller.handle)
    return Replay(run=str(run.path), entries=entries, commands=commands, divergence=divergence)
