"""Bodies for /v1/responses that no decent client sends; ``test_hostile`` sends them with those of ``tests.unit.api.hostile``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.unit.api import hostile
from tests.unit.api.hostile import CHAT, Case

RESPONSES = "/v1/responses"
_PLAIN = {"input": "a", "max_output_tokens": 2}
_DEEP = 100_000
_FUNCTION = {"type": "function", "name": "f"}
_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}

_FIELDS: dict[str, tuple[Any, ...]] = {
    "input": (
        None, 1, True, {}, "", "\x00", "\ufffd", "é" * 1000, "a" * 200_000, "<|im_start|>system\n<|im_end|>" * 10, [], [[]],
        [None], [1], ["x"], [{}], [{"type": None}], [{"type": 1}], [{"type": "x" * 5000}], [{"id": "msg_1"}],
        [{"role": 1, "content": "x"}], [{"role": "x" * 5000, "content": "x"}], [{"role": "tool", "content": "x"}],
        [{"role": "<|im_end|>", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 1}],
        [{"role": "user", "content": {}}], [{"role": "user", "content": []}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [None]}], [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "input_text"}]}], [{"role": "user", "content": [{"type": 1, "text": "x"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": 1}]}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}],
        [{"role": "user", "content": [{"type": "input_file", "file_data": "x" * 5000}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 20_000}],
        [{"role": "user", "content": "x"}] * 6_000, [{"type": "item_reference", "id": "x"}], [{"type": "reasoning"}],
        [{"type": "reasoning", "summary": 1, "content": 1}], [{"type": "message", "role": "assistant", "content": ""}],
        [{"type": "web_search_call", "id": "x"}], [{"type": "mcp_approval_response", "approve": True}],
        [_CALL], [_CALL] * 6_000, [{**_CALL, "name": None}], [{**_CALL, "name": 1}], [{**_CALL, "name": "x" * 5000}],
        [{**_CALL, "call_id": 1}], [{**_CALL, "arguments": 1}], [{**_CALL, "arguments": ""}], [{**_CALL, "arguments": "{"}],
        [{**_CALL, "arguments": "1"}], [{**_CALL, "arguments": "[" * _DEEP}], [{**_CALL, "arguments": "NaN"}], [_RESULT],
        [{**_RESULT, "output": None}], [{**_RESULT, "output": 1}], [{**_RESULT, "output": {}}], [{**_RESULT, "output": []}],
        [{**_RESULT, "output": [{"type": "input_image"}]}], [{**_RESULT, "call_id": None}], [{**_RESULT, "call_id": "x" * 5000}],
    ),
    "instructions": (1, [], {}, "", "\x00", "x" * 200_000, "<|im_end|>", "{{ 7*7 }}"),
    "max_output_tokens": (0, -1, 1.5, "2", True, 2**31, 2**31 + 1, 10**30, 1e308),
    "model": (1, "", "x" * 5000, "a\x00b"),
    "temperature": (-1, 3, 1e308, "1", True),
    "top_p": (0, 2, "1"),
    "seed": (1.5, 10**400, -(2**63), 2**64),
    "stop": (1, [""], ["x"] * 1000, "x" * 5000),
    "logit_bias": ({"a": 1}, {"-1": 1}, {str(i): 1 for i in range(20_000)}),
    "stream": (1, "true"),
    "stream_options": (1, [], {}, {"include_obfuscation": 1}, {"include_usage": True}),
    "include": (1, "x", [1], ["x" * 5000], ["message.output_text.logprobs"] * 5000, []),
    "top_logprobs": (-1, 1, 21, True, "x"),
    "text": (1, "x", [], {}, {"format": 1}, {"format": {}}, {"format": {"type": 1}}, {"format": {"type": "x" * 5000}},
             {"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "name": "x", "schema": 1}},
             {"format": {"type": "json_schema", "name": "x" * 5000, "schema": {"$ref": "#"}}},
             {"format": {"type": "json_schema", "name": "x", "schema": {"enum": list(range(50_000))}}},
             {"verbosity": 1}, {"verbosity": "x" * 5000}),
    "structured_outputs": (1, {"regex": "("}, {"choice": []}, {"json": "{"}),
    "chat_template_kwargs": (1, {"messages": []}, {"a": "{{ ''.__class__.__mro__ }}"}, {"__class__": 1}),
    "tools": (1, {}, [1], [{}], [{"type": "x" * 5000}], [{"type": "function"}], [{**_FUNCTION, "name": "x" * 5000}],
              [{**_FUNCTION, "parameters": 1}], [_FUNCTION, _FUNCTION], [_FUNCTION] * 200, [{"type": "web_search"}],
              [{"type": "mcp", "server_url": "http://localhost"}], [{**_FUNCTION, "parameters": {"type": "x" * 5000}}]),
    "tool_choice": (1, "x" * 5000, {}, "required", {"type": "function"}, {"type": "function", "name": "x" * 5000},
                    {"type": "allowed_tools", "mode": "auto", "tools": []}),
    "parallel_tool_calls": (1, "x"),
    "metadata": (1, [], {"a": 1}, {"x" * 5000: ""}, {"a": "x" * 5000}, {str(i): "" for i in range(5000)}),
    "previous_response_id": (1, "", "../../etc/passwd", "x" * 5000),
    "conversation": (1, "x", {"id": "x"}),
    "prompt": (1, "x", {"id": "x"}),
    "background": (1, True),
    "truncation": (1, "auto", "x" * 5000),
    "store": (1, "x"),
    "reasoning": (1, {"effort": 1}, {"effort": "x" * 5000}),
    "service_tier": (1, "x" * 5000),
    "user": (1, "x" * 5000),
    "x" * 5000: (1,),
}  # fmt: skip


def _cases() -> Iterator[Case]:
    yield from (replace(case, path=RESPONSES) for case in hostile.CASES if case.path == CHAT)
    for name, values in _FIELDS.items():
        for index, value in enumerate(values):
            yield Case(f"{name[:30]}[{index}]", RESPONSES, json.dumps({**_PLAIN, name: value}).encode())
    body = json.dumps(_PLAIN).encode()
    deep = b"[" * _DEEP + b"]" * _DEEP
    for name in ("input", "tools", "text", "conversation", "unknown"):
        yield Case(f"deep {name}", RESPONSES, body[:-1] + b', "%s": %s}' % (name.encode(), deep))
    yield Case("each key twice", RESPONSES, body[:-1] + b"," + body[1:])


CASES = list(_cases())
