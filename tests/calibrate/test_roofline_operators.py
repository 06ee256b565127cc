"""Operators: what an iteration multiplies, reads and sends, by counting."""

import random
from statistics import mean

import numpy as np
import pytest

from heddle_calibrate.roofline.efficiency import (
    Efficiency,
    efficiency,
    nearest_key,
    parent,
    seconds,
    shipped_efficiencies,
)
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.operators import (
    LayoutError,
    Operator,
    decode_iterations,
    operators,
    prefill_iterations,
)
from heddle_core.ids import EngineShape
from heddle_sim.known_models import known_config
from heddle_sim.model_config import model_shape
from heddle_sim.model_shape import ModelShape, count_parameters

NAMES = ("Qwen3-8B", "Qwen3-30B-A3B", "gpt-oss-120b", "DeepSeek-V3")


def shape(name: str) -> ModelShape:
    return model_shape(known_config(name), place=name, name=name.lower())


def decode(
    model: ModelShape, batch: float, context: float, *, tp: int = 1, ep: int = 1, dp: int = 1
) -> list[Operator]:
    work = decode_iterations(np.array([batch]), np.array([context]))
    return operators(model, EngineShape("h200", tp, ep=ep, dp=dp), work)


def total(found: list[Operator], what: str, *kinds: str) -> float:
    return sum(o.count * float(getattr(o, what)[0]) for o in found if o.kind in kinds)


@pytest.mark.parametrize("name", [*NAMES, "DeepSeek-V3.2", "Qwen3.5-397B-A17B"])
def test_a_token_is_multiplied_with_every_active_parameter_but_the_embedding(name: str) -> None:
    model = shape(name)
    p = count_parameters(model)
    active = p.active - p.embedding
    flops = total(decode(model, 1, 1), "flops", "gemm", "experts")
    assert flops == pytest.approx(2 * active, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallelism_divides_work_but_not_latent_kv(name: str) -> None:
    model = shape(name)
    one, four = decode(model, 8, 4096), decode(model, 8, 4096, tp=4)
    assert total(four, "flops", "experts") == pytest.approx(total(one, "flops", "experts") / 4)
    kinds = ("attention", "latent-attention")
    ratio = total(four, "flops", *kinds) / total(one, "flops", *kinds)
    assert ratio == pytest.approx(1 / 4)
    kv_ratio = total(four, "bytes", *kinds) / total(one, "bytes", *kinds)
    assert (kv_ratio > 0.8) if name == "DeepSeek-V3" else (kv_ratio == pytest.approx(1 / 4))


def test_attention_reads_the_kv_of_the_batch() -> None:
    found = decode(shape("Qwen3-8B"), 16, 8192)
    read = 16 * 8192 * 147_456
    own = 36 * 2 * 16 * 32 * 128 * 2  # queries in, results out
    assert total(found, "bytes", "attention") == read + own


def test_layers_with_a_window_read_no_more_than_it() -> None:
    model = shape("gpt-oss-120b")
    by_context = [
        {o.name: float(o.bytes[0]) for o in decode(model, 4, context)} for context in (4096, 8192)
    ]
    assert by_context[0]["sliding attention"] == by_context[1]["sliding attention"]
    window = 4 * 128 * 2 * 8 * 64 * 2
    assert by_context[0]["sliding attention"] == window + 2 * 4 * 64 * 64 * 2
    assert by_context[1]["attention"] > 1.9 * by_context[0]["attention"]


@pytest.mark.parametrize("tokens", [1, 3, 16, 200])
def test_the_distinct_experts_of_a_batch_are_those_of_random_choices(tokens: int) -> None:
    model = shape("Qwen3-30B-A3B")
    draw = random.Random(5)
    tries = [
        len({e for _ in range(tokens) for e in draw.sample(range(128), 8)}) for _ in range(400)
    ]
    found = next(o for o in decode(model, tokens, 1) if o.kind == "experts")
    one = 3 * 2048 * 768 * 2
    activations = tokens * 8 * (2 * 2048 + 3 * 768) * 2
    assert (float(found.bytes[0]) - activations) / one == pytest.approx(mean(tries), rel=0.02)


def test_the_busiest_gpu_has_more_than_its_share_and_never_more_than_its_experts() -> None:
    model = shape("Qwen3-30B-A3B")
    share = total(decode(model, 4, 1), "bytes", "experts") / 8
    few = total(decode(model, 4, 1, tp=8, ep=8), "bytes", "experts")
    assert 1.2 * share < few < 4 * share
    everything = count_parameters(model).experts * 2 / 8
    many = decode(model, 4000, 1, tp=8, ep=8)
    weights = next(o for o in many if o.kind == "experts")
    activations = 48 * (4000 * 8 / 8 + np.sqrt(2 * np.log(8) * 4000 * 7 / 8)) * (2 * 2048 + 3 * 768)
    assert 48 * float(weights.bytes[0]) == pytest.approx(everything + 2 * activations, rel=1e-3)


def test_collectives_are_there_only_with_several_gpus() -> None:
    model = shape("Qwen3-30B-A3B")
    links = ("all-reduce", "all-to-all")
    assert not [o for o in decode(model, 8, 1) if o.kind in links]
    reduced = decode(model, 8, 1, tp=4)
    # Two in each layer, of a vector a token: each GPU sends 2 (tp - 1) / tp of it.
    assert total(reduced, "bytes", "all-reduce") == 2 * 48 * (2 * 3 / 4) * 8 * 2048 * 2
    ranks = decode(model, 8, 1, ep=4, dp=4)
    assert total(ranks, "bytes", "all-reduce") == 0
    # Dispatch and combine: copies for 4 GPUs, 3 of them elsewhere.
    assert total(ranks, "bytes", "all-to-all") == 2 * 48 * 8 * (3 / 4) * 4 * 2048 * 2


def test_a_prompt_has_half_a_square_of_pairs() -> None:
    model = shape("Qwen3-8B")
    work = prefill_iterations(np.array([512.0]), np.array([1024.0]))
    found = operators(model, EngineShape("h200", 1), work)
    attention = next(o for o in found if o.kind == "attention")
    assert attention.key == "attention prefill"
    assert float(attention.flops[0]) == 4 * 512 * (1024 + 256) * 32 * 128
    head = next(o for o in found if o.name == "LM head")
    assert float(head.flops[0]) == 2 * 4096 * 151_936


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("Qwen3-8B", EngineShape("h200", 3), "32 attention heads do not divide over TP 3"),
        ("Qwen3-8B", EngineShape("h200", 2, ep=2), "a dense model has no experts to spread"),
        ("Qwen3-8B", EngineShape("h200", 2, dp=2), "a dense model has no experts to spread"),
        ("gpt-oss-120b", EngineShape("h200", 64, dp=3, ep=192), "128 experts do not divide over"),
        ("Qwen3-30B-A3B", EngineShape("h200", 32, dp=5), "768 wide do not divide over TP 160"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(
    name: str, layout: EngineShape, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        operators(shape(name), layout, decode_iterations(np.ones(1), np.ones(1)))


def test_an_operator_takes_its_launch_and_the_larger_of_both_times() -> None:
    h200 = GPU_CLASSES["h200"]
    work = decode_iterations(np.array([1.0]), np.array([1.0]))
    head = operators(shape("Qwen3-8B"), EngineShape("h200", 1), work)[-1]
    one = {"gemm bf16": Efficiency(10.0, 0.5, 1.0)}
    moved = 2 * 4096 * 151_936 / (0.5 * 4.8e12)
    assert float(seconds(head, h200, one)[0]) == pytest.approx(10e-6 + moved, rel=1e-3)


def test_gpus_without_nvlink_share_their_bus() -> None:
    model = shape("Qwen3-8B")
    reduce = {
        tp: next(o for o in decode(model, 256, 1, tp=tp) if o.kind == "all-reduce") for tp in (2, 4)
    }
    fitted = {"all-reduce": Efficiency(0.0, 1.0, 1.0)}

    def ratio(gpu: str) -> float:
        times = [float(seconds(o, GPU_CLASSES[gpu], fitted)[0]) for o in reduce.values()]
        return times[1] / times[0]

    assert ratio("h200") == pytest.approx(1.5)
    assert ratio("l40s") == pytest.approx(1.5 * 4)


def test_a_kind_without_rows_takes_the_efficiency_of_the_nearest() -> None:
    fitted = shipped_efficiencies().mean
    assert efficiency("gemm int4", fitted) == fitted["gemm bf16"]
    assert efficiency("experts int4 prefill", fitted) == fitted["experts bf16 prefill"]
    assert efficiency("experts nvfp4 prefill", fitted) == fitted["experts fp8 prefill"]
    few = {key: fitted[key] for key in ("gemm bf16", "gemm fp8", "attention", "experts int4")}
    assert efficiency("gemm nvfp4", few) == fitted["gemm fp8"]
    assert efficiency("experts mxfp4", few) == fitted["experts int4"]
    assert efficiency("latent-attention", few) == fitted["attention"]
    with pytest.raises(KeyError):
        efficiency("no such kind", fitted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", [None, "fp8", "int4", "nvfp4", "mxfp4"])
def test_every_operator_has_an_efficiency_on_every_class(name: str, precision: str | None) -> None:
    model = model_shape(known_config(name), place="", name=name, precision=precision)  # type: ignore[arg-type]
    one, layout = np.ones(1), EngineShape("h200", 2, ep=2 if model.experts else 1)
    works = (decode_iterations(one, one), prefill_iterations(one, one))
    for operator in (o for work in works for o in operators(model, layout, work)):
        for gpu in GPU_CLASSES.values():
            time_s = float(seconds(operator, gpu, shipped_efficiencies().of(gpu.name))[0])
            assert 0 < time_s < 1


def test_efficiencies_are_shares_of_the_data_sheet() -> None:
    fitted = shipped_efficiencies()
    assert set(fitted.classes) == {"a100", "h100", "h200", "l40s", "b200", "b300", "gb200"}
    for rows in (fitted.mean, *fitted.classes.values()):
        for key, e in rows.items():
            assert 0 < e.bandwidth <= 1, key
            assert 0 < e.arithmetic <= 1, key
            assert 0.5 < e.launch_us < 400, key
            assert parent(key) is None or nearest_key(str(parent(key)), rows) is not None


def test_sparse_attention_reads_the_chosen_tokens_and_scores_all() -> None:
    near, far = ({o.name: o for o in decode(shape("DeepSeek-V3.2"), 4, n)} for n in (2048, 8192))
    assert far["attention"].bytes == near["attention"].bytes
    assert far["attention"].flops == near["attention"].flops
    assert far["index scores"].flops == pytest.approx(4 * near["index scores"].flops)
    prompt = prefill_iterations(np.array([8192.0]), np.array([0.0]))
    found = operators(shape("DeepSeek-V3.2"), EngineShape("h200", 8), prompt)
    (attention,) = (o for o in found if o.name == "attention")
    assert attention.flops == 2 * 8192 * 2048 * 16 * (2 * 512 + 64)


def test_linear_attention_takes_as_long_at_any_context() -> None:
    near, far = ({o.name: o for o in decode(shape("Qwen3.5-27B"), 4, n)} for n in (2048, 8192))
    assert far["linear attention"].bytes == near["linear attention"].bytes
    assert (near["linear attention"].count, near["attention"].count) == (48, 16)
    # Matrices of 48 heads, 128 x 128 in float32, read and written; and vectors in and out.
    states = 4 * 48 * 128 * 128 * 4 * 2
    vectors = 4 * (2 * (16 + 48) * 128 + 2 * 48) * 2
    assert float(near["linear attention"].bytes[0]) == states + vectors


@pytest.mark.parametrize(("dp", "exchanged"), [(1, False), (2, True), (4, True)])
def test_ranks_of_data_parallelism_exchange_tokens_of_experts(dp: int, exchanged: bool) -> None:
    found = decode(shape("Qwen3-30B-A3B"), 4, 2048, ep=4, dp=dp, tp=4 // dp)
    assert any(each.name == "dispatch and combine" for each in found) == exchanged
