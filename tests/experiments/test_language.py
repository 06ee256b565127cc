"""A language model with a regression head, on a tiny random one; and the contexts that it reads."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.predictor.contexts import StepText, TrajectoryText, context_of, read_texts
from heddle_predict.corpus import split
from heddle_predict.errors import PredictError
from heddle_predict.play import Pace
from heddle_predict.quantiles import LEVELS
from tests.predict.made import script, synthetic

LIFE = [(20, 5, True), (30, 700, False), (40, 0, True)]
TEXT = TrajectoryText(
    "g/0",
    "Find the bug",
    (StepText("first", "fine"), StepText("second", "broken"), StepText("third", "")),
)


def test_a_context_contains_past_steps_and_nothing_later():
    told = context_of(script("g/0", LIFE), 1, True, {"g/0": TEXT})
    assert told.splitlines() == [
        "task coding, prompt of 100 tokens",
        "Find the bug",
        "step 1: 20 tokens",
        "first",
        "sandbox ok, 5 tokens",
        "fine",
        "remaining:",
    ]
    in_tool = context_of(script("g/0", LIFE), 1, False, {"g/0": TEXT})
    assert "step 2: 30 tokens\nsecond\ncalls sandbox\nremaining:" in in_tool
    assert "broken" not in in_tool
    assert "700" not in in_tool


def test_a_context_does_not_change_with_the_future():
    other = script("g/0", [*LIFE[:2], (999, 1, True), (999, 1, True)])
    for step, queued in ((0, True), (0, False), (1, True), (1, False), (2, True)):
        assert context_of(script("g/0", LIFE), step, queued, {}) == context_of(
            other, step, queued, {}
        )


def test_without_texts_a_context_states_sizes_and_tools():
    told = context_of(script("g/0", LIFE), 2, True, {})
    assert told.splitlines()[1:] == [
        "step 1: 20 tokens",
        "sandbox ok, 5 tokens",
        "step 2: 30 tokens",
        "sandbox failed, 700 tokens",
        "remaining:",
    ]


def test_texts_are_read_line_by_line(tmp_path: Path):
    line = {"trajectory_id": "a", "prompt": "p", "steps": [{"out": "o", "obs": "b"}], "model": "x"}
    path = tmp_path / "t.text.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(line) + "\n\n")
    assert read_texts([path]) == {"a": TrajectoryText("a", "p", (StepText("o", "b"),))}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PredictError, match=r"t\.text\.jsonl\.gz: damaged or cut short"):
        read_texts([path])
    plain = tmp_path / "t.jsonl"
    plain.write_text(json.dumps(line) + '\n{"steps": []}\n')
    with pytest.raises(PredictError, match=r"t\.jsonl: line 2: not the text of a trajectory"):
        read_texts([plain])
    plain.write_bytes(json.dumps(line).encode() + b'\n{"trajectory_id": "\xff"}\n')
    with pytest.raises(PredictError, match=r"t\.jsonl: line 2: not the text of a trajectory"):
        read_texts([plain])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model of the family the paper used, of a few thousand random weights."""
    torch = pytest.importorskip("torch", reason="language models need torch: heddle-rl[train]")
    transformers = pytest.importorskip(
        "transformers", reason="language models need transformers: heddle-rl[train]"
    )
    tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")
    folder = tmp_path_factory.mktemp("tiny")
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    corpus = [context_of(s, len(s.steps) - 1, True, {}) for s in synthetic().scripts[:40]]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=160, special_tokens=["?"])
    model.train_from_iterator(corpus, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?").save_pretrained(
        folder
    )
    config = transformers.Qwen3Config(
        vocab_size=200,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
    )
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path):
    from experiments.predictor.language import LanguageFit, fit_language

    seen, held = split(synthetic(), share=0.3, seed=1)
    settings = LanguageFit(epochs=1, most_questions=240, context_tokens=96)
    return fit_language([seen], base=base, texts=[], seed=1, settings=settings), held


@pytest.mark.soak
def test_a_fine_tuned_model_answers_with_rising_quantiles(model):
    fitted, held = model
    asked, quantiles = fitted.answer(held, Pace())
    assert quantiles.shape == (len(asked), len(LEVELS))
    assert (np.diff(quantiles, axis=1) >= -1e-6 * quantiles[:, 1:]).all()
    assert (quantiles >= 1.0).all()


@pytest.mark.soak
def test_what_is_read_decides_the_answer(model, tmp_path: Path):
    """Other words in the context, other estimates: the base is not there for show."""
    fitted, held = model
    texts = tmp_path / "t.jsonl"
    lines = [
        {"trajectory_id": s.id, "prompt": "task failed sandbox 700 tokens " * 5, "steps": []}
        for s in held.scripts
    ]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain = fitted.answer(held, Pace())[1]
    told = fitted.answer(held, Pace(), [texts])[1]
    assert not np.allclose(plain, told)


def test_a_folder_that_is_no_language_model_is_refused(base: Path, tmp_path: Path):
    from experiments.predictor.language import fit_language

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(PredictError, match=said):
            fit_language([synthetic()], base=folder, texts=[], seed=0)

    refused(tmp_path, "not a folder of a language model")
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    refused(tmp_path, "transformers cannot load it")
    # Weights that would have to be unpickled are not looked at.
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(tmp_path, "transformers cannot load it")
