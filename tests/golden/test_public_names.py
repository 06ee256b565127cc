"""Public names change on purpose only."""

import json

from tests.golden.public_names import KEPT, public_names


def test_public_names_are_those_of_the_list():
    assert public_names() == json.loads(KEPT.read_text())
