"""Inspect: its agent loop, its tools and its retries, over chat completions."""

import json
import warnings
from typing import Any

import pytest

from heddle_core.events import StepFinished, ToolReturned, TrajectoryArrived

pytest.importorskip("inspect_ai", reason="no Inspect here; `make clients` has it")
pytestmark = pytest.mark.filterwarnings("ignore")


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"content": "I do it.", "tool_calls": [{"function": function}]}


def test_samples_are_trajectories_and_its_tools_run(serve: Any, tmp_path: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import inspect_ai
        from inspect_ai.agent import react
        from inspect_ai.dataset import Sample
        from inspect_ai.model import get_model
        from inspect_ai.scorer import match
        from inspect_ai.tool import tool

    ran = []

    @tool
    def count() -> Any:
        async def execute(word: str) -> int:
            """Count letters.

            Args:
                word: What to count in.
            """
            ran.append(word)
            return len(word)

        return execute

    samples = [Sample(input=f"Letters of heddle, for the reader {n}", target="6") for n in range(8)]
    replies = [call("count", word="heddle"), call("submit", answer="6")]
    with serve("--engines", "2", replies=replies) as run:
        [log] = inspect_ai.eval(
            inspect_ai.Task(dataset=samples, solver=react(tools=[count()]), scorer=match()),
            model=get_model("openai-api/heddle/fake", base_url=f"{run.url}/v1", api_key="none"),
            log_dir=str(tmp_path / "logs"),
            display="none",
        )
    assert log.status == "success", log.error
    assert ran == ["heddle"] * 8
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    arrived = run.events(TrajectoryArrived)
    assert len(arrived) == 8
    assert len(run.events(StepFinished)) == 16
    assert [e.tool for e in run.events(ToolReturned)] == ["count"] * 8
