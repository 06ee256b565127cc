"""Fits are kept small here: what they do is tested, not how well they end up doing it."""

from collections.abc import Iterator

import pytest

from heddle_predict import fit, trees


@pytest.fixture(autouse=True, scope="session")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "ENOUGH_ROWS", 0)
        patch.setattr(fit, "AUGMENT_TRAJECTORIES", 32)
        patch.setattr(trees, "MOST_ROUNDS", 40)
        yield
