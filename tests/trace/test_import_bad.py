"""Logs that are not as they should be: one clear line, and nothing written, half or whole."""

import gzip
import json
import struct
import zipfile
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from heddle.cli import main
from heddle_trace import read_trace
from heddle_trace.importers import sources as reading
from tests.trace.imported_logs import EXPECTED, FIXTURES

MOONCAKE = '{"timestamp":0,"input_length":10,"output_length":5,"hash_ids":[1]}'
CALL = '{"request":{"messages":[{"role":"user","content":"q"}]},"response":{"choices":[]}}'
CHAT = '{"id":"%s","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}'


def run(tmp_path: Path, *arguments: object) -> Result:
    out = tmp_path / "out" / "t.jsonl.gz"
    out.parent.mkdir(exist_ok=True)
    return CliRunner().invoke(main, ["trace", "import", *map(str, arguments), "-o", str(out)])


def refused(tmp_path: Path, *arguments: object, says: str, status: int = 2) -> str:
    """An import that must end in one line and leave nothing behind."""
    done = run(tmp_path, *arguments)
    assert done.exit_code == status, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert says in lines[0], lines[0]
    return lines[0]


def kept(tmp_path: Path, *arguments: object) -> tuple[Result, int]:
    """What an import says that leaves damaged records out, and how many trajectories it has."""
    done = run(tmp_path, *arguments, "--set", "logs.skip_bad=true", "--json")
    assert done.exit_code == 0, done.output
    return done, len(read_trace(tmp_path / "out" / "t.jsonl.gz").records)


def file(tmp_path: Path, content: str | bytes, name: str = "log.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def chat(*messages: dict[str, object], **more: object) -> str:
    return json.dumps({"messages": list(messages), **more})


BAD_LINES = {
    "malformed": ('{"timestamp":0,', "malformed JSON at column 16"),
    "two objects": (MOONCAKE * 2, "malformed JSON at column 67 (Extra data)"),
    "no object": ("[1]", "expected object, got array"),
    "not UTF-8": (b'{"timestamp":0,"input_length":1,"session_id":"\xff"}', "is not UTF-8"),
    "NaN": (MOONCAKE.replace(":0,", ":NaN,"), "holds NaN, which JSON does not have"),
    "Infinity": (MOONCAKE.replace(":0,", ":-Infinity,"), "holds -Infinity"),
    "overflow": (MOONCAKE.replace(":0,", ":1e999,"), "timestamp: number out of range"),
    "huge": (MOONCAKE.replace(":10,", ":%s," % ("9" * 400)), "input_length: expected int"),
    "too many tokens": (MOONCAKE.replace(":5,", ":10000001,"), "output_length: expected int"),
    "negative": (MOONCAKE.replace(":5,", ":-5,"), "output_length: expected int"),
    "half a token": (MOONCAKE.replace(":5,", ":5.5,"), "output_length: expected int"),
    "text": (MOONCAKE.replace(":5,", ':"5",'), "output_length: expected int | null, got str"),
    "missing": (MOONCAKE.replace('"output_length":5,', ""), "output_length is missing"),
    "blocks": (MOONCAKE.replace("[1]", "[1,2,3]"), "hash_ids: 3 blocks do not fit a prompt of 10"),
    "deep": ('{"x":' + "[" * 100_000, "is nested too deeply"),
    "rubbish": (bytes(range(1, 9)), "malformed JSON at column 1"),
    "another format": (CALL, "it looks like openai-chat: a file that mixes formats has to be"),
}


@pytest.mark.parametrize(("line", "says"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_damaged_line_is_named_with_file_and_line(tmp_path, line, says):
    line = line.encode() if isinstance(line, str) else line
    path = file(tmp_path, f"{MOONCAKE}\n\n".encode() + line + f"\n{MOONCAKE}\n".encode())
    said = refused(tmp_path, path, says=says)
    assert said.startswith(f"Error: {path}: line 3: ")
    assert "logs.skip_bad" in said
    done, trajectories = kept(tmp_path, path)
    answer = json.loads(done.stdout)
    assert (trajectories, answer["damaged"]) == (2, 1)
    assert answer["first_damaged"][0].startswith(f"{path}: line 3: ")


def test_a_clock_that_goes_backwards_is_reported(tmp_path):
    def log(second_s: float) -> str:
        return chat(
            {"role": "user", "content": "q", "timestamp": 1_700_000_000},
            {"role": "assistant", "content": "a", "timestamp": 1_700_000_010, "tool_calls": [{}]},
            {"role": "tool", "content": "r", "timestamp": second_s},
            {"role": "assistant", "content": "b", "timestamp": 1_700_000_020},
        )

    back = file(tmp_path, log(1_700_000_007))
    said = refused(tmp_path, back, says="the clock goes backwards by 3 s after generation 0")
    assert f"{back}: line 1: " in said
    # Two clocks of one log are never quite the same.
    done, trajectories = kept(tmp_path, file(tmp_path, log(1_700_000_009.5)))
    assert (trajectories, json.loads(done.stdout)["damaged"]) == (1, 0)
    assert "spans of 0 to -1 s" in done.stdout
    (record,) = read_trace(tmp_path / "out" / "t.jsonl.gz").records
    assert record.steps[0].tool_s == 0.0


def test_requests_in_the_wrong_order_of_time_are_reported(tmp_path):
    text = (FIXTURES / "mooncake.jsonl").read_text().replace('"timestamp": 60000', '"timestamp": 9')
    refused(tmp_path, file(tmp_path, text), says="the clock goes backwards by 29.991 s after")


def edited(name: str, old: str, new: str) -> str:
    text = (FIXTURES / name).read_text()
    assert old in text
    return text.replace(old, new)


NEGATIVE = {
    "a tool": ("swe_agent.traj", '"execution_time": 1.5', '"execution_time": -7.5', "-7.5 s"),
    "a delay": ("mooncake_sessions.jsonl", '"delay_ms": 50', '"delay_ms": -5000', "-5 s"),
    "a span": (
        "dynamo.jsonl",
        '"ended_at_unix_ms": 1777312801500',
        '"ended_at_unix_ms": 1777312800000',
        "the tool ends 1080 ms before it starts",
    ),
    "a request": ("dynamo.jsonl", '"total_time_ms": 1000', '"total_time_ms": -9000', "backwards"),
}


@pytest.mark.parametrize(("name", "old", "new", "says"), NEGATIVE.values(), ids=NEGATIVE.keys())
def test_negative_durations_are_reported(tmp_path, name, old, new, says):
    refused(tmp_path, file(tmp_path, edited(name, old, new), name), says=says)


def test_times_that_are_none_are_reported(tmp_path):
    for old, new, says in (
        ("2026-02-04T22:00:02.000Z", "yesterday", "'yesterday' is no time; ISO 8601 is expected"),
        ('"2026-02-04T22:00:02.000Z"', "12.5", "12.5 is no Unix time"),
        ('"2026-02-04T22:00:02.000Z"', "1e300", "1e+300 is no Unix time"),
    ):
        text = edited("claude_code.jsonl", old, new)
        assert "line 4: " in refused(tmp_path, file(tmp_path, text), says=says)


def test_a_wait_beyond_all_measure_is_reported(tmp_path):
    text = edited("mooncake_sessions.jsonl", '"delay_ms": 50', '"delay_ms": 9000000000000')
    said = refused(tmp_path, file(tmp_path, text), says="tool_s: found 9000000000")
    assert "30 days" in said


@pytest.mark.parametrize("results", ["openai", "claude"])
def test_a_log_without_tool_results_is_reported(tmp_path, results):
    if results == "claude":
        lines = (FIXTURES / "claude_code.jsonl").read_text().splitlines()
        text = "\n".join(line for line in lines if "tool_result" not in line)
    else:
        call = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "Read"}}]}
        text = chat({"role": "user", "content": "q"}, call, call, call)
    path = file(tmp_path, text)
    said = refused(tmp_path, path, says="calls 'Read' and others, and has no result of any tool")
    assert "export the log with its tool messages" in said


def test_a_log_that_ends_while_its_tool_runs_is_sound(tmp_path):
    call = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "run"}}]}
    path = file(tmp_path, chat({"role": "user", "content": "q"}, call))
    _, trajectories = kept(tmp_path, path)
    (record,) = read_trace(tmp_path / "out" / "t.jsonl.gz").records
    assert trajectories == 1
    assert (record.steps[0].tool, record.steps[0].tool_s) == ("run", None)


def test_some_calls_without_a_result_are_noted(tmp_path):
    call = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "run"}}]}
    result = {"role": "tool", "content": "r"}
    path = file(tmp_path, chat({"role": "user", "content": "q"}, call, call, result, call))
    done, _ = kept(tmp_path, path)
    assert (
        json.loads(done.stdout)["assumed"][
            "steps whose tool gave no result: its time and size not recorded"
        ]
        == 1
    )


def test_ids_that_are_taken_are_reported(tmp_path):
    path = file(tmp_path, "\n".join(CHAT % name for name in ("a", "b", "a")))
    said = refused(tmp_path, path, says="trajectory_id 'a' is taken by an earlier record")
    assert f"{path}: line 3: " in said
    text = edited("tau2.json", '"id": "sim-2"', '"id": "sim-1"')
    refused(tmp_path, file(tmp_path, text, "t.json"), says="record 2: trajectory_id 'telecom-no_")
    assert kept(tmp_path, path)[1] == 2


@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_an_empty_file_is_reported(tmp_path, content):
    refused(tmp_path, file(tmp_path, content), says="log.jsonl: is empty; nothing to import")


def test_an_empty_file_of_a_named_format_is_reported(tmp_path):
    path = file(tmp_path, "")
    refused(
        tmp_path,
        path,
        "--format",
        "verl",
        says="holds no trajectory of this format; nothing",
    )


def test_binary_rubbish_is_reported(tmp_path):
    path = file(tmp_path, bytes(range(256)) * 40)
    refused(tmp_path, path, says="is binary, or not UTF-8; give a log in one of the formats")
    refused(tmp_path, path, "--format", "tau2", says="after record 0: malformed JSON")
    refused(tmp_path, path, "--format", "mooncake", says="line 1: ")


def test_a_format_that_is_not_the_files_is_reported(tmp_path):
    for name, expected in EXPECTED.items():
        wrong = "verl" if expected.format != "verl" else "tau2"
        refused(
            tmp_path,
            FIXTURES / name,
            "--format",
            wrong,
            says=f"{name}: this is {expected.format}, not {wrong}; use --set logs.format=",
        )


def test_a_file_that_is_no_log_is_reported(tmp_path):
    path = file(tmp_path, '{"hello": "world"}')
    assert "mooncake" in refused(tmp_path, path, says="no known format is recognised; name one")
    refused(tmp_path, path, "--format", "tau2", says="holds no trajectory of this format")
    refused(tmp_path, path, "--format", "mooncake", says="line 1: input_length is missing")


def test_a_trace_is_not_imported_again(tmp_path):
    path = file(tmp_path, '{"trajectory_id":"a","group_id":"g","workload":"w","steps":[]}')
    refused(tmp_path, path, says="is a trace of Heddle's already; nothing to import")


def test_files_of_two_formats_are_reported(tmp_path):
    says = "tau2.json is tau2, "
    refused(tmp_path, FIXTURES / "tau2.json", FIXTURES / "verl.jsonl", says=says)


def test_gzip_that_was_cut_off_is_reported(tmp_path):
    packed = gzip.compress((FIXTURES / "claude_code.jsonl").read_bytes())
    path = file(tmp_path, packed[: len(packed) * 2 // 3], "log.jsonl.gz")
    says = "the gzip data ends too early: the file was cut off; copy it again"
    refused(tmp_path, path, says=f"{path}: line 8: {says}")
    path = file(tmp_path, packed[:40], "log.jsonl.gz")
    refused(tmp_path, path, says=f"{path}: {says}")
    packed = gzip.compress((FIXTURES / "openai_chat_tasks.json").read_bytes())
    path = file(tmp_path, packed[: len(packed) - 30], "log.json.gz")
    refused(tmp_path, path, says="log.json.gz: after record ")


def test_what_a_cut_file_still_holds_can_be_kept(tmp_path):
    rows = "\n".join(CHAT % f"{i}-{'x' * 50}" for i in range(3_000)).encode()
    packed = gzip.compress(rows, compresslevel=0)
    path = file(tmp_path, packed[: len(packed) // 2], "log.jsonl.gz")
    done, trajectories = kept(tmp_path, path)
    assert 1_000 < trajectories < 2_000
    assert json.loads(done.stdout)["damaged"] == 1


def test_gzip_that_is_damaged_is_reported(tmp_path):
    packed = bytearray(gzip.compress((FIXTURES / "claude_code.jsonl").read_bytes()))
    packed[-6] ^= 0xFF  # of the sum over what it holds
    path = file(tmp_path, bytes(packed), "log.jsonl.gz")
    refused(tmp_path, path, says="the gzip data is damaged (CRC check failed")


def test_zstd_is_reported(tmp_path):
    path = file(tmp_path, b"\x28\xb5\x2f\xfd" + bytes(40), "log.jsonl.zst")
    refused(tmp_path, path, says="is compressed with zstd; unpack it first")


BAD_DOCUMENTS = {
    "cut off": (lambda text: text[: len(text) // 2], "the JSON document ends too early"),
    "trailing": (lambda text: text + "}", "malformed JSON (trailing garbage)"),
    "NaN": (lambda text: text.replace('"reward": 0.0', '"reward": NaN'), "holds NaN or Infinity"),
    "not UTF-8": (lambda text: text.encode().replace(b"parcel", b"parc\xff"), "is not UTF-8"),
    "overflow": (lambda text: text.replace('"trial": 1', '"trial": 1e999'), "malformed JSON ("),
}


@pytest.mark.parametrize(("spoil", "says"), BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS.keys())
def test_a_damaged_document_is_named_with_the_record_before(tmp_path, spoil, says):
    spoilt = spoil((FIXTURES / "openai_chat_tasks.json").read_text())
    path = file(tmp_path, spoilt, "runs.json")
    assert f"{path}: after record " in refused(tmp_path, path, says=says)


def test_a_damaged_item_of_a_document_is_left_out_alone(tmp_path):
    text = edited("openai_chat_tasks.json", '"model": "m1"', '"model": 1')
    path = file(tmp_path, text, "runs.json")
    refused(tmp_path, path, says=f"{path}: record 2: model: expected str | null, got int")
    assert kept(tmp_path, path)[1] == 2


def test_a_role_that_is_none_is_reported(tmp_path):
    path = file(tmp_path, chat({"role": "narrator", "content": "q"}))
    refused(tmp_path, path, says="line 1: role 'narrator' is not known; use system, ")


def test_a_trajectory_of_which_a_part_is_damaged_is_left_out_whole(tmp_path):
    text = edited("swe_agent.traj", '"execution_time": 0.25', '"execution_time": "long"')
    path = file(tmp_path, text, "a.traj")
    refused(tmp_path, path, says="a.traj: record 1: execution_time: expected float | null, got str")
    good = FIXTURES / "swe_agent.traj"
    done, trajectories = kept(tmp_path, path, good)
    assert trajectories == 1
    assert json.loads(done.stdout)["dropped"] == {"trajectories of which a part is damaged": 1}


def zipped(path: Path, **members: str | bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/") + ".json", content)
    return path


def test_archives_that_are_no_log_are_reported(tmp_path):
    path = zipped(tmp_path / "a.eval", notes="{}")
    refused(tmp_path, path, says="a.eval: holds no trajectory of this format")
    path = zipped(tmp_path / "b.eval", samples__1="{", header="{}")
    refused(tmp_path, path, says="b.eval: samples/1.json: malformed JSON at column 2")
    whole = (FIXTURES / "inspect.eval").read_bytes()
    path = file(tmp_path, whole[: len(whole) // 2], "c.eval")
    refused(tmp_path, path, says="c.eval: the zip archive is damaged")
    spoilt = bytearray(whole)
    spoilt[spoilt.index(b"q1_epoch_1.json") + 40] ^= 0xFF
    path = file(tmp_path, bytes(spoilt), "d.eval")
    assert "samples/q1_epoch_1.json" in refused(tmp_path, path, says="d.eval: ")
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        wrong = bytearray(whole)
        entry = wrong.rindex(b"q1_epoch_1.json") - len("samples/") - 46
        assert wrong[entry : entry + 4] == b"PK\1\2"
        wrong[entry + 10 : entry + 12] = method.to_bytes(2, "little")
        path = file(tmp_path, bytes(wrong), "e.eval")
        assert "samples/q1_epoch_1.json" in refused(tmp_path, path, says="e.eval: ")


def test_a_line_that_does_not_end_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 200)
    path = file(tmp_path, f"{MOONCAKE}\n" + "x" * 1_000 + f"\n{MOONCAKE}\n")
    refused(tmp_path, path, says="line 2: is longer than")
    assert kept(tmp_path, path)[1] == 2


def test_files_that_cannot_be_read_are_reported(tmp_path):
    refused(tmp_path, tmp_path / "none.jsonl", says="none.jsonl: no such file; check the path")
    refused(tmp_path, tmp_path, says="the folder holds no file; name one with logs")
    path = file(tmp_path, MOONCAKE)
    refused(tmp_path, path, tmp_path / "." / "log.jsonl", says="is named twice")
    refused(tmp_path, "/dev/null", says="is a pipe or a device")


def test_outputs_that_are_impossible_are_reported(tmp_path):
    path = file(tmp_path, MOONCAKE)

    def said(out: Path, *more: str) -> str:
        done = CliRunner().invoke(main, ["trace", "import", str(path), "-o", str(out), *more])
        assert done.exit_code == 2
        assert "Traceback" not in done.output
        return " ".join(done.stderr.split())

    assert "a trace must be named" in said(tmp_path / "t.json")
    assert "no such folder; make it first" in said(tmp_path / "none" / "t.jsonl")
    assert "is one of the files to import" in said(path, "--force")
    (tmp_path / "link.jsonl").symlink_to(path)
    assert "is one of the files to import" in said(tmp_path / "link.jsonl", "--force")
    assert path.read_text() == MOONCAKE


def test_an_output_that_is_a_link_to_itself_is_replaced(tmp_path):
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    arguments = ["trace", "import", str(file(tmp_path, MOONCAKE)), "-o", str(loop)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert len(read_trace(loop).records) == 1


def test_an_output_that_is_there_stays_as_it_is(tmp_path):
    path, out = file(tmp_path, MOONCAKE), tmp_path / "t.jsonl"
    out.write_text("mine")
    arguments = ["trace", "import", str(path), "-o", str(out)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "--force" in done.stderr
    assert out.read_text() == "mine"
    path.write_text(MOONCAKE + "\n{")
    assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 2
    assert out.read_text() == "mine"
    path.write_text(MOONCAKE)
    assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0
    assert len(read_trace(out).records) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "t.jsonl"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    done = run(tmp_path, file(tmp_path, MOONCAKE))
    assert done.exit_code == 1
    assert "disk is full" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("heddle_trace.writing.TraceWriter.write", stop)
    done = run(tmp_path, file(tmp_path, MOONCAKE))
    assert done.exit_code == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_wrong_ratios_and_tokenizers_are_reported(tmp_path):
    path = FIXTURES / "openai_chat.jsonl"
    refused(tmp_path, path, "--set", "logs.chars_per_token=0", says="give a number from 0.1 to 100")
    refused(
        tmp_path, path, "--set", "logs.chars_per_token=nan", says="give a number from 0.1 to 100"
    )
    refused(
        tmp_path, path, "--set", "logs.tokenizer=none.tiktoken", says="none.tiktoken: no such file"
    )
    spoilt = file(tmp_path, "not base64 at all\n", "bad.tiktoken")
    refused(
        tmp_path, path, "--set", f"logs.tokenizer={spoilt}", says="is no file of tiktoken ranks"
    )
    says = "give a tokenizer.json, a *.tiktoken file, or one of"
    refused(tmp_path, path, "--set", "logs.tokenizer=klingon", says=says)


def test_a_directory_of_an_archive_that_names_wrong_places_is_reported(tmp_path):
    data = (FIXTURES / "inspect.eval").read_bytes()
    entry = data.rindex(b"samples/") - 46  # its name is at the end
    end = data.rindex(b"PK\x05\x06")
    for at, value in product((entry + 24, entry + 42, end + 16), (1, 2**31, 2**32 - 2)):
        path = tmp_path / "a.eval"
        path.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
        refused(tmp_path, path, says="a.eval: ")
