"""verl's dumps and the Responses API: what their logs tell, and what they do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from heddle_trace import open_gaps, read_trace
from heddle_trace.errors import TraceError
from heddle_trace.importers import ImportReport, import_trace
from heddle_trace.schema import TrajectoryRecord

CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
T = 1_777_000_000


def imported(
    tmp_path: Path, *rows: dict[str, Any], **options: Any
) -> tuple[ImportReport, tuple[TrajectoryRecord, ...]]:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_trace([log], tmp_path / "made.jsonl", **options)
    return report, tuple(read_trace(tmp_path / "made.jsonl").records)


def dumped(output: str, uid: str | int | None = "p_0_0", **more: Any) -> dict[str, Any]:
    row = {"input": "i" * 36, "output": output, "gts": None, "score": 0.5, "step": 3, **more}
    return row if uid is None else {**row, "uid": uid}


def steps(record: TrajectoryRecord) -> list[tuple[Any, ...]]:
    return [(s.output_tokens, s.tool, s.tool_tokens, s.n_tools) for s in record.steps]


TEMPLATES = {
    "qwen": (CALL, "\nuser\n<tool_response>\nrr\n</tool_response>\nassistant\n"),
    "qwen-coder": (
        "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>",
        "\nuser\n<tool_response>\nrr\n</tool_response>\nassistant\n",
    ),
    "glm": (
        "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "\n<tool_response>\nrr\n</tool_response>\n",
    ),
}


@pytest.mark.parametrize(("call", "answer"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_sequence_of_verl_is_split_where_its_tools_answered(tmp_path, call, answer):
    output = f"{'t' * 40}{call}{answer}{call}{answer}{'u' * 36}"
    _, (record,) = imported(tmp_path, dumped(output), chars_per_token=1.0)
    assert steps(record) == [
        (40 + len(call), "search", len(answer), None),
        (len(call), "search", len(answer), None),
        (36, None, None, None),
    ]
    assert sum(o + (a or 0) for o, _, a, _ in steps(record)) == len(output)


def test_nothing_is_an_answer_before_a_call(tmp_path):
    words = "the mark <tool_response> of a tool </tool_response> and more"
    _, (record,) = imported(tmp_path, dumped(words), chars_per_token=1.0)
    assert steps(record) == [(len(words), None, None, None)]


def test_a_call_without_an_answer_was_not_run(tmp_path):
    _, (record,) = imported(tmp_path, dumped("t" * 20 + CALL), chars_per_token=1.0)
    assert steps(record) == [(20 + len(CALL), None, None, None)]


def test_only_calls_that_were_answered_are_counted(tmp_path):
    other = CALL.replace("search", "fetch")
    answers = "\nuser\n" + "<tool_response>\nrr\n</tool_response>\n" * 2 + "assistant\n"
    _, (record,) = imported(tmp_path, dumped(CALL + other + CALL + answers + "u"))
    assert [(s.tool, s.n_tools) for s in record.steps] == [("search+fetch", 2), (None, None)]


def test_a_sequence_that_was_cut_within_an_answer_ends_with_its_tool(tmp_path):
    cut = CALL + "\nuser\n<tool_response>\n" + "r" * 50
    _, (record,) = imported(tmp_path, dumped(cut), chars_per_token=1.0)
    assert steps(record) == [(len(CALL), "search", len(cut) - len(CALL), None)]


def test_verl_records_no_times_and_the_report_says_so(tmp_path):
    report, (record,) = imported(tmp_path, dumped(CALL + "\nuser\n<tool_response>\nr"))
    assert any("neither times" in sentence for sentence in report.assumptions)
    assert open_gaps(read_trace(tmp_path / "made.jsonl"))["tool_s"] == 1
    assert [(s.tool_s, s.llm_s, s.t_s, s.tool_ok) for s in record.steps] == [(None,) * 4]
    assert (record.reward, record.step, record.agent) == (0.5, 3, "verl")


def test_samples_without_a_uid_are_grouped_by_input_and_step(tmp_path):
    other = {**dumped("a", None), "input": "j" * 36}
    later = dumped("a", None, step=4)
    _, records = imported(
        tmp_path,
        dumped("a", None),
        dumped("b", None, request_id="r-1"),
        other,
        later,
    )
    assert [r.trajectory_id for r in records] == ["log/1", "r-1", "log/3", "log/4"]
    groups = [r.group_id for r in records]
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3


def test_a_uid_that_is_no_key_of_a_sample_is_the_prompts(tmp_path):
    _, records = imported(tmp_path, dumped("a", 7), dumped("b", 7))
    assert [(r.trajectory_id, r.group_id) for r in records] == [("log/1", "7"), ("log/2", "7")]


def test_rewards_of_every_kind_beside_the_score_do_no_harm(tmp_path):
    more = {"acc": True, "pred": "[1]", "num_turns": 4, "extra": {"a": [1]}}
    _, (record,) = imported(tmp_path, dumped("a", **more))
    assert record.reward == 0.5


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input": "a", "output": "b", "score": 1.0}, "step is missing"),
        ({**dumped("b"), "output": None}, "output: expected str, got null"),
        ({**dumped("b"), "score": "good"}, "score: expected float | null, got str"),
    ],
)
def test_a_damaged_row_of_verl_is_named(tmp_path, row, says):
    with pytest.raises(TraceError, match=r"log\.jsonl: line 2: ") as raised:
        imported(tmp_path, dumped("a"), row, format="verl")
    assert says in str(raised.value)


def response(name: str, *output: dict[str, Any], at: float = 0, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 10, "output_tokens": 5}
    more = {"usage": usage, "created_at": T + at, "completed_at": T + at + 1, **more}
    return {"id": f"resp_{name}", "object": "response", "output": list(output), **more}


def text(words: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": words, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def call(name: str, id: str, kind: str = "function_call") -> dict[str, Any]:
    return {"type": kind, "call_id": id, "name": name, "arguments": "{}"}


def asked(input: object, answer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"request": {"input": input, **more}, "response": answer}


def test_a_chain_goes_on_from_file_to_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(asked("q", response("1", call("run", "c")))))
    second = asked(
        [{"type": "function_call_output", "call_id": "c", "output": "ok"}],
        response("2", text("done"), at=4, usage={"input_tokens": 30, "output_tokens": 2}),
        previous_response_id="resp_1",
    )
    (tmp_path / "b.jsonl").write_text(json.dumps(second))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    import_trace(paths, tmp_path / "t.jsonl")
    (record,) = read_trace(tmp_path / "t.jsonl").records
    (first, last) = record.steps
    assert (first.tool, first.tool_s, first.tool_tokens) == ("run", 3.0, 15)
    assert (last.input_tokens, last.output_tokens, last.tool) == (30, 2, None)
    # In the wrong order the chain is not known when its second response comes.
    report = import_trace(paths[::-1], tmp_path / "t.jsonl")
    assert report.trajectories == 2
    assert any("the log does not hold before them" in what for what in report.assumed)


def test_branches_of_a_chain_are_a_group(tmp_path):
    rows = [asked("q", response("0", text("a")))]
    rows += [
        asked("w", response(str(n), text("b"), at=n), previous_response_id="resp_0")
        for n in (1, 2, 3)
    ]
    rows.append(asked("x", response("9", text("c"), at=9), previous_response_id="resp_2"))
    _, records = imported(tmp_path, *rows)
    assert [(r.trajectory_id, len(r.steps)) for r in records] == [
        ("log/1", 2),
        ("log/3", 2),
        ("log/4", 1),
    ]
    assert len({r.group_id for r in records}) == 1


def test_calls_that_bring_their_history_are_joined_by_it(tmp_path):
    user = {"role": "user", "content": "q"}
    think = {"type": "reasoning", "summary": [], "encrypted_content": "e"}
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    first = asked([user], response("1", think, call("run", "c")), instructions="be brief")
    second = asked(
        [user, call("run", "c"), result],
        response("2", text("done"), at=3),
        instructions="be brief",
    )
    third = asked(
        [user, call("run", "c"), result, {"role": "assistant", "content": "done"}, user],
        response("3", text("bye"), at=9),
        instructions="be brief",
    )
    other = asked([user], response("4", text("hi"), at=9), instructions="be long")
    _, records = imported(tmp_path, first, second, third, other)
    assert [[s.tool for s in r.steps] for r in records] == [["run", "user", None], [None]]
    assert len({r.group_id for r in records}) == 2


def test_what_the_service_ran_is_part_of_the_generation(tmp_path):
    hosted = {"type": "web_search_call", "action": {"query": "q"}}
    shell = call("", "s", "shell_call")
    done = {"type": "shell_call_output", "call_id": "s", "output": []}
    rows = [
        asked("q", response("1", hosted, shell, done, text("a"))),
        asked("w", response("2", text("b"), at=5), previous_response_id="resp_1"),
    ]
    report, (record,) = imported(tmp_path, *rows)
    assert [(s.tool, s.tool_s, s.llm_s) for s in record.steps] == [
        ("user", 4.0, 1.0),
        (None, None, 1.0),
    ]
    assert report.assumed["responses in which the service ran tools"] == 1


def test_sessions_and_tasks_of_the_metadata_are_used(tmp_path):
    metadata = {"session_id": "s-1", "task_id": "t-9"}
    rows = [
        asked("q", response("1", text("a")), metadata=metadata),
        asked("w", response("2", text("b"), at=5, metadata=metadata)),
    ]
    _, (record,) = imported(tmp_path, *rows)
    assert (record.trajectory_id, record.group_id, len(record.steps)) == ("s-1", "t-9", 2)


def test_times_of_the_logger_count_where_the_response_has_none(tmp_path):
    answer = response("1", call("run", "c"), completed_at=None)
    row = {**asked("q", answer), "start_time": T - 1, "end_time": T + 2.5}
    _, (record,) = imported(tmp_path, row)
    assert (record.steps[0].llm_s, record.steps[0].cached_tokens) == (3.5, None)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"hello": "world"}, "has no response"),
        (asked("q", response("2", {"type": 3})), "output[0].type: expected str, got int"),
        (asked("q", response("2", usage={"output_tokens": -1})), "usage.output_tokens: expected"),
        (asked([{"role": "boss"}], response("2")), "role 'boss' is not known"),
        (asked("q", response("2", created_at="now")), "'now' is no time"),
        (asked(7, response("2")), "input: expected"),
    ],
)
def test_a_damaged_call_is_named_and_can_be_left_out(tmp_path, row, says):
    sound = asked("q", response("1", text("a")))
    with pytest.raises(TraceError, match=r"log\.jsonl: line 2: ") as raised:
        imported(tmp_path, sound, row)
    assert says in str(raised.value)
    report, records = imported(tmp_path, sound, row, skip_bad=True)
    assert (report.damaged, len(records)) == (1, 1)
