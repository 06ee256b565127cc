"""Campaigns find planted defects, name them, make them small, and draw the same cases again."""

import ast
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import msgspec
import pytest
from click.testing import CliRunner

from campaigns import __main__ as command
from campaigns import report
from campaigns.__main__ import main, replay
from campaigns.campaign import Failure, Outcome, minimised, numbered, saved
from campaigns.faults.campaign import Faults
from campaigns.faults.engines import Disturbances, EngineFault, ReportFault
from campaigns.faults.loop import LoopCase
from campaigns.faults.rollout import RolloutCase
from campaigns.faults.tokens import TokenLedger
from campaigns.fuzz.campaign import Fuzz, FuzzCase
from campaigns.fuzz.edits import Edit, edited
from campaigns.kill.campaign import KillCase, Kills
from campaigns.kill.process import DEFECT, nothing, signalled, started
from campaigns.mutants.campaign import COVERED_BY, NEAR, ROOT
from campaigns.mutants.mutations import mutated, mutations
from campaigns.report import execute, table
from heddle_compiled import why_not
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.engines import StepRequest
from heddle_rollout.migrations import Migrations
from heddle_sim.engine_client import SimEngineClient
from tests.rollout.one_world import answer

sources_only = pytest.mark.skipif(
    not why_not(), reason="a compiled class calls its own methods, not one put in their place"
)


def faulty_rollout(**changes: object) -> RolloutCase:
    case = numbered(Faults(), 0, 0)
    while not isinstance(case, RolloutCase):
        case = Faults().case(Random(str(case)))
    fields = {
        "policy": "heddle",
        "trajectories": 6,
        "longest_steps": 3,
        "kv_per_gpu_tokens": 48_000,
        "rewrites": None,
        "prefill_gpus": 0,
        "host_kv": "none",
        "workload": "coding",
    }
    return msgspec.structs.replace(case, **(fields | changes))


DEATHS = Disturbances(
    engines=(
        EngineFault(kind="death", engine="e0", at_s=3.0),
        EngineFault(kind="hang", engine="e1", at_s=4.0, seconds=20.0),
        EngineFault(kind="stall", engine="e2", at_s=4.0, seconds=5.0),
    ),
    reports=tuple(
        ReportFault(kind=kind, number=number, seconds=0.7)
        for number, kind in enumerate(("late", "twice", "lost", "failed_move") * 8, 12)
    ),
    speeds={"e3": 0.05},
)


def test_a_rollout_survives_every_kind_of_disturbance():
    assert Faults().run(faulty_rollout(disturbances=DEATHS)).failure is None


@sources_only
def test_a_rollout_without_disturbances_loses_what_a_defect_loses(monkeypatch):
    monkeypatch.setattr(SimEngineClient, "die", lambda self: [], raising=True)
    failure = Faults().run(faulty_rollout(disturbances=DEATHS)).failure
    assert failure is not None


@sources_only
def test_a_move_without_an_end_is_stuck(monkeypatch):
    monkeypatch.setattr(Migrations, "_end", lambda self, migration, placed: None)
    monkeypatch.setattr("campaigns.faults.rollout.MOST_EVENTS", 2000)
    case = faulty_rollout(disturbances=Disturbances(), trajectories=9, prediction_s=0.0, slots=2)
    failure = Faults().run(msgspec.structs.replace(case, policy="verl+follow_rank+lpt")).failure
    assert failure is not None
    assert failure.kind.startswith("stuck")


def test_tokens_twice_and_tokens_left_out_are_seen():
    script = answer("a", 10, 5)
    for prompt, most in ((10, 5), (11, 4), (10, 6)):
        ledger = TokenLedger(lambda name: script)
        request = StepRequest(
            trajectory=TrajectoryId("a"),
            group=GroupId("a"),
            prompt_tokens=prompt,
            shared_tokens=0,
            max_tokens=most,
            exact=True,
        )
        if (prompt, most) == (10, 5):
            ledger.started(EngineId("e0"), request)
            continue
        with pytest.raises(AssertionError):
            ledger.started(EngineId("e0"), request)


def test_every_kind_of_case_is_drawn_again_and_read_back():
    for campaign in (Faults(), Fuzz(), Kills()):
        for number in range(30):
            case = numbered(campaign, 7, number)
            assert case == numbered(campaign, 7, number)
            raw = msgspec.json.encode(case)
            assert msgspec.json.decode(raw, type=campaign.case_type) == case
            assert case not in list(campaign.smaller(case))
    drawn = {type(numbered(Faults(), 0, n)) for n in range(200)}
    assert drawn >= {RolloutCase, LoopCase}


class Sevens:
    """Fails for numbers with a seven in them."""

    name, unit, case_type, tolerated, saves = "faults", "numbers", int, 0.0, True
    most_wall_s = 100.0

    def begin(self, folder: str) -> None:
        pass

    def case(self, rng: Random) -> int:
        return rng.randrange(100)

    def run(self, case: int) -> Outcome:
        failure = Failure("seven", f"it is {case}") if "7" in str(case) else None
        return Outcome(failure, {"sum": case, "peak": case})

    def smaller(self, case: int) -> Iterator[int]:
        yield from range(case)


def test_findings_are_counted_minimised_and_saved(tmp_path: Path, monkeypatch):
    result = execute(Sevens(), 3, minutes=1.0, cases=60, jobs=2)
    cases = [numbered(Sevens(), 3, n) for n in range(60)]
    failing = [n for n, case in enumerate(cases) if "7" in str(case)]
    finding = result.findings["seven"]
    assert (result.cases, finding.cases, finding.first) == (60, len(failing), failing[0])
    assert (result.counts["sum"], result.counts["peak"]) == (sum(cases), max(cases))
    assert result.failed
    assert minimised(Sevens(), 79, "seven") == 7
    text = f"it is 7, at {ast.__file__}"
    path = saved(Sevens(), 7, Failure("seven", text), tmp_path)
    assert json.loads(path.read_text()) == {
        "campaign": "faults",
        "failure": "it is 7, at ast.py",
        "case": 7,
    }
    assert f"--seed 3 --case {failing[0]}" in table([result])
    monkeypatch.setattr(command, "campaign_named", lambda name: Sevens())
    assert replay(path) == "it is 7"
    done = CliRunner().invoke(
        main, ["faults", "--seed", "3", "--case", str(failing[0]), "--save", str(tmp_path / "new")]
    )
    assert done.exit_code == 1
    assert len(list((tmp_path / "new").iterdir())) == 1


class Dying(Sevens):
    """Ends its process at numbers with a seven in them."""

    def run(self, case: int) -> Outcome:
        return os._exit(3) if "7" in str(case) else Outcome()


class Waiting(Sevens):
    """Waits for ever at numbers with a seven in them."""

    most_wall_s = 0.5

    def run(self, case: int) -> Outcome:
        while "7" in str(case):
            signal.pause()
        return Outcome()


@pytest.mark.parametrize(
    ("campaign", "kind"),
    [(Dying(), "process ended with status 3"), (Waiting(), "hang: no end after 0 s")],
)
def test_a_case_that_ends_or_stops_its_process_costs_itself_alone(campaign: Sevens, kind: str):
    failing = [n for n in range(30) if "7" in str(numbered(campaign, 3, n))]
    result = execute(campaign, 3, minutes=1.0, cases=30, jobs=2)
    finding = result.findings[kind]
    assert (result.cases, finding.cases, finding.first) == (30, len(failing), failing[0])
    assert not finding.failure.repeatable


def test_a_process_runs_so_many_cases_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch):
    class Naming(Sevens):
        def run(self, case: int) -> Outcome:
            return Outcome(counts={f"in {os.getpid()}": 1})

    monkeypatch.setattr(report, "CASES_OF_PROCESS", 7)
    result = execute(Naming(), 3, minutes=1.0, cases=29, jobs=2)
    # Of the 15 and 14 cases of the two.
    assert sorted(result.counts.values()) == [1, 7, 7, 7, 7]
    assert (result.cases, result.failed) == (29, False)


def test_a_request_to_end_keeps_what_was_found():
    class Requesting(Sevens):
        def run(self, case: int) -> Outcome:
            if case == numbered(self, 3, 5):
                os.kill(os.getppid(), signal.SIGTERM)
                signal.pause()
            return Outcome()

    result = execute(Requesting(), 3, minutes=1.0, cases=60, jobs=1)
    assert result.interrupted
    assert result.cases <= 5


def test_a_damaged_input_is_judged(monkeypatch):
    case = FuzzCase(
        arguments=("trace", "check", "in.jsonl"),
        edits=(Edit(file="in.jsonl", kind="scalar", place=3, value=b"NaN"),),
    )
    assert Fuzz().run(case).failure is None
    monkeypatch.setattr("heddle.cli.trace.read_trace", None, raising=False)
    monkeypatch.setattr("heddle.cli.main.main", lambda *a, **k: 1 / 0)
    failure = Fuzz().run(case).failure
    assert failure is not None
    assert failure.kind.startswith("traceback ZeroDivisionError")


@pytest.mark.parametrize(
    ("edit", "after"),
    [
        (Edit(file="f", kind="scalar", place=1, value=b"null"), b'{"a": null}'),
        (Edit(file="f", kind="insert", place=1, value=b"x"), b'{x"a": 12}'),
        (Edit(file="f", kind="delete", place=0, length=2), b'a": 12}'),
        (Edit(file="f", kind="cut", place=4), b'{"a"'),
        (Edit(file="f", kind="empty"), b""),
        (Edit(file="f", kind="missing"), None),
    ],
)
def test_edits_do_what_they_are_called(edit: Edit, after: bytes | None):
    assert edited(b'{"a": 12}', edit) == after


def test_a_command_is_killed_at_a_call_and_judged(tmp_path: Path):
    done = started(("policies", "list"), tmp_path, nothing, counts_calls=True).wait()
    assert (done.status, done.calls > 100) == (0, True)
    ended = started(("policies", "list"), tmp_path, signalled(9, done.calls // 2)).wait()
    assert ended.status == -9
    case = KillCase(command="resample", kind="signal", signal=15, share=0.9)
    assert Kills().run(case).failure is None
    assert Kills().run(KillCase(command="import", kind="disk full", file_bytes=1)).failure is None
    assert Kills().run(KillCase(command="resample", kind="read-only")).failure is None


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (ValueError, DEFECT)])
def test_an_error_in_a_commands_process_removes_no_folder_of_its_parent(
    error: type[BaseException], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("campaigns.kill.process._command", Mock(side_effect=error))
    with TemporaryDirectory(dir=tmp_path) as name:
        assert started((), Path(name), nothing).wait().status == status
        assert Path(name).is_dir()


SOURCE = """\
def most(values, limit):
    total = 0
    for value in values:
        if value < limit and value != 3:
            total += value
            values.clear()
    return total
"""


def test_every_planted_fault_changes_the_module():
    tree = ast.parse(SOURCE)
    number = len(mutations(tree))
    changed = {mutated(SOURCE, n)[1] for n in range(number)}
    assert len(changed) == number >= 8
    assert ast.unparse(tree) not in changed
    assert any("values.clear()" not in source for source in changed)
    assert any("value <= limit" in source for source in changed)


def test_all_tests_that_judge_planted_faults_are_there():
    """pytest ends with an error where one is not, which looks like a fault that was found."""
    judges = [test for tests in COVERED_BY.values() for test in tests]
    judges += [f"tests/{folder}" for folders in NEAR.values() for folder in folders]
    for path, _, name in (judge.partition("::") for judge in judges):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), name


def test_no_process_of_a_campaign_is_left():
    before = os.listdir("/proc") if os.path.isdir("/proc") else []
    execute(Sevens(), 3, minutes=1.0, cases=4, jobs=2)
    assert not [p for p in os.listdir("/proc") if p not in before and p.isdigit() and _mine(p)]


def _mine(process: str) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()
