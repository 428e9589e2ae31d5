"""Structured answers and tool calls through the real command, as openai-python asks for them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import psutil
import pytest
from pydantic import BaseModel, Field

from tests.process.harness import DEADLINE_S, Server, null_server

ASK: Any = [{"role": "user", "content": "Describe it."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with null_server("--mode", "disagg") as shared:
        yield shared


def checkers(running: Server) -> list[psutil.Process]:
    children = psutil.Process(running.process.pid).children()
    return [child for child in children if "disagg.grammar_process" in child.cmdline()]


class Trip(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_a_pydantic_model_is_parsed(client: openai.OpenAI) -> None:
    """openai's parse(), which sends the model's schema, gets an object of it, from prefill and decode together."""
    answer = client.chat.completions.parse(model="null", messages=ASK, response_format=Trip)
    assert isinstance(answer.choices[0].message.parsed, Trip)
    assert answer.choices[0].finish_reason == "stop"


def test_a_forced_call_streams(client: openai.OpenAI) -> None:
    """Name first, arguments in fragments; whole, they follow the tool's schema; and its answer can be sent back."""
    chunks = list(
        client.chat.completions.create(
            model="null", messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True
        )
    )
    entries = [entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or []]
    assert entries[0].function is not None
    assert (entries[0].function.name, entries[0].type) == ("get_weather", "function")
    fragments = [entry.function.arguments or "" for entry in entries if entry.function is not None]
    assert len(fragments) > 5
    jsonschema.validate(json.loads("".join(fragments)), SCHEMA)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    call = {"id": entries[0].id, "type": "function", "function": {"name": "get_weather", "arguments": "".join(fragments)}}
    history = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": entries[0].id, "content": "fine"},
    ]
    after = client.chat.completions.create(model="null", messages=history, tools=TOOLS, max_tokens=4)
    assert after.choices[0].finish_reason == "length"


def test_a_monstrous_form_is_refused_and_hurts_nobody(running: Server) -> None:
    """One that would compile for minutes is a 400 within seconds; streams run on meanwhile, and good forms pass afterwards."""
    monster = {"allOf": [{"type": "string", "pattern": f".*{index}.*"} for index in range(60)]}
    asked = {"messages": ASK, "max_tokens": 60}
    with ThreadPoolExecutor(1) as threads:
        stream = running.stream("a stream beside it", 200)
        assert stream.next_event() is not None
        started = time.monotonic()
        refused = threads.submit(running.request, "POST", "/v1/chat/completions", {**asked, "guided_json": monster})
        stream.read_to_end()
        stream.close()
        status, answer = refused.result()
    assert (status, answer["error"]["param"]) == (400, "guided_json")
    assert "too long to compile" in answer["error"]["message"]
    assert time.monotonic() - started < 10.0
    status, answer = running.request("POST", "/v1/chat/completions", {**asked, "guided_json": SCHEMA})
    assert status == 200
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
    assert len(checkers(running)) == 1
    running.wait_until_empty(1.0)


def test_the_process_that_tries_forms_may_die(running: Server) -> None:
    """Its death is noticed by the next form, which is refused or passes with the next process; then all is as before."""
    status, _ = running.request("POST", "/v1/completions", {"prompt": "a", "guided_regex": "x{3}"})
    assert status == 200
    (checker,) = checkers(running)
    checker.kill()
    checker.wait(DEADLINE_S)
    running.request("POST", "/v1/completions", {"prompt": "a", "guided_regex": "y{3}"})
    status, answer = running.request("POST", "/v1/completions", {"prompt": "a", "guided_regex": "z{3}"})
    assert (status, answer["choices"][0]["text"]) == (200, "zzz")
