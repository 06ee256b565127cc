"""Decides what an RL loop starts, trains and updates, above the controller of its rollouts.

Like that controller it reads no clock and does no I/O: events come in, commands go out. It owns the
rollouts' controller and hands their events on. Groups, versions and batches are kept here; steps,
homes and queues there. Neither reads the other's state.
"""

import math
import typing
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias

from heddle_core.commands import (
    AccumulateGradients,
    AssignGpus,
    Cancel,
    CloseRollout,
    Command,
    Discard,
    OpenRollout,
    Score,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.controller import Controller
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineStopped,
    EngineUpdated,
    Event,
    GpusAssigned,
    GradientsAccumulated,
    LoopEvent,
    LoopStarted,
    Scored,
    StartFailed,
    Trained,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId
from heddle_core.ledger import LedgerError
from heddle_core.loop.groups import Group, Groups, GroupSample, Prompt
from heddle_core.loop.hybrid import HybridPool
from heddle_core.loop.regime import Regime
from heddle_core.loop.split_plan import StepEnd

MOST_FAILURES: Final = 3
"""Starts, samples and rewards of a group that may fail before its prompt is given up."""

EXTRA: Final = RolloutId("extra")
"""The open rollout of trajectories that start outside a round."""

_LOOP_EVENTS: Final = frozenset(typing.get_args(LoopEvent))

Stage: TypeAlias = Literal[
    "collecting",
    "accumulating",
    "to_training",
    "training",
    "to_rollout",
    "draining",
    "updating",
    "over",
]
"""What the loop does besides its rollouts: it waits for a batch, computes gradients of a part of
it, moves the GPUs to training, trains, moves them back, waits for running trajectories, updates the
engines, or has ended."""

MOST_FAILED_PROMPTS: Final = 100
"""For each prompt that is trained: then the loop is given up."""


class TooManyFailuresError(RuntimeError):
    """A loop that does not get on, because nearly every start or reward fails."""


class OutOfPromptsError(ValueError):
    """The data set has no prompt left."""


class LoopController:
    """Trains so many batches under a regime, then discards what still runs."""

    def __init__(
        self,
        controller: Controller,
        regime: Regime,
        prompts: Iterable[Prompt],
        *,
        batches: int,
        pool: HybridPool | None = None,
        slots: int = 1,
        on_ended: Callable[[GroupId, int], None] | None = None,
    ) -> None:
        """`prompts` start in this order.

        A regime with hybrid GPUs needs their `pool`, and the `slots` of the other engines.
        `on_ended` gets the group and the output tokens of each trajectory that ends by itself.
        """
        self.regime = regime
        self.groups = Groups()
        self.stage: Stage = "collecting"
        self.version = 0
        self.begun = 0
        """Batches whose training has begun."""
        self.trained = 0
        """Batches whose training has ended."""
        self.failed_prompts = 0
        """Prompts of which too many samples failed."""
        self._rollouts = controller
        self._batches = batches
        self._prompts = iter(prompts)
        self._deferred: deque[Prompt] = deque()
        self._unstarted: deque[tuple[Group, int]] = deque()  # samples of groups that have started
        self._rounds = 0
        self._extra_is_open = False
        self._due: dict[RolloutId, int] = {}
        """Trajectories of each rollout that have not arrived."""
        self._short: set[RolloutId] = set()
        """Rollouts of which fewer trajectories arrive than announced."""
        self._engines: dict[EngineId, None] = {}
        self._updating: dict[EngineId, None] = {}
        self._cause = 0
        self._training: tuple[TrajectoryId, ...] = ()
        self._accumulated = 0
        """Groups of the batch in collection that the trainer has had."""
        self._pool, self._slots = pool, slots
        self._on_ended = on_ended
        self._now_s = 0.0
        self._waits_since_s = 0.0
        """Since when the trainer has nothing to do and has its GPUs."""
        self._awaited = regime.groups
        """Groups that a batch lacked then."""
        self._train_since_s = self._train_s = self._rollout_s = 0.0
        """Begin of the last training, its seconds, and those in which a batch is generated."""
        by_batch = regime.staleness.counted_by == "batch"
        collecting: tuple[Stage, ...] = ("collecting", "accumulating")
        self._round_stages = (*collecting, "training") if by_batch else collecting
        """Stages in which a round may start, where updates wait for running trajectories."""
        self._on: dict[type[Event], Callable[[Any, list[Command]], None]] = {
            EngineFailed: self._on_engine_gone,
            EngineReady: self._on_engine_ready,
            EngineStopped: self._on_engine_gone,
            EngineUpdated: self._on_engine_updated,
            GpusAssigned: self._on_gpus_assigned,
            GradientsAccumulated: self._on_accumulated,
            LoopStarted: self._on_loop_started,
            Scored: self._on_scored,
            StartFailed: self._on_start_failed,
            Trained: self._on_trained,
            TrajectoryArrived: self._on_arrived,
            TrajectoryFinished: self._on_finished,
        }

    @property
    def deadline_s(self) -> float | None:
        return self._rollouts.deadline_s

    @property
    def over(self) -> bool:
        """Whether all batches are trained and every trajectory has ended."""
        return self.stage == "over" and not self.groups.samples

    def handle(self, event: Event) -> Sequence[Command]:
        """Take one event in; return the commands it causes."""
        out: list[Command]
        cause = self._rollouts.events
        if type(event) in _LOOP_EVENTS:
            self._rollouts.skip_event()
            out = []
        else:
            if self._on_ended is not None and isinstance(event, TrajectoryFinished):
                self._note_length(event, self._on_ended)
            out = list(self._rollouts.handle(event))
        react = self._on.get(type(event))
        if react is not None:
            self._cause = cause
            self._now_s = event.time_s
            react(event, out)
            self._advance(out)
        return tuple(out)

    # -- samples ----------------------------------------------------------------------------------

    def _on_loop_started(self, e: LoopStarted, out: list[Command]) -> None:
        """Nothing besides the start of the first trajectories."""

    def _on_arrived(self, e: TrajectoryArrived, out: list[Command]) -> None:
        sample = self.groups.sample(e.trajectory)
        self._arrived_in(sample.rollout, out)
        if sample.phase == "discarded":
            self._cancel(sample, out)
        else:
            self.groups.move(sample, "running")

    def _on_start_failed(self, e: StartFailed, out: list[Command]) -> None:
        sample = self.groups.sample(e.trajectory)
        was_wanted = sample.phase != "discarded"
        if was_wanted:
            self.groups.move(sample, "discarded")
        self.groups.forget(sample)
        self._short.add(sample.rollout)
        self._arrived_in(sample.rollout, out)
        if was_wanted:
            self._replace(sample, out)

    def _on_finished(self, e: TrajectoryFinished, out: list[Command]) -> None:
        sample = self.groups.sample(e.trajectory)
        if sample.phase == "discarded":
            self.groups.forget(sample)
        elif e.outcome in ("completed", "truncated"):
            self.groups.move(sample, "scoring")
            out.append(Score(trajectory=e.trajectory, cause=self._cause))
        else:
            self.groups.move(sample, "discarded")
            self.groups.forget(sample)
            self._replace(sample, out)

    def _note_length(self, e: TrajectoryFinished, note: Callable[[GroupId, int], None]) -> None:
        if e.outcome in ("completed", "truncated"):
            ended = self._rollouts.ledger.trajectory(e.trajectory)
            note(ended.group, ended.output_tokens)

    def _on_scored(self, e: Scored, out: list[Command]) -> None:
        sample = self.groups.sample(e.trajectory)
        if sample.phase == "discarded":
            self.groups.forget(sample)
        elif e.reward is None:
            self._discard(sample, out)
            self.groups.forget(sample)
            self._replace(sample, out)
        else:
            sample.reward = e.reward
            self.groups.move(sample, "scored")
            if sample.group.complete:
                self._completed(sample.group, out)

    def _completed(self, group: Group, out: list[Command]) -> None:
        """End what a complete group does not need; drop what the regime does not train."""
        for other in list(group.live.values()):
            if other.phase != "scored":
                self._discard(other, out)
        group.seconds = self._now_s - group.started_s
        batching, complete = self.regime.batching, self.groups.complete
        drops = batching.equal_rewards == "drop"
        if drops and len({sample.reward for sample in group.live.values()}) == 1:
            self._drop(group, out)
        elif batching.most_complete is not None and len(complete) > batching.most_complete:
            self._drop(next(iter(complete.values())), out)

    def _replace(self, failed: GroupSample, out: list[Command]) -> None:
        """Start a failed sample again if its group needs it, unless too many of it have failed."""
        group = failed.group
        group.failures += 1
        if self.stage == "over" or len(group.live) >= group.needed:
            return
        if group.failures > MOST_FAILURES:
            self.failed_prompts += 1
            self._drop(group, out)
            most = MOST_FAILED_PROMPTS * self.regime.groups * (self.trained + 1)
            if self.failed_prompts > most:
                raise TooManyFailuresError(
                    f"{self.failed_prompts:,} prompts were given up, each after "
                    f"{MOST_FAILURES + 1} failures of its samples, while {self.trained} of "
                    f"{self._batches} batches were trained: environments or rewards fail too often"
                )
        else:
            self._start_sample(group, failed.number, EXTRA, out)

    def _discard(self, sample: GroupSample, out: list[Command]) -> None:
        """A sample is not needed: end it if it runs."""
        before = sample.phase
        self.groups.move(sample, "discarded")
        if before == "running":
            self._cancel(sample, out)
        elif before != "starting":
            out.append(Discard(trajectory=sample.trajectory, cause=self._cause))
            if before == "scored":
                self.groups.forget(sample)

    def _cancel(self, sample: GroupSample, out: list[Command]) -> None:
        out.append(Cancel(trajectory=sample.trajectory, reason="discarded", cause=self._cause))

    def _drop(self, group: Group, out: list[Command]) -> None:
        for sample in list(group.live.values()):
            self._discard(sample, out)
        self.groups.drop(group)

    # -- training and weights ---------------------------------------------------------------------

    def _on_trained(self, e: Trained, out: list[Command]) -> None:
        if self.stage != "training" or e.batch != self.begun - 1:
            raise LedgerError(f"batch {e.batch} is not in training")
        self.trained += 1
        self._training = ()
        self._train_s = self._now_s - self._train_since_s
        if self.trained == self._batches:
            self.stage = "over"
            for group in list(self.groups.open.values()):
                self._drop(group, out)
        elif self.regime.split.colocated:
            self.stage = "to_rollout"
            out.append(AssignGpus(role="rollout", cause=self._cause))
        else:
            self._after_training()

    def _on_accumulated(self, e: GradientsAccumulated, out: list[Command]) -> None:
        if self.stage != "accumulating" or e.batch != self.begun:
            raise LedgerError(f"no gradients of batch {e.batch} are due")
        self.stage = "collecting"

    def _on_gpus_assigned(self, e: GpusAssigned, out: list[Command]) -> None:
        if e.pool == "hybrid":
            if self._pool is None:
                raise LedgerError("there is no hybrid pool")
            out.extend(self._pool.assigned(e, self._cause))
            self._begin_waiting()
        elif self.stage == "to_training" and e.role == "training":
            self.stage = "training"
            self._train(out)
        elif self.stage == "to_rollout" and e.role == "rollout":
            self._after_training()
        else:
            raise LedgerError(f"GPUs were assigned to {e.role} while {self.stage}")

    def _after_training(self) -> None:
        due = self.trained % self.regime.update.every == 0
        self.stage = "draining" if due else "collecting"
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        self._waits_since_s = self._now_s
        self._awaited = max(0, self.regime.groups - len(self.groups.complete))

    def _move_gpus(self, step: StepEnd | None, out: list[Command]) -> None:
        """Let hybrid GPUs change sides if their rule says so."""
        pool = self._pool
        assert pool is not None
        if pool.state == "rollout":
            if pool.rule.takes_back(len(self.groups.complete), step):
                out.extend(pool.take_back(self._now_s, self._cause))
        elif pool.state == "training" and step is not None:
            last = self.trained + self.regime.update.every >= self._batches
            if not last and pool.rule.lends(step):
                out.append(pool.lend(self._now_s, self._cause))

    def _on_engine_ready(self, e: EngineReady, out: list[Command]) -> None:
        self._engines[e.engine] = None
        if self._pool is not None and e.engine in self._pool:
            self._pool.ready(e.engine, self._now_s)

    def _on_engine_gone(self, e: EngineStopped | EngineFailed, out: list[Command]) -> None:
        if self._pool is not None and e.engine in self._pool:
            out.extend(self._pool.gone(e.engine, self._now_s, self._cause))
        self._engines.pop(e.engine, None)
        self._updating.pop(e.engine, None)

    def _on_engine_updated(self, e: EngineUpdated, out: list[Command]) -> None:
        if e.engine in self._engines and self._updating.pop(e.engine, 0) is not None:
            raise LedgerError(f"engine {e.engine!r} was not to be updated")
        if e.engine in self._engines and e.version < self.version:
            self._update([e.engine], self.version, out)

    def _train(self, out: list[Command]) -> None:
        batch = self.begun - 1
        out.append(Train(batch=batch, trajectories=self._training, cause=self._cause))

    # -- what follows from the state --------------------------------------------------------------

    def _advance(self, out: list[Command]) -> None:
        """Do all that can be done now."""
        if self._pool is not None and self.stage != "over":
            self._move_gpus(None, out)
        if self.stage == "collecting":
            self._begin_training(out)
        if self.stage == "draining":
            self._begin_update(out)
        if self.stage == "updating" and not (self._updating and self.regime.update.waits):
            self._end_update(out)
            self._begin_training(out)
        if self.stage == "over":
            if self._extra_is_open and not self._due.get(EXTRA):
                self._extra_is_open = False
                out.append(CloseRollout(rollout=EXTRA, cause=self._cause))
        else:
            self._start_groups(out)

    def _begin_training(self, out: list[Command]) -> None:
        if self._pool is not None and not self._pool.trainer_ready:
            return
        missing = self.regime.groups - self._accumulated
        found = self._trainable(missing)
        if len(found) == missing:
            if self._pool is not None:
                self._pool.rule.waited(self._now_s - self._waits_since_s, self._awaited)
                in_flight = (self.regime.staleness.bound + 1.0) * self.regime.update.every
                self._rollout_s = fmean(group.seconds for group in found) / in_flight
                self._train_since_s = self._now_s
            self._training = self._take(found)
            self._accumulated = 0
            self.begun += 1
            self._leave_rest(out)
            if self.regime.split.colocated:
                self.stage = "to_training"
                out.append(AssignGpus(role="training", cause=self._cause))
            else:
                self.stage = "training"
                self._train(out)
        elif found and len(found) >= (self.regime.batching.accumulate_from or missing):
            self.stage = "accumulating"
            self._accumulated += len(found)
            out.append(
                AccumulateGradients(
                    batch=self.begun, trajectories=self._take(found), cause=self._cause
                )
            )

    def _take(self, groups: Iterable[Group]) -> tuple[TrajectoryId, ...]:
        """Take groups out; return their samples."""
        return tuple(s.trajectory for group in groups for s in self.groups.train(group))

    def _leave_rest(self, out: list[Command]) -> None:
        """Do with the groups that are not in the batch what the regime says."""
        rest = self.regime.batching.rest
        if rest == "keep":
            return
        for group in list(self.groups.open.values()):
            if rest == "defer":
                again = group.prompt.deferrals + 1
                self._deferred.append(replace(group.prompt, deferrals=again))
            self._drop(group, out)

    def _trainable(self, missing: int) -> list[Group]:
        """Complete groups to train now, `missing` at most; places of late ones are kept."""
        regime, groups = self.regime, self.groups
        if len(groups.complete) < min(regime.batching.accumulate_from or missing, missing):
            return []
        ready = list(groups.complete.values())
        if regime.batching.order == "started":
            return [g for g in islice(groups.open.values(), missing) if g.complete]
        if regime.batching.order == "oldest":
            ready.sort(key=lambda group: group.order)
        if regime.staleness.late == "wait" and regime.batching.rest == "keep":
            missing -= min(self._places_of_late(ready), missing)
        return ready[:missing]

    def _places_of_late(self, ready: list[Group]) -> int:
        """Places of this batch that groups that are not `ready` must have to be within the bound.

        Of those that may be trained under a version at the latest, this batch takes as many as do
        not fit into the batches between; they come first in `ready` from now on.
        """
        regime, most = self.regime, self.regime.staleness.most
        left = regime.update.every - 1 - self.trained % regime.update.every
        open_ = sorted(group.version + most for group in self.groups.open.values())
        known = sorted(group.version + most for group in ready)
        kept, urgent = 0, -1
        for last in dict.fromkeys(open_):
            batches = left + (last - self.version) * regime.update.every
            later = max(0, batches * regime.groups)
            must = bisect_right(open_, last) - later
            if must > 0:
                kept, urgent = max(kept, must - bisect_right(known, last)), last
        ready.sort(key=lambda group: min(group.version + most, urgent + 1))
        return kept

    def _begin_update(self, out: list[Command]) -> None:
        update = self.regime.update
        if update.mode == "drain" and self.groups.in_flight:
            return
        self.stage = "updating"
        self._update([e for e in self._engines if e not in self._updating], self.version + 1, out)

    def _update(self, engines: Sequence[EngineId], version: int, out: list[Command]) -> None:
        """Let engines take weights; those that take older ones now follow."""
        update = self.regime.update
        self._updating |= dict.fromkeys(engines)
        out.extend(
            UpdateWeights(
                engine=engine,
                version=version,
                mode=update.mode,
                keep_kv=update.keep_kv,
                cause=self._cause,
            )
            for engine in engines
        )

    def _end_update(self, out: list[Command]) -> None:
        self.version += 1
        self.stage = "collecting"
        if self.regime.staleness.late == "drop":
            for group in self.groups.before(self.version - self.regime.staleness.most):
                self._drop(group, out)
        self._begin_waiting()
        if self._pool is not None:
            step = StepEnd(
                ready=len(self.groups.complete),
                train_s=self._train_s,
                rollout_s=self._rollout_s,
                pressure=self.groups.in_flight / self._slots,
            )
            self._move_gpus(step, out)

    # -- starts -----------------------------------------------------------------------------------

    def _start_groups(self, out: list[Command]) -> None:
        regime, groups = self.regime, self.groups
        drains = regime.update.mode == "drain"
        if drains and not (self.stage in self._round_stages and groups.in_flight == 0):
            return
        if regime.staleness.admits == "samples":
            self._start_samples(out)
            return
        long_round = drains and len(self._deferred) >= regime.groups
        count = regime.groups if long_round else self._may_start()
        if count <= 0:
            return
        samples = regime.samples if long_round else regime.started_samples
        prompts = [self._next_prompt(long_round) for _ in range(count)]
        rollout = EXTRA
        if drains or not self._rounds:
            rollout = RolloutId(f"round-{self._rounds}")
            self._rounds += 1
            self._due[rollout] = 0
            out.append(
                OpenRollout(
                    rollout=rollout,
                    trajectories=sum(min(samples, prompt.samples) for prompt in prompts),
                    weights_version=self.version,
                    cause=self._cause,
                )
            )
        for prompt in prompts:
            group = groups.start(
                prompt, needed=regime.samples, version=self.version, now_s=self._now_s
            )
            for number in range(min(samples, prompt.samples)):
                self._start_sample(group, number, rollout, out)

    def _start_samples(self, out: list[Command]) -> None:
        """Start samples one by one as there is room, those of a new group after all others."""
        most, groups = self.regime.staleness.max_concurrent or 0, self.groups
        while groups.in_flight < most:
            if not self._unstarted:
                if self._may_start() <= 0:
                    return
                prompt, needed = self._next_prompt(False), self.regime.samples
                new = groups.start(prompt, needed=needed, version=self.version, now_s=self._now_s)
                samples = min(self.regime.started_samples, prompt.samples)
                self._unstarted.extend((new, number) for number in range(samples))
            group, number = self._unstarted.popleft()
            if groups.open.get(group.id) is group and not group.complete:
                self._start_sample(group, number, EXTRA, out)

    def _may_start(self) -> int:
        """Groups that the regime lets start now."""
        regime, groups = self.regime, self.groups
        staleness, extra = regime.staleness, regime.sampling.extra_groups
        # A trainer that is slower than its engines would let groups pile up without end.
        allowed = [2 * regime.groups * self._batches + extra - groups.live]
        if staleness.counted_by == "version":
            versions = self.version * (1.0 + staleness.growth)
            batches = (staleness.bound + versions + 1) * regime.update.every
            allowed.append(math.floor(batches * regime.groups + 1e-9) + extra - groups.live)
        elif staleness.counted_by == "batch":
            allowed.append((self.begun + 1) * regime.groups + extra - groups.live)
        if staleness.max_concurrent is not None:
            each, busy = regime.started_samples, groups.in_flight
            if staleness.admits == "groups":
                busy = (len(groups.open) - len(groups.complete)) * each
            free = staleness.max_concurrent - busy
            allowed.append(free if staleness.admits == "samples" else free // each)
        return min(allowed)

    def _next_prompt(self, long_round: bool) -> Prompt:
        if long_round:
            return self._deferred.popleft()
        prompt = next(self._prompts, None)
        if prompt is None:
            raise OutOfPromptsError(f"no prompt is left after {self.groups.started} groups")
        return prompt

    def _start_sample(
        self, group: Group, number: int, rollout: RolloutId, out: list[Command]
    ) -> None:
        if rollout == EXTRA and not self._extra_is_open:
            self._extra_is_open = True
            out.append(
                OpenRollout(
                    rollout=EXTRA,
                    trajectories=None,
                    weights_version=self.version,
                    cause=self._cause,
                )
            )
        start = group.prompt.deferrals + group.failures
        again = f".{group.prompt.deferrals}.{group.failures}" if start else ""
        trajectory = TrajectoryId(f"{group.id}/{number}{again}")
        self.groups.add(group, trajectory, number=number, rollout=rollout, version=self.version)
        self._due[rollout] = self._due.get(rollout, 0) + 1
        out.append(
            StartTrajectory(
                trajectory=trajectory,
                group=group.id,
                sample=number,
                rollout=rollout,
                cause=self._cause,
            )
        )

    def _arrived_in(self, rollout: RolloutId, out: list[Command]) -> None:
        """A trajectory has arrived in its rollout, or never will."""
        self._due[rollout] -= 1
        if rollout != EXTRA and not self._due[rollout]:
            del self._due[rollout]
            if rollout in self._short:
                self._short.discard(rollout)
                out.append(CloseRollout(rollout=rollout, cause=self._cause))
