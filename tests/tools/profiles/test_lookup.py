"""Drafts by n-grams on recorded text: what is found, and what is counted."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.profiles.lookup import Counted, Lookup, command, count, measure

REPEATED = {
    "group_id": "g",
    "model": "m",
    "prompt": "one two three four five six seven",
    "steps": [{"out": "one two three four five six seven", "obs": ""}],
}


def test_a_text_that_stood_before_is_drafted_and_accepted():
    lookup, counted = Lookup(), Counted()
    lookup.push(list("abcdefgh"))
    count(lookup, list("abcdefgh"), counted)
    # Two tokens are made before an n-gram is found; then four are accepted and one is made.
    assert counted.iterations == 4
    assert counted.accepted == [2, 1, 1, 1]


def test_a_text_without_repetition_has_no_drafts():
    counted = Counted()
    count(Lookup(), list("abcdefgh"), counted)
    assert (counted.iterations, counted.drafted, counted.accepted) == (8, 0, [0, 0, 0, 0])


def test_siblings_that_answered_alike_raise_acceptance():
    other = {**REPEATED, "prompt": "", "steps": [{"out": "a b c d e f g h i j", "obs": ""}]}
    alone = measure([other, other], 0, 10).plain()
    after = measure([other, other], 1, 10).plain()
    assert alone["accepted"][0] == 0.0
    assert after["accepted"][0] > 0.2


def test_the_command_prints_chances_by_position(tmp_path: Path):
    path = tmp_path / "some.text.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps(REPEATED) + "\n")
    done = CliRunner().invoke(command, [str(path), "--siblings", "0"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["trace"] == path.name
    assert found["accepted"][0] == pytest.approx(found["with_drafts"], abs=0.3)
    assert found["accepted"] == sorted(found["accepted"], reverse=True)
