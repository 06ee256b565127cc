"""Other weights, too little KV, and sampling, on real engines."""

import asyncio
import json
import shutil
from collections.abc import Iterator

import pytest

from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineClient, StepResult
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings
from tests.rollout.contract import LIMIT_S, Bench, ids, request
from tests.runtime.vllm_bench import needs_vllm, vllm_bench

pytestmark = needs_vllm

PROMPT, OUTPUT, LONG = 200, 60, 800


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One engine with room for 2,048 tokens of KV, which pins the blocks of steps that have ended
    while there is room; steps that are not exact are sampled.
    """
    folder = tmp_path_factory.mktemp("vllm")
    with vllm_bench(
        folder,
        kv_bytes=2 << 20,
        max_context=1024,
        temperature=0.7,
        kv_transfer="none",
        pin_s=60.0,
        max_batched_tokens=1024,
    ) as bench:
        bench.weights = str(make_tiny_model(folder / "other", seed=2))
        yield bench


async def tokens(
    bench: Bench, engine: EngineClient, name: str, prompt: str, *, output: int = OUTPUT
) -> list[int]:
    engine.start(request(name, ids(prompt, PROMPT), output))
    return list((await bench.recorder.end_of(name)).output_ids)


def test_kv_that_runs_short_is_taken_away_prefilled_again_and_counted(bench):
    async def main() -> None:
        engine = await bench.engine()
        names = [f"tight{i}" for i in range(4)]
        expected = {name: await tokens(bench, engine, name, name, output=600) for name in names}
        for name in names:
            engine.start(request(name, ids(name, PROMPT), 600))
        ends: dict[str, StepResult] = {name: await bench.recorder.end_of(name) for name in names}
        assert {name: list(end.output_ids) for name, end in ends.items()} == expected
        assert sum(end.recomputes for end in ends.values()) > 0
        async with asyncio.timeout(LIMIT_S):
            while engine.sample().preemptions == 0:
                await asyncio.sleep(0.1)

    bench.run(main())


def test_a_pinned_step_goes_on_with_all_of_its_kv(bench):
    """Beside that, its tokens are those of a trajectory that was not pinned."""

    async def main() -> None:
        engine = await bench.engine()
        context = ids("session", PROMPT)
        ends: dict[str, list[StepResult]] = {"pinned": [], "plain": []}
        for name in ends:
            grown_by = list(context)
            for i in range(3):
                if name == "plain":
                    engine.forget(TrajectoryId(name))
                engine.start(request(name, grown_by, 50))
                end = await bench.recorder.end_of(name)
                ends[name].append(end)
                grown_by = [*grown_by, *end.output_ids, *ids(f"tool {i}", 77)]
        made = {name: [end.output_ids for end in each] for name, each in ends.items()}
        assert made["pinned"] == made["plain"]
        # All but the last token, which was sampled and not computed; the prefix cache has blocks.
        known = [PROMPT + 50 - 1, PROMPT + 50 + 77 + 50 - 1]
        assert [end.cached_tokens for end in ends["pinned"][1:]] == known
        assert all(end.cached_tokens % 32 == 0 for end in ends["plain"])
        for name in ends:
            engine.forget(TrajectoryId(name))

    bench.run(main())


def test_sampling_is_repeatable_and_differs_between_trajectories(bench):
    async def main() -> None:
        engine = await bench.engine()
        context = ids("sampled", PROMPT)
        made = []
        for name in ("first", "second", "first"):
            engine.start(request(name, context, 40, exact=False))
            made.append((await bench.recorder.end_of(name)).output_ids)
        assert made[0] == made[2]
        assert made[0] != made[1]

    bench.run(main())


def test_sampled_prompts_that_do_not_fit_into_one_iteration_together_all_run(bench):
    """Cut in two, a prefill whose request has a seed would end the engine: see `process.py`."""

    async def main() -> None:
        engine = await bench.engine()
        for name in ("left", "right"):
            engine.start(request(name, ids(name, 700), 20, exact=False))
        for name in ("left", "right"):
            end = await bench.recorder.end_of(name)
            assert (end.finished, end.error) == (True, "")
            assert 1 <= end.tokens <= 20
            engine.forget(TrajectoryId(name))

    bench.run(main())


def test_new_weights_make_the_tokens_of_a_fresh_engine_on_them(bench, tmp_path):
    """A step under way goes on with its tokens, and nothing of the old KV is found again.

    The fresh engine also stops a step that is not exact where its model says that texts end.
    """

    async def main() -> None:
        engine = await bench.engine()
        before = await tokens(bench, engine, "before", "same prompt")
        engine.start(request("during", ids("during", PROMPT), LONG))
        step = engine._running.get(TrajectoryId("during"))
        assert step is not None
        while not step.made:
            await asyncio.sleep(0.01)
        engine.update_weights(7, bench.weights)
        assert await bench.recorder.take("updated") == 7
        during = await bench.recorder.end_of("during")
        assert (during.tokens, during.finished) == (LONG, True)
        assert during.recomputes >= 1
        after = await tokens(bench, engine, "after", "same prompt")
        assert after != before

        end_of_text = after[10]
        model = shutil.copytree(bench.weights, tmp_path / "model")
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end_of_text}))
        settings = VllmSettings(
            model_dir=str(model), dtype="float32", max_context=1024, kv_bytes=4 << 20
        )
        launcher = VllmLauncher(settings, log_dir=tmp_path)
        spec = EngineSpec(engine=EngineId("fresh"), shape=EngineShape("cpu", 1), max_running=4)
        fresh = launcher.start(spec, bench.recorder)
        await bench.recorder.take("ready")
        assert await tokens(bench, fresh, "fresh", "same prompt") == after
        # What the old weights had made of it became context; from there on the new ones went on.
        assert not await continues(bench, fresh, "during", during.output_ids, 0)
        assert await continues(bench, fresh, "during", during.output_ids, LONG - 50)

        fresh.start(request("stops", ids("same prompt", PROMPT), OUTPUT, exact=False))
        stopped = await bench.recorder.end_of("stops")
        assert stopped.finished
        assert list(stopped.output_ids) == after[: after.index(end_of_text) + 1]
        await launcher.close()

    bench.run(main())


async def continues(
    bench: Bench, engine: EngineClient, name: str, made: tuple[int, ...], at: int
) -> bool:
    """Whether the engine makes the rest of `made` from its first `at` tokens."""
    context = [*ids(name, PROMPT), *made[:at]]
    engine.start(request(name, context, len(made) - at))
    return (await bench.recorder.end_of(name)).output_ids == made[at:]


def test_an_engine_whose_model_is_broken_says_why_and_leaves_nothing(bench, tmp_path):
    async def main() -> None:
        model = shutil.copytree(bench.weights, tmp_path / "model")
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
        launcher = VllmLauncher(
            VllmSettings(model_dir=str(model), kv_bytes=4 << 20, max_context=512),
            log_dir=tmp_path,
        )
        spec = EngineSpec(engine=EngineId("broken"), shape=EngineShape("cpu", 1), max_running=4)
        engine = launcher.start(spec, bench.recorder)
        reason, salvaged = await bench.recorder.take("failed")
        assert reason.startswith("SafetensorError")
        assert "\n" not in reason
        assert salvaged == {}
        assert engine.gone
        await launcher.close()

    bench.run(main())


def test_new_weights_with_the_kv_kept_change_a_running_step_from_there_on(bench, tmp_path):
    async def main() -> None:
        engine = await bench.engine()
        undisturbed = await tokens(bench, engine, "still", "in flight", output=700)
        for pinned in ("before", "during", "after", "still"):
            engine.forget(TrajectoryId(pinned))
        third = make_tiny_model(tmp_path / "third", seed=3)
        engine.start(request("moving", ids("in flight", PROMPT), 700))
        engine.update_weights(9, str(third), keep_kv=True)
        assert await bench.recorder.take("updated") == 9
        moving = await bench.recorder.end_of("moving")
        assert (moving.tokens, moving.finished, moving.recomputes) == (700, True, 0)
        made = list(moving.output_ids)
        assert len(made) == len(undisturbed)
        assert made != undisturbed

    bench.run(main())
