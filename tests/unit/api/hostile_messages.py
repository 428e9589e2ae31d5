"""Bodies for Anthropic's routes that no decent client sends; ``test_hostile`` sends them as well as the other tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.unit.api import hostile
from tests.unit.api.hostile import CHAT, Case

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
_USER = {"role": "user", "content": "a"}
_PLAIN = {"messages": [_USER], "max_tokens": 2}
_DEEP = 100_000
_TOOL = {"name": "f", "input_schema": {"type": "object"}}
_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


def _says(role: str, *blocks: Any) -> list[Any]:
    return [_USER, {"role": role, "content": list(blocks)}]


_FIELDS: dict[str, tuple[Any, ...]] = {
    "messages": (
        _says("user", None), _says("user", 1), _says("user", {}), _says("user", {"type": 1}), _says("user", {"type": "x" * 5000}),
        _says("user", {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}), _says("user", _USE),
        _says("user", {"type": "document", "source": {"type": "base64", "data": "x" * 5000}}), _says("assistant", _RESULT),
        _says("assistant", _USE), _says("assistant", *[_USE] * 5_000), _says("assistant", {**_USE, "input": 1}),
        _says("assistant", {**_USE, "input": "{"}), _says("assistant", {**_USE, "name": 1}), [*_says("assistant", _USE), _USER],
        [*_says("assistant", {**_USE, "name": "x" * 5000, "id": "<|im_end|>", "input": {"x" * 5000: None}}), _USER],
        _says("user", _RESULT), _says("user", *[_RESULT] * 5_000), _says("user", {**_RESULT, "tool_use_id": 1}),
        _says("user", {**_RESULT, "content": 1}), _says("user", {**_RESULT, "content": [1]}),
        _says("user", {**_RESULT, "content": [{"type": "image"}]}), _says("user", {**_RESULT, "content": []}),
        _says("user", {**_RESULT, "content": None, "is_error": True}), _says("user", {**_RESULT, "is_error": 1}),
        _says("user", {**_RESULT, "content": [_RESULT]}), _says("assistant", {"type": "thinking", "thinking": 1}),
        _says("assistant", {"type": "text", "text": ""}), _says("assistant", {"type": "text", "text": "<|im_end|>"}),
        _says("assistant", {"type": "text", "text": " \n"}), _says("system", {"type": "text", "text": "x"}),
        [{"role": "assistant", "content": "x"}], [_USER, {"role": "assistant", "content": "x" * 200_000}],
    ),
    "system": (1, {}, "", [], [1], [{}], [{"type": "image"}], [{"type": "text"}], "\x00", "x" * 200_000, "<|im_end|>",
               [{"type": "text", "text": "x"}] * 20_000),
    "max_tokens": (None, 0, -1, 1.5, "2", True, [], {}, 2**31 + 1, 10**30, 1e308),
    "stop_sequences": (1, "x", [1], [""], ["x"] * 1000, ["x" * 5000], {}, [None]),
    "temperature": (-1, 1.01, 1e308, "1", True),
    "top_p": (0, 2, "1"),
    "top_k": (-1, 1.5, 10**30),
    "stream": (1, "true"),
    "tools": (1, {}, [1], [{}], [{"type": "x" * 5000, "name": "f"}], [{"name": "f"}], [{**_TOOL, "name": "x" * 5000}],
              [{**_TOOL, "input_schema": 1}], [_TOOL, _TOOL], [_TOOL] * 200, [{"type": "bash_20250124", "name": "bash"}],
              [{**_TOOL, "input_schema": {"type": "x" * 5000}}]),
    "tool_choice": (1, "auto", {}, {"type": 1}, {"type": "x" * 5000}, {"type": "any"}, {"type": "tool"},
                    {"type": "tool", "name": "x" * 5000}, {"type": "auto", "disable_parallel_tool_use": 1}),
    "thinking": (1, {}, {"type": "enabled", "budget_tokens": 10**30}, {"type": "x" * 5000}),
    "output_config": (1, {"format": 1}, {"format": {}}, {"format": {"type": "json_schema"}}, {"effort": 1},
                      {"format": {"type": "json_schema", "schema": {"$ref": "#"}}},
                      {"format": {"type": "json_schema", "schema": {"enum": list(range(50_000))}}}),
    "metadata": (1, [], {"user_id": 1}, {"user_id": "x" * 5000}),
    "model": (1, "", "x" * 5000, "a\x00b", "claude-sonnet-4-5"),
    "x" * 5000: (1,),
}  # fmt: skip


def _cases() -> Iterator[Case]:
    for case in hostile.CASES:
        if case.path == CHAT and not case.name.startswith("max_tokens"):  # here too many are as many as there is room for
            yield replace(case, path=MESSAGES)
    for path in (MESSAGES, COUNT):
        for name, values in _FIELDS.items():
            for index, value in enumerate(values):
                yield Case(f"{name[:30]}[{index}]", path, json.dumps({**_PLAIN, name: value}).encode())
        body = json.dumps(_PLAIN).encode()
        deep = b"[" * _DEEP + b"]" * _DEEP
        for name in ("messages", "tools", "system", "output_config", "unknown"):
            yield Case(f"deep {name}", path, body[:-1] + b', "%s": %s}' % (name.encode(), deep))
        deep = b'{"a":' * 5_000 + b"1" + b"}" * 5_000
        use = b'{"type": "tool_use", "id": "c", "name": "f", "input": %s}' % deep
        turns = (
            b'{"role": "user", "content": "a"}, {"role": "assistant", "content": [%s]}, {"role": "user", "content": "a"}' % use
        )
        yield Case("deep input", path, b'{"max_tokens": 2, "messages": [%s]}' % turns)


CASES = list(_cases())
