"""Shipped profiles: the table of them in the documentation, and KV that their GPUs hold."""

from pathlib import Path

import pytest

from benchmarks.profile_table import rows
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_sim.profile_files import known_profiles, load_profile
from heddle_sim.profile_layouts import read_layout

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_table_is_that_of_the_files() -> None:
    page = (ROOT / "docs" / "calibration.md").read_text()
    missing = [row for row in rows() if row not in page]
    assert missing == [], "run benchmarks/profile_table.py and put its output into the page"


@pytest.mark.parametrize(("model", "gpu"), known_profiles())
def test_kv_fits_in_memory(model: str, gpu: str) -> None:
    """The KV of a rank, replicated where it has more GPUs than KV heads, within 0.9 of a GPU."""
    profile = load_profile(model, gpu)
    for name, entry in profile.tables.items():
        tp, _, _ = read_layout(name)
        of_gpu = entry.kv_capacity_tokens * profile.kv_bytes_per_token / min(tp, profile.kv_heads)
        assert of_gpu < 0.9 * GPU_CLASSES[gpu].memory * 1.01, name
