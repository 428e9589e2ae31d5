"""Tool calls in a model's text: how each family of models writes them, read while the text still streams.

    text … <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>  ─▶  content "text …", call 0: f, {"x" …, : 1}

A call is told as soon as its name is known; its arguments follow as they come, as the model wrote them. What begins like a
call and turns out to be none is content, all of it. Pure: what is read does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from disagg import grammar
from disagg.text.tokenizer import Tokenizer

_SPACES = " \t\r\n"
_BETWEEN = _SPACES + ",;[]"  # objects of one opening
_ENDS_WORD = _SPACES + ",}]:"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One family's way to write calls. A call is an object with a name and arguments; several may stand in one list.

    ``opening`` begins calls anywhere in the text; "" = they are the whole text, which then begins with a brace.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str
    template: str  # of one call in the rules that force calls: {call} is its object
    separator: str  # between two of them
    around: tuple[str, str] = ("", "")  # all of them together
    id_prefix: str = "call_"
    id_length: int = 24  # of the digits behind it

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that can be control tokens, and still must be seen."""
        return tuple(text for text in (self.opening, self.closing) if text)


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    arguments_key="arguments",
    template="<tool_call>\n{call}\n</tool_call>",
    separator="\n",
)
LLAMA3 = ToolFormat(name="llama3", opening="", closing="", arguments_key="parameters", template="{call}", separator="; ")
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    closing="",
    arguments_key="arguments",
    template="{call}",
    separator=", ",
    around=("[TOOL_CALLS][", "]"),
    id_prefix="",  # its templates take nine letters and digits, and raise at any other id
    id_length=9,
)
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}


def tool_format(setting: str, template_source: str | None) -> ToolFormat | None:
    """The format that ``setting`` names; for ``auto`` the one that the model's chat template shows. None: there is none."""
    if setting != "auto":
        return FORMATS.get(setting)
    source = template_source or ""
    signs = {"<tool_call>": HERMES, "[TOOL_CALLS]": MISTRAL, "<|python_tag|>": LLAMA3, "ipython": LLAMA3}
    return next((form for sign, form in signs.items() if sign in source), None)


def takes_tools(template_source: str | None) -> bool:
    """Whether a chat template reads the variable ``tools``."""
    return re.search(r"\{[%{][^}]*\btools\b", template_source or "") is not None


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How the served model calls tools. ``marker_ids``: the markers that are control tokens to it."""

    form: ToolFormat
    marker_ids: Mapping[str, int]


def tool_support(setting: str, template_source: str | None, tokenizer: Tokenizer) -> ToolSupport | None:
    """``setting``: a format's name, ``none``, or ``auto``: what the chat template shows. None: calls are not read."""
    form = tool_format(setting, template_source)
    if form is None:
        return None
    special = [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)]
    names = {tokenizer.token_text(token): token for token in special}
    return ToolSupport(form, {name: names[name] for name in form.markers if name in names})


def calls_grammar(support: ToolSupport, tools: Mapping[str, dict[str, Any]], *, may_be_many: bool) -> str:
    """An answer that is one call, or one or more, of ``tools``: their names, and the schemas of their arguments."""
    form, marker_ids = support.form, support.marker_ids

    def spelled(text: str) -> str:
        parts = re.split("(" + "|".join(map(re.escape, form.markers)) + ")", text) if form.markers else [text]
        return " ".join(f"<[{marker_ids[part]}]>" if part in marker_ids else grammar.literal(part) for part in parts if part)

    rules, names = [], []
    for index, (name, schema) in enumerate(tools.items()):
        head = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
        before, after = form.template.split("{call}")
        names.append(f"call{index}")
        rules.append(f"call{index}: {spelled(before + head)} arguments{index} {spelled('}' + after)}")
        rules.append(f"arguments{index}: %json {json.dumps(grammar.json_form(schema), ensure_ascii=False)}")
    many = f" ({grammar.literal(form.separator)} call)*" if may_be_many else ""
    begin, end = (spelled(text) for text in form.around)
    return grammar.lark("\n".join([f"start: {begin} call{many} {end}", f"call: {' | '.join(names)}", *rules]))


# --------------------------------------------------------------------------------------------------------- reading


class CallDelta(NamedTuple):
    """Part of call number ``call``: its name, told once and first, and a piece of its arguments' text."""

    call: int
    name: str | None
    arguments: str


class _At(Enum):
    TEXT = auto()  # content; calls may begin
    BETWEEN = auto()  # after an opening, outside of objects
    OBJECT = auto()


class ToolParser:
    """One answer: ``push`` its text, then ``flush``. ``num_told`` calls have a name, ``num_complete`` of them have ended.

    ``names``: calls of other tools are content, where nothing but its form tells a call from an answer in JSON.
    """

    def __init__(self, form: ToolFormat, names: Collection[str] = ()) -> None:
        self.num_told = 0
        self.num_complete = 0
        self._form = form
        self._names = frozenset(names) if not form.opening else None
        self._at = _At.TEXT
        self._may_begin = True  # without an opening, calls are the whole text
        self._held = ""  # of TEXT: spaces, and what may become an opening; of BETWEEN: what may become a closing
        self._opening = ""  # the last one, with the spaces before it
        self._has_told = False  # a call has been told since, and no content
        self._raw = ""  # read since then
        self._object = _CallObject(self._names)
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """``(content, what is new of the calls)``."""
        while text:
            match self._at:
                case _At.TEXT:
                    text = self._read_text(text)
                case _At.BETWEEN:
                    text = self._read_between(text)
                case _At.OBJECT:
                    text = self._read_object(text)
        return self._take()

    def flush(self) -> tuple[str, list[CallDelta]]:
        """What was held back: the text has ended. A call that has been told stays one, cut as it is."""
        is_cut_call = self._at is _At.OBJECT and self._object.name is None
        if self._at is _At.TEXT:
            if self._held.strip(_SPACES) or not self._has_told:
                self._content.append(self._held)
        elif not self._has_told:
            self._content += [self._opening, self._raw, self._held]
        elif is_cut_call:
            self._content.append(self._raw)
        self._at, self._held = _At.TEXT, ""
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        content, self._content = "".join(self._content), []
        deltas, self._deltas = self._deltas, []
        return content, deltas

    def _read_text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        opening = self._form.opening
        start = text.find(opening) if opening else -1
        if start >= 0:
            self._give(text[:start])
            return self._begin(text[start + len(opening) :])
        if not opening and self._may_begin and (begun := text.lstrip(_SPACES)):
            self._may_begin = False
            if begun[0] == "{":
                self._give(text[: len(text) - len(begun)])
                return self._begin(begun)
        self._give(text, num_kept=_overlap(text, opening))
        return ""

    def _give(self, text: str, *, num_kept: int = 0) -> None:
        """Content, but for its last ``num_kept`` characters and the spaces before them: they are none before a call."""
        end = len(text[: len(text) - num_kept].rstrip(_SPACES))
        self._content.append(text[:end])
        self._has_told = self._has_told and not end
        self._held = text[end:]

    def _begin(self, rest: str) -> str:
        self._at, self._opening = _At.BETWEEN, self._held + self._form.opening
        self._held = self._raw = ""
        self._has_told = False
        return rest

    def _read_between(self, text: str) -> str:
        closing = self._form.closing
        for index, char in enumerate(text):
            self._held += char
            if closing.startswith(self._held) and self._held != closing:
                continue
            read, self._held = self._held, ""
            if read == "{":
                self._at, self._object = _At.OBJECT, _CallObject(self._names)
                return text[index:]
            self._raw += read
            if read == closing and self._has_told:
                self._at = _At.TEXT
                return text[index + 1 :]
            if read not in _BETWEEN:
                return self._fail(text[index + 1 :])
        return ""

    def _read_object(self, text: str) -> str:
        call, was_told = self._object, self._object.name is not None
        num_read = 0
        while num_read < len(text) and not (call.is_complete or call.is_broken):
            call.feed(text[num_read])
            num_read += 1
        self._raw += text[:num_read]
        rest = text[num_read:]
        if call.name is not None:
            self._has_told = True
            arguments = call.take()
            if arguments or not was_told:
                self._deltas.append(CallDelta(self.num_told - was_told, None if was_told else call.name, arguments))
            self.num_told += not was_told
            self._raw = text[num_read - 1 : num_read]  # what broke it, if it is broken
        if call.is_broken:
            self.num_complete = self.num_told
            return self._fail(rest)
        if call.is_complete:
            self.num_complete, self._raw, self._at = self.num_told, "", _At.BETWEEN
        return rest

    def _fail(self, rest: str) -> str:
        """What has been read since the opening, or since the last call that was told, is text, and may hold another opening."""
        if not self._has_told:
            self._content.append(self._opening)
        self._at = _At.TEXT
        return self._raw + rest


class _Expects(Enum):
    BEGIN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_END = auto()  # within a key or a value
    COMMA_OR_END = auto()


class _CallObject:
    """Reads one JSON object, character by character. ``name`` is known before anything of the arguments is told.

    ``names``: no other name will do; None = any.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.name: str | None = None
        self.is_complete = False
        self.is_broken = False  # what was fed last cannot stand where it does, or this is no call
        self._names = names
        self._expects = _Expects.BEGIN
        self._key: Any = None  # of the value that is read
        self._is_key = False  # what is read is a key itself
        self._is_streamed = False  # what is read are the arguments
        self._value = ""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._has_arguments = False
        self._arguments = ""  # not told yet

    def take(self) -> str:
        """What is new of the arguments."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def feed(self, char: str) -> None:
        if self._expects is _Expects.VALUE_END:
            self._feed_value(char)
        elif char in _SPACES:
            return
        elif self._expects is _Expects.VALUE and char not in _ENDS_WORD:
            self._begin_value(char, is_key=False)
        elif char == '"' and self._expects in (_Expects.KEY, _Expects.KEY_OR_END):
            self._begin_value(char, is_key=True)
        elif char == "{" and self._expects is _Expects.BEGIN:
            self._expects = _Expects.KEY_OR_END
        elif char == ":" and self._expects is _Expects.COLON:
            self._expects = _Expects.VALUE
        elif char == "," and self._expects is _Expects.COMMA_OR_END:
            self._expects = _Expects.KEY
        elif char == "}" and self._expects in (_Expects.COMMA_OR_END, _Expects.KEY_OR_END):
            self._end()
        else:
            self.is_broken = True

    def _begin_value(self, char: str, *, is_key: bool) -> None:
        self._expects, self._is_key, self._value = _Expects.VALUE_END, is_key, ""
        self._is_streamed = char == "{" and not is_key and self._key in _ARGUMENTS and not self._has_arguments
        self._feed_value(char)

    def _feed_value(self, char: str) -> None:
        """One character of a key or value; or the first behind a number or a word, which nothing else ends."""
        is_word = self._value and self._value[0] not in '"{['
        if is_word and char in _ENDS_WORD:
            self._end_value()
            if not self.is_broken:
                self.feed(char)
            return
        self._value += char
        if self._is_streamed:
            self._arguments += char
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
        elif char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if char in '"}]' and not self._is_in_string and not self._depth and len(self._value) > 1:
            self._end_value()

    def _end_value(self) -> None:
        value, is_arguments = self._value, self._key in _ARGUMENTS and not self._has_arguments
        self._expects = _Expects.COLON if self._is_key else _Expects.COMMA_OR_END
        try:
            if self._is_key:
                self._key = json.loads(value, strict=False)
            elif self._key == "name":
                self.name = self._checked(json.loads(value, strict=False))
            elif is_arguments:
                self._has_arguments = True
                if not self._is_streamed:
                    self._arguments += _object_text(json.loads(value, strict=False), value)
        except ValueError:
            self.is_broken = True

    def _checked(self, name: Any) -> str:
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            raise ValueError("not the name of a tool")
        return name

    def _end(self) -> None:
        self.is_complete = self.name is not None
        self.is_broken = not self.is_complete
        if not self._has_arguments:
            self._arguments = "{}"


def _object_text(value: Any, text: str) -> str:
    """Arguments that are no object: some models write the object's text as a string, or null for none."""
    if value is None:
        return "{}"
    return value if isinstance(value, str) else text


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)
