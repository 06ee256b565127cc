"""Signals that end a run on engines: which are raised, where, and which are not."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from heddle.signals import StopSignals, Terminated, terminal_signals_blocked


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_first_is_raised_where_it_comes_and_no_other():
    with StopSignals():
        with pytest.raises(KeyboardInterrupt) as raised:
            send(signal.SIGINT)
        assert not isinstance(raised.value, Terminated)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            send(number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_is_not_ctrl_c_has_its_own_status(number: signal.Signals, status: int):
    with StopSignals(), pytest.raises(Terminated, match=f"ended by {number.name}") as raised:
        send(number)
    assert raised.value.status == status


def test_what_is_deferred_is_raised_at_the_end():
    reached = []

    def work() -> None:
        with StopSignals() as signals, signals.deferred():
            send(signal.SIGTERM)
            send(signal.SIGINT)
            reached.append("end")

    with pytest.raises(Terminated, match="SIGTERM"):
        work()
    assert reached == ["end"]


def test_an_error_goes_before_what_was_deferred():
    def work() -> None:
        with StopSignals() as signals, signals.deferred():
            send(signal.SIGINT)
            raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        work()


def test_a_callback_is_called_for_each_and_for_those_before():
    received: list[int] = []

    def work() -> None:
        with StopSignals() as signals, signals.deferred():
            send(signal.SIGINT)
            with signals.on_signal(received.append):
                send(signal.SIGTERM)
                send(signal.SIGINT)
            send(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert received == [1, 2, 3]


def test_handlers_are_given_back_and_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    theirs = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGINT) is not theirs[0]
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            send(signal.SIGHUP)
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == theirs
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def inside() -> None:
        with StopSignals() as signals, signals.deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]


DROPS = """
import os, signal, sys, time
from heddle import signals
from heddle.signals import StopSignals, first_ends_process, terminate_on_signals

number = int(sys.argv[1])
signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))

def send():
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python calls the handler here at the latest

class Freed:
    def __del__(self):
        send()

def wait():
    while True:
        time.sleep(0.01)
"""
DROPS_AND_WAITS = """
signals.AGAIN_S = 0.5  # not while it still prints
try:
    with first_ends_process(), eval(sys.argv[2])():
        Freed()
        print("goes on", flush=True)
        wait()
except KeyboardInterrupt as error:
    for _ in range(3):
        send()  # ignored while the first ends the process
    print("ended", type(error).__name__, error)
"""


def dropping(script: str, *arguments: str) -> str:
    """Output of a script in a process of its own, which prints no errors."""
    done = subprocess.run(
        [sys.executable, "-c", DROPS + script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("manager", ["terminate_on_signals", "StopSignals"])
@pytest.mark.parametrize(
    ("number", "ended"),
    [
        (signal.SIGINT, "ended KeyboardInterrupt "),
        (signal.SIGTERM, "ended Terminated ended by SIGTERM"),
        (signal.SIGHUP, "ended Terminated ended by SIGHUP"),
    ],
)
def test_a_signal_whose_exception_python_drops_comes_again(
    number: signal.Signals, ended: str, manager: str
):
    """Python drops what is raised while it frees an object."""
    assert dropping(DROPS_AND_WAITS, str(int(number)), manager) == f"goes on\n{ended}\n"


SENT_BY_TEST = """
sent = []
signals.start_new_thread = lambda function, arguments: sent.append(arguments)
"""


@pytest.mark.parametrize("block", ["deferred()", "on_signal(print)"])
def test_a_dropped_signal_that_a_callback_has_had_is_not_raised_later(block: str):
    script = f"""
with first_ends_process(), StopSignals() as stop:
    Freed()
    try:
        with stop.{block}:
            pass
    except KeyboardInterrupt:
        print("ended")
    assert sent == [(number,)]
    send()  # as it comes again
    send()
    print("closed")
"""
    shown = {"deferred()": "ended", "on_signal(print)": "1"}[block]
    assert dropping(SENT_BY_TEST + script, str(int(signal.SIGTERM))) == f"{shown}\nclosed\n"


def test_a_second_signal_while_the_first_is_dropped_does_not_replace_it():
    script = """
signals.start_new_thread = lambda *a: send()
try:
    with first_ends_process(), StopSignals():
        Freed()
        print("goes on")
        send()  # as the first comes again
except KeyboardInterrupt:
    print("ended")
"""
    assert dropping(script, str(int(signal.SIGINT))) == "goes on\nended\n"


def test_other_errors_that_python_drops_are_printed_and_the_hook_is_given_back():
    script = """
class Failing:
    def __del__(self):
        raise ValueError("a defect")

before = sys.unraisablehook = lambda unraisable: print(repr(unraisable.exc_value))
with first_ends_process():
    Failing()
assert sys.unraisablehook is before
"""
    assert dropping(script, str(int(signal.SIGINT))) == "ValueError('a defect')\n"


@pytest.mark.parametrize("ends", ["as it is", "by an error"])
def test_a_signal_that_another_thread_receives_waits_until_processes_have_started(ends: str):
    over, reached = threading.Event(), []
    other = threading.Thread(target=over.wait)
    other.start()

    def work() -> None:
        with terminal_signals_blocked():
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            time.sleep(0.1)
            reached.append(ends)
            if ends == "by an error":
                raise OSError

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        over.set()
        other.join()
    assert reached == [ends]
