"""What other processes take of the machine's CPUs, from Linux's counters."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_runtime.cpu_load import CpuLoad, CpuMeter


def write_proc(
    proc: Path, *, idle: int, busy: int, cpus: int = 2, own: Mapping[int, tuple[int, int]]
) -> None:
    """Counters of `cpus` CPUs, in ticks; `own` are process ids, with their parents and ticks."""
    proc.mkdir(exist_ok=True)
    line = f"{busy - 3} 0 1 {idle - 1} 1 1 1 0 55 0"
    each = "".join(f"cpu{n} 1 1 1 1 1 1 1 1 0 0\n" for n in range(cpus))
    (proc / "stat").write_text(f"cpu  {line}\n{each}intr 5\nctxt 9\n")
    (proc / "meminfo").write_text("MemTotal: 1 kB\n")
    for pid, (parent, ticks) in own.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        times = f"{ticks - 3} 1 1 1"
        zeros = " ".join("0" * 8)
        (proc / str(pid) / "stat").write_text(f"{pid} (a) b)) S {parent} {zeros} 7 {times} 20 0\n")


ME = os.getpid()


def test_what_this_process_and_its_tree_take_is_not_of_others(tmp_path: Path):
    proc = tmp_path / "proc"
    own = {ME: (1, 100), 900001: (ME, 50), 900002: (900001, 20), 900009: (1, 400)}
    write_proc(proc, idle=1000, busy=1000, own=own)
    meter = CpuMeter(proc)
    own = {ME: (1, 140), 900001: (ME, 90), 900002: (900001, 80), 900009: (1, 900)}
    write_proc(proc, idle=1100, busy=1300, own=own)
    # 400 ticks of two CPUs: 100 idle, 140 ours, and so 160 of others.
    assert meter.read() == CpuLoad(cpus=2, others=pytest.approx(0.8))
    load = meter.read()
    assert load is not None
    assert load.share == pytest.approx(0.4)


def test_an_engine_that_starts_and_ends_meanwhile_is_ours(tmp_path: Path):
    proc = tmp_path / "proc"
    write_proc(proc, idle=0 + 5, busy=10, cpus=4, own={ME: (1, 5)})
    meter = CpuMeter(proc)
    # A process that was waited for is in its parent's ticks.
    write_proc(proc, idle=105, busy=310, cpus=4, own={ME: (1, 205), 900001: (ME, 60)})
    assert meter.read() == CpuLoad(cpus=4, others=pytest.approx(0.4))


@given(idle=st.integers(0, 10**6), ours=st.integers(0, 10**6), others=st.integers(0, 10**6))
def test_others_are_never_negative_and_never_more_than_all(
    tmp_path_factory: pytest.TempPathFactory, idle: int, ours: int, others: int
):
    proc = tmp_path_factory.mktemp("proc")
    write_proc(proc, idle=1, busy=3, own={ME: (1, 3)})
    meter = CpuMeter(proc)
    write_proc(proc, idle=1 + idle, busy=3 + ours + others, own={ME: (1, 3 + ours)})
    load = meter.read()
    if idle + ours + others == 0:
        assert load is None
    else:
        assert load is not None
        assert load.share == pytest.approx(others / (idle + ours + others))


@pytest.mark.parametrize("content", [None, "", "cpu 1 2 3\n", "cpu a b c d e f g h\ncpu0\n"])
def test_without_counters_there_is_no_load(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert CpuMeter(tmp_path).read() is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux shows its counters in /proc")
def test_this_machine_is_measured():
    meter = CpuMeter()
    load = None
    while load is None:
        load = meter.read()
        sum(range(10**5))
    assert load.cpus >= 1
    assert 0.0 <= load.others <= load.cpus
