"""Runs the cases of campaigns in processes, and prints what they found."""

import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.campaign import Campaign, Failure, Outcome, minimised, numbered, saved

FORK: Final = multiprocessing.get_context("fork")
PROGRESS_S: Final = 60.0
ENDING: Final = (signal.SIGINT, signal.SIGTERM)
IN_MEMORY: Final = "/dev/shm"
"""Where a file costs no time of a disk, if there is such a place."""
CASES_OF_PROCESS: Final = 10_000
"""Then a new process goes on: click's test runner keeps a few kB of each command that it runs."""


@dataclass(slots=True)
class Finding:
    """All cases that failed in one way."""

    first: int
    """Number of the first of them."""
    failure: Failure
    cases: int = 1
    file: str = ""


@dataclass(slots=True)
class Result:
    """What a campaign did."""

    campaign: Campaign
    seed: int
    cases: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    """Lines of cases, by their number."""
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether more cases failed than are tolerated."""
        failed = sum(finding.cases for finding in self.findings.values())
        return failed > self.campaign.tolerated * self.cases

    def add(self, number: int, outcome: Outcome) -> None:
        self.cases += 1
        for name, value in outcome.counts.items():
            most = max(self.counts[name], value)
            self.counts[name] = most if name.startswith("peak") else self.counts[name] + value
        if outcome.note:
            self.notes[number] = outcome.note
        if outcome.failure is None:
            return
        found = self.findings.get(outcome.failure.kind)
        if found is None:
            self.findings[outcome.failure.kind] = Finding(number, outcome.failure)
            return
        found.cases += 1
        if number < found.first:
            found.first, found.failure = number, outcome.failure


def execute(
    campaign: Campaign,
    seed: int,
    *,
    minutes: float,
    cases: int | None,
    jobs: int,
    progress: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Run cases from number 0 on, until the time is over, so many are done, or a request to end.

    Args:
        minutes: wall-clock time; the cases that run then are finished.
        cases: at most; None: as many as the time permits.
        jobs: processes.
        progress: called about once a minute.
    """
    result = Result(campaign, seed)
    # Ctrl-C is a request to end too, which shells switch off for jobs in the background. It is no
    # exception, which would be lost in the hooks of `fork` if it came while a process starts.
    requests: list[int] = []
    before = {n: signal.signal(n, lambda number, _: requests.append(number)) for n in ENDING}
    until_s = time.monotonic() + 60.0 * minutes
    shares = [Share(campaign, seed, first, jobs, until_s, cases) for first in range(jobs)]
    reported_s = time.monotonic()
    try:
        while not requests and (running := [share for share in shares if not share.over]):
            connections = [share.connection for share in running]
            ready = multiprocessing.connection.wait(connections, timeout=1.0)
            for share in running:
                share.look(result, readable=share.connection in ready)
            if time.monotonic() - reported_s > PROGRESS_S:
                reported_s = time.monotonic()
                progress(result)
    finally:
        result.interrupted = bool(requests)
        for share in shares:
            share.end()
        for number, handler in before.items():
            signal.signal(number, handler)
    return result


class Share:
    """Every `jobs`-th case, in a process; when that dies or hangs, the next one goes on after."""

    def __init__(
        self,
        campaign: Campaign,
        seed: int,
        first: int,
        jobs: int,
        until_s: float,
        cases: int | None,
    ) -> None:
        self._campaign, self._seed, self._jobs = campaign, seed, jobs
        self._until_s, self._cases = until_s, cases
        self._number = first
        """Of the case that runs."""
        self.over = False
        parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="heddle-campaign-", dir=parent)
        self._start()

    def _start(self) -> None:
        self.connection, theirs = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=self._run, args=(theirs,))
        self._process.start()
        theirs.close()
        self._reported_s = time.monotonic()

    def look(self, result: Result, *, readable: bool) -> None:
        """Take what the process sent; a process that is dead or silent too long is a finding."""
        if not readable:
            if time.monotonic() - self._reported_s > self._campaign.most_wall_s:
                self._lost(result, f"hang: no end after {self._campaign.most_wall_s:.0f} s")
            return
        try:
            outcome, cpu_s = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            self._lost(result, f"process ended with status {self._process.exitcode}")
            return
        self._reported_s = time.monotonic()
        result.cpu_s += cpu_s
        if outcome is None:
            self._process.join()
            self.over = not self._goes_on(self._number)
            if not self.over:
                self.connection.close()
                self._start()
            return
        result.add(self._number, outcome)
        self._number += self._jobs

    def _goes_on(self, number: int) -> bool:
        """Whether the case of this number is to begin."""
        return time.monotonic() < self._until_s and (self._cases is None or number < self._cases)

    def _lost(self, result: Result, what: str) -> None:
        case = numbered(self._campaign, self._seed, self._number)
        result.add(self._number, Outcome(Failure(what, f"{case}", repeatable=False)))
        self._number += self._jobs
        self._kill()
        self._start()

    def end(self) -> None:
        """End the process, whatever it does, and remove what it left."""
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _run(self, connection: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._campaign.begin(self._folder.name)
        number, used_s = self._number, 0.0
        last = number + CASES_OF_PROCESS * self._jobs
        while number < last and self._goes_on(number):
            outcome = self._campaign.run(numbered(self._campaign, self._seed, number))
            before_s, used_s = used_s, _cpu_s()
            connection.send((outcome, used_s - before_s))
            number += self._jobs
        connection.send((None, 0.0))


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def save_findings(result: Result, folder: Path) -> None:
    """Minimise the first case of every finding, and write it to a folder."""
    for kind, finding in result.findings.items():
        case = numbered(result.campaign, result.seed, finding.first)
        failure = finding.failure
        if failure.repeatable:
            case = minimised(result.campaign, case, kind)
            failure = result.campaign.run(case).failure or failure
        finding.file = str(saved(result.campaign, case, failure, folder))


def table(results: list[Result]) -> str:
    """One line for each campaign, then one block for each finding."""
    rows = [("campaign", "seed", "cases", "a CPU second", "findings", "counted")]
    for r in results:
        counted = ", ".join(f"{value:,} {name}" for name, value in sorted(r.counts.items()))
        cases = f"{r.cases:,} {r.campaign.unit}"
        rate = f"{r.cases / r.cpu_s:,.1f}" if r.cpu_s else ""
        rows.append((r.campaign.name, str(r.seed), cases, rate, str(len(r.findings)), counted))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_notes(results), *(line for r in results for line in _findings(r))])


def _notes(results: list[Result]) -> Iterator[str]:
    for result in results:
        for number, note in sorted(result.notes.items()):
            yield f"{result.campaign.name}: case {number}: {note}"


def so_far(result: Result) -> str:
    """One line about a campaign that goes on."""
    cases = f"{result.cases:,} {result.campaign.unit}"
    rate = result.cases / result.cpu_s if result.cpu_s else 0.0
    found = len(result.findings)
    latest = f", the latest: {[*result.findings][-1]}" if found else ""
    return f"{result.campaign.name}: {cases}, {rate:,.1f} a CPU second, {found} findings{latest}"


def _findings(result: Result) -> Iterator[str]:
    for kind, finding in result.findings.items():
        name, times = result.campaign.name, f"{finding.cases} of {result.cases:,}"
        yield f"\n{name}: {kind} ({times} cases; the first is case {finding.first})"
        yield finding.failure.text.rstrip()
        yield f"again: python -m campaigns {name} --seed {result.seed} --case {finding.first}"
        if finding.file:
            yield f"saved: {finding.file}"
