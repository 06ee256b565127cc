"""Large pages: where Linux has them, and no error where it has not."""

import gc
from pathlib import Path

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
