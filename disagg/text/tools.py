"""Tool calls in a model's text: how each family of models writes them, read while the text still streams.

    text … <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>  ─▶  content "text …", call 0: f, {"x" …, : 1}
    text … [TOOL_CALLS]f[ARGS]{"x": 1}                                  ─▶  the same

A call is told as soon as its name is known; its arguments follow as they come, as the model wrote them. What begins like a
call and turns out to be none is content, all of it. Pure: what is read does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from disagg import grammar
from disagg.text.call_object import SPACES, CallObject
from disagg.text.tokenizer import Tokenizer

_BETWEEN = SPACES + ",;[]"  # objects of one opening
_NAME = "[a-zA-Z0-9_.-]{1,64}"  # as the API takes them
_HEAD = re.compile(rf"({_NAME})\s*(?:\[CALL_ID\]\s*\w{{0,32}}\s*)?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 160
_MOST_SPACES = 256
_ID = "{id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One family's way to write calls. A call is an object with a name and arguments; several may stand in one list.

    Or, where ``has_heads``, its name stands before its arguments' object. ``opening`` begins calls anywhere in the text; "" =
    they are the whole text, which then begins with a brace. The rules that force calls write them as ``call`` says: what comes
    before the name, between it and the arguments, and after them.
    """

    name: str
    opening: str
    closing: str = ""
    call: tuple[str, str, str]
    separator: str = ""  # between two of them
    around: tuple[str, str] = ("", "")  # all of them together
    has_heads: bool = False
    further_markers: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_length: int = 24  # of the digits behind it

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that can be control tokens, and still must be seen."""
        return tuple(text for text in (self.opening, self.closing, *self.further_markers) if text)


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    separator="\n",
)
LLAMA3 = ToolFormat(name="llama3", opening="", call=('{"name": "', '", "parameters": ', "}"), separator="; ")
MISTRAL = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    call=('{"name": "', '", "arguments": ', "}"),
    separator=", ",
    around=("[TOOL_CALLS][", "]"),
    has_heads=True,
    further_markers=("[CALL_ID]", "[ARGS]"),
    id_prefix="",  # its templates take nine letters and digits, and raise at any other id
    id_length=9,
)
MISTRAL_V13 = replace(MISTRAL, call=("[TOOL_CALLS]", "[ARGS]", ""), separator="", around=("", ""))
MISTRAL_V11 = replace(MISTRAL_V13, call=("[TOOL_CALLS]", f"[CALL_ID]{_ID}[ARGS]", ""))
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
_SIGNS = {"<tool_call>": HERMES, "[TOOL_CALLS]": MISTRAL, "<|python_tag|>": LLAMA3, "ipython": LLAMA3}
_SIGNS_OF_OTHERS = ("<function=", "<arg_key>")  # Qwen3-Coder and GLM: XML between the same <tool_call> tags


def tool_format(setting: str, template_source: str | None) -> ToolFormat | None:
    """The format that ``setting`` names; for ``auto`` the one that the model's chat template shows. None: there is none.

    Which generation of Mistral's formats it is the template shows in any case.
    """
    source = template_source or ""
    if setting != "auto":
        form = FORMATS.get(setting)
    elif any(sign in source for sign in _SIGNS_OF_OTHERS):
        form = None
    else:
        form = next((form for sign, form in _SIGNS.items() if sign in source), None)
    if form is MISTRAL and "[ARGS]" in source:
        return MISTRAL_V11 if "[CALL_ID]" in source else MISTRAL_V13
    return form


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


def calls_grammar(
    support: ToolSupport, tools: Mapping[str, dict[str, Any]], *, may_be_many: bool, other: str | None = None
) -> str:
    """An answer that is one call, or one or more, of ``tools``: their names, and the schemas of their arguments.

    Or what ``other``, a grammar of its own, allows.
    """
    form, marker_ids = support.form, support.marker_ids

    def spelled(text: str) -> str:
        parts = re.split("(" + "|".join(map(re.escape, (*form.markers, _ID))) + ")", text)
        return " ".join(spelled_part(part) for part in parts if part)

    def spelled_part(part: str) -> str:
        if part == _ID:
            return "/[a-zA-Z0-9]{9}/"
        return f"<[{marker_ids[part]}]>" if part in marker_ids else grammar.literal(part)

    rules, names = [], []
    for index, (name, schema) in enumerate(tools.items()):
        before, between, after = form.call
        names.append(f"call{index}")
        rules.append(f"call{index}: {spelled(before + name + between)} arguments{index} {spelled(after)}")
        rules.append(f"arguments{index}: %json {json.dumps(grammar.json_form(schema), ensure_ascii=False)}")
    many = f" ({spelled(form.separator)} call)*" if may_be_many else ""
    begin, end = (spelled(text) for text in form.around)
    start = "start: calls" if other is None else "start: calls | @other"
    text = "\n".join([start, f"calls: {begin} call{many} {end}", f"call: {' | '.join(names)}", *rules])
    return grammar.lark(text) if other is None else grammar.either(text, other)


# --------------------------------------------------------------------------------------------------------- reading


class CallDelta(NamedTuple):
    """Part of call number ``call``: its name, told once and first, and a piece of its arguments' text.

    ``place``: how many characters of the answer's content come before it.
    """

    call: int
    name: str | None
    arguments: str
    place: int


class _At(Enum):
    TEXT = auto()  # content; calls may begin
    BETWEEN = auto()  # after an opening, outside of objects
    HEAD = auto()  # a name, before the object of its arguments
    OBJECT = auto()


class ToolParser:
    """One answer: ``push`` its text, then ``flush``. ``num_told`` calls have a name, ``num_complete`` of them have ended.
    ``num_content`` characters of content have been given.

    ``names``: calls of other tools are content, where nothing but its form tells a call from an answer in JSON.
    ``is_either``: the text is calls or content, not both, so that what begins otherwise holds none.
    """

    def __init__(self, form: ToolFormat, names: Collection[str] = (), *, is_either: bool = False) -> None:
        self.num_told = 0
        self.num_complete = 0
        self.num_content = 0
        self._form = form
        self._names = frozenset(names) if not form.opening else None
        self._at = _At.TEXT
        self._is_either = is_either or not form.opening
        self._may_begin = True  # else the text has begun otherwise
        self._held = ""  # of TEXT: spaces, and what may become an opening; of BETWEEN: what may become a closing
        self._opening = ""  # the last one, with the spaces before it
        self._has_told = False  # a call has been told since, and no content
        self._raw = ""  # read since then
        self._head = ""
        self._object = CallObject(self._names)
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
                case _At.HEAD:
                    text = self._read_head(text)
                case _At.OBJECT:
                    text = self._read_object(text)
        return self._take()

    def flush(self) -> tuple[str, list[CallDelta]]:
        """What was held back: the text has ended. A call that has been told stays one, cut as it is."""
        is_cut_call = self._at is _At.OBJECT and self._object.name is None
        if self._at is _At.TEXT:
            if self._held.strip(SPACES) or not self._has_told:
                self._content.append(self._held)
        elif not self._has_told:
            self._content += [self._opening, self._raw, self._held, self._head]
        elif is_cut_call:
            self._content.append(self._raw)
        self._at, self._held, self._head = _At.TEXT, "", ""
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        content, self._content = "".join(self._content), []
        self.num_content += len(content)
        deltas, self._deltas = self._deltas, []
        return content, deltas

    def _read_text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        opening = self._form.opening
        if self._is_either:
            begun = text.lstrip(SPACES) if self._may_begin else ""
            sign = opening or "{"
            if begun.startswith(sign):
                self._give(text[: len(text) - len(begun)])
                return self._begin(begun[len(opening) :])
            if sign.startswith(begun) and self._may_begin:
                self._give(text, num_kept=len(begun))
                return ""
            self._may_begin, opening = False, ""
        elif (start := text.find(opening)) >= 0:
            self._give(text[:start])
            return self._begin(text[start + len(opening) :])
        self._give(text, num_kept=_overlap(text, opening))
        return ""

    def _give(self, text: str, *, num_kept: int = 0) -> None:
        """Content, but for its last ``num_kept`` characters and the spaces before them: they are none before a call.

        Unless there are more of them than anybody writes before one. Models get stuck in spaces.
        """
        kept_from = len(text) - num_kept
        end = max(len(text[:kept_from].rstrip(SPACES)), kept_from - _MOST_SPACES)
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
                self._at, self._object = _At.OBJECT, CallObject(self._names)
                return text[index:]
            if self._form.has_heads and not self._has_told and "[" not in self._raw and read not in _BETWEEN:
                self._at = _At.HEAD
                return text[index:]
            self._raw += read
            if read == closing and self._has_told:
                self._at = _At.TEXT
                return text[index + 1 :]
            if read not in _BETWEEN or len(self._raw) > _MOST_SPACES:
                return self._fail(text[index + 1 :])
        return ""

    def _read_head(self, text: str) -> str:
        end = text.find("{")
        self._head += text if end < 0 else text[:end]
        if end < 0 and len(self._head) <= _LONGEST_HEAD:
            return ""
        head, self._head = self._head, ""
        self._raw += head
        if end < 0 or len(head) > _LONGEST_HEAD or (match := _HEAD.fullmatch(head)) is None:
            return self._fail("" if end < 0 else text[end:])
        self._at, self._object, self._raw, self._has_told = _At.OBJECT, CallObject(None, name=match[1]), "", True
        self._tell(match[1], "")
        return text[end:]

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
                self._tell(None if was_told else call.name, arguments)
            self._raw = text[num_read - 1 : num_read]  # what broke it, if it is broken
        if call.is_broken:
            self.num_complete = self.num_told
            return self._fail(rest)
        if call.is_complete:
            self.num_complete, self._raw, self._at = self.num_told, "", _At.BETWEEN
        return rest

    def _tell(self, name: str | None, arguments: str) -> None:
        self.num_told += name is not None
        place = self.num_content + sum(map(len, self._content))
        self._deltas.append(CallDelta(self.num_told - 1, name, arguments, place))

    def _fail(self, rest: str) -> str:
        """What has been read since the opening, or since the last call that was told, is text, and may hold another opening."""
        if not self._has_told:
            self._content.append(self._opening)
            self._may_begin = False
        self._at = _At.TEXT
        return self._raw + rest


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-size:])), 0)
