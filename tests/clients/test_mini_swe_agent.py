"""mini-swe-agent: sixteen agents over two engines, whose commands run in folders of their own."""

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from heddle_core.events import StepFinished, ToolReturned, TrajectoryArrived, TrajectoryFinished

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
pytest.importorskip("minisweagent", reason="no mini-swe-agent here; `make clients` has it")
pytestmark = pytest.mark.filterwarnings("ignore")

AGENTS = 16
COMMANDS = (
    "basename $PWD > name.txt",
    "sleep 0.1; wc -c name.txt",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat name.txt",
)


def block(command: str) -> dict[str, Any]:
    return {"content": f"THOUGHT: next.\n\n```mswea_bash_command\n{command}\n```"}


def tool_call(command: str) -> dict[str, Any]:
    arguments = json.dumps({"command": command})
    return {
        "content": "I do it.",
        "tool_calls": [{"function": {"name": "bash", "arguments": arguments}}],
    }


def solve(kind: str, url: str, folder: Path, headers: dict[str, str]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel
        from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    model = (LitellmTextbasedModel if kind == "text" else LitellmModel)(
        model_name="openai/fake",
        model_kwargs={"api_base": f"{url}/v1", "api_key": "none", "extra_headers": headers},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=str(folder)),
        system_template="You mend programs . " * 30,
        instance_template="Task : {{task}}",
        step_limit=10,
    )
    return str(agent.run(f"mend {folder.name}")["submission"])


@pytest.mark.parametrize("kind", ["text", "tools"])
@pytest.mark.parametrize("named", [False, True])
def test_sixteen_agents_are_sixteen_trajectories(
    kind: str, named: bool, serve: Any, tmp_path: Path
):
    folders = [tmp_path / f"agent-{n}" for n in range(AGENTS)]
    for folder in folders:
        folder.mkdir()
    replies = [(block if kind == "text" else tool_call)(command) for command in COMMANDS]
    with serve("--engines", "2", "--set", "cluster.max_running=4", replies=replies) as run:

        def play(folder: Path) -> str:
            headers = {"X-Session-ID": folder.name} if named else {}
            found = solve(kind, run.url, folder, headers)
            if named:
                end = Request(f"{run.url}/finish_session?session_id={folder.name}", method="POST")
                with urlopen(end) as answer:
                    assert answer.status == 200
            return found

        with ThreadPoolExecutor(AGENTS) as pool:
            submitted = list(pool.map(play, folders))
    # Commands ran where they belong, and nobody got the reply of another step.
    assert [each.strip() for each in submitted] == [folder.name for folder in folders]
    arrived = run.events(TrajectoryArrived)
    assert len(arrived) == AGENTS
    steps = [e.trajectory for e in run.events(StepFinished)]
    assert {steps.count(e.trajectory) for e in arrived} == {len(COMMANDS)}
    assert {e.tool for e in run.events(ToolReturned)} == {"bash"}
    outcomes = {e.outcome for e in run.events(TrajectoryFinished)}
    assert outcomes == ({"completed"} if named else {"cancelled"})
    if named:
        assert set(run.tools()) == {"bash"}
