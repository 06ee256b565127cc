"""Logs made to do harm, or spoilt by chance: they end in one clear line, or in a sound trace."""

import json
import random
import tracemalloc
from pathlib import Path

import ijson
import pytest

from heddle_trace import TraceError, read_trace
from heddle_trace.importers import checked, import_trace
from heddle_trace.importers import sources as reading
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.writing import TraceWriter
from tests.trace.builders import call, record
from tests.trace.imported_logs import EXPECTED, FIXTURES
from tests.trace.test_import_bad import MOONCAKE, chat, edited, file, kept, refused, zipped

ODD = (
    *("null", "true", "-1", "0", "1.5", "1e308", "9" * 30, "9" * 400, "1e999", "NaN", "-Infinity"),
    *('""', '"\\ud800"', '"x\\u0000\\ny"', json.dumps("n" * 1_500), json.dumps("9" * 5_000)),
    '"9999-12-31T23:59:59-14:00"',
    *(
        "{}",
        "[]",
        "[[]]",
        "[null]",
        '{"a": null}',
        "[" * 400 + "]" * 400,
        "[" * 3_000 + "]" * 3_000,
    ),
)
"""JSON of values that a log may hold where something else is meant, and some that are no JSON."""


def paths(value: object, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [here]
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        found += paths(item, (*here, key))
    return found


def replaced(value: object, path: tuple[str | int, ...], new: object) -> object:
    if not path:
        return new
    copy = value.copy()  # type: ignore[attr-defined]
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def sound_or_one_line(path: Path, format: str) -> None:
    """Import it, with damage stopping it and with damage left out."""
    out = path.with_name("t.jsonl")
    for skip_bad in (False, True):
        out.unlink(missing_ok=True)
        said = ""
        try:
            import_trace([path], out, format=format, skip_bad=skip_bad)
        except TraceError as error:
            said = str(error)
        if said:
            assert "\n" not in said
            assert str(path) in said
            assert len(said) < 600
            assert list(path.parent.iterdir()) == [path]
        else:
            read_trace(out)


@pytest.mark.parametrize("name", EXPECTED)
def test_any_value_may_be_anything(tmp_path, name):
    if name.endswith(".eval"):
        pytest.skip("an archive; its samples are those of inspect.json")
    text = (FIXTURES / name).read_text()
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [json.loads(line) for line in text.splitlines()]
    chance = random.Random(name)
    for _ in range(60):
        at = chance.randrange(len(values))
        spoilt = [*values]
        spoilt[at] = replaced(values[at], chance.choice(paths(values[at])), "@odd@")
        lines = "\n".join(map(json.dumps, spoilt)).replace('"@odd@"', chance.choice(ODD))
        sound_or_one_line(file(tmp_path, lines, name), EXPECTED[name].format)


@pytest.mark.parametrize("name", ["inspect.eval", "tau2.json", "openai_chat.jsonl"])
def test_any_byte_may_be_anything(tmp_path, name):
    whole = (FIXTURES / name).read_bytes()
    chance = random.Random(name)
    for _ in range(60):
        data = bytearray(whole)
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randrange(1, 50)]
            case 2:
                data[at:at] = chance.choice(
                    (b"\n", b"\0", b'"', b"\\", b"{", b"]", b"\xff", b"NaN")
                )
            case _:
                del data[at + 1 :]
        sound_or_one_line(file(tmp_path, bytes(data), name), EXPECTED[name].format)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_a_document_that_nests_too_deeply_is_reported_before_it_takes_memory(tmp_path, opening):
    apart = " " * checked.PIECE_BYTES  # the record before is not in one piece with the damage
    text = edited("openai_chat_tasks.json", '"trial": 1', f'{apart}"trial": {opening * 20_000}')
    path = file(tmp_path, text, "runs.json")
    tracemalloc.start()
    refused(
        tmp_path, path, says="after record 1: malformed JSON (nested more than 512 levels deep)"
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000
    assert kept(tmp_path, path)[1] == 1


def test_brackets_in_texts_nest_nothing(tmp_path):
    said = json.dumps('[{"' * 2_000 + "\\")[1:-1]
    text = edited(
        "openai_chat_tasks.json", '"trial": 1', f'"trial": 1, "note": "{said}", "more": "{said}"'
    )
    assert kept(tmp_path, file(tmp_path, text, "runs.json"), "--force")[1] == 3
    deep = f"{'[' * 500}{']' * 500}"
    text = edited("openai_chat_tasks.json", '"trial": 1', f'"trial": 1, "a": {deep}, "b": [{deep}]')
    assert kept(tmp_path, file(tmp_path, text, "runs.json"), "--force")[1] == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
def test_depth_is_followed_from_piece_to_piece(tmp_path, size):
    deepest = "[" * checked.MAX_DEPTH + r'"a\\\"]}[{", "\\"' + "]" * checked.MAX_DEPTH
    for text, fits in ((deepest, True), (f"[{deepest}]", False)):
        path = file(tmp_path, b"\xef\xbb\xbf" + text.encode())
        with path.open("rb") as stream:
            reader = checked.CheckedReader(stream)
            try:
                read = b"".join(iter(lambda reader=reader: reader.read(size), b""))
            except ijson.JSONError:
                assert not fits
            else:
                assert fits
                assert read.decode().removeprefix("\ufeff") == text


def test_a_text_without_end_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(checked, "MAX_TEXT_BYTES", 3 * 1024**2)
    for longest, fits in (
        ("x" * 2_000_000, True),
        ("[" * 6_000_000, False),
        ("9" * 6_000_000, False),
    ):
        quoted = longest if longest[0] == "9" else f'"{longest}"'
        text = edited("openai_chat_tasks.json", '"trial": 1', f'"trial": 1, "note": {quoted}')
        path = file(tmp_path, text, "runs.json")
        if fits:
            assert kept(tmp_path, path)[1] == 3
            (tmp_path / "out" / "t.jsonl.gz").unlink()
        else:
            refused(
                tmp_path, path, says="after record 1: malformed JSON (a text longer than 3 MiB)"
            )


def test_a_document_may_begin_with_a_byte_order_mark(tmp_path):
    path = file(
        tmp_path, b"\xef\xbb\xbf" + (FIXTURES / "openai_chat_tasks.json").read_bytes(), "runs.json"
    )
    assert kept(tmp_path, path)[1] == 3


def test_lines_in_utf_16_are_reported(tmp_path):
    says = "is binary, or not UTF-8; give a log in one of the formats"
    refused(tmp_path, file(tmp_path, MOONCAKE.encode("utf-16-le")), says=says)
    path = file(tmp_path, MOONCAKE.encode("utf-16"))
    refused(tmp_path, path, "--format", "mooncake", says="line 1: is not UTF-8")
    path = file(tmp_path, (FIXTURES / "tau2.json").read_text().encode("utf-16"), "t.json")
    refused(tmp_path, path, "--format", "tau2", says="malformed JSON (invalid char in json text);")


def test_half_a_character_is_shown_as_a_question_mark(tmp_path):
    session = chat(
        {"role": "user", "content": "q \\ud800"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "ru@n"}}]},
        {"role": "tool", "content": "r"},
        id="c@",
    )
    _, trajectories = kept(tmp_path, file(tmp_path, session.replace("@", "\\ud83d")))
    (made,) = read_trace(tmp_path / "out" / "t.jsonl.gz").records
    assert trajectories == 1
    assert (made.trajectory_id, made.steps[0].tool) == ("c?", "ru?n")
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        with pytest.raises(TraceError, match="half of a character"):
            writer.write(record(call(1, tool="\ud800")))
        writer.write(record(call(1)))
    assert len(read_trace(tmp_path / "t.jsonl").records) == 1


@pytest.mark.parametrize("name", ["a\nb.jsonl", "a\x1b[31m.jsonl", "a\udcff.jsonl"])
def test_names_that_cannot_be_shown_are_reported(tmp_path, name):
    path = file(tmp_path, MOONCAKE, name)
    refused(tmp_path, path, says="the name holds line ends, or bytes that are no text; rename")


def test_a_damaged_step_leaves_its_run_out(tmp_path):
    text = edited("swe_agent.traj", '"execution_time": 0.25', '"execution_time": 0.25, "x": 0')
    steps = json.loads(text)
    steps["trajectory"][1]["observation"] = 7
    path = file(tmp_path, json.dumps(steps), "a.traj")
    refused(tmp_path, path, says="a.traj: record 2: a message's content is a int; text is expected")
    done, trajectories = kept(tmp_path, path, FIXTURES / "swe_agent.traj")
    assert (json.loads(done.stdout)["damaged"], trajectories) == (1, 1)


def test_a_damaged_message_leaves_its_conversation_out(tmp_path):
    messages = [{"role": "user", "content": "q"}, 3, {"role": "assistant", "content": "a"}]
    path = file(tmp_path, json.dumps(messages), "chat.json")
    refused(tmp_path, path, says="chat.json: record 2: expected object, got int")
    says = "left out: 1 trajectories of which a part is damaged; 1 damaged records"
    refused(tmp_path, path, "--set", "logs.skip_bad=true", says=says)


def test_archives_that_cannot_be_unpacked_are_reported(tmp_path, monkeypatch):
    path = zipped(tmp_path / "a.eval", header="{", samples__1="{}")
    refused(tmp_path, path, says="a.eval: header.json: malformed JSON at column 2")
    spoilt = bytearray((FIXTURES / "inspect.eval").read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = spoilt.find(mark)
        while at >= 0:
            spoilt[at + flags] |= 1
            at = spoilt.find(mark, at + 1)
    path = file(tmp_path, bytes(spoilt), "b.eval")
    refused(tmp_path, path, says="is encrypted; unpack the archive with its password")
    spoilt = bytearray((FIXTURES / "inspect.eval").read_bytes())
    spoilt[spoilt.find(b"PK\x01\x02") + 6] = 255  # the version that is needed to unpack it
    path = file(tmp_path, bytes(spoilt), "c.eval")
    refused(tmp_path, path, says="c.eval: the zip archive is damaged (zip file version 25.5)")
    monkeypatch.setattr(reading, "MAX_MEMBER_BYTES", 1_000)
    path = zipped(tmp_path / "d.eval", header="{}", samples__1=" " * 1_001)
    refused(tmp_path, path, says="samples/1.json: unpacks to 1,001 bytes; 1,000 at most")


def test_a_workload_that_is_no_name_is_reported(tmp_path):
    path = file(tmp_path, MOONCAKE)
    refused(tmp_path, path, "--set", "logs.workload=w" * 1_001, says="workload: found")
    refused(tmp_path, path, "--set", "logs.workload=\udc80", says="it holds half of a character")


def test_one_bad_file_of_several_is_named(tmp_path):
    good, more = file(tmp_path, MOONCAKE, "a.jsonl"), file(tmp_path, MOONCAKE, "c.jsonl")
    empty = file(tmp_path, "", "d.jsonl")
    refused(tmp_path, good, empty, says="d.jsonl: is empty; nothing to import")
    bad = file(tmp_path, f"{MOONCAKE}\n{{", "b.jsonl")
    assert "b.jsonl: line 2: " in refused(tmp_path, good, bad, more, says="malformed JSON")
    done, trajectories = kept(tmp_path, good, bad, more)
    assert (json.loads(done.stdout)["damaged"], trajectories) == (1, 3)


def test_ranks_that_leave_bytes_out_are_reported(tmp_path):
    pytest.importorskip("tiktoken", reason="heddle-rl[tokens] is not installed")
    ranks = file(tmp_path, "YQ== 0\n", "tiny.tiktoken")
    says = "tiny.tiktoken: is no file of tiktoken ranks (not every single byte has a rank)"
    refused(tmp_path, FIXTURES / "openai_chat.jsonl", "--set", f"logs.tokenizer={ranks}", says=says)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (DamagedError("is odd"), "is odd"),
        (RecursionError("x"), "is nested too deeply"),
        (OverflowError("x"), "holds a number that is too large"),
    ],
)
def test_what_a_record_runs_into_is_damage(error, says):
    notes = Notes(skip_bad=True)
    with notes.guard("a: line 1"):
        raise error
    assert (notes.damaged, notes.first_damaged) == (1, [f"a: line 1: {says}"])
    with pytest.raises(TraceError, match="skip_bad"), Notes().guard("a: line 1"):
        raise error
    with pytest.raises(KeyError), notes.guard("a: line 2"):
        raise KeyError
