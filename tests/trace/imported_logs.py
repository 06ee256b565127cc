"""What a small log of our own becomes in each format."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

FIXTURES = Path(__file__).parent / "fixtures"


class Expected(NamedTuple):
    """Per trajectory: id, group, prompt; per step: output, tool, seconds, tokens added, success."""

    format: str
    read: int
    trajectories: tuple[Any, ...]
    dropped: Mapping[str, int] = MappingProxyType({})


EXPECTED = {
    "agentic_mooncake.jsonl": Expected(
        format="dynamo",
        read=4,
        trajectories=(
            (
                "x",
                "x",
                100,
                (
                    (10, "grep", 0.5, 30, True),
                    (20, "unspecified", None, 40, None),
                    (30, None, None, None, None),
                ),
            ),
            ("y", "y", 50, ((5, None, None, None, None),)),
        ),
    ),
    "agentic_mooncake_v2.jsonl": Expected(
        format="dynamo",
        read=5,
        trajectories=(
            (
                "p/main",
                "p",
                100,
                (
                    (10, "unspecified", 0.5, 30, None),
                    (20, "unspecified", None, 40, None),
                    (30, None, None, None, None),
                ),
            ),
            ("p/side", "p", 50, ((5, None, None, None, None),)),
        ),
    ),
    "claude_code.jsonl": Expected(
        format="claude-code",
        read=15,
        trajectories=(
            (
                "S-1",
                "prompt-636f53ce5b1746f0",
                1503,
                (
                    (26, "Read+Grep", 1.5, 126, False),
                    (40, "user", 30.0, 20, None),
                    (25, None, None, None, None),
                ),
            ),
            ("S-1/side-66accdcc", "prompt-d2e44f4fc214cf89", 302, ((11, None, None, None, None),)),
        ),
        dropped={"lines that are no message": 2, "messages that no model made, such as errors": 1},
    ),
    "claude_code_agent.jsonl": Expected(
        format="claude-code",
        read=2,
        trajectories=(
            ("S-1/abc123", "prompt-d84b405c6b5322ee", 201, ((9, None, None, None, None),)),
        ),
    ),
    "dynamo.jsonl": Expected(
        format="dynamo",
        read=8,
        trajectories=(
            (
                "plan",
                "plan",
                128,
                (
                    (16, "web_search", 1.0, 56, True),
                    (30, "read", 0.5, 30, False),
                    (12, "user", 6.0, 28, None),
                    (7, None, None, None, None),
                ),
            ),
            ("plan/sub", "plan/sub", 64, ((8, None, None, None, None),)),
        ),
        dropped={"request_payload rows": 1},
    ),
    "dynamo_hashes.jsonl": Expected(
        format="dynamo",
        read=3,
        trajectories=(
            (
                "a",
                "a",
                130,
                (
                    (10, "unspecified", 4.9, 60, None),
                    (10, None, None, None, None),
                ),
            ),
            ("c", "c", 70, ((10, None, None, None, None),)),
        ),
    ),
    "inspect.eval": Expected(
        format="inspect",
        read=2,
        trajectories=(
            (
                "quiz/q1/E2/1",
                "quiz/q1",
                100,
                (
                    (20, "search", 2.5, 100, False),
                    (30, None, None, None, None),
                ),
            ),
            (
                "quiz/q1/E2/1/helper-1",
                "quiz/q1/helper",
                50,
                (
                    (7, "bash", 0.5, 33, True),
                    (9, None, None, None, None),
                ),
            ),
            (
                "quiz/q2/E2/1",
                "quiz/q2",
                20,
                (
                    (14, "bash", None, 20, False),
                    (5, None, None, None, None),
                ),
            ),
        ),
        dropped={"generations by scorers": 1},
    ),
    "inspect.json": Expected(
        format="inspect",
        read=3,
        trajectories=(
            (
                "quiz/q1/E1/1",
                "quiz/q1",
                100,
                (
                    (20, "search", 2.5, 100, False),
                    (30, None, None, None, None),
                ),
            ),
            (
                "quiz/q1/E1/1/helper-1",
                "quiz/q1/helper",
                50,
                (
                    (7, "bash", 0.5, 33, True),
                    (9, None, None, None, None),
                ),
            ),
            (
                "quiz/q2/E1/1",
                "quiz/q2",
                20,
                (
                    (14, "bash", None, 20, False),
                    (5, None, None, None, None),
                ),
            ),
        ),
        dropped={"generations by scorers": 1, "samples without a generation": 1},
    ),
    "mooncake.jsonl": Expected(
        format="mooncake",
        read=5,
        trajectories=(
            (
                "mooncake/1",
                "mooncake/1",
                1100,
                (
                    (50, "user", None, 30, None),
                    (70, "user", None, 1350, None),
                    (5, None, None, None, None),
                ),
            ),
            ("mooncake/2", "mooncake/2", 600, ((20, None, None, None, None),)),
            ("mooncake/4", "mooncake/1", 1200, ((10, None, None, None, None),)),
        ),
    ),
    "mooncake_sessions.jsonl": Expected(
        format="mooncake",
        read=2,
        trajectories=(
            (
                "s1",
                "s1",
                2048,
                (
                    (128, "user", 0.05, 384, None),
                    (100, None, None, None, None),
                ),
            ),
        ),
    ),
    "openai_chat.jsonl": Expected(
        format="openai-chat",
        read=3,
        trajectories=(
            (
                "conv-1",
                "t-9",
                50,
                (
                    (30, "search+fetch", 2.5, 40, None),
                    (10, "user", 60.0, 10, None),
                    (6, None, None, None, None),
                ),
            ),
            (
                "conv-2",
                "prompt-358d829e28091ffb",
                10,
                (
                    (12, "legacy", None, 10, None),
                    (5, None, None, None, None),
                ),
            ),
        ),
        dropped={
            "parts of messages that are no text (image_url): 0 tokens": 1,
            "conversations without a generation": 1,
        },
    ),
    "openai_chat_array.json": Expected(
        format="openai-chat",
        read=2,
        trajectories=(
            ("one", "prompt-29d3522789eb6784", 10, ((10, None, None, None, None),)),
            ("two", "prompt-29d3522789eb6784", 10, ((20, None, None, None, None),)),
        ),
    ),
    "openai_chat_calls.jsonl": Expected(
        format="openai-chat",
        read=4,
        trajectories=(
            (
                "openai_chat_calls/1",
                "prompt-a99a21e345603195",
                20,
                (
                    (9, "open", 3.0, 11, None),
                    (4, None, None, None, None),
                ),
            ),
            (
                "sess",
                "prompt-f9e448e04a79d6b8",
                10,
                (
                    (10, "user", 58.5, 20, None),
                    (5, None, None, None, None),
                ),
            ),
        ),
    ),
    "openai_chat_messages.json": Expected(
        format="openai-chat",
        read=3,
        trajectories=(
            (
                "openai_chat_messages/1",
                "prompt-157ba860e21f0a13",
                20,
                ((10, None, None, None, None),),
            ),
        ),
    ),
    "openai_chat_tasks.json": Expected(
        format="openai-chat",
        read=3,
        trajectories=tuple(
            (
                f"{task}/{trial}",
                task,
                108,
                ((6, "find_parcel", None, 5, None), (5, None, None, None, None)),
            )
            for task, trial in (("3", 0), ("3", 1), ("8", 0))
        ),
    ),
    "openai_responses.jsonl": Expected(
        format="openai-responses",
        read=7,
        trajectories=(
            (
                "openai_responses/1",
                "prompt-32769d6af838fe21",
                20,
                (
                    (9, "open+weigh", 3.0, 16, None),
                    (4, "user", 54.0, 10, None),
                    (20, None, None, None, None),
                ),
            ),
            (
                "openai_responses/3",
                "prompt-32769d6af838fe21",
                46,
                ((6, None, None, None, None),),
            ),
            (
                "openai_responses/7",
                "prompt-d3661b89d4a798a5",
                500,
                ((7, None, None, None, None),),
            ),
        ),
        dropped={
            "calls without a response, such as refused ones": 1,
            "responses that failed or were cancelled": 1,
        },
    ),
    "openai_responses_array.json": Expected(
        format="openai-responses",
        read=4,
        trajectories=(
            (
                "openai_responses_array/1",
                "t-1",
                10,
                (
                    (10, "run", 3.0, 20, None),
                    (19, None, None, None, None),
                ),
            ),
            (
                "conv_1",
                "prompt-71710bc5349f4441",
                30,
                (
                    (5, "shell", 2.0, 15, None),
                    (3, None, None, None, None),
                ),
            ),
        ),
    ),
    "openai_responses_events.jsonl": Expected(
        format="openai-responses",
        read=5,
        trajectories=(
            (
                "openai_responses_events/3",
                "prompt-f944ca198417978c",
                20,
                (
                    (9, "open", 1.5, 11, None),
                    (4, None, None, None, None),
                ),
            ),
        ),
        dropped={
            "responses that had not ended": 1,
            "events of streams that hold no response": 1,
            "responses that are logged a second time": 1,
        },
    ),
    "swe_agent.traj": Expected(
        format="swe-agent",
        read=3,
        trajectories=(
            (
                "swe_agent",
                "acme__widget-7",
                100,
                (
                    (24, "ls", 0.25, 20, None),
                    (32, "edit", 1.5, 10, None),
                    (5, "submit", 0.125, 0, None),
                ),
            ),
        ),
    ),
    "tau2.json": Expected(
        format="tau2",
        read=2,
        trajectories=(
            (
                "telecom-no_signal/sim-1",
                "telecom-no_signal",
                1000,
                (
                    (30, "get_line+get_bill", 0.5, 70, False),
                    (12, "user", 3.0, 13, None),
                    (4, "user", 0.5, 3, None),
                ),
            ),
            ("telecom-no_signal/sim-2", "telecom-no_signal", 990, ((5, None, None, None, None),)),
        ),
        dropped={"answers of the simulated user's own tools": 1},
    ),
    "verl.jsonl": Expected(
        format="verl",
        read=4,
        trajectories=(
            (
                "3f0c4d4e-5a52-4c6b-9a43-0c8f3d1f2a11_0",
                "3f0c4d4e-5a52-4c6b-9a43-0c8f3d1f2a11",
                30,
                (
                    (58, "search+open", None, 40, None),
                    (10, None, None, None, None),
                ),
            ),
            (
                "3f0c4d4e-5a52-4c6b-9a43-0c8f3d1f2a11_1",
                "3f0c4d4e-5a52-4c6b-9a43-0c8f3d1f2a11",
                30,
                (
                    (37, "search", None, 117, None),
                    (10, None, None, None, None),
                ),
            ),
            ("b_0", "b", 13, ((14, None, None, None, None),)),
        ),
    ),
    "atif.json": Expected(
        format="atif",
        read=1,
        trajectories=(
            (
                "atif",
                "prompt-45eccda043ca7d66",
                100,
                (
                    (40, "bash_command+read_file", None, 15, None),
                    (10, "unspecified", None, 20, None),
                    (6, None, None, None, None),
                ),
            ),
            ("atif/scout-1", "prompt-04993f8392bc6f35/scout", 12, ((10, None, None, None, None),)),
        ),
    ),
    "langfuse.jsonl": Expected(
        format="langfuse",
        read=7,
        trajectories=(
            ("t1", "sum-3", 100, ((25, "run", 2.0, 35, True), (9, None, None, None, None))),
            ("t2", "prompt-c0de62909392e1ae", 2, ((3, None, None, None, None),)),
        ),
        dropped={
            "generations within a generation, recorded twice": 1,
            "generations that had not ended": 1,
        },
    ),
    "langfuse_traces.json": Expected(
        format="langfuse",
        read=1,
        trajectories=(
            ("s-9", "tr", 30, ((4, "user", 20.0, 16, None), (6, None, None, None, None))),
            ("s-9/tr3", "tr3", 30, ((7, None, None, None, None),)),
        ),
        dropped={"generations that failed": 1},
    ),
    "langsmith.jsonl": Expected(
        format="langsmith",
        read=6,
        trajectories=(
            ("th-1", "ex-7", 80, ((25, "reset", 4.0, 25, True), (11, None, None, None, None))),
            ("r1/r3", "ex-7/reset", 20, ((4, None, None, None, None),)),
        ),
        dropped={"generations that failed": 1},
    ),
    "langsmith_tree.json": Expected(
        format="langsmith",
        read=1,
        trajectories=(
            (
                "n1",
                "prompt-af09efb0a32f8d33",
                10,
                ((5, "docs", 1.5, None, True), (10, None, None, None, None)),
            ),
        ),
    ),
    "openhands.jsonl": Expected(
        format="openhands",
        read=3,
        trajectories=(
            (
                "openhands/1",
                "acme__w-7",
                300,
                (
                    (30, "execute_bash", 5.5, 10, False),
                    (10, "think", 0.1, 1, None),
                    (4, "user", 0.5, 10, None),
                    (12, None, None, None, None),
                ),
            ),
            (
                "openhands/2",
                "acme__w-7",
                500,
                ((50, "terminal+file_editor", 2.5, 60, False), (9, None, None, None, None)),
            ),
        ),
        dropped={"runs without a generation": 1},
    ),
    "openhands_events.json": Expected(
        format="openhands",
        read=6,
        trajectories=(
            (
                "openhands_events/1",
                "prompt-f1c32abf622c9207",
                300,
                ((30, "execute_bash", 5.5, 90, False), (12, None, None, None, None)),
            ),
        ),
    ),
    "otel_flat.json": Expected(
        format="otel",
        read=4,
        trajectories=(
            ("0xaa", "box-1", 30, ((6, "open", 3.0, 14, None), (4, None, None, None, None))),
            ("0xaa/parallel-1", "box-1/parallel", 20, ((3, None, None, None, None),)),
        ),
    ),
    "otel_otlp.jsonl": Expected(
        format="otel",
        read=3,
        trajectories=(
            (
                "c-1",
                "prompt-9d04f8c355746cd3",
                100,
                (
                    (20, "find+track", 3.0, 30, False),
                    (10, "research", 6.0, 40, None),
                    (30, "user", 61.0, 10, None),
                    (8, None, None, None, None),
                ),
            ),
            (
                "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/08",
                "prompt-9d04f8c355746cd3/invoke_agent",
                40,
                ((5, "unspecified", 1.0, 5, None), (7, None, None, None, None)),
            ),
        ),
        dropped={"generations that failed": 1},
    ),
}
