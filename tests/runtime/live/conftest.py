"""The tokenizer that tests of live agents share."""

import pytest

from heddle_runtime.agents.tokenizer import FileTokenizer
from tests.runtime.live.played import library


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    return FileTokenizer(library())
