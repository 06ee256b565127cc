"""Groups of an RL loop: from the start of their samples to the batch that they are trained in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from heddle_core.ids import GroupId, RolloutId, TrajectoryId
from heddle_core.ledger import LedgerError

SamplePhase: TypeAlias = Literal["starting", "running", "scoring", "scored", "discarded"]

SAMPLE_TRANSITIONS: Final[Mapping[SamplePhase, Mapping[SamplePhase, str]]] = {
    "starting": {"running": "TrajectoryArrived", "discarded": "StartFailed, or not needed"},
    "running": {"scoring": "TrajectoryFinished", "discarded": "failed or cancelled"},
    "scoring": {"scored": "Scored", "discarded": "no reward, or not needed"},
    "scored": {"discarded": "its group is dropped"},
    "discarded": {},
}
"""From each phase of a sample, the phases that may follow and what leads to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of the loop's data set."""

    group: GroupId
    samples: int
    """Samples of it that can be started."""
    deferrals: int = 0
    """Times that it was started and put off."""


@dataclass(slots=True, eq=False, kw_only=True)
class GroupSample:
    """One trajectory of a group."""

    trajectory: TrajectoryId
    group: "Group"
    number: int
    """Which of the prompt's samples it is; a repeated start has the same number."""
    rollout: RolloutId
    version: int
    """Weights version at its start."""
    phase: SamplePhase = "starting"
    reward: float | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """The samples of one prompt that are trained together."""

    prompt: Prompt
    needed: int
    """Scored samples that make it complete."""
    order: int
    """Groups that started before it."""
    version: int
    """Weights version at the start of its first sample."""
    live: dict[TrajectoryId, GroupSample] = field(default_factory=dict)
    """Samples that are not discarded."""
    started: int = 0
    """Starts of samples so far, repeated ones too."""
    failures: int = 0
    started_s: float = 0.0
    seconds: float = 0.0
    """From its start until it was complete."""
    complete: bool = False
    """Whether it can be trained."""

    @property
    def id(self) -> GroupId:
        return self.prompt.group

    @property
    def scored(self) -> int:
        """Samples with a reward."""
        return sum(sample.phase == "scored" for sample in self.live.values())


class Groups:
    """Every group that has started and is neither trained nor dropped."""

    def __init__(self) -> None:
        self.open: dict[GroupId, Group] = {}
        """In order of their start."""
        self.complete: dict[GroupId, Group] = {}
        """Those of `open` that can be trained, in the order in which they completed."""
        self.samples: dict[TrajectoryId, GroupSample] = {}
        """Live samples of open groups, and discarded ones whose end is still due."""
        self.started = 0
        self.trained = 0
        self.dropped = 0
        self.in_flight = 0
        """Samples that are starting or running."""

    @property
    def live(self) -> int:
        """Groups that have started and were not dropped, trained ones too."""
        return self.started - self.dropped

    def start(self, prompt: Prompt, *, needed: int, version: int, now_s: float) -> Group:
        if prompt.group in self.open:
            raise LedgerError(f"group {prompt.group!r} started twice")
        new = Group(
            prompt=prompt, needed=needed, order=self.started, version=version, started_s=now_s
        )
        self.open[new.id] = new
        self.started += 1
        return new

    def add(
        self,
        group: Group,
        trajectory: TrajectoryId,
        *,
        number: int,
        rollout: RolloutId,
        version: int,
    ) -> GroupSample:
        if trajectory in self.samples:
            raise LedgerError(f"trajectory {trajectory!r} started twice")
        sample = GroupSample(
            trajectory=trajectory, group=group, number=number, rollout=rollout, version=version
        )
        group.live[trajectory] = self.samples[trajectory] = sample
        group.started += 1
        self.in_flight += 1
        return sample

    def sample(self, trajectory: TrajectoryId) -> GroupSample:
        """Return a sample whose end is due, or that is scored."""
        found = self.samples.get(trajectory)
        if found is None:
            raise LedgerError(f"trajectory {trajectory!r} was not started by this loop")
        return found

    def move(self, sample: GroupSample, phase: SamplePhase) -> None:
        """Change the phase of a sample; its only writer."""
        if phase not in SAMPLE_TRANSITIONS[sample.phase]:
            raise LedgerError(f"sample {sample.trajectory!r} is {sample.phase}, so not {phase}")
        if sample.phase in ("starting", "running") and phase not in ("starting", "running"):
            self.in_flight -= 1
        sample.phase = phase
        group = sample.group
        if phase == "discarded":
            group.live.pop(sample.trajectory, None)
        elif phase == "scored" and not group.complete and group.scored >= group.needed:
            group.complete = True
            self.complete[group.id] = group

    def forget(self, sample: GroupSample) -> None:
        """Let go of a discarded sample whose end has come."""
        if sample.phase != "discarded":
            raise LedgerError(f"sample {sample.trajectory!r} is {sample.phase}, not discarded")
        self.samples.pop(sample.trajectory, None)

    def train(self, group: Group) -> tuple[GroupSample, ...]:
        """Take a complete group out; return its scored samples."""
        if not group.complete:
            raise LedgerError(f"group {group.id!r} is not complete")
        trained = tuple(s for s in group.live.values() if s.phase == "scored")
        if len(trained) != group.needed or len(group.live) != group.needed:
            raise LedgerError(f"group {group.id!r} has {len(group.live)} samples left")
        for sample in trained:
            del self.samples[sample.trajectory]
        del self.open[group.id], self.complete[group.id]
        self.trained += 1
        return trained

    def drop(self, group: Group) -> None:
        """Take a group out whose samples are all discarded."""
        if group.live:
            raise LedgerError(f"group {group.id!r} has {len(group.live)} samples left")
        del self.open[group.id]
        self.complete.pop(group.id, None)
        self.dropped += 1

    def before(self, version: int) -> Iterable[Group]:
        """Yield open groups that began before `version`."""
        return [group for group in self.open.values() if group.version < version]

    def check(self) -> None:
        """Assert what must hold after every event."""
        live = {id_: s for g in self.open.values() for id_, s in g.live.items()}
        for id_, sample in live.items():
            assert self.samples.get(id_) is sample, f"{id_} is live and not known"
            assert sample.phase != "discarded", f"{id_} is live and discarded"
        for id_, sample in self.samples.items():
            assert id_ in live or sample.phase == "discarded", f"{id_} belongs to no open group"
        in_flight = sum(s.phase in ("starting", "running") for s in live.values())
        assert in_flight == self.in_flight, f"{self.in_flight} in flight, not {in_flight}"
        assert set(self.complete) == {g.id for g in self.open.values() if g.complete}
        for group in self.open.values():
            assert group.scored <= group.needed, f"{group.id} has more samples than it needs"
            assert group.complete == (group.scored == group.needed), f"{group.id} completes wrongly"
        assert self.started == self.trained + self.dropped + len(self.open)
