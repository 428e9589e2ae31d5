"""Grammars, held against judges that know nothing of llguidance: jsonschema for schemas, ``re`` for expressions."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import grammar
from disagg.errors import GrammarError
from disagg.grammar import Compiler, Matcher, Vocabulary
from disagg.model import find_model
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer

VOCABULARY = grammar_vocabulary(load_tokenizer(find_model("null")))  # an id below 256 is that byte
COMPILER = Compiler(VOCABULARY)
(END,) = VOCABULARY.ends
MAX_TOKENS = 600


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether the grammar lets ``text`` be written byte by byte, and then end."""
    for byte in text.encode():
        if matcher.is_complete or not matcher.allowed(may_stop=True)[byte]:
            return False
        matcher.read([byte])
    return matcher.is_complete or bool(matcher.allowed(may_stop=True)[END])


def write(text: str, seed: int) -> str:
    """A random text of the grammar. It likes to end, and to close what is open."""
    matcher, rng = COMPILER.matcher(text, [END]), random.Random(seed)
    written = bytearray()
    for _ in range(MAX_TOKENS):
        allowed = np.flatnonzero(matcher.allowed(may_stop=True)).tolist()
        liked = [token for token in allowed if token == END or token in b'"]}']
        token = rng.choice(liked if liked and rng.random() < 0.5 else allowed)
        matcher.read([token])
        if token != END:
            written.append(token)
        if matcher.is_complete:
            return written.decode()
    raise AssertionError(f"no end: {bytes(written)!r}")


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"type": "string", "maxLength": 8},
    {"enum": ["red", "green", 3, None]},
    {"const": {"a": [1, 2]}},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3, "maximum": 12}]},
    {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "integer", "minimum": 0, "maximum": 9}},
     "required": ["v"], "additionalProperties": False},
    {"$ref": "#/$defs/point", "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}},
     "required": ["x"], "additionalProperties": False}}},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
]  # fmt: skip
PATTERNS = ["a+b?", r"\d{3}-\d{4}", "^(yes|no)$", r"[^x]{1,5}", r"\$5\$", r"(?i)hello", "[a-z]{2} [a-d]{2}", "(a|ab)(c|bcd)?"]


@given(st.sampled_from(SCHEMAS), st.integers(0, 10**6))
def test_what_a_schema_allows_is_valid(schema: dict[str, Any], seed: int) -> None:
    """Any text that is written within the mask is JSON, and valid under the schema."""
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    assert list(validator(schema).iter_errors(json.loads(write(grammar.json_schema(schema), seed)))) == []


@given(st.sampled_from(PATTERNS), st.integers(0, 10**6))
def test_what_an_expression_allows_matches_whole(pattern: str, seed: int) -> None:
    """Any text that is written within the mask is matched by the expression from end to end."""
    assert re.fullmatch(pattern, write(grammar.regex(pattern), seed))


@given(st.sampled_from(PATTERNS), st.text(alphabet="abcdxyesno 0123456789-$hHelLo", max_size=9))
def test_what_an_expression_refuses_does_not_match(pattern: str, text: str) -> None:
    """A text is allowed if, and only if, the expression matches it from end to end."""
    assert accepts(COMPILER.matcher(grammar.regex(pattern), [END]), text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (grammar.choice(["yes", "no", 'say "hi"\n', "né"]), ["yes", "no", 'say "hi"\n', "né"], ["", "y", "yesno"]),
        (grammar.choice(["a", "ab"]), ["a", "ab"], ["abb", "b"]),
        (grammar.choice(["\x7f", "\x00\x1f", "\u2028", "/x/ // #", ""]), ["\x7f", "\x00\x1f", "\u2028", "/x/ // #", ""], ["x"]),
        (grammar.either('start: "<" %json {"type": "integer"} | @other', grammar.choice(["a", "b"])), ["<1", "b"], ["1", "<a"]),
        (grammar.either('start: n | @other\nn: "x"', grammar.lark('start: n\nn: "y"')), ["x", "y"], ["xy", ""]),
        (grammar.either('start: "x" | @other', grammar.json_schema({"type": "integer"})), ["x", "12"], ["x1", '"1"']),
        (grammar.lark_or_gbnf('start: "(" start ")" | "x"'), ["x", "((x))"], ["(x", ""]),
        (grammar.lark_or_gbnf('root ::= "<" [a-z]+ ">"'), ["<abc>"], ["<>", "<A>"]),
        (grammar.json_schema({"type": "object"}), ["{}", '{"a": [1,2]}', '{"a":null, "b":{}}'], ["[]", "{", "{\n}", '{"a":  1}']),
    ],
)  # fmt: skip
def test_each_kind_of_grammar(text: str, good: list[str], bad: list[str]) -> None:
    """Choices, rules in two notations, any object: what is a text of them and what is none. JSON stands on one line."""
    assert [accepts(COMPILER.matcher(text, [END]), one) for one in good] == [True] * len(good)
    assert [accepts(COMPILER.matcher(text, [END]), one) for one in bad] == [False] * len(bad)


@given(st.sampled_from(SCHEMAS), st.integers(0, 10**6), st.randoms())
def test_reading_all_tokens_at_once_leads_to_the_same_place(schema: dict[str, Any], seed: int, rng: random.Random) -> None:
    """Whoever begins in the middle of an answer allows what the one before would have allowed."""
    text = grammar.json_schema(schema)
    written = write(text, seed).encode()
    written = written[: rng.randrange(len(written) + 1)]
    one_by_one, at_once = COMPILER.matcher(text, [END]), COMPILER.matcher(text, [END])
    for byte in written:
        one_by_one.allowed(may_stop=True)
        one_by_one.read([byte])
    at_once.read(written)
    assert one_by_one.num_read == at_once.num_read == len(written)
    assert one_by_one.is_complete == at_once.is_complete
    if not at_once.is_complete:
        np.testing.assert_array_equal(one_by_one.allowed(may_stop=True), at_once.allowed(may_stop=True))


def test_an_answer_is_complete_when_nothing_may_follow() -> None:
    """Not where it may end, but where it must; then also by its end of sequence."""
    matcher = COMPILER.matcher(grammar.regex("ab{0,1}"), [END])
    matcher.read(b"a")
    assert (matcher.is_complete, matcher.allowed(may_stop=True)[END]) == (False, True)
    matcher.read(b"b")
    assert matcher.is_complete
    ended = COMPILER.matcher(grammar.regex("ab{0,1}"), [END])
    ended.read([*b"a", END])
    assert ended.is_complete


def ids(mask: grammar.Mask) -> list[int]:
    return np.flatnonzero(mask).tolist()


def test_stop_ids_come_where_the_answer_is_whole() -> None:
    """Every end of sequence that the request knows, and its own control tokens; an ordinary stop token is text."""
    matcher = COMPILER.matcher(grammar.regex("a*|ab"), [257, END, ord("a")])
    assert ids(matcher.allowed(may_stop=True)) == [ord("a"), 257, END]
    matcher.read(b"a")
    assert ids(matcher.allowed(may_stop=True)) == [ord("a"), ord("b"), 257, END]
    assert ids(matcher.allowed(may_stop=False)) == [ord("b")]


def test_min_tokens_yield_to_the_grammar() -> None:
    """Stop ids are kept out while there is anything else; an answer that can only end may end."""
    open_ended = COMPILER.matcher(grammar.regex("a*"), [END])
    assert ids(open_ended.allowed(may_stop=False)) == [ord("a")]
    empty = COMPILER.matcher(grammar.regex("a{0}|b"), [END])
    assert ids(empty.allowed(may_stop=False)) == [ord("b")]
    only_end = COMPILER.matcher(grammar.regex("a{0}"), [END])
    assert ids(only_end.allowed(may_stop=False)) == [END]


def test_without_an_end_of_sequence_an_answer_goes_on_while_it_can() -> None:
    """ignore_eos: no end is offered beside other tokens, and one that nothing else could follow is still there."""
    assert ids(COMPILER.matcher(grammar.regex("a*"), []).allowed(may_stop=True)) == [ord("a")]
    assert ids(COMPILER.matcher(grammar.regex("a{0}"), []).allowed(may_stop=True)) == [END]


BROKEN = {
    "unknown type": (grammar.json_schema({"type": "thing"}), "thing"),
    "unsupported keyword": (grammar.json_schema({"not": {"type": "string"}}), "not"),
    "unknown reference": (grammar.json_schema({"$ref": "#/$defs/x"}), "x"),
    "no value at all": (grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), ""),
    "open bracket": (grammar.regex("[a"), ""),
    "look-ahead": (grammar.regex("(?=a)b"), "look-around"),
    "unknown rule": (grammar.lark("start: nothing"), "nothing"),
    "no rules": (grammar.lark("!!"), ""),
    "no end": (grammar.lark('start: "a" start'), "Too many items"),
    "nothing but itself": (grammar.json_schema({"$ref": "#"}), "nothing can follow"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_grammar_says_what_is_wrong(name: str) -> None:
    """One line that names the fault, for whoever compiles it."""
    text, fault = BROKEN[name]
    with pytest.raises(GrammarError) as caught:
        COMPILER.check(text)
    assert fault in str(caught.value)
    assert 0 < len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def write_first(matcher: Matcher, num_tokens: int) -> None:
    for _ in range(num_tokens):
        matcher.read([int(matcher.allowed(may_stop=True).argmax())])


def test_a_step_that_gets_too_complex_is_an_error() -> None:
    """What compiles may still grow beyond all bounds while it is followed: that ends it."""
    matcher = COMPILER.matcher(grammar.regex("((((a{1,200}){1,200}){1,200}){1,200}){1,200}"), [END])
    with pytest.raises(GrammarError, match=r"after \d+ tokens"):
        write_first(matcher, 100)


def test_rules_that_read_a_text_in_ever_more_ways_are_an_error() -> None:
    """Their steps take longer with every token, and every stream of the worker waits for them: that ends it early."""
    tokens = ["".join(letters) for size in range(1, 6) for letters in itertools.product("ab", repeat=size)]
    compiler = Compiler(Vocabulary(tokens=[*(token.encode() for token in tokens), b"<end>"], special=frozenset([62]), ends=(62,)))
    matcher = compiler.matcher(grammar.lark('start: s\ns: s s | "a" | "b" | "aa" | "ab"'), [62])
    with pytest.raises(GrammarError, match="Too many items"):
        write_first(matcher, 200)


def test_a_wide_schema_is_within_the_limits() -> None:
    """Five hundred optional properties, in their order, with any of them left out."""
    schema = {
        "type": "object",
        "properties": {f"p{index}": {"type": "integer"} for index in range(500)},
        "additionalProperties": False,
    }
    text = json.dumps({f"p{index}": index for index in range(0, 500, 7)})
    assert accepts(COMPILER.matcher(grammar.json_schema(schema), [END]), text)


def test_ids_beyond_the_models_are_no_tokens() -> None:
    """A tokenizer may know more ids than the model has logits for: what only those could write cannot be written."""
    tokenizer = load_tokenizer(find_model("null"))
    compiler = Compiler(grammar_vocabulary(tokenizer, 100))
    assert compiler.matcher(grammar.regex("[a-z]"), [END]).allowed(may_stop=True).tolist()[97:] == [True] * 3
    with pytest.raises(GrammarError, match="nothing can follow"):
        compiler.check(grammar.regex("z"))


def test_a_forgotten_grammar_is_compiled_again() -> None:
    """Its matchers go on; a new one begins at the beginning."""
    text = grammar.regex("abc")
    first = COMPILER.matcher(text, [END])
    first.read(b"a")
    COMPILER.forget(text)
    second = COMPILER.matcher(text, [END])
    assert (ids(first.allowed(may_stop=True)), ids(second.allowed(may_stop=True))) == ([ord("b")], [ord("a")])
