"""Shipped profiles: the table of them in the documentation, and KV that their GPUs hold."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.profile_table import rows
from heddle_calibrate.fit.curves import DecodeFit
from heddle_calibrate.fit.kernel_tables import KernelTables, fit_prefill
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.pairs import least_pair_s, least_pairs_s, with_kv_of
from heddle_core.ids import EngineShape
from heddle_sim.known_models import known_config
from heddle_sim.model_config import model_shape
from heddle_sim.profile_files import known_profiles, load_profile, read_layout

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_table_is_that_of_the_files() -> None:
    table = "docs/tables/shipped_profiles.txt"
    kept = (ROOT / table).read_text().splitlines()
    assert kept == rows(), f"python benchmarks/profile_table.py > {table}"
    assert f'--8<-- "{table}"' in (ROOT / "docs" / "profiles.md").read_text()


@pytest.mark.parametrize(("model", "gpu"), known_profiles())
def test_kv_fits_in_memory(model: str, gpu: str) -> None:
    """The KV of a rank, replicated where it has more GPUs than KV heads, within 0.9 of a GPU."""
    profile = load_profile(model, gpu)
    for name, entry in profile.tables.items():
        tp, _, _ = read_layout(name)
        of_gpu = entry.kv_capacity_tokens * profile.kv_bytes_per_token / min(tp, profile.kv_heads)
        assert of_gpu < 0.9 * GPU_CLASSES[gpu].memory * 1.01, name


@pytest.mark.parametrize(("model", "gpu"), known_profiles())
def test_rooflines_are_those_of_the_data_sheets(model: str, gpu: str) -> None:
    roofline, card = load_profile(model, gpu).roofline, GPU_CLASSES[gpu]
    assert roofline is not None
    assert roofline.bandwidth_bytes_per_s == card.peak_bandwidth >= card.bandwidth
    assert roofline.source == card.peak_source


# -- pairs of attention ----------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "gpu"), known_profiles())
def test_no_pair_of_attention_is_faster_than_the_gpu_multiplies(model: str, gpu: str) -> None:
    """A cached prefix is never free to attend to."""
    profile = load_profile(model, gpu)
    base = re.sub("-(fp8|nvfp4)$", "", model)
    shape = model_shape(known_config(base), place=base, name=base)
    shape = with_kv_of(shape, profile.kv_bytes_per_token, 1)
    for name, entry in profile.tables.items():
        tp, dp, ep = read_layout(name)
        least_s = least_pair_s(shape, EngineShape(gpu, tp, ep=ep, dp=dp), GPU_CLASSES[gpu])
        assert least_s > 0
        assert entry.prefill.pair_ns >= least_s * 1e9 * (1 - 1e-4), name


def test_the_least_time_of_a_pair_is_that_of_two_products() -> None:
    dense = model_shape(known_config("Qwen3-8B"), place="", name="qwen3-8b")
    h100 = GPU_CLASSES["h100"]
    heads, width, layers = 32, 128, 36
    flops = layers * (2 * width + 2 * width) * heads
    one, two = EngineShape("", 1), EngineShape("", 2)
    assert least_pair_s(dense, one, h100) == pytest.approx(flops / 989e12)
    assert least_pair_s(dense, two, h100) == pytest.approx(flops / 2 / 989e12)
    narrow = with_kv_of(dense, dense.kv_bytes_per_token() / 2, 1)
    assert least_pair_s(narrow, one, h100) == pytest.approx(flops / 1979e12)
    assert with_kv_of(narrow, dense.kv_bytes_per_token(2), 2) == dense
    windowed = replace(dense, window=128, sliding_layers=18)
    assert least_pair_s(windowed, one, h100) == pytest.approx(flops / 2 / 989e12)


def test_layouts_and_classes_without_a_bound_have_none() -> None:
    dense = model_shape(known_config("Qwen3-8B"), place="", name="qwen3-8b")
    shapes = [EngineShape("", 1), EngineShape("", 3)]
    assert list(least_pairs_s(dense, shapes, GPU_CLASSES["h100"])) == ["1"]
    assert least_pairs_s(dense, shapes, None) == {}


def test_a_source_in_which_prefixes_are_free_is_bounded() -> None:
    """Prompts of 512, 2K, 8K and 32K tokens take time for their tokens alone, prefixes none."""
    lone = [(512, 0, 60.0), (2048, 0, 120.0), (8192, 0, 360.0), (32768, 0, 1440.0)]
    columns = ["prompt_tokens", "prefix_cached_tokens", "prefill_ms"]
    none = pd.DataFrame()
    tables = KernelTables(
        decode=none,
        prefill=pd.DataFrame([*lone, (32768, 32256, 55.0)], columns=columns),
        mixed=none,
        capacity=none,
    )
    decode = DecodeFit(
        batch=np.array([1.0, 2.0]), base_s=np.array([0.01, 0.011]), context_s=np.zeros(2)
    )
    free = fit_prefill(tables, decode, 0.5)
    bounded = fit_prefill(tables, decode, 0.5, least_pair_s=1e-10)
    assert free.pair_s == 0.0
    assert bounded.pair_s == 1e-10
    for tokens, _, ms in lone[:3]:
        n = np.array(float(tokens))
        added_s = bounded.added_s(n, n * n / 2)
        assert added_s == pytest.approx(ms / 1e3 - bounded.idle_s)
        assert bounded.added_s(n, n * 32_000) > added_s
