"""What models write is read, and they see how their programs ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_runtime.agents.dialogue import (
    GiveAnswer,
    RunProgram,
    opening,
    output_of,
    read_generation,
)
from heddle_runtime.sandbox.runner import SandboxLimits
from tests.runtime.live.played import ran


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 42", GiveAnswer("42")),
        ("So\n  **Answer:** 6 * 7 = 42 \n\nThat is all.", GiveAnswer("6 * 7 = 42")),
        ("Answer: 1\nno, wait\nanswer: **2**", GiveAnswer("2")),
        ("Answer:\n42", None),
        ("The Answer: 42", None),
        ("", None),
        ("```python\nprint(1)\n```", RunProgram("print(1)\n")),
        ("```py\r\nprint(1)\r\n```\r\n \n", RunProgram("print(1)\r\n")),
        ("Answer: 1\n```python\nx\n```\n", RunProgram("x\n")),
        ("```python\nx\n```\nAnswer: 1", GiveAnswer("1")),
        ("```python\nx\n```\nWhat do I see?", None),
        ("```python\nfirst\n```\n```python\nsecond\n```", RunProgram("second\n")),
        ("```python\nx\n```\n```\ntext\n```", None),
        ("```\nprint(1)\n```", None),
        ("````python\nprint(1)\n```", None),
        ("````\nAnswer: 3\n````", GiveAnswer("3")),
        ("```python\nprint('Answer: 3')\n", None),
        ("```\nAnswer: 3\n```", None),
        ("```python print(1)```", None),
        ("    ```Python  example\nx\n  ```", RunProgram("x\n")),
        ("Answer: a" + " " * 200_000 + "b", GiveAnswer("a" + " " * 200_000 + "b")),
        ("```" + " " * 200_000 + "`", None),
        ("```python\ns = '''\n```python\n'''\n```", RunProgram("s = '''\n```python\n'''\n")),
        ("```python\n```", RunProgram("\n")),
    ],
)
def test_a_generation_is_a_program_an_answer_or_neither(text, said):
    assert read_generation(text, whole=True) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: 4", None),
        ("Answer: 42\n", GiveAnswer("42")),
        ("Answer: 42\nand", GiveAnswer("42")),
        ("```python\nx\n```", RunProgram("x\n")),
        ("```python\nx\n``", None),
    ],
)
def test_a_line_that_was_cut_is_no_answer(text, said):
    assert read_generation(text, whole=False) == said


@given(st.text(alphabet=st.sampled_from("`python \nAnswer:*x\r\t")), st.booleans())
def test_anything_can_be_read(text, whole):
    said = read_generation(text, whole=whole)
    if isinstance(said, GiveAnswer):
        assert said.text.strip() == said.text != ""
        assert said.text in text
    elif isinstance(said, RunProgram):
        assert said.source.rstrip("\n") in text
        assert text.rstrip().endswith("```")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ran(stdout="1\n\n"), "1"),
        (ran(), "[no output]"),
        (ran(stdout="a\n", stderr="b\n"), "a\nb"),
        (ran(status="error", exit_code=3, stdout="a"), "a\n[ended with exit code 3]"),
        (ran(status="signal", exit_code=None, signal="SIGSEGV"), "[ended by SIGSEGV]"),
        (ran(status="time", exit_code=None, stdout="x"), "x\n[cut off after 30 s]"),
        (ran(status="cpu", exit_code=None), "[cut off after 10 s of CPU time]"),
        (
            ran(status="output", exit_code=None, stdout="yy"),
            "yy\n[cut off: more than 65,536 bytes of output]",
        ),
    ],
)
def test_a_model_sees_how_its_program_ended(result, shown):
    assert output_of(result, SandboxLimits()) == shown


def test_a_prompt_is_shown_as_it_is():
    text = opening("  Use {braces} and \0 and 100 %.\n")
    assert "Question:\nUse {braces} and \0 and 100 %.\n\nStep 1:\n" in text
    assert "Answer: 42" in text  # how to answer
