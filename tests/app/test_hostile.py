"""What goes wrong around a run: signals, killed processes, odd streams, names and terminals."""

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import feather
from pyarrow import parquet as pq

from campaigns.processes import descendants
from heddle import command
from heddle.cli import main
from heddle.cli.errors import exit_with_user_errors
from heddle.cluster.config import MAX_GPUS, MAX_RUNNING, ClusterConfig
from heddle.config import RunConfig
from heddle.runs import directory, load_run
from heddle.runs import files as run_files
from heddle.runs.files import RunError
from heddle.runs.journal_entries import decode
from heddle.simulation import simulate
from tests.app.journals import ONE_RUN, Heddle, last_run, run_of, unlisted
from tests.patience import PATIENCE_S
from tests.test_architecture import PACKAGES

COMMAND = (sys.executable, "-m", "heddle.cli")
CLUSTER = ("--gpus", "2", "--max-running", "2")
CODING = Path(__file__).resolve().parents[2] / "traces" / "coding-512.jsonl.gz"
COMPARE = (*COMMAND, "compare", str(CODING), "--policies", "verl,slime", "--seeds", "40")


def _default_signals() -> None:
    """In a child: signals as at login, whatever the tests' own process ignores or blocks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _comparison(folder: Path, jobs: int) -> "subprocess.Popen[str]":
    """A comparison that is under way: its first run has a directory."""
    process = subprocess.Popen(
        [*COMPARE, "--jobs", str(jobs)],
        cwd=folder,
        start_new_session=True,  # a group of its own, to which a signal can be sent
        preexec_fn=_default_signals,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not list(folder.glob("runs/*/*/manifest.json")):
        time.sleep(0.02)
    return process


def _states(folder: Path) -> list[str]:
    runs = [p for p in folder.glob("runs/*") if not p.name.endswith("-compare")]
    runs += [p for p in folder.glob("runs/*-compare/*") if p.is_dir()]
    return [load_run(p, unfinished=True).status for p in runs]


def _forkserver(pid: int) -> int | None:
    """The process that forks the workers of a comparison, as soon as there is one."""
    for child in descendants(pid):
        with suppress(OSError):
            if "forkserver" in Path(f"/proc/{child}/cmdline").read_text():
                return child
    return None


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_request_to_end_closes_the_runs(tmp_path: Path, jobs: int):
    process = _comparison(tmp_path, jobs)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("Interrupted: ended by SIGTERM.\n")
    assert "of 80 runs are finished and stay in runs/" in err
    assert "running" not in _states(tmp_path)
    assert len(_states(tmp_path)) < 80


def test_a_rollout_without_engines_left_is_one_message(refused: Callable[..., str], trace: Path):
    deaths = "e0@0.1,e0+1@0.3,e0+2@0.5,e0+3@0.7"
    options = (
        "--gpus",
        1,
        "--set",
        "cluster.engine_start_s=0.1",
        "--set",
        f"cluster.failures={deaths}",
    )
    err = refused(*ONE_RUN, trace, *options, status=1)
    assert err.startswith("Error: ")
    assert "trajectories cannot go on at" in err
    assert "the last to fail was e0+3: injected fault" in err
    assert "keeps the journal up to there; it is no result." in err


@pytest.mark.parametrize("words", [("compare", "--policies"), ("run", "--policy")])
def test_engines_of_a_framework_are_refused_where_there_is_none(
    refused: Callable[..., str], trace: Path, words: tuple[str, str]
):
    verb, option = words
    err = refused(verb, trace, option, "heddle+given")
    assert "planner given starts no engines" in err
    assert "Leave +given out" in err


@pytest.mark.parametrize("package", PACKAGES)
def test_the_errors_of_every_package_are_messages(package: str):
    class RefusedError(ValueError):
        pass

    RefusedError.__module__ = f"{package}.anything"
    with pytest.raises(SystemExit), exit_with_user_errors():
        raise RefusedError("what, and what to do")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no server forks them")
def test_a_killed_worker_is_one_message(tmp_path: Path):
    process = _comparison(tmp_path, 2)
    server = _forkserver(process.pid)
    assert server is not None
    os.kill(descendants(server)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert "a process was killed before its run was done" in err
    assert "fewer --jobs" in err


def test_workers_end_with_the_process_that_started_them(tmp_path: Path):
    process = _comparison(tmp_path, 2)
    process.kill()
    # Standard error is held by every worker: it ends when the last of them has.
    process.communicate(timeout=PATIENCE_S)
    assert len(_states(tmp_path)) < 80
    assert "running" not in _states(tmp_path)


def test_a_killed_run_is_replayed_as_far_as_it_goes(tmp_path: Path):
    (tmp_path / "die.py").write_text(
        "import os, signal\n"
        "from heddle.runs import directory as runs\n"
        "from heddle.cli import main\n"
        "runs.CHUNK_ENTRIES = 200\n"
        "flush, count = runs.RunDirectory.flush, [0]\n"
        "def die(run):\n"
        "    flush(run)\n"
        "    count[0] += 1\n"
        "    if count[0] == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "runs.RunDirectory.flush = die\n"
        f"main(['compare', {str(CODING)!r}, '--policies', 'verl', '--jobs', '1'])\n"
    )
    died = subprocess.run(
        [sys.executable, "die.py"], cwd=tmp_path, capture_output=True, check=False
    )
    assert died.returncode == -signal.SIGKILL
    run = last_run(tmp_path / "runs")
    done = CliRunner().invoke(main, ["replay", str(run)])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"{run}: its process died before it finished: replaying")
    assert done.stdout.startswith("600 events")
    assert CliRunner().invoke(main, ["report", str(run)]).exit_code == 2


def test_a_second_signal_does_not_break_into_the_closing_of_a_run(tmp_path: Path):
    (tmp_path / "twice.py").write_text(
        "import os, signal\n"
        "from heddle.runs import directory as runs\n"
        "from heddle.cli import main\n"
        "runs.CHUNK_ENTRIES = 200\n"
        "flush, close = runs.RunDirectory.flush, runs.RunDirectory._close_journal\n"
        "def first(run):\n"
        "    flush(run)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def again(run):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    close(run)\n"
        "runs.RunDirectory.flush, runs.RunDirectory._close_journal = first, again\n"
        f"main(['compare', {str(CODING)!r}, '--policies', 'verl', '--jobs', '1'])\n"
    )
    done = subprocess.run(
        [sys.executable, "twice.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert _states(tmp_path) == ["interrupted"]
    run = last_run(tmp_path / "runs")
    assert CliRunner().invoke(main, ["replay", str(run)]).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_ends_all_of_them(tmp_path: Path, number: signal.Signals):
    """As when a terminal is closed, or a batch system ends a job."""
    process = _comparison(tmp_path, 2)
    time.sleep(0.3)  # runs are under way in all of them
    assert process.poll() is None, "it ended before the signal"
    os.killpg(process.pid, number)
    time.sleep(0.001)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, err
    assert "Interrupted" in err
    if number != signal.SIGTERM:  # that ends the processes that serve the others
        assert "Traceback" not in err
    assert "running" not in _states(tmp_path)


@pytest.mark.parametrize(
    ("first", "more", "message"),
    [
        (signal.SIGINT, [signal.SIGTERM], "Interrupted."),
        (signal.SIGHUP, [signal.SIGINT, signal.SIGTERM], "Interrupted: ended by SIGHUP."),
    ],
)
def test_more_signals_do_not_break_into_the_closing_of_a_comparison(
    tmp_path: Path, first: signal.Signals, more: list[signal.Signals], message: str
):
    """The first has the lowest number: Python handles it first if others come before it runs."""
    process = _comparison(tmp_path, 2)
    while process.poll() is None:  # to its last instruction
        for number in (first, *more):
            process.send_signal(number)
        time.sleep(0.001)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + first, err
    assert err.startswith(f"{message}\n")
    assert "Traceback" not in err
    assert "running" not in _states(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no server forks them")
def test_an_interrupt_while_workers_start_begins_no_run(tmp_path: Path):
    process = subprocess.Popen(
        [*COMPARE, "--jobs", "2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not _forkserver(process.pid):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "0 of 80 runs are finished" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seed", 2**32 - 1, "--seeds", "2"), "seed 4294967295 and 1 after it pass 4294967295"),
        (("--max-running", MAX_RUNNING + 1), "max_running must be from 1 to 8,192"),
        (("--gpus", MAX_GPUS + 1), "gpus must be from 1 to 100,000"),
        (("--set", "cluster.report_interval_s=1e-300"), "report_interval_s must be from 0.01"),
        (("--set", "cluster.gpus=2\nseed=3"), "one key at a time; repeat --set for others"),
        (("--set", "cluster.gpus.x=2"), "cluster.gpus is a value, not a section: gpus = ..."),
        (("--model", "gpt"), "unknown model 'gpt'; did you mean "),
    ],
)
def test_absurd_values_are_refused_before_a_run(
    refused: Callable[..., str], trace: Path, options: tuple[object, ...], said: str
):
    assert said in refused("compare", trace, "--policies", "verl", *options)
    assert not Path("runs").exists()


def test_the_largest_engine_that_is_allowed_runs(heddle: Heddle, trace: Path):
    done = heddle(*ONE_RUN, trace, "--json", "--max-running", MAX_RUNNING, "--gpus", 1)
    assert done.exit_code == 0, done.output


def test_a_toml_file_may_begin_with_a_byte_order_mark(heddle: Heddle, trace: Path):
    Path("a.toml").write_bytes(b"\xef\xbb\xbf" + f'trace = "{trace}"\nseed = 7\n'.encode())
    done = heddle(*ONE_RUN, "-c", "a.toml", "--json", *CLUSTER)
    assert run_of(done)["seed"] == 7


def test_a_pipe_is_no_trace(refused: Callable[..., str], tmp_path: Path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    assert "save it to a file" in refused(*ONE_RUN, pipe)


def test_a_link_to_nowhere_is_no_folder_for_runs(refused: Callable[..., str], trace: Path):
    Path("dangling").symlink_to("nowhere")
    message = refused(*ONE_RUN, trace, *CLUSTER, "--out", "dangling")
    assert message.startswith("Error: dangling: is there already, and is no folder")


def test_a_run_that_cannot_begin_leaves_no_directory(
    refused: Callable[..., str], trace: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(run_files, "write_json", fails)
    assert "the disk is full" in refused(*ONE_RUN, trace, *CLUSTER, status=1)
    assert not Path("runs").exists()


def test_a_limit_on_the_size_of_files_is_one_message(trace: Path, tmp_path: Path):
    limited = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({8 << 10}, {8 << 10}))\n"
    words = [*ONE_RUN, str(trace), "--jobs", "1"]
    run = f"from heddle.cli import main; main({words!r})"
    done = subprocess.run(
        [sys.executable, "-c", limited + run], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "raise the limit (ulimit -f)" in done.stderr
    assert _states(tmp_path) == ["failed"]


def test_lack_of_memory_is_one_message(
    refused: Callable[..., str], trace: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("heddle.simulation.simulate_rollout", fails)
    assert "not enough memory" in refused(*ONE_RUN, trace, *CLUSTER, status=1)
    run = last_run()
    assert load_run(run, unfinished=True).status == "failed"


def test_files_that_may_not_be_read_say_so(
    refused: Callable[..., str], heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Path(run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"])

    def denied(path: object, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    mapped = pa.memory_map

    def journal_denied(path: bytes) -> pa.MemoryMappedFile:
        if path.endswith(b"events.arrow"):
            denied(path)
        return mapped(path)

    monkeypatch.setattr(pa, "memory_map", journal_denied)
    assert "events.arrow: permission denied; change its permissions" in refused("replay", run)
    monkeypatch.setattr(Path, "read_text", denied)
    assert "manifest.json: permission denied; change its permissions" in refused("replay", run)
    Path("a.toml").touch()
    said = refused(*ONE_RUN, "-c", "a.toml")
    assert "a.toml: permission denied; change its permissions" in said


def test_a_link_that_leads_back_to_itself_is_one_message(refused: Callable[..., str], trace: Path):
    for name in ("l.toml", "l.heddle", "l.jsonl", "l"):
        Path(name).symlink_to(name)
    assert "l.toml: is a link that leads back to itself" in refused(*ONE_RUN, "-c", "l.toml")
    model = ("--policies", "heddle+learned", "--set", "predictor_model=l.heddle")
    assert "l.heddle: is a link that leads" in refused(*ONE_RUN, trace, *model)
    assert "l.jsonl: cannot be read (Too many levels" in refused(*ONE_RUN, "l.jsonl")
    assert "l: is there already, and is no folder" in refused(*ONE_RUN, trace, "--out", "l")


@pytest.mark.parametrize("chained", [False, True])
def test_an_interrupt_during_the_imports_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chained: bool
):
    class Interrupting:
        """An import that Ctrl-C breaks off, itself or inside of an extension module."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "heddle.cli":
                if chained:
                    raise ImportError("no extension") from KeyboardInterrupt()
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "heddle.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_interrupt_around_the_command_line_is_one_message_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heddle.cli.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_interrupt_that_breaks_a_stream_is_one_message_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heddle.cli.main", interrupted)
    # What `TextIOWrapper.reconfigure` leaves when it is interrupted refuses to be written to.
    with Path(os.devnull).open() as unwritable:
        monkeypatch.setattr(sys, "stderr", unwritable)
        with pytest.raises(SystemExit) as ended:
            command.main()
    assert ended.value.code == 130
    assert capfd.readouterr().err == "Interrupted.\n"


def test_an_import_that_fails_by_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "heddle.cli", None)
    with pytest.raises(ImportError):
        command.main()


def test_a_figure_is_drawn_whole_or_not_at_all(
    heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Path(run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"])

    def fails(_: object, file: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    assert heddle("report", run).exit_code == 1
    assert list((run / "figures").iterdir()) == []


def test_a_second_report_passes_over_the_figures_of_the_first(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl,slime", *CLUSTER)
    (folder,) = Path("runs").iterdir()
    first = heddle("report", *sorted(folder.iterdir()))
    assert (folder / "figures").is_dir()
    again = heddle("report", *sorted(folder.iterdir()))
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert heddle("report", folder / "figures").exit_code == 2


class _Clock:
    """Gives every run of a test its moment; see `RunDirectory`."""

    def __init__(self, *seconds: int) -> None:
        self._moments = [datetime(2026, 1, 2, 3, 4, s, tzinfo=UTC) for s in seconds]

    def now(self, zone: tzinfo) -> datetime:
        return self._moments.pop(0) if len(self._moments) > 1 else self._moments[0]


def _two_runs(trace: Path) -> list[str]:
    clusters = (ClusterConfig(gpus=gpus) for gpus in (1, 2))
    configs = [RunConfig(trace=str(trace), cluster=cluster) for cluster in clusters]
    return [simulate(config, out=Path("runs")).path.name for config in configs]


def test_runs_that_began_at_different_times_are_distinguished(
    heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(directory, "datetime", _Clock(5, 5, 6))
    _two_runs(trace)
    done = heddle("report", *sorted(Path("runs").iterdir()))
    times = ("03:04:05", "03:04:06")
    assert all(f"s0 {time}" in done.stdout.splitlines()[0] for time in times)
    assert len(list(Path("runs/figures").glob("timeline-*.png"))) == 2


def test_runs_of_one_policy_and_seed_are_distinguished(
    heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(directory, "datetime", _Clock(5))
    names = _two_runs(trace)
    done = heddle("report", *sorted(Path("runs").iterdir()))
    assert all(name in done.stdout.splitlines()[0] for name in names)
    drawn = [p.name for p in Path("runs/figures").glob("timeline-*.png")]
    assert sorted(drawn) == sorted(f"timeline-{name}.png" for name in names)
    shutil.copytree(Path("runs") / names[0], Path("elsewhere") / names[0])
    both = heddle("report", Path("runs") / names[0], Path("elsewhere") / names[0], "-o", "f")
    assert f"elsewhere/{names[0]}" in both.stdout.splitlines()[0]


def test_ascii_streams_show_a_question_mark(trace: Path, tmp_path: Path):
    done = subprocess.run(
        [*COMMAND, "compare", trace, "--policies", "verl", "--seeds", "2", *CLUSTER],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Warning: 6 trajectories for 2 engines")
    row = next(line for line in done.stdout.splitlines() if line.startswith("verl "))
    assert " ? " in row  # in the place of a plus-minus sign


def test_a_file_name_that_is_not_utf8_survives(heddle: Heddle, trace: Path, tmp_path: Path):
    odd = tmp_path / os.fsdecode(b"odd\xff.jsonl")
    try:
        shutil.copy(trace, odd)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    done = heddle(*ONE_RUN, odd, "--json", *CLUSTER)
    assert load_run(run_of(done)["run"]).config.trace == str(odd)


def test_a_folder_of_runs_whose_name_is_not_utf8_is_read_again(
    heddle: Heddle, trace: Path, tmp_path: Path
):
    odd = tmp_path / os.fsdecode(b"odd\xff")
    try:
        odd.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    made = heddle(*ONE_RUN, trace, "--json", "--out", odd, *CLUSTER)
    run = run_of(made)["run"]
    for words in (("replay", run), ("report", run, "-o", "figures"), ("runs", "--in", odd)):
        done = heddle(*words)
        assert done.exit_code == 0, done.output


def test_help_on_a_full_disk_is_one_message():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--help"], stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the disk is full")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_value_is_cut_on_a_narrow_terminal(trace: Path, tmp_path: Path, width: int):
    policies = "verl,slime,verl+lpt+progressive"
    shown = _on_terminal(
        *(width, tmp_path, "compare", trace, "--policies", policies, "--seeds", "2"),
        *(*CLUSTER, "--wide"),
    )
    for word in (*policies.split(","), "throughput_tok_s", "preemptions", "±"):
        assert word in shown
    assert "…" not in shown
    assert "…" not in _on_terminal(width, tmp_path, "trace", "describe", CODING)


def _on_terminal(width: int, folder: Path, *args: object) -> str:
    """What a command writes to a terminal of this many columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)], stdout=theirs, stderr=subprocess.DEVNULL, cwd=folder, env=env
    )
    os.close(theirs)
    found = b""
    try:
        while piece := os.read(ours, 65536):
            found += piece
    except OSError:
        pass  # how Linux says that the other side of a terminal is closed
    os.close(ours)
    assert process.wait() == 0
    return found.decode()


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("name", "Dispatch", "Dispatch is no event"),
        ("name", "Nonsense", "'Nonsense', which this version does not know"),
        ("cause", 0, None),
        ("payload", "{", None),
    ],
)
def test_a_damaged_row_is_named(
    heddle: Heddle, trace: Path, column: str, value: object, said: str | None
):
    run = run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"]
    table = pa.Table.from_batches(load_run(run).batches())
    kinds, names = table.column("kind").to_pylist(), table.column("name").to_pylist()
    if column == "payload":
        row = next(i for i, n in enumerate(names) if n == "StartEngine")
    else:
        row = next(i for i, n in enumerate(names) if n == "StepFinished" and kinds[i] == "event")
    rows = table.to_pylist()
    rows[row][column] = value
    damaged = pa.Table.from_pylist(rows, table.schema)
    if said is None:
        assert len(list(decode(damaged.to_batches()))) > 0  # not read for this kind of row
        return
    with pytest.raises(RunError, match=said):
        list(decode(damaged.to_batches()))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("manifest.json", "manifest.json: damaged: Object missing required field `policy`"),
        ("steps.parquet", "steps.parquet: damaged: it has no column 'queueing_s'"),
        ("events.arrow", "events.arrow: damaged: it has no column "),
    ],
)
def test_a_file_of_a_run_that_lacks_something_is_named(
    refused: Callable[..., str], heddle: Heddle, trace: Path, file: str, said: str
):
    run = Path(run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"])
    path = unlisted(run) / file
    path.chmod(0o644)
    if file == "manifest.json":
        manifest = json.loads(path.read_text())
        del manifest["policy"]
        path.write_text(json.dumps(manifest))
    elif file == "steps.parquet":
        pq.write_table(pa.Table.from_batches(load_run(run).batches()), path)
    else:
        feather.write_feather(load_run(run).steps, path)
    assert said in refused("report", run)


def test_text_of_a_run_that_is_no_text_is_named(
    refused: Callable[..., str], heddle: Heddle, trace: Path
):
    run = unlisted(Path(run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"]))
    for name in ("steps.parquet", "manifest.json"):
        (run / name).chmod(0o644)
    data = (run / "steps.parquet").read_bytes()
    (run / "steps.parquet").write_bytes(data.replace(b"queueing_s", b"queueing\xf0("))
    assert "steps.parquet: damaged: 'utf-8' codec can't decode" in refused("report", run)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "\ud800"}))
    assert "manifest.json: damaged: 'utf-8' codec can't encode" in refused("report", run)


def test_a_manifest_without_its_driver_is_damaged(
    refused: Callable[..., str], heddle: Heddle, trace: Path
):
    run = Path(run_of(heddle(*ONE_RUN, trace, "--json", *CLUSTER))["run"])
    path = unlisted(run) / "manifest.json"
    path.chmod(0o644)
    manifest = json.loads(path.read_text())
    del manifest["driver"]
    path.write_text(json.dumps(manifest))
    said = "manifest.json: damaged: Object missing required field `driver`"
    assert said in refused("profile", "check", run)
