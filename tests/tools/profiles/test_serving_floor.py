"""Noise and hindsight of published runs: exact on runs that are made of known constants."""

from dataclasses import replace

import numpy as np
import pytest

from heddle_calibrate.serving.limits import limits
from heddle_calibrate.serving.rows import ServingRow
from heddle_calibrate.serving.samples import ServingSample, samples
from heddle_sim.profile_files import load_profile
from tools.profiles.serving_floor import floors

QWEN = {("qwen3-8b", "h100"): load_profile("qwen3-8b", "h100")}


def runs(factors: tuple[float, float]) -> list[ServingSample]:
    """Runs at TP 1 and 2 whose kernels take other times than the profile's by these factors."""
    rows = [
        ServingRow(
            line=1, engine="vllm", version="1.0", model="qwen3-8b", precision="bf16", gpu="h100",
            tp=tp, rank_tp=tp, dp=1, expert_parallel=False, input_tokens=prompt, output_tokens=256,
            concurrency=clients, ttft_s=60.0, tpot_s=1.0,
            limits=limits({}, clients=clients, input_tokens=prompt),
        )
        for tp in (1, 2)
        for prompt in (1024, 4096)
        for clients in (4, 16, 64)
    ]  # fmt: skip
    found, out = samples(rows, QWEN)
    assert not out
    return [
        replace(
            s,
            row=replace(
                s.row,
                tpot_s=factor * (s.work.per_token.decode_s + s.work.per_token.prefill_s),
                ttft_s=factor * (s.work.first_token.decode_s + s.work.first_token.prefill_s),
            ),
        )
        for s in found
        for factor in [factors[s.row.tp - 1]]
    ]


def test_constants_in_hindsight_leave_what_their_part_cannot_tell_apart() -> None:
    *_, layouts, models, engine = floors(runs((1.0, 1.0)))
    for floor in (layouts, models, engine):
        assert max(*floor.tpot, *floor.ttft) < 0.5
    *_, layouts, models, engine = floors(runs((1.0, 3.0)))
    assert max(*layouts.tpot, *layouts.ttft) < 0.5
    assert models.tpot == pytest.approx(engine.tpot)
    assert np.mean(models.tpot) > 5


def test_noise_is_how_much_longer_the_slower_of_two_alike_runs_takes() -> None:
    found = runs((1.0, 1.0))
    first = found[0]
    slower = replace(
        first, row=replace(first.row, tpot_s=1.1 * first.row.tpot_s, ttft_s=first.row.ttft_s / 2)
    )
    later = replace(slower, row=replace(slower.row, version="2.0"))
    other = replace(slower, row=replace(slower.row, concurrency=5))
    one, two, *_ = floors([*found, slower, later, other])
    assert one.tpot == pytest.approx([10.0])
    assert one.ttft == pytest.approx([100.0])
    assert sorted(two.tpot) == pytest.approx([0.0, 10.0])
    assert one.cells() == ["10.0", "10.0", "100.0", "100.0"]
    assert floors(found)[0].cells() == ["", "", "", ""]
