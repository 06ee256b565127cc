"""What a campaign once found, and was mended, stays mended."""

from pathlib import Path

import pytest

from campaigns.__main__ import replay
from campaigns.campaign import COUNTER_EXAMPLES

FILES = sorted(COUNTER_EXAMPLES.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_counter_example_fails_no_more(path: Path):
    assert replay(path) == ""
