"""What importers share: clocks, counting, sessions, joining, the beginning of files."""

import sys
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from heddle_trace import TraceError
from heddle_trace.importers import joining
from heddle_trace.importers.chat import Message, generations_of, prompt_of
from heddle_trace.importers.clocks import elapsed, seconds
from heddle_trace.importers.generations import (
    LoggedGeneration,
    derive_added,
    fingerprint,
    identifier,
    steps_of,
    tool_name,
)
from heddle_trace.importers.heads import head_of_bytes
from heddle_trace.importers.joining import PrefixJoin
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import sources
from heddle_trace.importers.tokens import CHARS_PER_TOKEN, apportioned, counter
from heddle_trace.limits import Name


@pytest.mark.parametrize(
    "value",
    [
        1_700_000_000,
        1_700_000_000.0,
        1_700_000_000_000,
        1_700_000_000_000_000,
        1_700_000_000_000_000_000,
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20",
        "2023-11-14 22:13:20.0000000",
        "2023-11-15T00:13:20+02:00",
    ],
)
def test_a_time_is_seconds_whatever_its_unit(value):
    assert seconds(value) == pytest.approx(1_700_000_000, abs=1e-6)


def test_no_time_is_none_and_nonsense_is_damage():
    assert seconds(None) is None
    assert seconds("") is None
    for nonsense in (0, -1_700_000_000, 42, 1e11, float("inf"), float("nan"), "noon", "12"):
        with pytest.raises(DamagedError):
            seconds(nonsense)


def test_spans_are_whole_microseconds_and_small_steps_back_are_noted():
    notes = Notes()
    assert elapsed(1_700_000_000.1, 1_700_000_000.4, "", notes) == 0.3
    assert notes.assumed == {}
    assert elapsed(5.0, 4.0, "", notes) == 0.0
    assert list(notes.assumed.values()) == [1]
    with pytest.raises(DamagedError, match=r"backwards by 1\.001 s here"):
        elapsed(5.0, 3.999, "here", notes)


def test_a_counter_counts_by_characters_and_says_so():
    count = counter()
    assert CHARS_PER_TOKEN == 3.6
    assert (count.count(""), count.count(None), count.count("a"), count.count("a" * 36)) == (
        0,
        0,
        1,
        10,
    )
    assert count.texts == 2
    assert count.name == "at 3.6 characters a token"
    assert counter(chars_per_token=2).count("abcd") == 2


RANKS = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abab": 257}


def test_a_file_of_ranks_counts_with_tiktoken(tmp_path):
    pytest.importorskip("tiktoken", reason="heddle-rl[tokens] is not installed")
    import base64

    path = tmp_path / "tiny.tiktoken"
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    path.write_text("\n".join(lines) + "\n")
    count = counter(str(path))
    assert count.name == "with tiny.tiktoken"
    assert [count.count(text) for text in ("ab", "abab", "abc", "", "\ud800")] == [1, 1, 2, 0, 1]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Stand-ins for libraries that need not be installed."""

    class Tokenizer:
        @staticmethod
        def from_file(path: str) -> SimpleNamespace:
            if "bad" in path:
                raise Exception("no model in it")
            return SimpleNamespace(
                encode=lambda text, add_special_tokens: SimpleNamespace(ids=text.split())
            )

    def get_encoding(name: str) -> SimpleNamespace:
        if name == "words":
            return SimpleNamespace(encode_ordinary=lambda text: text.split())
        if name == "far":
            raise ConnectionError("no route")
        raise ValueError(name)

    tiktoken = SimpleNamespace(get_encoding=get_encoding, list_encoding_names=lambda: ["words"])
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Tokenizer))
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    return monkeypatch


def test_a_tokenizer_is_a_file_a_folder_or_a_name(libraries, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for named in (tmp_path / "tokenizer.json", tmp_path, "words"):
        assert counter(str(named)).count("three words here") == 3


def test_tokenizers_that_cannot_be_loaded_are_reported(libraries, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for named, says in (
        (tmp_path / "bad.json", "is no tokenizer.json"),
        (tmp_path / "none.json", "no such file"),
        ("far", "is not on this machine and could not be fetched"),
        ("other", "or one of words"),
    ):
        with pytest.raises(TraceError, match=says):
            counter(str(named))
    libraries.setitem(sys.modules, "tokenizers", None)
    libraries.setitem(sys.modules, "tiktoken", None)
    for named, says in (
        ("x/tokenizer.json", "library tokenizers"),
        ("words", "heddle-rl\\[tokens\\]"),
    ):
        with pytest.raises(TraceError, match=says):
            counter(named)


@given(st.integers(0, 10_000), st.lists(st.integers(0, 1_000), min_size=1, max_size=20))
def test_shares_add_up_and_are_within_one_of_exact(total, weights):
    shares = apportioned(total, weights)
    assert sum(shares) == total
    whole = sum(weights)
    for share, weight in zip(shares, weights, strict=True):
        exact = total * weight / whole if whole else total / len(weights)
        assert abs(share - exact) < 1


class Part(msgspec.Struct, array_like=True):
    number: int


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers()), max_size=60))
def test_sessions_come_back_whole_in_the_order_of_their_first_parts(parts):
    expected: dict[str, list[int]] = {}
    with Sessions(Part) as sessions:
        for session, number in parts:
            number %= 2**31
            sessions.add(session, Part(number))
            expected.setdefault(session, []).append(number)
        found = [(session, [p.number for p in members]) for session, members in sessions]
    assert found == list(expected.items())


def test_many_sessions_take_no_time_that_grows_with_their_square():
    with Sessions(Part) as sessions:
        for number in range(30_000):
            sessions.add(f"s{number % 15_000}", Part(number))
        counts = [len(members) for _, members in sessions]
    assert counts == [2] * 15_000


def join_all(requests: list[tuple[list[int], int, int]], join: PrefixJoin | None = None):
    """Requests as (blocks, input, output), blocks of 10 tokens."""
    join = join or PrefixJoin()
    places = []
    for number, (blocks, input_tokens, output_tokens) in enumerate(requests):
        full = min(input_tokens // 10, len(blocks))
        places.append(
            join.place(
                f"r{number}",
                blocks,
                full=full,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )
        )
    return [(place.trajectory, place.tree, place.shared) for place in places]


def test_a_request_continues_the_longest_that_it_begins_with():
    assert join_all(
        [
            ([1, 2, 3], 25, 5),  # two full blocks
            ([1, 2, 4, 5], 35, 5),  # as long as the first and its output
            ([1, 2, 4, 6, 7], 45, 5),  # the longer prefix wins
            ([1, 2, 9], 27, 1),  # too short to hold the first's output
            ([1, 2, 8, 8], 40, 1),  # the first again: another branch of its tree
            ([7, 7], 20, 1),
        ]
    ) == [
        ("r0", "r0", 0),
        ("r0", "r0", 2),
        ("r0", "r0", 3),
        ("r3", "r3", 0),
        ("r4", "r0", 2),
        ("r5", "r5", 0),
    ]


def test_one_block_alone_is_no_evidence():
    assert [p[0] for p in join_all([([1], 15, 1), ([1, 2], 20, 1)])] == ["r0", "r1"]


def test_what_can_be_continued_is_bounded_and_the_rest_counted(monkeypatch):
    join = PrefixJoin(limit=2)
    requests = [([n, n], 20, 1) for n in range(5)]
    join_all(requests, join)
    assert join.forgotten == 3
    monkeypatch.setattr(joining, "SAME_PREFIX", 3)
    join = PrefixJoin()
    join_all([([1, 1], 20, 1)] * 5, join)
    assert join.forgotten == 2


def said(role: str, tokens: int = 10, **more: object) -> Message:
    return Message(role, tokens, **more)


def test_a_chat_is_cut_at_the_words_of_the_assistant():
    messages = [
        said("system", 5),
        said("user", 7),
        said("assistant", 20, calls=("a", "b"), time_s=10.0, start_s=8.0),
        said("tool", 30, time_s=11.0, failed=False),
        said("tool", 40, time_s=13.0, failed=True),
        said("assistant", 21, time_s=20.0),
        said("user", 9, time_s=50.0),
        said("assistant", 22, time_s=60.0),
        said("user", 3, time_s=99.0),
    ]
    assert prompt_of(messages) == 12
    first, second, third = steps_of(generations_of(messages, Notes()), Notes())
    assert (first.tool, first.n_tools, first.tool_ok) == ("a+b", 2, False)
    assert (first.tool_s, first.tool_tokens, first.llm_s) == (3.0, 70, 2.0)
    assert (second.tool, second.tool_s, second.tool_tokens) == ("user", 30.0, 9)
    assert (third.tool, third.tool_s, third.tool_tokens) == (None, None, None)
    # A simulated user is part of the environment, to its last word.
    last = generations_of(messages, Notes(), simulated_user=True)[-1]
    assert (last.tools, last.until_s, last.added) == (("user",), 99.0, 3)


def test_how_long_a_person_broke_a_call_off_for_is_no_tool_time():
    messages = [
        said("user"),
        said("assistant", calls=("a",), time_s=1.0),
        said("user", time_s=500.0),
        said("assistant", calls=("a",), time_s=600.0, start_s=590.0),
        said("tool", time_s=601.0),
        said("assistant", time_s=602.0),
    ]
    first, second, _ = steps_of(generations_of(messages, Notes()), Notes())
    assert (first.tool, first.tool_s) == ("a", None)
    assert second.tool_s == 1.0


def test_what_a_step_added_is_taken_from_recorded_prompts_where_nothing_was_dropped():
    generations = [
        LoggedGeneration(output=10, input=100, added=7),
        LoggedGeneration(output=10, input=150, added=7),
        LoggedGeneration(output=10, input=120),
    ]
    derive_added(generations)
    assert [g.added for g in generations] == [40, 7, None]


def test_names_are_kept_when_they_can_be():
    assert tool_name(()) is None
    assert tool_name(("a", "b", "a")) == "a+b"
    assert tool_name((" ", "b")) == "unspecified+b"
    assert tool_name(tuple(f"tool-{n}" for n in range(1_000))) == "unspecified"
    assert identifier("conv-7") == "conv-7"
    assert identifier("") == "unnamed"
    long = identifier("x" * 5_000)
    assert len(long) <= 200
    assert long != identifier("x" * 5_001)
    assert msgspec.convert(identifier("\ud800"), Name)
    assert fingerprint("a", "b") != fingerprint("ab")
    assert fingerprint("a\ud800") == fingerprint("a\ud800")


def test_a_head_shows_lines_or_the_beginning_of_a_document():
    rows = head_of_bytes(b'{"a":1}\n{"b":2}\nrubbish\n{"c"')
    assert rows.rows == ({"a": 1}, {"b": 2})
    assert rows.document == {"a": 1}
    document = head_of_bytes(b'{\n "a": {"x": [1, 2, {"y": "cut o')
    assert document.rows == ()
    assert document.document["a"]["x"][:2] == [1, 2]
    assert document.has("a")
    items = head_of_bytes(b'[{"traj": [], "task_id": 3}, {"traj"')
    assert items.item() == {"traj": [], "task_id": 3}
    assert head_of_bytes(b"\xef\xbb\xbf{}").document == {}
    assert not head_of_bytes(b"\x00\x01").readable
    assert not head_of_bytes(b"caf\xe9 au lait").readable
    assert head_of_bytes("café".encode()[:-1]).readable  # a letter cut in two by the head's end


def test_labels_are_the_shortest_unique_ends_of_paths(tmp_path):
    paths = []
    for name in ("a/run.json", "b/run.json", "b/other.jsonl.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        paths.append(path)
    assert [s.label for s in sources(paths)] == ["a/run", "b/run", "b/other"]
    assert [s.label for s in sources(paths[1:])] == ["run", "other"]
    twin = tmp_path / "b" / "run.eval"
    twin.write_text("{}")
    assert [s.label for s in sources([paths[1], twin])] == ["run.json", "run.eval"]
