"""SkyRL's own training entry, trainer and loader in the order of an epoch file, by its own keys."""

import asyncio
import json
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest

from heddle.epochs.file import EpochFile, read_samples

pytest.importorskip("skyrl", reason="no SkyRL here; `make clients` has it")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS, BATCH = 16, 4


@pytest.fixture(scope="module")
def skyrl() -> Any:
    """`heddle.epochs.skyrl`, and SkyRL with it."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        typing_extensions = pytest.importorskip("typing_extensions")
        # SkyRL is for Python 3.12, from which on pydantic takes this class of `typing`.
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        import heddle.epochs.skyrl

        yield heddle.epochs.skyrl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from heddle_runtime.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=1)
    return folder


def words(model: Path, folder: Path, *more: str) -> list[str]:
    """SkyRL's command line, with the lines that docs/frameworks.md says."""
    for split, count in (("train", PROMPTS), ("test", 3)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{split} question {n}"}],
                "env_class": "gsm8k",
                "extra_info": {"index": n},
            }
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "trainer.override_entrypoint=heddle.epochs.skyrl",
        f"data.heddle.epoch_file={folder}/epoch.jsonl",
        f"data.train_data=['{folder}/train.jsonl']",
        f"data.val_data=['{folder}/test.jsonl']",
        "data.dataloader.num_workers=0",
        f"trainer.policy.model.path={model}",
        f"trainer.train_batch_size={BATCH}",
        f"trainer.policy_mini_batch_size={BATCH}",
        "trainer.epochs=3",
        "trainer.placement.colocate_all=false",
        "trainer.enable_ray_gpu_monitor=false",
        "trainer.logger=console",
        "generator.inference_engine.enable_ray_prometheus_stats=false",
        *more,
    ]


@pytest.fixture
def train(skyrl: Any, model: Path, tmp_path: Path, monkeypatch: Any) -> Any:
    """Run SkyRL's entry point up to its trainer, which is not run, and needs no cluster."""

    def started(*more: str) -> Any:
        made: list[Any] = []

        def trained(config: Any) -> None:
            training = skyrl.EpochTraining(config)
            inputs = dict.fromkeys(("tracker", "inference_engine_client", "generator"))
            made.append(
                training.get_trainer(
                    cfg=config,
                    tokenizer=training.tokenizer,
                    train_dataset=training.train_dataset,
                    eval_dataset=training.eval_dataset,
                    colocate_pg=None,
                    **inputs,
                )
            )

        class Ray:
            @staticmethod
            def remote(**options: Any) -> Any:
                return lambda call: type("Actor", (), {"remote": staticmethod(trained)})

            @staticmethod
            def get(result: Any) -> None:
                return None

        from skyrl.train.entrypoints import main_base

        monkeypatch.setattr(sys, "argv", ["main_base", *words(model, tmp_path, *more)])
        monkeypatch.setattr(skyrl, "ray", Ray)
        monkeypatch.setattr(skyrl, "initialize_ray", lambda config: None)
        # Its processes take a minute to start; one reads a few prompts at once.
        prompts = main_base.PromptDataset
        monkeypatch.setattr(
            main_base, "PromptDataset", lambda **given: prompts(**(given | {"num_workers": 1}))
        )
        main_base.main()
        return made[0]

    return started


def numbers(batch: list[dict[str, Any]]) -> list[int]:
    return [int(each["prompt"][0]["content"].split()[-1]) for each in batch]


def packed(batches: list[list[int]]) -> list[bool]:
    return [len({n // BATCH for n in batch}) == 1 for batch in batches]


def test_skyrls_loader_has_prompts_of_like_length_in_a_batch(train: Any, tmp_path: Path):
    loader = train().train_dataloader
    epochs = []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(numbers(batch))
            for row in batch:
                EpochFile(tmp_path / "epoch.jsonl").add(row["uid"], 10 * numbers([row])[0])
    for epoch in epochs:
        assert sorted(n for batch in epoch for n in batch) == list(range(PROMPTS))
    assert not all(packed(epochs[0]))
    assert all(packed(epochs[1]))
    assert all(packed(epochs[2]))


def test_skyrls_checkpoint_of_the_loader_goes_on_in_the_epoch(train: Any, tmp_path: Path):
    import torch

    def write(batch: list[dict[str, Any]]) -> list[int]:
        for row in batch:
            EpochFile(tmp_path / "epoch.jsonl").add(row["uid"], 10 * numbers([row])[0])
        return numbers(batch)

    loader = train().train_dataloader
    for batch in loader:
        write(batch)
    rows = iter(loader)
    seen = [n for _ in range(2) for n in write(next(rows))]
    torch.save(loader.state_dict(), tmp_path / "data.pt")
    for batch in rows:
        write(batch)
    resumed = train().train_dataloader
    resumed.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=False))
    rest = [n for batch in resumed for n in numbers(batch)]
    assert sorted(seen + rest) == list(range(PROMPTS))
    assert all(packed([numbers(batch) for batch in resumed]))
    # After the last batch of an epoch, and after its end, the next one begins.
    rows = iter(resumed)
    for _ in range(PROMPTS // BATCH):
        next(rows)
    last = resumed.state_dict()
    assert next(rows, None) is None
    for state in (last, resumed.state_dict()):
        later = train().train_dataloader
        later.load_state_dict(state)
        assert len(list(later)) == PROMPTS // BATCH


def test_the_gateway_gets_the_names_of_the_data_set(train: Any, serve: Any, tmp_path: Path):
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from skyrl.train.generators.utils import prepare_generator_input

    trainer = train()
    lengths: dict[str, list[int]] = {}

    async def epoch(url: str) -> list[list[int]]:
        batches = []
        async with RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="fake"
        ) as client:
            for batch in trainer.train_dataloader:
                batches.append(numbers(batch))
                sampled, _ = prepare_generator_input(batch, 2, {}, "gsm8k", "train", 0)
                for name in sampled["trajectory_ids"]:
                    length = 3 + trainer.train_dataset.ids.index(name.instance_id)
                    await sample(client, name, length)
                    lengths.setdefault(name.instance_id, []).append(length)
        return batches

    async def sample(client: Any, name: Any, length: int) -> None:
        # As SkyRL's generator names its sessions; a fake engine ends a generation at its limit.
        asked = {
            "prompt_token_ids": [[1, 2, 3]],
            "sampling_params": {"max_tokens": length, "min_tokens": length},
            "session_ids": [name.to_string()],
        }
        out = await client.generate(asked)
        assert len(out["response_ids"][0]) == length
        await client.finish_session(name.to_string())

    file = tmp_path / "epoch.jsonl"
    options = ("--set", f"serve.epoch_file={file}", "--set", "serve.fake_tokens=100000")
    with serve(*options, "--set", "runtime.time_scale=0.01") as run:
        first, second = (asyncio.run(epoch(run.url)) for _ in range(2))
    found: dict[str, list[int]] = {}
    for each in read_samples(file):
        found.setdefault(each.prompt, []).append(each.tokens)
    assert found == lengths
    assert not all(packed(first))
    assert all(packed(second))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("data.heddle.plan=sort",), r"data\.heddle\.plan = 'sort' is no epoch plan"),
        (("data.heddle.file=x",), "file"),
    ],
)
def test_wrong_keys_are_refused(train: Any, more: tuple[str, ...], said: str):
    with pytest.raises(ValueError, match=said):
        train(*more)


def test_a_file_of_other_prompts_is_refused(train: Any, tmp_path: Path):
    EpochFile(tmp_path / "epoch.jsonl").add("another", 7)
    with pytest.raises(ValueError, match="has lengths of 0 of the 16 prompts of the data set"):
        train()
    loader = train("data.heddle.on_mismatch=random").train_dataloader
    assert sorted(n for batch in loader for n in numbers(batch)) == list(range(PROMPTS))
