"""verl's own loaders with `EpochDataset`, from verl's configuration, and what its router writes."""

import json
import time
from pathlib import Path

import pytest

from heddle.epochs.file import EpochFile, read_samples
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS, BATCH = 16, 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("verl", reason="no verl here; `make verl` has it")
    from transformers import AutoTokenizer

    from heddle_runtime.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=1)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def data_config(tokenizer, tmp_path, monkeypatch):
    """verl's configuration of data, with the lines that docs/frameworks.md says."""
    import verl
    from hydra import compose, initialize_config_dir

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for split, count in (("train", PROMPTS), ("test", 3)):
        rows = [
            {
                "data_source": "made/up",
                "prompt": [{"role": "user", "content": f"question {n}"}],
                "reward_model": {"style": "rule", "ground_truth": str(n)},
                "extra_info": {"split": split, "index": n},
            }
            for n in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def compose_with(*overrides, folder=tmp_path):
        config = Path(verl.__file__).parent / "trainer" / "config"
        with initialize_config_dir(str(config), version_base=None):
            return compose(
                "ppo_trainer",
                overrides=[
                    f"data.train_files={folder}/train.jsonl",
                    f"data.val_files={folder}/test.jsonl",
                    f"data.train_batch_size={BATCH}",
                    f"+data.cache_dir={folder}/cache",
                    "data.custom_cls.path=pkg://heddle_verl.epochs",
                    "data.custom_cls.name=EpochDataset",
                    "data.shuffle=false",
                    "data.dataloader_num_workers=0",
                    f"+data.heddle.epoch_file={folder}/epoch.jsonl",
                    *overrides,
                ],
            ).data

    return compose_with


def loader(config, tokenizer, files="train_files"):
    """As verl's trainers make it."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    dataset = create_rl_dataset(config[files], config, tokenizer, None)
    return StatefulDataLoader(
        dataset=dataset,
        batch_size=config.train_batch_size,
        num_workers=config["dataloader_num_workers"],
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(config, dataset),
    )


def numbers(batch):
    return [int(each["content"].split()[1]) for (each,) in batch["raw_prompt"]]


def write(path, batch):
    """Lengths of a batch, as the router writes them: the longer, the later in the data set."""
    for name, number in zip(batch["heddle_prompt"], numbers(batch), strict=True):
        EpochFile(path).add(name, 10 * number)


def packed(batches):
    return [len({n // BATCH for n in batch}) == 1 for batch in batches]


def test_verls_loader_has_prompts_of_like_length_in_a_batch(data_config, tokenizer, tmp_path):
    made = loader(data_config(), tokenizer)
    epochs = []
    for _ in range(3):
        epochs.append([])
        for batch in made:
            epochs[-1].append(numbers(batch))
            write(tmp_path / "epoch.jsonl", batch)
    for epoch in epochs:
        assert sorted(n for batch in epoch for n in batch) == list(range(PROMPTS))
    assert not all(packed(epochs[0]))
    assert all(packed(epochs[1])), epochs
    assert all(packed(epochs[2]))
    assert epochs[1] != epochs[2]


def test_verls_checkpoint_of_the_loader_goes_on_in_the_epoch(data_config, tokenizer, tmp_path):
    import torch

    made = loader(data_config(), tokenizer)
    for batch in made:
        write(tmp_path / "epoch.jsonl", batch)
    iterator = iter(made)
    seen = [n for _ in range(2) for n in numbers(next(iterator))]
    torch.save(made.state_dict(), tmp_path / "data.pt")
    for batch in iterator:
        write(tmp_path / "epoch.jsonl", batch)
        write(tmp_path / "epoch.jsonl", batch)
    resumed = loader(data_config(), tokenizer)
    resumed.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=False))
    rest = [n for batch in resumed for n in numbers(batch)]
    assert sorted(seen + rest) == list(range(PROMPTS))
    assert all(packed(numbers(batch) for batch in resumed))
    # At the end of an epoch, the next one begins.
    torch.save(resumed.state_dict(), tmp_path / "end.pt")
    later = loader(data_config(), tokenizer)
    later.load_state_dict(torch.load(tmp_path / "end.pt", weights_only=False))
    assert sorted(n for batch in later for n in numbers(batch)) == list(range(PROMPTS))


def test_validation_keeps_its_own_order(data_config, tokenizer):
    made = loader(data_config("data.train_batch_size=1"), tokenizer, "val_files")
    batches = list(made)
    assert [numbers(batch) for batch in batches] == [[0], [1], [2]]
    assert not any("heddle_prompt" in batch for batch in batches)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.shuffle=true"], r"set data\.shuffle=false and data\.dataloader_num_workers=0"),
        (["data.dataloader_num_workers=8"], "has the order itself, in the trainer's process"),
        (["data.train_batch_size=5"], "16 prompts are no whole batches of 5: take 15 of them"),
        (["+data.heddle.plan=sort"], r"data\.heddle\.plan = 'sort' is no epoch plan"),
        (["+data.heddle.file=x"], r"'file': 'x'\}: give it data\.heddle\.epoch_file, "),
    ],
)
def test_what_cannot_be_is_refused(data_config, tokenizer, overrides, said):
    with pytest.raises(ValueError, match=said):
        loader(data_config(*overrides), tokenizer)


def test_a_file_of_other_prompts_is_refused_or_ignored_on_demand(data_config, tokenizer, tmp_path):
    EpochFile(tmp_path / "epoch.jsonl").add("another", 7)
    with pytest.raises(ValueError, match="has lengths of 0 of the 16 prompts of the data set"):
        loader(data_config(), tokenizer)
    made = loader(data_config("+data.heddle.on_mismatch=random"), tokenizer)
    assert sorted(n for batch in made for n in numbers(batch)) == list(range(PROMPTS))


@pytest.mark.parametrize("values", [{"ends": "unknown"}, {"ends": "announced", "proxy": False}])
def test_the_router_writes_no_lengths_that_it_does_not_know(values):
    from heddle_verl.settings import read_settings

    file = {"model": "qwen3-14b", "gpu": "h100", "epoch_file": "epoch.jsonl", **values}
    with pytest.raises(ValueError, match="epoch_file needs counted tokens and known ends"):
        read_settings(file)


def test_the_router_writes_lengths_under_the_names_of_the_data_set(
    ray_cluster, yaml_file, tmp_path, verl_config
):
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from heddle_verl.agent_loops import Manager
    from tests.verl.fakes import engines
    from tests.verl.test_agent_loops import batch

    path = tmp_path / "epoch.jsonl"
    file = yaml_file(ends="announced", epoch_file=path)
    router = get_router_handle(engines(2, slots=4), router_config_path=file)
    manager = Manager.create(verl_config, LLMServerClient(verl_config, router))
    samples = [(f"uid{n // 2}", [n // 2] * 9, [5 + n, 7]) for n in range(8)]
    made = batch(samples, step=1)
    made.non_tensor_batch["heddle_prompt"] = made.non_tensor_batch["uid"].copy()
    made.non_tensor_batch["heddle_prompt"][:] = [f"name{n // 2}" for n in range(8)]
    manager.generate_sequences(made)
    checked = batch(samples[:2], step=1)
    checked.non_tensor_batch["heddle_prompt"] = checked.non_tensor_batch["uid"]
    checked.meta_info["validate"] = True
    manager.generate_sequences(checked)
    end_s = time.monotonic() + PATIENCE_S
    while len(found := read_samples(path)) < 8:
        assert time.monotonic() < end_s, found
        time.sleep(0.05)
    assert sorted((each.prompt, each.tokens) for each in found) == [
        (f"name{n // 2}", 12 + n) for n in range(8)
    ]
