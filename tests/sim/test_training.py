"""Training steps, their memory, weight updates: by hand, and against published phases."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_sim.model_names import listed_models
from heddle_sim.profile_files import ProfileError
from heddle_sim.trained_models import TrainedModel, UnknownModelError, trained_model
from heddle_sim.training import (
    PEAK_TFLOPS,
    TrainingError,
    TrainLayout,
    pipeline_stretch,
)
from heddle_sim.training_files import TRAINING_FILE, load_training
from heddle_sim.training_memory import TrainingMemoryError, check_memory, training_memory
from heddle_sim.weight_update import WEIGHT_BYTES, WeightUpdateError, tensors_of
from tools.profiles.training_rows import flops_per_token

TRAINING = load_training().training
UPDATES = load_training().weight_update
PROMPT = 120
"""NeMo-RL's lengths leave the prompt out."""

PHASES = [
    ("llama-3.1-8b", 8, "megatron", TrainLayout(), 795, 28, 18),
    ("llama-3.1-8b", 8, "fsdp", None, 777, 38, 19),
    ("llama-3.1-70b", 64, "megatron", TrainLayout(tp=4, pp=4), 398, 28, 18),
    ("llama-3.1-70b", 64, "fsdp", None, 395, 97, 28),
    ("qwen3-32b", 64, "megatron", TrainLayout(tp=4, pp=2), 3283, 68, 40),
]
"""NeMo-RL 0.3 release notes: 2048 samples, 4 optimizer steps, 2 log-prob passes, H100."""


@pytest.mark.parametrize(
    ("model", "gpus", "backend", "layout", "tokens", "train", "logprob"), PHASES
)
def test_published_phases_of_dense_models_are_met_to_15_percent_and_llama_70b_to_26(
    model, gpus, backend, layout, tokens, train, logprob
):
    found = TRAINING.step_time(
        np.full(2048, tokens + PROMPT),
        model=model,
        gpu="h100",
        gpus=gpus,
        backend=backend,
        layout=layout,
        optimizer_steps=4,
        logprob_passes=2,
    )
    assert found.train_s + found.fixed_s == pytest.approx(train, rel=0.15)
    assert found.logprob_s == pytest.approx(logprob, rel=0.26 if "70b" in model else 0.15)
    assert found.total_s == found.train_s + found.logprob_s + found.fixed_s


def test_flops_of_a_token_are_those_counted_by_hand():
    # Llama-3.1-8B: 8.030e9 parameters, 128,256 x 4096 of them embedding; 32 layers of 4096.
    by_hand = 6 * (8.030e9 - 128_256 * 4096) + 6 * 32 * 4096 * 8192
    assert flops_per_token("llama-3.1-8b", 8192) == pytest.approx(by_hand)
    # Tokens and model TFLOP per second and GPU that Megatron-Bridge publishes side by side.
    assert flops_per_token("llama-3.1-8b", 8192) * 14_451 == pytest.approx(744e12, rel=0.003)
    assert flops_per_token("llama-3.1-70b", 8192) * 1602 == pytest.approx(719e12, rel=0.003)
    assert flops_per_token("qwen3-30b-a3b", 4096) * 5275 == pytest.approx(121e12, rel=0.03)
    assert flops_per_token("qwen3-235b-a22b", 4096) * 1575 == pytest.approx(233e12, rel=0.005)


def test_a_tied_embedding_is_multiplied_as_output_head():
    assert trained_model("qwen3-4b").multiplied == trained_model("qwen3-4b").parameters
    assert trained_model("qwen3-8b").multiplied < trained_model("qwen3-8b").parameters


def test_packed_samples_attend_to_themselves_alone():
    def train_s(lengths):
        return TRAINING.step_time(lengths, model="qwen3-8b", gpu="h100", gpus=1).train_s

    together = train_s([8000])
    assert train_s([8000, 0]) == together
    assert train_s([4000, 4000]) < together
    by_token = 4000 * TRAINING.token_s("qwen3-8b", 4000, gpu="h100")
    assert train_s(np.array([4000, 4000])) == pytest.approx(2 * by_token)


@given(
    st.lists(st.integers(1, 32_768), min_size=1, max_size=50),
    st.sampled_from(sorted(listed_models()["shapes"])),
    st.sampled_from(["h100", "h20", "b200", "a100"]),
)
def test_more_tokens_are_never_faster_nor_more_gpus_slower_over_their_collectives(
    lengths, model, gpu
):
    def step(gpus: int, lengths: list[int]):
        return TRAINING.step_time(lengths, model=model, gpu=gpu, gpus=gpus)

    steps = [step(gpus, lengths) for gpus in (8, 16, 64, 512)]
    assert all(many.train_s < few.train_s for few, many in itertools.pairwise(steps))
    assert steps[1].fixed_s == steps[2].fixed_s == steps[3].fixed_s
    assert step(8, [*lengths, 100]).total_s > steps[0].total_s
    assert step(8, [n + 1 for n in lengths]).total_s > steps[0].total_s


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_more_gpus_help_until_collectives_take_the_time(backend):
    def total(gpus: int) -> float:
        one = TRAINING.step_time(
            [4096] * 4096, model="qwen3-8b", gpu="h100", gpus=gpus, backend=backend
        )
        return one.total_s

    seconds = [total(gpus) for gpus in (16, 32, 64, 128, 256)]
    assert all(many < few for few, many in itertools.pairwise(seconds))
    assert total(256) > total(16) / 16


def test_a_token_of_a_dense_model_is_products_and_attention_by_hand():
    m = trained_model("llama-3.1-8b")
    peak = 989e12
    by_hand = 6 * m.multiplied / (peak * TRAINING.matmul["megatron"])
    by_hand += 6 * 32 * 4096 * 8192 / (peak * TRAINING.attention["megatron"])
    assert TRAINING.token_s(m, 8192, gpu="h100") == pytest.approx(by_hand)


def test_experts_cost_dispatch_and_host_time_which_tp_does_not_divide():
    m = trained_model("qwen3-30b-a3b")

    def token(gpu="h100", **layout):
        return TRAINING.token_s(m, 4096, gpu=gpu, layout=TrainLayout(**layout))

    host = m.expert_layers * TRAINING.expert_layer_s
    tp_bytes = 16 * m.layers * m.hidden / (450e9 * TRAINING.link_efficiency)
    assert token() - token(expert_graphs=True) == pytest.approx(host)
    assert token(tp=2) - token() == pytest.approx(host + tp_bytes)
    assert token("gb200") == token("gb200", expert_graphs=True) < token("b200")


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_a_low_precision_shortens_products_by_no_more_than_its_peak(precision):
    m = trained_model("llama-3.1-70b")
    plain = TRAINING.token_s(m, 0, gpu="b200")
    low = TRAINING.token_s(m, 0, gpu="b200", precision=precision)
    assert plain / (4 if precision == "nvfp4" else 2) < low < plain
    attention = TRAINING.token_s(m, 8192, gpu="b200") - plain
    assert TRAINING.token_s(m, 8192, gpu="b200", precision=precision) - low == pytest.approx(
        attention
    )


def test_published_rates_of_blackwell_that_no_fit_has_seen_are_met_to_a_third():
    """Megatron-Bridge 26.08 in MXFP8, 4096 tokens: model TFLOP/s of a GPU."""
    for model, gpu, published in (
        ("qwen3-30b-a3b", "gb200", 923),
        ("qwen3-30b-a3b", "gb300", 1029),
        ("qwen3-235b-a22b", "gb200", 1077),
        ("qwen3-235b-a22b", "gb300", 1306),
        ("deepseek-v3", "gb200", 1276),
        ("deepseek-v3", "gb300", 1635),
    ):
        one = TRAINING.token_s(model, 4096, gpu=gpu, precision="mxfp8")
        assert flops_per_token(model, 4096) / one / 1e12 == pytest.approx(published, rel=1 / 3)


def test_padded_samples_each_take_as_long_as_the_longest():
    def step(lengths, **layout):
        return TRAINING.step_time(
            lengths, model="qwen3-8b", gpu="h100", gpus=8, layout=TrainLayout(**layout)
        )

    ragged = [100] * 63 + [4000]
    assert step(ragged, padded=True) == step([4000] * 64)
    assert step(ragged).total_s < step(ragged, padded=True).total_s


def test_colocated_and_optimizer_steps_and_passes_cost_time():
    def step(**more):
        given = {"model": "qwen3-8b", "gpu": "h100", "gpus": 16, "backend": "fsdp", **more}
        return TRAINING.step_time([2000] * 512, **given)

    assert step(colocated=True).train_s > step().train_s
    assert step(optimizer_steps=4).fixed_s == pytest.approx(4 * step().fixed_s)
    assert step(logprob_passes=2).logprob_s == pytest.approx(2 * step().logprob_s)
    assert step(logprob_passes=0).logprob_s == 0
    assert TRAINING.step_time([], model="qwen3-8b", gpu="h100", gpus=8).total_s == 0


def test_each_optimizer_step_waits_for_its_longest_sample():
    """Twice the ranks train as fast where every mini-batch has a sample that is long for a rank."""
    lengths = ([20_000] + [500] * 31) * 4

    def train_s(gpus, optimizer_steps):
        return TRAINING.step_time(
            lengths,
            model="qwen3-8b",
            gpu="h100",
            gpus=gpus,
            layout=TrainLayout(),
            optimizer_steps=optimizer_steps,
        ).train_s

    longest = TRAINING.step_time([20_000], model="qwen3-8b", gpu="h100", gpus=1).train_s
    assert train_s(32, 4) == pytest.approx(4 * longest)
    assert train_s(64, 4) == pytest.approx(train_s(32, 4))
    assert train_s(64, 1) == pytest.approx(longest)
    assert train_s(1, 4) == pytest.approx(train_s(1, 1))


def test_a_pipeline_fills_and_drains():
    layout = TrainLayout(pp=4, micro_batch_tokens=1000)
    # 16,000 tokens on 2 ranks of data parallelism: 8 micro-batches.
    assert pipeline_stretch(layout, gpus=8, tokens=16_000, longest=10) == pytest.approx(11 / 8)
    assert pipeline_stretch(TrainLayout(), gpus=8, tokens=16_000, longest=10) == 1
    # Samples longer than a micro-batch make fewer of them.
    assert pipeline_stretch(layout, gpus=8, tokens=16_000, longest=4000) == pytest.approx(5 / 2)


@pytest.mark.parametrize(("optimizer_steps", "stretch"), [(1, 11 / 8), (2, 7 / 4), (8, 4.0)])
def test_the_pipeline_fills_and_drains_once_an_optimizer_step(optimizer_steps, stretch):
    def of(layout):
        return TRAINING.step_time(
            [100] * 160,
            model="qwen3-8b",
            gpu="h100",
            gpus=8,
            layout=layout,
            optimizer_steps=optimizer_steps,
        )

    alone = of(TrainLayout())
    piped = of(TrainLayout(pp=4, micro_batch_tokens=1000))
    assert piped.train_s == pytest.approx(stretch * alone.train_s)
    assert piped.logprob_s == pytest.approx(11 / 8 * alone.logprob_s)


def test_a_step_of_thousands_of_samples_takes_no_time():
    lengths = np.random.default_rng(1).integers(100, 32_768, 8192)
    start = time.process_time()
    for _ in range(100):
        TRAINING.step_time(lengths, model="qwen3-14b", gpu="h100", gpus=64)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"gpu": "h1000"}, "no peak FLOP rate of GPU 'h1000'; known: a100"),
        ({"gpus": 0}, "1 or more"),
        ({"gpus": 12, "layout": TrainLayout(tp=8)}, "give a multiple of 8"),
        ({"layout": TrainLayout(tp=0)}, "1 or more"),
        ({"lengths": [-1]}, "0 or more"),
        ({"backend": "deepspeed"}, "known: fsdp, megatron"),
        ({"precision": "mxfp8"}, "does not train in 'mxfp8', but in bf16, fp8"),
        ({"gpu": "a100", "precision": "fp8"}, "does not train in 'fp8', but in bf16; take"),
    ],
)
def test_a_step_that_cannot_be_says_why(more, part):
    given = {"lengths": [100], "model": "qwen3-8b", "gpu": "h100", "gpus": 8, **more}
    with pytest.raises(TrainingError, match=part):
        TRAINING.step_time(given.pop("lengths"), **given)


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(UnknownModelError, match="did you mean 'qwen3-14b'"):
        trained_model("qwen3-14")
    own = TrainedModel(
        name="own",
        parameters=1e9,
        active=1e9,
        layers=16,
        hidden=2048,
        heads=16,
        head_dim=128,
        vocabulary=32_000,
    )
    assert trained_model(own) is own
    assert trained_model("Qwen3-14B").layers == 40
    assert trained_model("Qwen/Qwen3-14B-FP8") is trained_model("qwen3-14b")


@pytest.mark.parametrize(
    ("model", "tokens", "peak"),
    [
        ("qwen3-4b", 16_384, 17.1),
        ("qwen3-4b", 65_536, 36.1),
        ("qwen3-30b-a3b", 16_384, 74.6),
        ("qwen3-30b-a3b", 65_536, 105.4),
    ],
)
def test_published_peaks_of_memory_are_met_to_4_gib(model, tokens, peak):
    """prime-rl, FSDP on 8 H200."""
    found = training_memory(model, gpu="h200", gpus=8, longest=tokens)
    assert found.needed_gib == pytest.approx(peak, abs=4)


@pytest.mark.parametrize(
    ("model", "longest", "least"),
    [("qwen3-32b", 8192, 8), ("qwen3-32b", 24_576, 13), ("qwen3-30b-a3b", 4096, 7)],
)
def test_what_does_not_fit_is_refused_with_the_number_that_does(model, longest, least):
    with pytest.raises(TrainingMemoryError) as e:
        check_memory(model, gpu="h100", gpus=4, longest=longest)
    text = str(e.value)
    assert f"training {model} on 4 h100 GPUs needs" in text
    assert "has 79.6" in text
    assert text.endswith(f"; {least} GPUs are the smallest number that works with this layout")
    assert check_memory(model, gpu="h100", gpus=least, longest=longest).needed_gib <= 79.6
    with pytest.raises(TrainingMemoryError):
        check_memory(model, gpu="h100", gpus=least - 1, longest=longest)


def test_a_layout_shards_weights_and_activations():
    wide = TrainLayout(tp=8, pp=4)
    assert check_memory(
        "llama-3.1-70b", gpu="h100", gpus=64, longest=4096, backend="megatron", layout=wide
    )
    with pytest.raises(TrainingMemoryError, match="no number of GPUs works with this layout"):
        check_memory(
            "llama-3.1-70b",
            gpu="h100",
            gpus=64,
            longest=4096,
            backend="megatron",
            layout=TrainLayout(tp=1),
        )
    with pytest.raises(TrainingError, match="60 GPUs do not divide by TP 8 x PP 4"):
        training_memory("llama-3.1-70b", gpu="h100", gpus=60, longest=4096, layout=wide)
    with pytest.raises(TrainingError, match="no memory size of GPU 'tpu'"):
        check_memory("qwen3-8b", gpu="tpu", gpus=8, longest=10)


@pytest.mark.parametrize("method", sorted(UPDATES.methods))
def test_updates_grow_with_the_model_and_pause_at_most_throughout(method):
    seconds = [UPDATES.time(m, method, gpus=32) for m in ("qwen3-8b", "qwen3-32b", 235e9)]
    assert all(few.total_s < many.total_s for few, many in itertools.pairwise(seconds))
    assert all(0 < one.pause_s <= one.total_s for one in seconds)
    assert UPDATES.time("qwen3-32b", method, gpus=256).total_s <= seconds[1].total_s


def test_an_update_is_set_up_and_sent_tensor_by_tensor():
    one, m = UPDATES.methods["nccl"], trained_model("qwen3-30b-a3b")
    by_hand = one.setup_s + tensors_of(m) * one.tensor_s + 2 * 30.532e9 / one.bytes_per_s
    assert UPDATES.time("qwen3-30b-a3b", "nccl", gpus=8).total_s == pytest.approx(by_hand)
    # Gate, up and down of 128 experts in each of 48 layers; 11 others there.
    assert 48 * (3 * 128 + 11) <= tensors_of(m) < 48 * 3 * 128 * 1.05
    with pytest.raises(WeightUpdateError, match="unknown weight update method 'pigeon'; known: "):
        UPDATES.time("qwen3-8b", "pigeon", gpus=8)
    with pytest.raises(WeightUpdateError, match="is none"):
        UPDATES.time(0.0, "nccl", gpus=8)


@pytest.mark.parametrize(
    ("name", "precision"), [("qwen3-8b-fp8", "fp8"), ("qwen3-8b", "bf16"), ("deepseek-v3", "fp8")]
)
def test_weights_pay_the_bytes_of_the_precision_in_their_name(name, precision):
    one, m = UPDATES.methods["tcp"], trained_model(name)
    size = m.parameters * WEIGHT_BYTES[precision]
    by_hand = one.setup_s + tensors_of(m) * one.tensor_s + size / one.bytes_per_s
    assert UPDATES.time(name, "tcp", gpus=8).total_s == by_hand


def test_an_own_model_with_experts_trains_and_has_weights_of_two_bytes():
    own = TrainedModel(
        name="own",
        parameters=3e10,
        active=3e9,
        layers=48,
        hidden=2048,
        heads=32,
        head_dim=128,
        vocabulary=152_000,
    )
    assert TRAINING.token_s(own, 1, gpu="h100") > 48 * TRAINING.expert_layer_s
    assert UPDATES.time(own, "tcp", gpus=8) == UPDATES.time(3e10, "tcp", gpus=8)
    assert all(TRAINING.token_s(own, 1, gpu=gpu) > 0 for gpu in PEAK_TFLOPS)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('"schema": "heddle.training/1"', '"schema": "other"', "is not a training profile"),
        (
            '"pause_share": 0.61',
            '"pause_share": 1.61',
            "rdma_p2p.pause_share must be from 0 to 1, not 1.61",
        ),
        ('"bytes_per_s": 6', '"bytes_per_s": -6', "bytes_per_s must be more than 0, not -6"),
        (
            '"low_precision_share": 0.',
            '"low_precision_share": 9.',
            "low_precision_share must be from 0 to 1",
        ),
        ('"fsdp": 0.902', '"fsdp": 0', "colocated_efficiency.fsdp must be more than 0"),
    ],
)
def test_a_damaged_file_is_refused_with_the_field(tmp_path: Path, old: str, new: str, part: str):
    text = TRAINING_FILE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "own.json"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ProfileError, match=part):
        load_training(path)
    with pytest.raises(ProfileError, match="cannot read"):
        load_training(tmp_path / "none.json")


def test_ranks_of_cp_hide_their_exchange_behind_the_attention_of_long_samples_in_a_node():
    model, profile = trained_model("qwen3-32b"), load_training().training

    def token_s(cp: int, length: float) -> float:
        return profile.token_s(model, length, gpu="h100", layout=TrainLayout(cp=cp))

    assert token_s(8, 16_000) == token_s(1, 16_000)
    # Beyond a node: two bytes of 8 heads of keys and values, three times both, past 15 other ranks.
    exchange = 12 * 15 * 64 * 8 * 128 / (50e9 * profile.link_efficiency)
    products = profile.token_s(model, 0, gpu="h100")
    assert token_s(16, 1_000) == pytest.approx(products + exchange)


def test_fsdp_exchanges_queries_keys_values_and_output_between_ranks_of_cp():
    model, profile = trained_model("qwen3-8b"), load_training().training
    one, four = (
        profile.token_s(model, 4_000, gpu="h20", backend="fsdp", layout=TrainLayout(cp=cp))
        for cp in (1, 4)
    )
    bytes_ = 8 * 36 * (32 + 8) * 128 * 3 / 4
    assert four - one == pytest.approx(bytes_ / (450e9 * profile.link_efficiency))


@pytest.mark.parametrize("gpu", ["l40s", "a100", "h100"])
def test_a_network_is_no_faster_than_the_link_to_it(gpu: str):
    model, profile = trained_model("qwen3-8b"), load_training().training

    def token_s(cp: int) -> float:
        layout = TrainLayout(cp=cp)
        return profile.token_s(model, 300, gpu=gpu, backend="fsdp", layout=layout)

    assert token_s(1) < token_s(8) < token_s(16)
    of_two, of_more = (
        profile.collectives_s(model, gpu=gpu, gpus=n, backend="fsdp") for n in (2, 16)
    )
    assert of_two <= of_more
