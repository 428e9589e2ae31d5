"""Tool calls read from text: what is a call, what is content, and that the cut of the text makes no difference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.text.tools import HERMES, LLAMA3, MISTRAL, CallDelta, ToolFormat, ToolParser, takes_tools, tool_format

NAMES = ("get_weather", "add")
Calls = list[tuple[str, str]]  # names with their arguments' text


def read(form: ToolFormat, *pieces: str) -> tuple[str, Calls]:
    """The content and the calls that ``pieces`` make, put together from the deltas as a client does it."""
    parser = ToolParser(form, NAMES)
    content, calls = "", []
    for new, deltas in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        content += new
        for delta in deltas:
            add(calls, delta)
    assert parser.num_told == len(calls)
    assert parser.num_complete <= len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def add(calls: list[list[str]], delta: CallDelta) -> None:
    if delta.name is not None:
        assert delta.call == len(calls), "the name comes first, and once"
        calls.append([delta.name, ""])
    calls[delta.call][1] += delta.arguments


CALL = '{"name": "add", "arguments": {"a": [1, {"b": "}]"}], "c": "\\"}"}}'
ARGUMENTS = '{"a": [1, {"b": "}]"}], "c": "\\"}"}'

READINGS: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, "no call at all", "no call at all", []),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("add", ARGUMENTS)]),
    (HERMES, f"I will add.\n\n<tool_call>{CALL}</tool_call>", "I will add.", [("add", ARGUMENTS)]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", [("add", ARGUMENTS)] * 2),
    (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [("add", ARGUMENTS)] * 2),
    (HERMES, f"<tool_call>{CALL}</tool_call> Done. ", " Done. ", [("add", ARGUMENTS)]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "unknown_here"}</tool_call>', "", [("unknown_here", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null, "x": 1.5}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "Zürich \U0001f30d', "", [("add", '{"a": "Zürich \U0001f30d')]),
    (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (HERMES, "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (HERMES, "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    (HERMES, "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
    (HERMES, ' <tool_call>{"name": 3}</tool_call>', ' <tool_call>{"name": 3}</tool_call>', []),
    (HERMES, f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", [("add", ARGUMENTS)]),
    (HERMES, f'<tool_call>{{"a" 1<tool_call>{CALL}</tool_call>', '<tool_call>{"a" 1', [("add", ARGUMENTS)]),
    (HERMES, f"<tool_call>{CALL}</tool_ca", "", [("add", ARGUMENTS)]),
    (HERMES, f"<tool_call>{CALL}</tool_x>", "</tool_x>", [("add", ARGUMENTS)]),
    (HERMES, '<tool_call>{"name": "add" "arguments": {}}</tool_call>', '"arguments": {}}</tool_call>', [("add", "")]),
    (HERMES, "a < b, <tool, <tool_cal", "a < b, <tool, <tool_cal", []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [("add", ARGUMENTS)]),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("add", ARGUMENTS)] * 2),
    (MISTRAL, "a list: [1, 2]", "a list: [1, 2]", []),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, '\n {"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {}}', "",
     [("add", "{}"), ("get_weather", "{}")]),
    (LLAMA3, ' {"name": "Ann", "age": 3}', ' {"name": "Ann", "age": 3}', []),
    (LLAMA3, '{"answer": {"name": "add"}} ', '{"answer": {"name": "add"}} ', []),
    (LLAMA3, 'Say {"name": "add", "parameters": {}}', 'Say {"name": "add", "parameters": {}}', []),
    (LLAMA3, "{", "{", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), READINGS, ids=[text[:40] for _, text, _, _ in READINGS])
def test_calls_are_told_from_content(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    """Each family's calls, whole, cut, broken and imitated; nothing that is no call is lost. Whole or in single characters."""
    assert read(form, text) == (content, calls)
    assert read(form, *text) == (content, calls)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "add", ', '"arguments": ', '"parameters": {"x": "y"}}', CALL, "{",
    "}", "[", "]", ",", ";", '"', "\\", ":", " ", "\n", "null", "1", "text", "<", "</", "é",
]  # fmt: skip


@given(st.sampled_from([HERMES, MISTRAL, LLAMA3]), st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.randoms())
def test_any_cut_of_the_text_reads_the_same(form: ToolFormat, fragments: list[str], rng: Any) -> None:
    """However the text is cut, content and calls are those of the whole text."""
    text = "".join(fragments)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, *pieces) == read(form, text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([HERMES, MISTRAL, LLAMA3]),
    st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), json_values, max_size=3)), min_size=1, max_size=3),
    st.sampled_from([None, 2]),
)
def test_what_a_model_writes_well_is_read_back(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], indent: Any) -> None:
    """Calls written in the format's own way come back with the same names and arguments, in order."""
    objects = [json.dumps({"name": name, form.arguments_key: arguments}, indent=indent) for name, arguments in calls]
    begin, end = form.around
    written = begin + form.separator.join(form.template.replace("{call}", text) for text in objects) + end
    content, found = read(form, written)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_stream_while_they_are_written() -> None:
    """The name is told before its arguments begin, and every piece of them at once: a client need not wait for the end."""
    parser = ToolParser(HERMES)
    told = [parser.push(piece)[1] for piece in ('<tool_call>{"name": "add"', ', "arguments": {"a"', ": 1", "}}", "</tool_call>")]
    assert told == [[(0, "add", "")], [(0, None, '{"a"')], [(0, None, ": 1")], [(0, None, "}")], []]
    assert parser.num_complete == 1


@pytest.mark.parametrize(
    ("setting", "source", "expected"),
    [
        ("auto", "{% if tools %}<tool_call>{% endif %}", HERMES),
        ("auto", "{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("auto", "{% if tools %}<|python_tag|>{% endif %}", LLAMA3),
        ("auto", "{% if tools %}something else{% endif %}", None),
        ("auto", None, None),
        ("none", "<tool_call>", None),
        ("llama3", "<tool_call>", LLAMA3),
    ],
)
def test_the_template_shows_the_format_unless_the_operator_names_it(
    setting: str, source: str | None, expected: ToolFormat | None
) -> None:
    """auto goes by the family's marker in the chat template; a name or none overrules it."""
    assert tool_format(setting, source) is expected


def test_a_template_takes_tools_if_it_reads_them() -> None:
    """The variable must be read by the template's code; the word in its text says nothing."""
    assert takes_tools("{%- if tools is defined %}x{% endif %}")
    assert takes_tools("{{ tools | tojson }}")
    assert not takes_tools("You have no tools. {{ messages }}")
    assert not takes_tools(None)
