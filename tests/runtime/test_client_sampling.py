"""A client's sampling on real engines of our own: it is followed, or refused with a reason."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import EngineRefusedError, StepRequest
from heddle_runtime.generation import Generation, GenerationEnd
from tests.rollout.contract import Bench, ids, request, until
from tests.runtime.vllm_bench import needs_vllm, vllm_bench

pytestmark = needs_vllm

PROMPT, OUTPUT = 100, 40
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("vllm")
    changes = {"progress_s": 0.01, "tokenizer": True, "kv_transfer": "none"}
    with vllm_bench(folder, forked=False, **changes) as bench:
        yield bench


def asked(name: str, sampling: dict[str, Any], *, output: int = OUTPUT, **more: Any) -> StepRequest:
    made = request(name, ids("one prompt", PROMPT), output, exact=False)
    return msgspec.structs.replace(made, payload=Generation(sampling=sampling, **more))


async def done(bench: Bench, step: StepRequest) -> tuple[list[int], GenerationEnd]:
    engine = await bench.engine()
    engine.start(step)
    end = await bench.recorder.end_of(step.trajectory)
    assert end.error == ""
    assert isinstance(end.extras, GenerationEnd)
    return list(end.output_ids), end.extras


def test_a_stop_token_ends_a_step_and_is_named(bench):
    async def main() -> None:
        tokens, end = await done(bench, asked("whole", GREEDY))
        assert (len(tokens), end) == (OUTPUT, GenerationEnd(finish_reason="length"))
        stop = tokens[10]
        cut, end = await done(bench, asked("cut", GREEDY | {"stop_token_ids": [stop]}))
        assert cut == tokens[: tokens.index(stop) + 1]
        assert (end.finish_reason, end.stop_reason) == ("stop", stop)

    bench.run(main())


def test_the_end_of_the_model_has_no_stop_reason(bench):
    async def main() -> None:
        only_end = {"temperature": 0.0, "allowed_token_ids": [0]}
        tokens, end = await done(bench, asked("model's end", only_end))
        assert (tokens, end.finish_reason, end.stop_reason) == ([0], "stop", None)

    bench.run(main())


def test_a_stop_string_ends_a_step_and_is_named(bench):
    async def main() -> None:
        # Bytes a and b only, so that there is text to search.
        letters = {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": [67, 68]}
        tokens, _ = await done(bench, asked("letters", letters))
        text = "".join({67: "a", 68: "b"}[token] for token in tokens)
        stop = text[7:10]
        cut, end = await done(bench, asked("cut text", letters | {"stop": ["zz", stop]}))
        assert cut == tokens[: text.index(stop) + len(stop)]
        assert (end.finish_reason, end.stop_reason) == ("stop", stop)
        engine = await bench.engine()
        await until(lambda: engine.sample().running == 0)

    bench.run(main())


def test_an_output_follows_a_grammar(bench):
    async def main() -> None:
        wanted = {"temperature": 0.0, "structured_outputs": {"regex": "(ab|ba){3}c"}}
        tokens, end = await done(bench, asked("grammar", wanted))
        text = "".join(chr(token - 67 + ord("a")) for token in tokens if token)
        assert re.fullmatch("(ab|ba){3}c", text)
        assert end.finish_reason == "stop"

    bench.run(main())


def test_log_probs_are_of_the_sampled_token_and_of_the_most_likely_ones(bench):
    async def main() -> None:
        tokens, end = await done(bench, asked("likely", GREEDY | {"logprobs": 3}))
        assert [entry["token_id"] for entry in end.logprobs] == tokens
        for entry in end.logprobs:
            top = [each["logprob"] for each in entry["top_logprobs"]]
            assert (entry["rank"], len(top)) == (1, 3)
            assert entry["logprob"] == top[0] == max(top)
        same, end = await done(bench, asked("bare", GREEDY | {"logprobs": 0}))
        assert same == tokens
        assert [len(entry["top_logprobs"]) for entry in end.logprobs] == [1] * OUTPUT

    bench.run(main())


def test_tokens_are_reported_while_a_step_runs(bench):
    async def main() -> None:
        came: list[int] = []
        tokens, _ = await done(bench, asked("reported", GREEDY, output=400, on_tokens=came.extend))
        assert 0 < len(came) <= len(tokens) == 400
        assert came == tokens[: len(came)]

    bench.run(main())


def test_prefixes_are_shared_between_steps_of_one_salt_only(bench):
    async def main() -> None:
        engine = await bench.engine()
        found = {}
        for name, salt in (("first", "a"), ("other", "b"), ("again", "a")):
            step = asked(f"salt {name}", GREEDY, output=4, cache_salt=salt)
            step = msgspec.structs.replace(step, prompt_ids=ids("salted", PROMPT))
            engine.start(step)
            found[name] = (await bench.recorder.end_of(step.trajectory)).cached_tokens
        assert found == {"first": 0, "other": 0, "again": 96}

    bench.run(main())


def test_an_abort_keeps_tokens_and_log_probs_together(bench):
    async def main() -> None:
        engine = await bench.engine()
        came: list[int] = []
        step = asked("aborted", GREEDY | {"logprobs": 1}, output=4000, on_tokens=came.extend)
        engine.start(step)
        await until(lambda: bool(came))
        engine.abort(TrajectoryId("aborted"))
        end = await bench.recorder.end_of("aborted")
        assert end.extras.finish_reason == "abort"
        assert [entry["token_id"] for entry in end.extras.logprobs] == list(end.output_ids)

    bench.run(main())


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 0.5}, "sampling has temprature: known are allowed_token_ids"),
        ({"n": 2}, "n must be 1"),
        ({"extra_args": {"kv_transfer_params": {}}}, "which only engines set"),
        ({"prompt_logprobs": 1}, "sampling has prompt_logprobs"),
    ],
)
def test_what_no_engine_knows_is_refused(bench, sampling, message):
    async def main() -> None:
        engine = await bench.engine()
        with pytest.raises(EngineRefusedError, match=message):
            engine.start(asked("refused", sampling))

    bench.run(main())


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"seed": 3, "temperature": 1.0}, "seed on a CPU needs whole prefills"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": "much"}, "top_p"),
        ({"structured_outputs": {"regex": "("}}, ""),
    ],
)
def test_what_this_engine_cannot_do_ends_the_step_with_an_error(bench, sampling, message):
    async def main() -> None:
        engine = await bench.engine()
        engine.start(asked("impossible", sampling))
        end = await bench.recorder.end_of("impossible")
        assert end.finished
        assert end.tokens == 0
        assert end.error
        assert message in end.error
        assert end.extras.finish_reason == "error"

    bench.run(main())


def test_a_token_that_the_model_does_not_know_ends_the_step_with_an_error(bench):
    async def main() -> None:
        engine = await bench.engine()
        engine.start(request("unknown", [300, 99_999], 4))
        end = await bench.recorder.end_of("unknown")
        assert "99999 is out of vocabulary" in end.error
        engine.start(request("known", [300, 301], 4))
        assert (await bench.recorder.end_of("known")).error == ""

    bench.run(main())
