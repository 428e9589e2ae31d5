"""Everything wrong in a body is a 400 in OpenAI's envelope: short, naming the field, before any work."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import CapturingLogger

from disagg.api import chat, completions, types
from disagg.api.errors import failure_of
from disagg.api.validate import Work
from disagg.errors import InvalidRequestError
from tests.unit.api.fakes import EOS, MODEL, TOKENIZER, FakeRouter, async_test, make_services, says, serving

USER = [{"role": "user", "content": "hi"}]
SERVICES = make_services(FakeRouter())
LONG = "Z" * 5000


def refusal(body: Any, *, is_chat: bool = False) -> InvalidRequestError:
    """The error of a body that must be refused."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequestError) as caught:
        (chat.plan if is_chat else completions.plan)(raw, SERVICES)
    assert caught.value.status == 400
    return caught.value


SHARED_FAULTS = [
    *[("temperature", value) for value in (-0.1, 2.1, True, "1", [], {})],
    *[("top_p", value) for value in (0, -1, 1.1, 2, "x")],
    *[("top_k", value) for value in (-2, 1.5, "x")],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("repetition_penalty", value) for value in (0, -1, 11)],
    *[("presence_penalty", value) for value in (-2.1, 2.1)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[("max_tokens", value) for value in (-1, 1.5, "5", True, 10**30)],
    *[("min_tokens", value) for value in (-1, 17)],
    *[("n", value) for value in (0, -1, 129, 1.0)],
    *[("seed", value) for value in (1.5, "x", True)],
    *[("stop", value) for value in ("", ["a", ""], 3, [3], ["x"] * 17, "x" * 1025)],
    *[("stop_token_ids", value) for value in ([-1], [TOKENIZER.vocab_size], ["a"], [1.0], 7, [1] * 129)],
    *[("logit_bias", value) for value in ({"a": 1}, {"-1": 1}, {str(TOKENIZER.vocab_size): 1}, {"1": 101}, {"1": "x"}, [])],
    *[("stream", value) for value in ("yes", 1)],
    *[("stream_options", value) for value in ({"include_usage": True}, {}, 3)],
    *[("response_format", value) for value in ({"type": "json_object"}, {"type": "json_schema"}, {"type": "zzz"}, "text")],
    *[(field, "x") for field in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")],
    *[(field, "yes") for field in ("ignore_eos", "skip_special_tokens", "return_token_ids")],
    *[("priority", value) for value in (1.5, "x", 2**31, -(2**31) - 1)],
    *[("user", value) for value in (1, {})],
]  # fmt: skip


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(("field", "value"), SHARED_FAULTS)
def test_a_wrong_shared_field_is_named(field: str, value: Any, is_chat: bool) -> None:
    """Wrong type, out of range, not finite, or not supported: the error's param and message name the field."""
    body = {"messages": USER, "max_tokens": 16} if is_chat else {"prompt": "a"}
    error = refusal({**body, field: value}, is_chat=is_chat)
    assert error.param is not None
    assert error.param.startswith(field)
    assert field in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("prompt", value) for value in (None, 3, "", [], [[]], [1, "a"], [[1], "a"], [1.5], [True], [-1], {}, [[1], []])],
        ("prompt", [10**20]),
        *[("logprobs", value) for value in (-1, 21, True, 1.5)],
        *[("best_of", value) for value in (0, 129, 1.5, "x")],
        ("suffix", "x"),
        ("echo", "x"),
        ("add_special_tokens", "x"),
        ("max_tokens", 0),
        ("n", 128),
    ],
)  # fmt: skip
def test_a_wrong_completion_field_is_named(field: str, value: Any) -> None:
    """The fields that only completions have; 128 is more choices than two prompts may have."""
    body: dict[str, Any] = {"prompt": ["a", "b"] if field == "n" else "a"}
    error = refusal({**body, field: value})
    assert error.param is not None
    assert error.param.startswith(field)


@pytest.mark.parametrize("change", [{"n": 3, "best_of": 2}, {"n": 1, "best_of": 2, "stream": True}, {"best_of": 128}])
def test_the_best_of_fewer_or_of_a_stream_or_of_too_many_are_refused(change: dict[str, Any]) -> None:
    """best_of is at least n, more than n only in whole answers, and counts as choices: two prompts make 256 of 128."""
    assert refusal({"prompt": ["a", "b"], **change}).param in ("best_of", "n")


@pytest.mark.parametrize("is_chat", [False, True])
def test_unknown_fields_are_ignored_with_a_line_in_the_debug_log(is_chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names, cut short, and never their values; a name that is not UTF-8 is no reason to refuse either."""
    lines = CapturingLogger()
    everything = structlog.make_filtering_bound_logger(logging.DEBUG)
    monkeypatch.setattr(types, "log", structlog.wrap_logger(lines, processors=[], wrapper_class=everything))
    plan = chat.plan if is_chat else completions.plan
    body = json.dumps({"messages": USER} if is_chat else {"prompt": "a"}).encode()
    plan(body[:-1] + b', "zz": "secret", "%s": 1}' % LONG.encode(), SERVICES)
    plan(body[:-1] + b', "\xff": 1}', SERVICES)
    ((method, _, line),) = lines.calls
    assert (method, line["fields"]) == ("debug", [LONG[:40], "zz"])
    assert "secret" not in str(line)


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages", {"messages": None}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("logprobs", {"logprobs": 5}),
        ("top_logprobs", {"top_logprobs": 5}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("continue_final_message", {"continue_final_message": True}),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("chat_template", {"chat_template": "{{ x }}"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "{{ x }}"}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": 3}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("functions", {"functions": [{"name": "f"}]}),
    ],
)
def test_a_wrong_chat_field_is_named(param: str, change: dict[str, Any]) -> None:
    """The fields that only chat has."""
    assert refusal({"messages": USER, **change}, is_chat=True).param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a"} x',
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "logit_bias": {"1": 1e999}}', b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"prompt=a&max_tokens=3",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, is_chat: bool) -> None:
    """Not JSON, not an object, numbers JSON does not have, nesting to exhaust the stack."""
    assert len(str(refusal(raw, is_chat=is_chat))) < 300


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": LONG},
        {"response_format": {"type": LONG}},
        {LONG: 1, "n": 0},
        {"logit_bias": {LONG: 1}},
        {"stop": [LONG]},
        {"suffix": LONG},
        {"prompt": {LONG: 1}},
        {"guided_json": {LONG: LONG}},
    ],
)
def test_an_error_quotes_nothing_of_a_long_body(change: dict[str, Any]) -> None:
    """A 5 KB body makes a short error."""
    message = failure_of(refusal({"prompt": "a", **change})).body()["error"]["message"]
    assert len(message) <= 300
    assert "ZZZ" not in message


def test_a_long_message_is_cut() -> None:
    """Even a template's own error, which may quote the conversation, stays within 300 characters."""
    message = failure_of(InvalidRequestError(LONG, param="messages")).body()["error"]["message"]
    assert len(message) == 300


@async_test
async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    """Alone, or together with an explicit max_tokens; the default max_tokens is cut to what is left."""
    router = FakeRouter(says("x"))
    async with serving(router, max_model_len=10) as client:
        alone = await client.refused("/v1/completions", {"prompt": "a" * 10})
        both = await client.refused("/v1/completions", {"prompt": "a" * 8, "max_tokens": 3})
        chats = await client.refused("/v1/chat/completions", {"messages": USER})
        await client.complete(prompt="a" * 8, max_tokens=2)
        await client.complete(prompt="a" * 8)
        await client.complete(prompt="a" * 10, max_tokens=0, echo=True)
        await client.refused("/v1/completions", {"prompt": "a" * 11, "max_tokens": 0, "echo": True})
    assert {error["code"] for error in (alone, both, chats)} == {"context_length_exceeded"}
    assert "maximum context length is 10 tokens" in both["message"]
    assert "11 were requested (8 in the prompt, at least 3 for the answer)" in both["message"]
    assert (alone["param"], chats["param"]) == ("prompt", "messages")
    assert [stream.request.params.max_tokens for stream in router.streams] == [2, 2, 0]


def test_a_prompt_that_no_tokens_could_hold_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding takes seconds per megabyte: a text with more characters than the context's tokens can have is not encoded."""

    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(TOKENIZER, "encode", never)
    monkeypatch.setattr(TOKENIZER, "encode_trusted", never)
    text = "x" * 100_000
    for error in (refusal({"prompt": ["x", text]}), refusal({"messages": [{"role": "user", "content": text}]}, is_chat=True)):
        assert error.code == "context_length_exceeded"
        assert "256 tokens" in str(error)


@async_test
async def test_only_the_served_model_exists() -> None:
    """Another name is a 404, none at all means the served one; nothing is submitted for a refused request."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        error = await client.refused("/v1/completions", {"prompt": "a", "model": "gpt-4"}, status=404)
        assert router.streams == []
        await client.complete(prompt="a", model=MODEL)
        await client.complete(prompt="a", model=None)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert len(router.streams) == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(sorted({*completions.CompletionBody.__struct_fields__, *chat.ChatBody.__struct_fields__, "other"}))


@given(st.dictionaries(fields, json_values, max_size=4), st.booleans())
def test_any_json_object_is_planned_or_refused(changes: dict[str, Any], is_chat: bool) -> None:
    """No body raises anything but InvalidRequestError, and what is planned fits the context and the vocabulary."""
    raw = json.dumps({**({"messages": USER} if is_chat else {"prompt": "a"}), **changes}).encode()
    try:
        work = (chat.plan if is_chat else completions.plan)(raw, SERVICES)
    except InvalidRequestError:
        return
    assert isinstance(work, Work)
    for request in work.requests:
        params = request.params
        assert request.prompt
        assert len(request.prompt) + params.max_tokens <= SERVICES.max_model_len
        assert 0 <= params.seed < 2**63
        assert params.min_tokens <= params.max_tokens
        assert params.max_tokens > 0 or params.num_prompt_logprobs is not None
        assert set(params.stop_token_ids) | set(params.logit_bias) | set(request.prompt) <= set(range(TOKENIZER.vocab_size))
        assert (EOS in params.stop_token_ids) or changes.get("ignore_eos")
