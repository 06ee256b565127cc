"""Layouts that are slower than on a class with a lesser data sheet."""

from dataclasses import replace

import pytest

from heddle_calibrate.roofline.slower_layouts import lesser, slower_layouts
from heddle_sim.profile_files import Profile, load_profile


def slower(profile: Profile, factor: float) -> Profile:
    """The same with longer decode steps at TP 2, on one GPU class of twice the memory."""
    entry = profile.tables["2"]
    decode = replace(entry.decode, base_ms=tuple(factor * ms for ms in entry.decode.base_ms))
    tables = {**profile.tables, "2": replace(entry, decode=decode)}
    return replace(profile, gpu="h200", tables=tables)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("b200", "gb200", True),
        ("gb200", "b200", False),
        ("b200", "b300", True),
        ("h800", "h100", True),
        ("h100", "h100", False),
        ("h20", "h100", False),
        ("h100", "h20", False),
        ("mine", "h100", False),
    ],
)
def test_a_lesser_class_is_better_in_nothing(one: str, other: str, expected: bool) -> None:
    assert lesser(one, other) is expected


def test_slower_layouts_are_named_with_their_share() -> None:
    h100 = load_profile("qwen3-8b", "h100")
    assert slower_layouts(slower(h100, 1.0), [h100]) == {}
    assert slower_layouts(slower(h100, 1.03), [h100]) == {}
    found = slower_layouts(slower(h100, 1.5), [h100])
    assert set(found) == {"h100"}
    assert set(found["h100"]) == {"2"}
    assert 0.2 < found["h100"]["2"] < 0.5
    assert slower_layouts(h100, [slower(h100, 0.5)]) == {}
