"""The shipped seconds of tools are what was measured, and say where they come from."""

import pytest

from heddle_trace.typical import LEVELS, kind_of, typical_seconds
from tests.trace import typical_tools

KINDS = {"shell", "tests", "python", "search", "browser", "edit", "user", "judge", "other"}


def test_every_kind_has_ascending_quantiles_and_a_source():
    assert set(typical_seconds()) == KINDS
    for kind, shipped in typical_seconds().items():
        assert list(shipped.levels) == sorted(shipped.levels), kind
        assert list(shipped.seconds) == sorted(shipped.seconds), kind
        assert len(shipped.levels) == len(shipped.seconds), kind
        assert shipped.seconds[0] > 0, kind
        assert len(shipped.source) > 20, kind


@pytest.mark.skipif(not typical_tools.SHARED.is_dir(), reason="records are not at ../shared")
def test_measured_kinds_are_what_their_command_prints():
    found = typical_tools.measured(typical_tools.SHARED)
    assert set(found) == KINDS - {"search", "browser", "judge"}
    for kind, (_, quantiles) in found.items():
        assert list(typical_seconds()[kind].levels) == LEVELS
        assert list(typical_seconds()[kind].seconds) == quantiles


def test_every_name_has_a_shipped_kind():
    for name in ("", "unspecified", "find_file", "ToolSearch", "__", "日本", "x" * 1000):
        assert kind_of(name) in KINDS
    assert [kind_of(name) for name in ("unspecified", "find_file", "ask_user")] == [
        "shell",
        "edit",
        "user",
    ]
