"""The journal of a run: every event and its commands. Metrics and replay read nothing else."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from heddle_core.commands import Command
from heddle_core.events import Event

Handle: TypeAlias = Callable[[Event], Sequence[Command]]
Sink: TypeAlias = Callable[[Event, Sequence[Command]], None]
"""Takes each event with the commands that it caused."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and the commands that it caused."""

    event: Event
    commands: Sequence[Command]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first entry at which the commands differ."""

    index: int
    event: Event
    recorded: Sequence[Command]
    replayed: Sequence[Command]

    def __str__(self) -> str:
        """Name the first command that differs."""
        for a, b in zip(self.recorded, self.replayed, strict=False):
            if a != b:
                return f"entry {self.index}, {self.event}: recorded {a}, replayed {b}"
        missing = self.recorded[len(self.replayed) :]
        extra = self.replayed[len(self.recorded) :]
        what = f"not replayed {missing[0]}" if missing else f"replayed besides {extra[0]}"
        return f"entry {self.index}, {self.event}: {what}"


def recorded(handle: Handle, sink: Sink) -> Handle:
    """Return `handle` with every call also passed to `sink`."""

    def handle_and_record(event: Event) -> Sequence[Command]:
        commands = handle(event)
        sink(event, commands)
        return commands

    return handle_and_record


def collecting(entries: list[Entry]) -> Sink:
    """Return a sink that appends an entry for each event."""
    return lambda event, commands: entries.append(Entry(event, commands))


def first_divergence(entries: Iterable[Entry], handle: Handle) -> Divergence | None:
    """Feed recorded events to a fresh `handle`; return where its commands first differ, or None."""
    for index, entry in enumerate(entries):
        replayed = handle(entry.event)
        if tuple(replayed) != tuple(entry.commands):
            return Divergence(
                index=index, event=entry.event, recorded=entry.commands, replayed=replayed
            )
    return None
