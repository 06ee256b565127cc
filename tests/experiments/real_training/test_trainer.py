"""A trainer in a real process: it learns, and kill -9 loses and repeats nothing."""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from campaigns.processes import descendants, wait_until_gone
from experiments.real_training.checkpoints import checkpoint, newest, partial
from experiments.real_training.messages import TrainerSettings, TrainMetrics
from experiments.real_training.trainer import ProcessTrainer, TrainerFailedError
from heddle_core.commands import AccumulateGradients, Train
from heddle_core.ids import GroupId
from heddle_runtime.tiny_model import make_tiny_model
from tests.patience import PATIENCE_S

# Not imported: that takes seconds in every process of the tests, and only the trainer's needs them.
LACKING = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}"),
]

SAMPLES, TOKENS = 96, 60
UNIFORM = -3.4657359
"""Log-prob of one of 32 tokens."""


@dataclass
class Sampled:
    """A finished trajectory, as far as a trainer reads it."""

    group: GroupId
    context_ids: list[int]
    reward: float

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(2, len(self.context_ids))]

    @property
    def logprobs(self) -> list[float]:
        return [UNIFORM] * (len(self.context_ids) - 2)


def batch_of(number: int) -> list[Any]:
    """Random tokens, rewarded for those that are even."""
    rng = random.Random(number)
    made = []
    for index in range(SAMPLES):
        tokens = [rng.randrange(3, 32) for _ in range(TOKENS)]
        reward = sum(token % 2 == 0 for token in tokens) / TOKENS
        made.append(Sampled(GroupId(f"g{index // 8}"), [3, 4, *tokens], reward))
    return made


class Bench:
    """A trainer, and the metrics of its batches."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        model = make_tiny_model(folder / "model", size="micro", seed=1)
        self.errors: list[BaseException] = []
        self.metrics: dict[int, TrainMetrics] = {}
        self.folder = folder / "trainer"
        self.trainer = ProcessTrainer(
            TrainerSettings(
                model_dir=str(model), **({"micro_batch": 4, "optimizer_steps": 4} | settings)
            ),
            self.folder,
            on_error=self.errors.append,
            on_batch=self.metrics.__setitem__,
        )

    def begin(self, batch: int) -> asyncio.Future[int]:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.trainer.train(Train(batch=batch, trajectories=()), batch_of(batch), done.set_result)
        return done

    def begin_part(self, batch: int, agents: Any) -> asyncio.Future[int]:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        command = AccumulateGradients(batch=batch, trajectories=())
        self.trainer.accumulate(command, agents, done.set_result)
        return done

    def begin_rest(self, batch: int, agents: Any) -> asyncio.Future[int]:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.trainer.train(Train(batch=batch, trajectories=()), agents, done.set_result)
        return done

    def weights(self, batch: int) -> bytes:
        return (checkpoint(self.folder, batch) / "model.safetensors").read_bytes()


async def undisturbed(folder: Path, batches: int) -> Bench:
    bench = Bench(folder)
    await bench.trainer.start()
    for batch in range(batches):
        assert await bench.begin(batch) == batch
    await bench.trainer.close()
    return bench


def test_kill_9_in_mid_step_repeats_that_batch_and_changes_nothing(tmp_path):
    others = descendants()

    async def main() -> None:
        expected = await undisturbed(tmp_path / "a", 3)
        bench = Bench(tmp_path / "b")
        await bench.trainer.start()
        for batch in range(3):
            done = bench.begin(batch)
            if batch:
                # While it computes: the step takes half a second, its checkpoint does not exist.
                await asyncio.sleep(0.1)
                assert newest(bench.folder) == batch - 1
                assert bench.trainer.pid is not None
                os.kill(bench.trainer.pid, signal.SIGKILL)
            assert await done == batch
        assert bench.trainer.restarts == 2
        assert bench.errors == []
        assert bench.weights(2) == expected.weights(2)
        losses = {batch: m.loss for batch, m in bench.metrics.items()}
        assert losses == {batch: m.loss for batch, m in expected.metrics.items()}
        await bench.trainer.close()

    asyncio.run(main())
    assert wait_until_gone(descendants(besides=others)) == []


def test_a_batch_that_was_trained_is_answered_and_not_trained_again(tmp_path):
    """As after a kill between the checkpoint and the report; half a checkpoint is no checkpoint."""

    async def main() -> None:
        bench = await undisturbed(tmp_path, 1)
        before, metrics = bench.weights(0), bench.metrics[0]
        left = partial(bench.folder, 1)
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
        again = Bench(tmp_path)
        ready = await again.trainer.start()
        assert ready.batches == 1
        assert await again.begin(0) == 0
        assert again.metrics[0] == metrics
        assert again.weights(0) == before
        assert await again.begin(1) == 1
        assert again.weights(1) != before
        assert newest(again.folder) == 1
        await again.trainer.close()

    asyncio.run(main())


def test_training_raises_the_probability_of_what_was_rewarded(tmp_path):
    """On the same batch again and again the ratio of even tokens grows to the clip."""

    async def main() -> None:
        bench = Bench(tmp_path, micro_batch=96, optimizer_steps=1, learning_rate=1e-3)
        await bench.trainer.start()
        first = await trained(bench, 0)
        for batch in range(1, 8):
            last = await trained(bench, batch)
        await bench.trainer.close()
        assert last.loss < first.loss - 0.01
        assert first.reward == pytest.approx(0.48, abs=0.05)
        assert first.generated == SAMPLES * TOKENS

    async def trained(bench: Bench, batch: int) -> TrainMetrics:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        bench.trainer.train(Train(batch=batch, trajectories=()), batch_of(0), done.set_result)
        await done
        return bench.metrics[batch]

    asyncio.run(main())


def test_a_trainer_that_cannot_start_says_why(tmp_path):
    async def main() -> None:
        bench = Bench(tmp_path)
        (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(TrainerFailedError, match=r"Safetensor.*trainer\.log"):
            await bench.trainer.start()
        await bench.trainer.close()

    asyncio.run(main())


def test_a_trainer_that_dies_again_and_again_fails_the_run(tmp_path):
    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.trainer.start()
        bench.begin(7)  # out of order: the process reports it and ends, each time
        async with asyncio.timeout(PATIENCE_S):
            while not bench.errors:
                await asyncio.sleep(0.05)
        assert "batch 7 came after 0 batches" in str(bench.errors[0])
        await bench.trainer.close()

    asyncio.run(main())


def by_group(agents: Any) -> list[list[Any]]:
    groups: dict[str, list[Any]] = {}
    for agent in agents:
        groups.setdefault(agent.group, []).append(agent)
    return list(groups.values())


def test_parts_of_a_batch_train_as_the_whole_batch_does(tmp_path):
    async def main() -> None:
        whole = Bench(tmp_path / "whole", optimizer_steps=1)
        parts = Bench(tmp_path / "parts", optimizer_steps=1)
        await whole.trainer.start()
        await parts.trainer.start()
        for batch in range(2):
            assert await whole.begin(batch) == batch
            *first, last = by_group(batch_of(batch))
            assert first
            for group in first:
                assert await parts.begin_part(batch, group) == batch
            assert await parts.begin_rest(batch, last) == batch
            one, other = whole.metrics[batch], parts.metrics[batch]
            assert other.loss == pytest.approx(one.loss, abs=1e-5)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
            assert (other.generated, other.tokens) == (one.generated, one.tokens)
            assert other.reward == pytest.approx(one.reward)
        await whole.trainer.close()
        await parts.trainer.close()

    asyncio.run(main())


def test_kill_9_between_parts_sends_them_again(tmp_path):
    async def main() -> None:
        benches = (
            Bench(tmp_path / "calm", optimizer_steps=1),
            Bench(tmp_path / "b", optimizer_steps=1),
        )
        for bench in benches:
            await bench.trainer.start()
            *first, last = by_group(batch_of(0))
            for number, group in enumerate(first):
                assert await bench.begin_part(0, group) == 0
                if bench is benches[1] and number in (1, 4):
                    assert bench.trainer.pid is not None
                    os.kill(bench.trainer.pid, signal.SIGKILL)
            assert await bench.begin_rest(0, last) == 0
            await bench.trainer.close()
        assert benches[1].trainer.restarts == 2
        assert benches[1].weights(0) == benches[0].weights(0)

    asyncio.run(main())
