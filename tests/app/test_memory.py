"""Large pages: where Linux has them, and no error where it has not."""

import ctypes
import errno
import gc
import mmap
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from heddle import memory


def huge_mb() -> float:
    """Megabytes of this process in large pages."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        pytest.skip("not Linux, or none of its large pages can be seen")
    line = next(line for line in text.splitlines() if line.startswith("AnonHugePages"))
    return int(line.split()[1]) / 1024


def test_new_objects_come_into_large_pages_at_a_collection():
    before_mb = huge_mb()
    with memory.large_pages():
        objects = [[number] for number in range(600_000)]
        gc.collect()
        if huge_mb() == before_mb:
            pytest.skip("this kernel makes no large pages on demand (Linux 6.1 does)")
        assert huge_mb() - before_mb > 20, "of 60 MB of objects"
    callbacks = [each for each in gc.callbacks if each.__module__ == memory.__name__]
    assert objects[599_999] == [599_999]
    assert not callbacks


@pytest.mark.parametrize("objects", [1_000, 900_000])
def test_what_a_large_simulation_leaves_is_given_back(objects: int):
    if not memory._resident_bytes():
        pytest.skip("the system does not say what memory a process has")
    with memory.many_objects():
        left: dict[str, object] = {"objects": [[number] for number in range(objects)]}
        left["itself"] = left
        with_it = memory._resident_bytes()
        del left
    given_back = with_it - memory._resident_bytes()
    assert given_back > 40e6 if objects > 1_000 else given_back < 10e6


@pytest.mark.parametrize("python", ["3.12", "3.13", "3.14", "without either"])
def test_names_of_types_are_forgotten_without_a_warning(python, monkeypatch: pytest.MonkeyPatch):
    def old() -> None:
        if python == "3.14":
            warnings.warn("sys._clear_type_cache() is deprecated", DeprecationWarning, stacklevel=2)
        called.append("old")

    called = list[str]()
    names = {"_clear_type_cache": old, "_clear_internal_caches": lambda: called.append("new")}
    there = {"3.12": list(names)[:1], "without either": []}.get(python, list(names))
    monkeypatch.setattr(memory, "sys", SimpleNamespace(**{name: names[name] for name in there}))
    sizes = iter([0, 0, memory.GROWN_BYTES])
    monkeypatch.setattr(memory, "_resident_bytes", lambda: next(sizes))
    with memory.many_objects():
        pass
    assert called == {"3.12": ["old"], "without either": []}.get(python, ["new"])


@pytest.mark.parametrize("objects", [1_000, 600_000])
def test_small_processes_and_other_systems_have_none(objects: int, monkeypatch: pytest.MonkeyPatch):
    made = list[bool]()
    monkeypatch.setattr(memory, "collapse", lambda: made.append(True))
    if objects > 1_000:
        monkeypatch.setattr(memory, "Path", lambda name: Path("/nowhere") / "statm")
    with memory.many_objects():
        kept = [[number] for number in range(objects)]
        gc.collect()
    assert not made
    assert len(kept) == objects


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Errors of `madvise`, one a call, then none."""
    errors = list[int]()

    def madvise(*_: object) -> int:
        ctypes.set_errno(errors.pop(0) if errors else 0)
        return -1 if ctypes.get_errno() else 0

    if not Path("/proc/self/maps").exists():
        pytest.skip("not Linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    return errors


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EBUSY])
def test_where_no_large_page_is_free_no_more_are_asked_for(error: int, advised: list[int]):
    advised += [errno.EINVAL, error, error]
    memory.collapse()
    assert advised == [error]


def test_many_pages_are_made_by_one_call(advised: list[int]):
    kept = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advised += [errno.EINVAL] * 400
    memory.collapse()
    assert advised
    kept.close()


def test_a_mapped_file_may_have_any_name(tmp_path: Path, advised: list[int]):
    path = tmp_path / "a\rb\x0cc\u2028d\nrw-p"
    path.write_bytes(b"x")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY):
        memory.collapse()


def test_where_the_memory_cannot_be_seen_nothing_is_said(monkeypatch: pytest.MonkeyPatch):
    said = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr(memory, "GROWN_BYTES", -(1 << 40))
    monkeypatch.setattr(memory, "collapse", lambda: Path("/nowhere/maps").read_bytes())
    with memory.large_pages():
        gc.collect()
    assert not said
