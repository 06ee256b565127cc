"""The campaign `answers`: clients of a gateway get exact answers in time, whatever engines do.

A case is a schedule of faults of two to four engines of `mock_vllm` behind a gateway, with honest
and hostile clients. It runs in virtual time on real sockets: a limit in seconds does not depend on
the machine.
"""

import asyncio
import re
import traceback
from collections.abc import Iterable
from random import Random
from typing import Final

import msgspec

from campaigns.campaign import Failure, Outcome
from campaigns.faults.answers_requests import (
    Sent,
    direct_s,
    hostile_request,
    new_request,
    send,
)
from campaigns.faults.answers_scene import Scene, in_virtual_time_too, logged, scene
from campaigns.faults.drawing import with_less, without_parts
from campaigns.faults.mock_bodies import BYTES_FROM
from campaigns.faults.mock_faults import (
    COUNTERS_ONLY,
    HARMLESS,
    KINDS,
    SILENT_STREAMS,
    SLOW_FACTOR,
    STEP_FAULTS,
    Fault,
)
from campaigns.faults.mock_vllm import MockVllm
from heddle_core.events import EngineFailed

LATE_S: Final = 10.0
"""What a gateway may add to the time of a request, whatever engines do, while one is well."""
NOTICED_S: Final = 10.0
"""What each further engine at which its stream was silent may add: 5 s of silence say nothing."""
BACK_S: Final = 5.0
"""An engine has steps again so long after the end of its fault."""
UNEVEN_S: Final = 10.0
"""After such an outage the policy `heddle` gives the engine that is back all new trajectories."""
ENOUGH: Final = 6
"""Requests for each engine that must begin in that time, for the engine to be missed."""
AFTER_S: Final = 8.0
"""Clients go on so long after the last fault."""
LONG: Final = 100_000
SHOWN: Final = 6
"""Problems in the text of a failure."""
POLICIES: Final = ("heddle", "heddle", "verl", "sticky_least_loaded", "slime")


class AnswersCase(msgspec.Struct, frozen=True, kw_only=True, tag="answers"):
    """Engines, their faults, and clients; all drawn by one seed. Times are seconds."""

    seed: int
    faults: tuple[Fault, ...] = ()
    policy: str = "heddle"
    relays: bool = True
    """Whether engines answer chats and completions themselves; otherwise they only generate."""
    engines: int = 2
    clients: int = 4
    hostile: int = 0
    """Clients whose requests are refused, or that go away."""
    seconds: float = 20.0
    iteration_s: float = 0.05
    prefill_tokens: int = 8192
    max_running: int = 256
    """Requests that an engine runs at once; others wait there."""
    long_prompts: int = 0
    """Requests of 100,000 tokens at the beginning."""
    thinks_s: float = 1.0
    """Mean time between two requests of a client."""


class _Run:
    def __init__(self, case: AnswersCase) -> None:
        self.case = case
        self.engines = [
            MockVllm(
                iteration_s=case.iteration_s,
                prefill_tokens=case.prefill_tokens,
                max_running=case.max_running,
                seed=f"{case.seed} {n}",
            )
            for n in range(case.engines)
        ]
        self.sent: list[Sent] = []
        self.problems: list[tuple[str, str]] = []
        """The category, and what happened."""
        self.refusals = 0

    async def play(self) -> None:
        """Play the case, and judge it."""
        case = self.case
        async with logged() as log:
            async with scene(self.engines, policy=case.policy, relays=case.relays) as now:
                clients = [self._client(now, n, hostile=False) for n in range(case.clients)]
                clients += [self._client(now, n, hostile=True) for n in range(case.hostile)]
                clients += [self._long(now, n) for n in range(case.long_prompts)]
                faults = [now.have(fault) for fault in case.faults]
                await asyncio.gather(*clients, *faults)
                await asyncio.sleep(AFTER_S)
                self._judge_requests(now)
                self._judge_engines(now)
                self._judge_rest(now)
            if not now.bench.replays():
                self.problems.append(("replay diverges", ""))
            self.problems += [("traceback", text) for text in log.found]

    async def _client(self, now: Scene, number: int, *, hostile: bool) -> None:
        case = self.case
        rng = Random(f"{case.seed} {number} {hostile}")
        context: list[int] = []
        for n in range(1 << 20):
            await asyncio.sleep(rng.expovariate(1.0 / case.thinks_s))
            if now.now_s > case.seconds:
                return
            name = f"{'h' if hostile else 'c'}{number}.{n}"
            draw = hostile_request if hostile else new_request
            sent = (
                draw(rng, name)
                if hostile or not context
                else new_request(rng, name, context=context)
            )
            if sent.path == "/inference/v1/generate" and not hostile and rng.random() < 0.5:
                # The client goes on with its own context, as agents do.
                context = [*sent.ids, *sent.made, BYTES_FROM + n % 256]
            else:
                context = []
            await self._send(now, sent)

    async def _long(self, now: Scene, number: int) -> None:
        rng = Random(f"{self.case.seed} long {number}")
        context = [BYTES_FROM + rng.randrange(256) for _ in range(LONG)]
        await self._send(now, new_request(rng, "", context=context))

    async def _send(self, now: Scene, sent: Sent) -> None:
        sent.limit_s = self._limit_s(sent)
        self.sent.append(sent)
        await send(now.http, now.url, sent)
        sent.begun_s -= now.began_s
        sent.ended_s -= now.began_s

    def _limit_s(self, sent: Sent) -> float:
        """How long a request may take: as it would without a gateway, and `LATE_S` more."""
        case = self.case
        alone_s = direct_s(sent, iteration_s=case.iteration_s, prefill_tokens=case.prefill_tokens)
        if case.long_prompts:
            parts = -(-LONG // case.prefill_tokens) * case.long_prompts
            alone_s += case.iteration_s * parts
        clients = case.clients + case.hostile
        waves = -(-clients // case.max_running)
        slow = any(fault.kind == "slow" for fault in case.faults)
        return alone_s * waves * (SLOW_FACTOR if slow else 1.0) + LATE_S + self._together_s()

    def _together_s(self) -> float:
        """For how long all engines had faults at once."""
        moments = sorted({f.at_s for f in self.case.faults})
        longest_s = 0.0
        for at_s in moments:
            there = [f for f in self.case.faults if f.at_s <= at_s < f.at_s + f.seconds]
            there = [f for f in there if f.kind not in HARMLESS]
            if len({f.engine for f in there}) == self.case.engines:
                longest_s += min(f.at_s + f.seconds for f in there) - at_s
        return longest_s

    # -- judging -----------------------------------------------------------------------------------

    def _judge_requests(self, now: Scene) -> None:
        for sent in self.sent:
            self.refusals += sent.refusal is not None
            took_s = sent.ended_s - sent.begun_s
            hit = self._hits(sent)
            silent = {engine for engine, kind in hit if kind in SILENT_STREAMS}
            sent.limit_s += NOTICED_S * max(len(silent) - 1, 0)
            where = f"{sent.kind}, {len(sent.ids)} + {len(sent.made)} tokens, begun at "
            where += f"{sent.begun_s:.2f} s, {took_s:.2f} s of {sent.limit_s:.2f}"
            where += f", hit by {hit}" if hit else ""
            failed = {engine for engine, kind in hit if kind in STEP_FAULTS}
            if len(failed) > 2:
                self.problems.append(("tried on a third engine", where))
            if sent.wrong and not self._excused(sent, hit):
                words = f": {sent.words[:200]}" if sent.words else ""
                category = sent.wrong.split(":")[0].split(" came as ")[0]
                self.problems.append((category, f"{where}: {sent.wrong}{words}"))
            elif sent.leaves_s is None and took_s > sent.limit_s:
                self.problems.append(("late", where))

    def _hits(self, sent: Sent) -> list[tuple[int, str]]:
        """The engines and kinds of the faults that hit a request, or its continuation."""
        ids = tuple(sent.ids)
        return [
            (n, kind)
            for n, engine in enumerate(self.engines)
            for kind, prompt in engine.spoiled
            if prompt[: len(ids)] == ids and len(prompt) < len(ids) + len(sent.made) + 1
        ]

    def _excused(self, sent: Sent, hit: list[tuple[int, str]]) -> bool:
        """Whether an error is right: two engines failed, or what was sent had been wrong."""
        if not sent.status or sent.refusal is not None:
            return False
        return len({engine for engine, kind in hit if kind in STEP_FAULTS}) > 1

    def _judge_engines(self, now: Scene) -> None:
        faulty = {f.engine for f in self.case.faults if f.kind not in HARMLESS}
        for failed in now.bench.events(EngineFailed):
            number = int(failed.engine.name[1:])
            if number not in faulty:
                self.problems.append(
                    ("a well engine failed", f"{failed.engine}: {failed.reason[:300]}")
                )
        for fault in self.case.faults:
            self._judge_return(now, fault)

    def _judge_return(self, now: Scene, fault: Fault) -> None:
        """An engine has steps again soon after the end of its fault."""
        if fault.kind in COUNTERS_ONLY:
            return  # it was never out
        if self.case.policy == "heddle" and any(
            f.engine != fault.engine and f.at_s < fault.at_s and f.seconds >= UNEVEN_S
            for f in self.case.faults
        ):
            return  # trajectories are even again only when the other engine has as many
        end_s = fault.at_s + fault.seconds
        again = [f for f in self.case.faults if f.engine == fault.engine and f.at_s >= end_s]
        if any(f.at_s < end_s + BACK_S for f in again):
            return
        late = [s for s in self.sent if end_s + BACK_S / 2 < s.begun_s < end_s + BACK_S - 0.5]
        if len([s for s in late if s.refusal is None]) < ENOUGH * self.case.engines:
            return
        begun = [at_s - now.began_s for at_s, _ in self.engines[fault.engine].begun]
        if not any(end_s <= at_s <= end_s + BACK_S for at_s in begun):
            next_s = min((at_s for at_s in begun if at_s > end_s), default=None)
            text = "never" if next_s is None else f"at {next_s - end_s:.1f} s"
            self.problems.append(
                ("not back", f"e{fault.engine} after {fault.kind}, {fault.seconds:g} s: {text}")
            )

    def _judge_rest(self, now: Scene) -> None:
        """Nothing is left."""
        if now.bench.gateway.failed:
            self.problems.append(("the gateway has failed", ""))
        left = len(list(now.bench.gateway.sessions.under_way))
        if left:
            self.problems.append(("steps are left", f"{left} at the gateway"))
        for n, engine in enumerate(self.engines):
            if engine.running:
                self.problems.append(("steps are left", f"{engine.running} at e{n}"))
        notes = [note for note in now.notes if "given up" in note or "not used again" in note]
        self.problems += [("given up", note) for note in notes]


class Answers:
    """One schedule of faults a case."""

    name = "answers"
    unit = "schedules"
    tolerated = 0.0
    saves = True
    most_wall_s = 900.0
    case_type = AnswersCase

    def begin(self, folder: str) -> None:
        """Nothing to prepare."""

    def case(self, rng: Random) -> AnswersCase:
        engines = rng.choice((2, 3, 4))
        clients = rng.choices((4, 12, 40, 200), weights=(30, 40, 25, 5))[0]
        faults = _any_faults(rng, engines)
        last_s = max(fault.at_s + fault.seconds for fault in faults)
        return AnswersCase(
            seed=rng.randrange(1_000_000),
            faults=faults,
            policy=rng.choice(POLICIES),
            relays=rng.random() < 0.8,
            engines=engines,
            clients=clients,
            hostile=rng.choice((0, 0, 2, 6)),
            seconds=round(last_s + AFTER_S, 1),
            iteration_s=rng.choice((0.02, 0.05, 0.1)) if clients < 200 else 0.1,
            thinks_s=rng.choice((0.3, 1.0, 2.0)) if clients < 40 else 4.0,
        )

    def run(self, case: AnswersCase) -> Outcome:
        """Run a case; the first problem names the failure, whatever the faults were."""
        run = _Run(case)
        try:
            in_virtual_time_too(run.play())
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename.rpartition('/')[2]} {frame.name} {frame.lineno}"
            text = "".join(traceback.format_exception(error)[-6:])
            return Outcome(Failure(f"{type(error).__name__} {place}", text))
        counts = {
            "requests": len(run.sent),
            "refusals": run.refusals,
            "tokens": sum(len(sent.made) for sent in run.sent),
            "faults": len(case.faults),
            "hits": sum(len(engine.spoiled) for engine in run.engines),
        }
        if not run.problems:
            return Outcome(counts=counts)
        kind = " ".join(re.sub(r"\d+", "N", run.problems[0][0]).split())
        shown = [f"{category}: {text}" for category, text in run.problems[:SHOWN]]
        more = len(run.problems) - SHOWN
        shown += [f"and {more} more"] if more > 0 else []
        shown += [
            f"{f.kind} at e{f.engine}, {f.at_s:g} s to {f.at_s + f.seconds:g} s"
            for f in case.faults
        ]
        return Outcome(Failure(kind, "\n".join(shown)), counts)

    def smaller(self, case: AnswersCase) -> Iterable[AnswersCase]:
        """Cases with less of everything."""
        if len(case.faults) > 1:
            yield from without_parts(case, "faults")
        yield from with_less(case, hostile=0, clients=1, engines=2, policy="verl", thinks_s=1.0)


def _any_faults(rng: Random, engines: int) -> tuple[Fault, ...]:
    """Draw faults, one after the other; sometimes two at once, and seldom all for two seconds."""

    def fault(kind: str, engine: int, at_s: float, seconds: float) -> Fault:
        share = rng.choice((1.0, 1.0, 0.3))
        return Fault(kind=kind, engine=engine, at_s=round(at_s, 1), seconds=seconds, share=share)

    faults: list[Fault] = []
    at_s = 2.0
    for _ in range(rng.choice((1, 1, 2, 3))):
        seconds = rng.choice((3.0, 8.0, 20.0))
        chosen = rng.sample(range(engines), 2 if engines > 2 and rng.random() < 0.2 else 1)
        faults += (fault(rng.choice(KINDS), engine, at_s, seconds) for engine in chosen)
        at_s += seconds + rng.choice((1.0, 6.0))
    if rng.random() < 0.05:
        kind = rng.choice(("refuse", "die", "silent", "status 503", "status 429"))
        faults += (fault(kind, engine, at_s + BACK_S, 2.0) for engine in range(engines))
    return tuple(faults)
