"""A tool call as a JSON object, ``{"name": "f", "arguments": {"x": 1}}``, read character by character while it is written."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Any

SPACES = " \t\r\n"
_ENDS_WORD = SPACES + ",}]:"
_ARGUMENTS = ("arguments", "parameters")


class _Expects(Enum):
    BEGIN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_END = auto()  # within a key or a value
    COMMA_OR_END = auto()


class CallObject:
    """Reads one JSON object. ``name`` is known before anything of the arguments is told.

    ``names``: no other name will do; None = any. With ``name`` given, the object is the arguments and nothing else. They are
    told as the model wrote them, but for line breaks and the like within strings, which JSON wants escaped.
    """

    def __init__(self, names: Collection[str] | None, *, name: str | None = None) -> None:
        self.name = name
        self.is_complete = False
        self.is_broken = False  # what was fed last cannot stand where it does, or this is no call
        self._names = names
        self._is_bare = name is not None
        self._expects = _Expects.BEGIN if name is None else _Expects.VALUE
        self._key: Any = None if name is None else _ARGUMENTS[0]  # of the value that is read
        self._is_key = False  # what is read is a key itself
        self._is_streamed = False  # what is read are the arguments
        self._value: list[str] = []  # its characters; of streamed arguments, which can be long, only the first
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._has_arguments = False
        self._arguments: list[str] = []  # not told yet

    def take(self) -> str:
        """What is new of the arguments."""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def feed(self, char: str) -> None:
        if self._expects is _Expects.VALUE_END:
            self._feed_value(char)
        elif char in SPACES:
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
        self._expects, self._is_key, self._value = _Expects.VALUE_END, is_key, []
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
        if self._is_streamed:
            is_control = self._is_in_string and char < " "
            self._arguments.append(json.dumps(char)[1:-1] if is_control else char)
        if not self._is_streamed or not self._value:
            self._value.append(char)
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
        if char in '"}]' and not self._is_in_string and not self._depth:
            self._end_value()

    def _end_value(self) -> None:
        value, is_arguments = "".join(self._value), self._key in _ARGUMENTS and not self._has_arguments
        self._expects = _Expects.COLON if self._is_key else _Expects.COMMA_OR_END
        self.is_complete = self._is_bare
        try:
            if self._is_key:
                self._key = _read(value)
            elif self._key == "name":
                self.name = self._checked(_read(value))
            elif is_arguments:
                self._has_arguments = True
                if not self._is_streamed:
                    self._arguments.append(_arguments_text(_read(value)))
        except (ValueError, RecursionError):
            self.is_broken = True

    def _checked(self, name: Any) -> str:
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            raise ValueError("not the name of a tool")
        name.encode()  # half of a surrogate pair, which JSON can escape, is no text: ValueError
        return name

    def _end(self) -> None:
        self.is_complete = self.name is not None
        self.is_broken = not self.is_complete
        if not self._has_arguments:
            self._arguments.append("{}")


def _read(text: str) -> Any:
    """Raises ValueError or RecursionError."""
    return json.loads(text, strict=False, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _arguments_text(value: Any) -> str:
    """Arguments that are not written as an object: some models write its text as a string, or null or nothing for none."""
    if value in (None, ""):
        return "{}"
    if isinstance(value, str):
        try:
            value.encode()
            if isinstance(_read(value), dict):
                return value
        except (ValueError, RecursionError):
            pass  # no object's text: a string like any other
    return json.dumps(value)
