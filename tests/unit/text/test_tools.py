"""Tool calls read from text: what is a call, what is content, and that the cut of the text makes no difference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.text.tools import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    CallDelta,
    ToolFormat,
    ToolParser,
    takes_tools,
    tool_format,
)

NAMES = ("get_weather", "add")
Calls = list[tuple[str, str]]  # names with their arguments' text


def read(form: ToolFormat, *pieces: str, is_either: bool = False) -> tuple[str, Calls]:
    """The content and the calls that ``pieces`` make, put together from the deltas as a client does it."""
    parser = ToolParser(form, NAMES, is_either=is_either)
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
    # As mistral-common writes them since v13, since v11 with the call's id, and as models write them without the mark.
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS]add[CALL_ID]Ab3dEf6hi[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}')]),
    (MISTRAL, 'Sure.\n[TOOL_CALLS] add [ARGS] {"a": {"b": "}["}}[TOOL_CALLS]get_weather[ARGS]{}', "Sure.",
     [("add", '{"a": {"b": "}["}}'), ("get_weather", "{}")]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": "cut', "", [("add", '{"a": "cut')]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1} Done.', " Done.", [("add", '{"a": 1}')]),
    (MISTRAL, "[TOOL_CALLS]add[ARGS", "[TOOL_CALLS]add[ARGS", []),
    (MISTRAL, "[TOOL_CALLS]get_weat", "[TOOL_CALLS]get_weat", []),
    (MISTRAL, "[TOOL_CALLS]not a name[ARGS]{}", "[TOOL_CALLS]not a name[ARGS]{}", []),
    (MISTRAL, "[TOOL_CALLS]add[ARGS][1]", "[TOOL_CALLS]add[ARGS][1]", []),
    (MISTRAL, "[TOOL_CALLS]x [TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]x", [("add", "{}")]),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300 + "{}", "[TOOL_CALLS]" + "x" * 300 + "{}", []),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, '\n {"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {}}', "",
     [("add", "{}"), ("get_weather", "{}")]),
    (LLAMA3, ' {"name": "Ann", "age": 3}', ' {"name": "Ann", "age": 3}', []),
    (LLAMA3, '{"answer": {"name": "add"}} ', '{"answer": {"name": "add"}} ', []),
    (LLAMA3, 'Say {"name": "add", "parameters": {}}', 'Say {"name": "add", "parameters": {}}', []),
    (LLAMA3, "{", "{", []),
    # What the client is given is JSON, though the model wrote none.
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "one\ntwo\t\\n"}}</tool_call>', "",
     [("add", '{"a": "one\\ntwo\\t\\n"}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "no object"}</tool_call>', "", [("add", '"no object"')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": ""}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": ["a\nb"]}</tool_call>', "", [("add", '["a\\nb"]')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', "",
     [("add", '"{\\"a\\": \\"\\ud800\\"}"')]),
    (HERMES, '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), READINGS, ids=[text[:40] for _, text, _, _ in READINGS])
def test_calls_are_told_from_content(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    """Each family's calls, whole, cut, broken and imitated; nothing that is no call is lost. Whole or in single characters."""
    assert read(form, text) == (content, calls)
    assert read(form, *text) == (content, calls)


@pytest.mark.parametrize(
    "text", [" ", "[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1}', "<tool_call>", f"<tool_call>{CALL}</tool_call>", CALL]
)
@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
def test_spaces_without_end_are_not_kept(form: ToolFormat, text: str) -> None:
    """A model that writes nothing else any more: they are given on as they come, for what is held is read again each time."""
    parser = ToolParser(form, NAMES)
    parser.push(text)
    given = sum(len(parser.push(" ")[0]) for _ in range(2000))
    assert given > 1000
    assert len(parser.flush()[0]) < 1000


def test_what_nests_without_end_is_content() -> None:
    """Deeper than any reader of JSON follows: no call, and no error."""
    deep = "[" * 5000 + "]" * 5000
    for text in (f'<tool_call>{{"name": {deep}}}</tool_call>', f'<tool_call>{{"arguments": {deep}, "name": "add"}}</tool_call>'):
        assert read(HERMES, text) == (text, [])


EITHER: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "", [("add", ARGUMENTS)] * 2),
    (HERMES, f"\n<tool_call>{CALL}", "", [("add", ARGUMENTS)]),
    (HERMES, f'{{"a": "<tool_call>"}}<tool_call>{CALL}', f'{{"a": "<tool_call>"}}<tool_call>{CALL}', []),
    (HERMES, "<tool", "<tool", []),
    (HERMES, " \n", " \n", []),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]add[ARGS]{}", "", [("add", "{}")] * 2),
    (MISTRAL, "[1, 2][TOOL_CALLS]add[ARGS]{}", "[1, 2][TOOL_CALLS]add[ARGS]{}", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), EITHER, ids=[text[:40] for _, text, _, _ in EITHER])
def test_where_calls_are_the_whole_answer_they_begin_it(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    """An answer that is calls or content, not both: what begins otherwise is content, whatever stands in it."""
    assert read(form, text, is_either=True) == (content, calls)
    assert read(form, *text, is_either=True) == (content, calls)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "add", ', '"arguments": ', '"parameters": {"x": "y"}}', CALL, "{",
    "}", "[", "]", ",", ";", '"', "\\", ":", " ", "\n", "null", "1", "text", "<", "</", "é", "add", "[ARGS]", "[CALL_ID]",
    "[TOOL", " " * 300,
]  # fmt: skip


@given(st.sampled_from([HERMES, MISTRAL, LLAMA3]), st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.booleans(), st.randoms())
def test_any_cut_of_the_text_reads_the_same(form: ToolFormat, fragments: list[str], is_either: bool, rng: Any) -> None:
    """However the text is cut, content and calls are those of the whole text."""
    text = "".join(fragments)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, *pieces, is_either=is_either) == read(form, text, is_either=is_either)


def text_and_names(form: ToolFormat, *pieces: str) -> str:
    """The content with the calls' names where the calls say that they stand in it."""
    parser = ToolParser(form, NAMES)
    content, marks = "", []
    for new, deltas in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        marks += [(delta.place, delta.name) for delta in deltas if delta.name is not None]
        content += new
    for place, name in reversed(marks):
        content = f"{content[:place]}[{name}]{content[place:]}"
    return content


def test_a_call_knows_its_place_in_the_content() -> None:
    """Text before, between and behind calls: each call tells how much of it comes first, however the text is cut."""
    text = f"One. <tool_call>{CALL}</tool_call> Two.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> Three."
    assert text_and_names(HERMES, text) == text_and_names(HERMES, *text) == "One.[add] Two.[add][add] Three."


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from([HERMES, MISTRAL, MISTRAL_V11, MISTRAL_V13, LLAMA3]),
    st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), json_values, max_size=3)), min_size=1, max_size=3),
    st.sampled_from([None, 2]),
)
def test_what_a_model_writes_well_is_read_back(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], indent: Any) -> None:
    """Calls written in the format's own way come back with the same names and arguments, in order."""
    before, between, after = (part.replace("{id}", "Ab3dEf6hi") for part in form.call)
    each = [before + name + between + json.dumps(arguments, indent=indent) + after for name, arguments in calls]
    written = form.separator.join(each).join(form.around)
    content, found = read(form, written)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_stream_while_they_are_written() -> None:
    """The name is told before its arguments begin, and every piece of them at once: a client need not wait for the end."""
    parser = ToolParser(HERMES)
    told = [parser.push(piece)[1] for piece in ('<tool_call>{"name": "add"', ', "arguments": {"a"', ": 1", "}}", "</tool_call>")]
    assert told == [[(0, "add", "", 0)], [(0, None, '{"a"', 0)], [(0, None, ": 1", 0)], [(0, None, "}", 0)], []]
    assert parser.num_complete == 1


@pytest.mark.parametrize(
    ("setting", "source", "expected"),
    [
        ("auto", "{% if tools %}<tool_call>{% endif %}", HERMES),
        ("auto", "{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("auto", "{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}", MISTRAL_V13),
        ("auto", "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + call.id + '[ARGS]' + arguments }}", MISTRAL_V11),
        ("mistral", "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_V13),
        ("mistral", None, MISTRAL),
        ("auto", "<tool_call>\n<function=name>\n<parameter=x>", None),
        ("auto", "<tool_call>name\n<arg_key>x</arg_key>", None),
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
    assert tool_format(setting, source) == expected


def test_a_template_takes_tools_if_it_reads_them() -> None:
    """The variable must be read by the template's code; the word in its text says nothing."""
    assert takes_tools("{%- if tools is defined %}x{% endif %}")
    assert takes_tools("{{ tools | tojson }}")
    assert not takes_tools("You have no tools. {{ messages }}")
    assert not takes_tools(None)
